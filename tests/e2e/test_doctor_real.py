"""On real parts, with nothing wrong, the doctor finds nothing wrong, and leaves nothing unseen."""

from __future__ import annotations

import json
import subprocess
import sys

from workers.stack import Stack


def test_a_healthy_stack_is_all_green(stack: Stack) -> None:
    stack.check()
    envoy, gateway = stack.url("envoy").removeprefix("http://"), stack.base_url
    command = [sys.executable, "-m", "extproc.cli", "doctor", "--json", "--probe"]
    ran = subprocess.run(  # noqa: S603 - our own
        [*command, "--envoy-admin", envoy, "--gateway", gateway],
        env=stack._extproc_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    findings = json.loads(ran.stdout)["findings"]
    assert [finding for finding in findings if finding["status"] != "ok"] == []
    assert ran.returncode == 0
