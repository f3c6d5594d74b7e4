"""``kvloop envoy render`` and ``kvloop envoy validate``.

Envoy's message types take half a second to import, so they are loaded only once a command runs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_origin

from pydantic import ValidationError

from extproc.envoy_binary import validate
from extproc.errors import ConfigError
from extproc.settings import EnvoySettings

if TYPE_CHECKING:
    import argparse

    from pydantic.fields import FieldInfo


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add both commands, and for each setting a flag, to the parser of ``kvloop envoy``."""
    commands = parser.add_subparsers(dest="envoy_command", required=True, metavar="COMMAND")
    rendering = commands.add_parser("render", help="write an Envoy bootstrap from the settings")
    rendering.add_argument("--out", type=Path, metavar="FILE", help="write there instead of to standard output")
    _add_setting_flags(rendering)
    checking = commands.add_parser("validate", help="have the real Envoy check a bootstrap")
    checking.add_argument("file", type=Path, nargs="?", help="the bootstrap; left out: what render would write")
    _add_setting_flags(checking)


def main(args: argparse.Namespace) -> int:
    """Run the chosen command; return 0, or 2 after one line on standard error."""
    try:
        return _render(args) if args.envoy_command == "render" else _validate(args)
    except (ConfigError, OSError) as error:
        print(f"kvloop envoy {args.envoy_command}: {error}", file=sys.stderr)
        return 2


def _render(args: argparse.Namespace) -> int:
    text = _rendered(args)
    if args.out is None:
        sys.stdout.write(text)
    else:
        args.out.write_text(text, encoding="utf-8")
    return 0


def _validate(args: argparse.Namespace) -> int:
    if args.file is None:
        validate(_rendered(args))
    elif not args.file.is_file():
        raise ConfigError(f"no such file: {args.file}")
    else:
        validate(args.file)
    print("Envoy accepts the configuration.")
    return 0


def _rendered(args: argparse.Namespace) -> str:
    from extproc.envoy_config import render  # noqa: PLC0415 - slow to import, see above

    return render(_settings(args))


def _settings(args: argparse.Namespace) -> EnvoySettings:
    """Merge the flags over the environment; ``ConfigError`` names the first wrong setting."""
    given = {name: getattr(args, name) for name in EnvoySettings.model_fields if getattr(args, name) is not None}
    try:
        return EnvoySettings(**given)
    except ValidationError as error:
        first = error.errors()[0]
        complaint = first["msg"].removeprefix("Value error, ")
        if not first["loc"]:  # several settings that do not fit each other: it names them
            raise ConfigError(complaint) from error
        raise ConfigError(f"{_flag(str(first['loc'][0]))}: {complaint} (got {first['input']!r})") from error


def _add_setting_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("settings", "Each is also read from the environment: KVLOOP_ENVOY_<NAME>.")
    for name, field in EnvoySettings.model_fields.items():
        several: dict[str, Any] = {"nargs": "+"} if get_origin(field.annotation) is tuple else {}
        group.add_argument(_flag(name), dest=name, metavar="VALUE", help=_help(field), **several)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _help(field: FieldInfo) -> str:
    default = " ".join(field.default) if isinstance(field.default, tuple) else field.default
    return f"{field.description} Default: {default}.".replace("%", "%%")
