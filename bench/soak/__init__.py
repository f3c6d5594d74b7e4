"""A long seeded play of conversations against kvloop's core and simulated engines, all in one process and no real time.

The pure parts are the real ones: the exchange, the store, the proof, the engines with their block pools, vLLM's bytes
out. Only what lies between them is played: a clock that jumps (SimPy), a network that cuts and delays, clients that edit
their history, fork, retry, leave and come back late, workers that crash, gateways that restart, pools too small for all.

Read in this order: ``workers`` (engines behind a surface of bytes) → ``gateway`` (performs an exchange's effects) →
``client`` (what conversations do) → ``world`` (puts all together, lets faults strike, judges).
"""

from bench.soak.world import Result, soak

__all__ = ["Result", "soak"]
