"""Simulated vLLM workers: the HTTP surface kvloop uses, over an honest model of the failure kvloop must prevent.

vLLM's prefill worker copies whatever a handle points at over the start of the prompt and never compares tokens. Here
each block of the pool remembers the tokens its KV was computed from *and what those tokens attended to*; reads copy
what lies there now; the text a worker generates is a function of the KV it really holds. So wrong KV gives visibly
different text, and the worker also counts the turn.

Read the modules in this order: ``kv`` (what lies in one block) → ``blocks`` (the pool: allocation, prefix cache) →
``engine`` (requests, reads, retained blocks, the handle) → ``text`` (tokenizer, chat template, the "model") →
``openai_api`` (requests in, vLLM's exact bytes out) → ``faults`` → ``worker`` (the HTTP shell) → ``fleet`` (several
workers in one process) → ``cli``. The first five are pure: no sockets, no asyncio, no clock.
"""
