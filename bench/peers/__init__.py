"""``kvloop bench peers``: the same load, in the same run, against kvloop and what one might use in its place.

Read in this order: ``workers.venvs`` (where the peers are installed) → ``fronts`` (how each is started) → ``command``. The
FastAPI proxy itself is ``fastapi_proxy``; it runs in its own environment and imports nothing of kvloop.
"""

from bench.peers.command import add_arguments, main

__all__ = ["add_arguments", "main"]
