"""Simulated vLLM workers: the HTTP surface kvloop uses, over an honest model of the failure kvloop must prevent.

vLLM's prefill worker copies whatever a handle points at over the start of the prompt and never compares tokens. Here
each block of the pool remembers the tokens its KV was computed from *and what those tokens attended to*; reads copy
what lies there now; the text a worker generates is a function of the KV it really holds. So wrong KV gives visibly
different text, and the worker also counts the turn.

Read the modules in this order: ``kv`` (what lies in one block) → ``blocks`` (the pool: allocation, prefix cache) →
``sequence`` (one sequence's blocks, and what the model attends to in them) → ``engine`` (admission, reads, retained
blocks, the handle) → ``text`` (tokenizer, chat template, the "model") → ``api_request`` and ``api_response`` (requests
in, vLLM's exact bytes out) → ``settings`` → ``calibration`` (timing from real runs) → ``faults`` → ``rank`` (an engine with what drives it) →
``worker`` (the HTTP shell) → ``fleet`` (several workers in one process) → ``cli``. All before ``rank`` is pure: no sockets,
no asyncio, no clock.
"""

from workers.sim.cli import add_arguments, main

__all__ = ["add_arguments", "main"]
