"""Fuzz one target in this process, led by coverage: ``python tests/fuzz/fuzz_one.py TARGET [libFuzzer's options and folders]``."""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["extproc", "hpack"]):
    import fuzz_targets


def main() -> None:
    """Run libFuzzer; it ends the process itself."""
    name, *options = sys.argv[1:]

    def test_one_input(data: bytes) -> None:
        fuzz_targets.run(name, data)

    atheris.Setup([sys.argv[0], *options], test_one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
