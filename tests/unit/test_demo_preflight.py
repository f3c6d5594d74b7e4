"""What is missing is found before anything starts, and the message says what to do."""

from __future__ import annotations

import argparse
import socket
from pathlib import Path

import pytest

from workers import demo
from workers.demo import main, preflight

MIB = 1024 * 1024


def test_a_missing_module_is_named_with_its_purpose_and_the_fix() -> None:
    (missing,) = preflight.missing_modules({"here": "a", "gone": "the proxy"}, installed=lambda name: name == "here")
    assert str(missing) == (
        "The Python module `gone` is missing (the proxy).\n    What to do: run `make setup` in the checkout."
    )


def test_modules_are_found_without_importing_what_surrounds_them() -> None:
    assert preflight.missing_modules({"json": "", "no_such_package.inside": "", "nor_this": ""}) == [
        preflight.Missing("The Python module `no_such_package.inside` is missing ().", preflight.SETUP),
        preflight.Missing("The Python module `nor_this` is missing ().", preflight.SETUP),
    ]


@pytest.mark.parametrize(("cores", "found"), [(1, 1), (2, 0), (64, 0)])
def test_two_cores_are_needed(cores: int, found: int) -> None:
    assert len(preflight.missing_cores(cores)) == found


@pytest.mark.parametrize(("available", "found"), [(6343 * MIB, 1), (6344 * MIB, 0)])
def test_memory_is_needed_for_two_workers_and_their_weights_in_float32(available: int, found: int) -> None:
    assert len(preflight.missing_memory(available, model_bytes=50 * MIB)) == found


def test_missing_memory_is_told_in_numbers() -> None:
    (missing,) = preflight.missing_memory(1000 * MIB, model_bytes=50 * MIB)
    assert missing.what == ("1,000 MiB of memory are available; two workers with this model need about 6,344 MiB.")


def test_a_cgroup_may_leave_less_memory_than_the_machine() -> None:
    meminfo = "MemTotal:  100 kB\nMemAvailable:   80 kB\n"
    assert preflight.available_memory_bytes(meminfo) == 80 * 1024
    assert preflight.available_memory_bytes(meminfo, "max\n", "5\n") == 80 * 1024
    assert preflight.available_memory_bytes(meminfo, "50000\n", "20000\n") == 30_000


def test_disk_space_is_looked_at_where_the_directory_will_be(tmp_path: Path) -> None:
    later = tmp_path / "not" / "yet"
    asked: list[Path] = []

    def free(path: Path) -> int:
        asked.append(path)
        return 5 * MIB

    (missing,) = preflight.missing_disk(later, 6 * MIB, "the model", free_bytes=free)
    assert missing.what == f"{tmp_path} has 5 MiB free; the model needs 6 MiB."
    assert preflight.missing_disk(later, 5 * MIB, "the model", free_bytes=free) == []
    assert asked == [tmp_path, tmp_path]


def test_a_directory_nobody_may_write_is_reported() -> None:
    (missing,) = preflight.missing_disk(Path("/proc/nowhere"), 1, "the model")
    assert missing.what.startswith("/proc cannot be written (the model): ")


def test_an_address_that_cannot_be_listened_on_is_reported() -> None:
    assert preflight.missing_ports() == []
    (missing,) = preflight.missing_ports("192.0.2.1")
    assert missing.what.startswith("No port can be opened on 192.0.2.1: ")


def test_a_model_directory_has_a_configuration(tmp_path: Path) -> None:
    assert len(preflight.missing_model(tmp_path)) == 1
    (tmp_path / "config.json").touch()
    assert preflight.missing_model(tmp_path) == []


def test_only_linux_will_do() -> None:
    assert preflight.missing_platform("linux") == []
    assert "darwin" in preflight.missing_platform("darwin")[0].what


def test_a_result_file_must_be_writable_beforehand(tmp_path: Path) -> None:
    wrong = [tmp_path, tmp_path / "no" / "such" / "directory.json"]
    right = [tmp_path / "new.json", Path("relative.png")]
    assert [missing.what for missing in preflight.missing_outputs(wrong + right)] == [
        f"{file} cannot be written." for file in wrong
    ]


@pytest.fixture
def everything_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "MODULES", {"no_such_module": "a thing"})
    monkeypatch.setattr(preflight.os, "sched_getaffinity", lambda _: {0})
    monkeypatch.setattr(preflight, "_available_memory_bytes", lambda: 0)

    def refused(*_: object, **__: object) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(socket, "create_server", refused)


@pytest.mark.usefixtures("everything_missing")
def test_everything_missing_is_told_at_once_and_nothing_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main(arguments("--model", str(tmp_path), "--chart", str(tmp_path))) == 2
    message = capsys.readouterr().err
    for part in ("`no_such_module`", "1 core(s)", "0 MiB", "config.json", "127.0.0.1", f"{tmp_path} cannot"):
        assert part in message
    assert message.count("What to do:") == 6


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return parser.parse_args(words)


def test_the_defaults_are_four_turns_about_3000_tokens_without_prefill_cache() -> None:
    args = arguments()
    assert (args.turns, args.document_tokens, args.prefill_cache, args.return_mode, args.keep) == (
        4,
        3000,
        "off",
        "lazy",
        False,
    )
    assert (args.model, args.json, args.chart) == (None, None, Path("kvloop-demo.png"))


@pytest.mark.parametrize(
    "words", [("--turns", "0"), ("--turns", "9"), ("--turns", "x"), ("--document-tokens", "-5"), ("--return", "soon")]
)
def test_what_makes_no_sense_is_refused(words: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        arguments(*words)
    assert words[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("environment", "directory"),
    [
        ({"KVLOOP_CACHE": "/a"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/kvloop"),
        ({"HOME": "/home/me"}, "/home/me/.cache/kvloop"),
    ],
)
def test_the_model_is_cached_where_the_environment_says(
    environment: dict[str, str], directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("KVLOOP_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert demo.cache_directory() == Path(directory)


def test_an_early_return_is_not_shown_behind_somebody_else_s_orchestrator(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments("--return", "eager", "--topology", "intercept")) == 2
    assert "chooses P itself" in capsys.readouterr().err
