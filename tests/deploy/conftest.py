"""The deploy tests borrow the gateway tests' harness: the real Envoy, the real ext_proc, simulated workers."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "gateway"))
