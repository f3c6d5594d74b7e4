"""The command line: it finds a command's module, loads no other, and says what is wrong in one line."""

from __future__ import annotations

import importlib
import runpy
import sys
import types
from typing import TYPE_CHECKING, Any

import pytest

from extproc import __version__, cli
from extproc.errors import ConfigError
from extproc.settings import GatewaySettings

if TYPE_CHECKING:
    import argparse


@pytest.fixture(autouse=True)
def commands(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Replace the commands: ``good`` has a module, the module of ``absent`` cannot be imported."""
    module = types.ModuleType("good_command")

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--status", type=int, default=0)

    def main(args: argparse.Namespace) -> int:
        return int(args.status)

    vars(module).update(add_arguments=add_arguments, main=main)
    monkeypatch.setitem(sys.modules, "good_command", module)
    absent = ("no_such_module", "needs what is not installed")
    monkeypatch.setattr(cli, "_COMMANDS", {"good": ("good_command", "do good"), "absent": absent})
    return module


@pytest.mark.parametrize("status", [0, 3])
def test_a_commands_status_is_the_exit_status(status: int) -> None:
    assert cli.main(["good", f"--status={status}"]) == status


def test_only_the_chosen_commands_module_is_loaded() -> None:
    assert cli.main(["good"]) == 0
    with pytest.raises(ModuleNotFoundError):
        cli.main(["absent"])


def test_the_arguments_are_the_process_own_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["kvloop", "good", "--status=4"])
    assert cli.main() == 4


@pytest.mark.parametrize(("argv", "status"), [(["--version"], 0), (["--help"], 0), ([], 2), (["bad"], 2)])
def test_what_is_no_command_ends_with_usage(argv: list[str], status: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    assert ended.value.code == status
    told = capsys.readouterr()
    assert (told.out if status == 0 else told.err).startswith(("usage: kvloop", f"kvloop {__version__}"))


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    told = capsys.readouterr().out
    assert "do good" in told
    assert "needs what is not installed" in told


def refuse(module: types.ModuleType, error: BaseException | None = None) -> None:
    """Let the command fail: with ``error``, or with what wrong settings raise."""

    def main(_: Any) -> int:
        if error is not None:
            raise error
        GatewaySettings()
        return 0

    vars(module)["main"] = main


def test_a_configuration_error_is_one_line(commands: types.ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    refuse(commands, ConfigError("no port is free"))
    assert cli.main(["good"]) == 2
    assert capsys.readouterr().err == "kvloop: no port is free\n"


@pytest.mark.parametrize(("command", "told"), [("envoy", True), ("doctor", True), ("top", True), ("serve", False)])
def test_commands_that_read_settings_tell_of_variables_that_set_nothing(
    command: str, told: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "_COMMANDS", {command: ("good_command", "do good")})
    monkeypatch.setenv("KVLOOP_REUSEE", "true")
    assert cli.main([command]) == 0
    line = "kvloop: KVLOOP_REUSEE is no setting and has no effect; did you mean KVLOOP_REUSE?"
    assert (line in capsys.readouterr().err.splitlines()) is told


@pytest.mark.parametrize(
    ("variables", "lines"),
    [
        ({"KVLOOP_LISTEN": "nowhere", "KVLOOP_REUSE": "perhaps"}, ["KVLOOP_LISTEN: ", "KVLOOP_REUSE: "]),
        ({"KVLOOP_HANDLE_TTL_SECONDS": "1"}, ["KVLOOP_HANDLE_MARGIN_SECONDS"]),
        ({"KVLOOP_CONVERSATION_HEADERS": "[1]"}, ["KVLOOP_CONVERSATION_HEADERS: "]),
        (
            {"KVLOOP_CONVERSATION_HEADERS": "x-chat-id"},
            ['KVLOOP_CONVERSATION_HEADERS: a list is spelled as JSON, like ["'],
        ),
        ({"KVLOOP_CONVERSATION_PATTERNS": "x"}, ['KVLOOP_CONVERSATION_PATTERNS: a table is spelled as JSON, like {"']),
    ],
)
def test_each_wrong_setting_is_one_line_that_names_it(
    commands: types.ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variables: dict[str, str],
    lines: list[str],
) -> None:
    refuse(commands)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["good"]) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == len(lines)
    assert all(line.startswith(f"kvloop: {start}") for line, start in zip(told, lines, strict=True))


def test_ctrl_c_at_any_time_is_one_line(commands: types.ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    refuse(commands, KeyboardInterrupt())
    assert cli.main(["good"]) == 130
    assert capsys.readouterr().err == "kvloop: interrupted\n"


def test_any_other_error_is_a_fault_and_keeps_its_traceback(commands: types.ModuleType) -> None:
    refuse(commands, RuntimeError("a fault"))
    with pytest.raises(RuntimeError, match="a fault"):
        cli.main(["good"])


def test_the_module_can_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["kvloop", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(cli.__file__, run_name="__main__")
    assert ended.value.code == 0


REAL_COMMANDS = runpy.run_path(cli.__file__, run_name="read")["_COMMANDS"]


@pytest.mark.parametrize("name", REAL_COMMANDS)
def test_every_command_keeps_the_contract(name: str) -> None:
    module = importlib.import_module(REAL_COMMANDS[name][0])
    assert callable(module.add_arguments)
    assert callable(module.main)
