"""The images are built from files that are there, and run as nobody. No Docker runs here: hadolint reads them."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from manifests import ROOT

from extproc import cli
from extproc.settings import GatewaySettings

FILES = sorted((ROOT / "deploy/docker").glob("*.Dockerfile"))
GATEWAY = ROOT / "deploy/docker/gateway.Dockerfile"
HADOLINT = Path(sys.executable).with_name("hadolint")


def instructions(path: Path) -> list[tuple[str, str]]:
    """Return a Dockerfile's instructions, in order, continued lines joined."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def last(path: Path, word: str) -> str:
    return [rest for name, rest in instructions(path) if name == word][-1]


def environment(path: Path) -> dict[str, str]:
    pairs = [pair for word, rest in instructions(path) if word == "ENV" for pair in shlex.split(rest)]
    return dict(pair.split("=", 1) for pair in pairs)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_hadolint_has_nothing_to_say(path: Path) -> None:
    assert HADOLINT.exists(), "hadolint is missing: run `make setup`"
    done = subprocess.run([HADOLINT, path], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_everything_copied_is_there_and_passes_the_dockerignore(path: Path) -> None:
    sent = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"}
    copied = [rest.split()[:-1] for word, rest in instructions(path) if word == "COPY" and "--from" not in rest]
    names = {name for group in copied for name in group}
    assert names <= sent
    assert all((ROOT / name).exists() for name in names)
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {pattern.removesuffix("*") for pattern in packages} <= names


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_image_runs_as_nobody_in_two_stages_and_knows_its_health(path: Path) -> None:
    words = [word for word, _ in instructions(path)]
    assert words.count("FROM") == 2
    assert last(path, "USER") == "65532:65532"
    assert words[-1] == "CMD"
    assert json.loads(last(path, "HEALTHCHECK").partition("CMD ")[2])
    assert json.loads(last(path, "ENTRYPOINT"))[0] == "kvloop"


def test_the_gateway_image_listens_where_its_health_check_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {name: value for name, value in environment(GATEWAY).items() if name.startswith("KVLOOP_")}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    settings = GatewaySettings()
    assert set(given) == {"KVLOOP_LISTEN", "KVLOOP_ADMIN_LISTEN"}
    ports = {settings.listen.rpartition(":")[2], settings.admin_listen.rpartition(":")[2]}
    assert set(last(GATEWAY, "EXPOSE").split()) == ports
    assert f"http://127.0.0.1:{settings.admin_listen.rpartition(':')[2]}/healthz" in last(GATEWAY, "HEALTHCHECK")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_an_image_runs_is_a_command_there_is(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*json.loads(last(path, "ENTRYPOINT")), *json.loads(last(path, "CMD"))]
    with pytest.raises(SystemExit) as ended:
        cli.main([*(word for word in words[1:] if word != "--help"), "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: kvloop")
