"""Where peers are installed: each in a virtual environment of its own, made on first use and kept."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

INSTALL_TIMEOUT_SECONDS: Final = 600.0
COMPLAINT_CHARACTERS: Final = 300
DONE_FILE: Final = "kvloop-installed.txt"
"""Written last, with the requirements, so that a half-made or outdated environment is made again."""


class PeerAbsentError(Exception):
    """A peer cannot be had; the message says why, for the table."""


@dataclass(frozen=True, slots=True)
class Environment:
    """A peer's virtual environment: its name and what pip installs there."""

    name: str
    requirements: tuple[str, ...]

    @property
    def directory(self) -> Path:
        """Where it is: below ``KVLOOP_CACHE``, else below the user's cache directory."""
        root = os.environ.get("KVLOOP_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "kvloop"
        return Path(root).expanduser() / "peers" / self.name

    def program(self, name: str) -> str:
        """Return the path of a program in it."""
        return str(self.directory / "bin" / name)

    @property
    def is_ready(self) -> bool:
        """Whether it was made with these requirements."""
        done = self.directory / DONE_FILE
        return done.is_file() and done.read_text(encoding="utf-8") == "\n".join(self.requirements)

    def make(self, tell: Callable[[str], None]) -> None:
        """Create and fill it unless it is ready; raises ``PeerAbsentError``."""
        if self.is_ready:
            return
        tell(f"installing {' '.join(self.requirements)} into {self.directory} (once)")
        python = self.program("python")
        _run([sys.executable, "-m", "venv", "--clear", str(self.directory)], self.name)
        _run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *self.requirements], self.name)
        (self.directory / DONE_FILE).write_text("\n".join(self.requirements), encoding="utf-8")


FASTAPI: Final = Environment("fastapi-httpx", ("fastapi>=0.115", "httpx>=0.28", "uvicorn[standard]>=0.34"))
VLLM_ROUTER: Final = Environment("vllm-router", ("vllm-router==0.1.17",))


def _run(argv: list[str], name: str) -> None:
    try:
        done = subprocess.run(  # noqa: S603 - pip and venv with our own arguments
            argv, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerAbsentError(f"{name} could not be installed: {error}") from error
    if done.returncode:
        complaint = " ".join((done.stderr or done.stdout).split())[-COMPLAINT_CHARACTERS:]
        raise PeerAbsentError(f"{name} could not be installed: {complaint}")


def main() -> None:
    """Make the environments the tests need; part of ``make setup``, which does not fail over them."""
    try:
        VLLM_ROUTER.make(lambda text: print(text, flush=True))  # noqa: T201 - part of a command
    except PeerAbsentError as error:
        print(f"{error}\nOnly the tests and the demo under vllm-router need it.")  # noqa: T201 - as above


if __name__ == "__main__":
    main()
