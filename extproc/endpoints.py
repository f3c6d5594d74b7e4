"""Which paths kvloop handles, and how their API dialects differ.

Envoy's routes send only these paths through ext_proc (``envoy_config`` builds the routes from this table); everything
else passes untouched.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final


class Dialect(Enum):
    """Which fields a request and its answer carry."""

    CHAT = "chat"
    COMPLETIONS = "completions"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One handled path and the path that renders its prompt to token ids (vLLM ``--enable-scale-out``)."""

    path: str
    render_path: str
    dialect: Dialect


CHAT: Final = Endpoint("/v1/chat/completions", "/v1/chat/completions/render", Dialect.CHAT)
COMPLETIONS: Final = Endpoint("/v1/completions", "/v1/completions/render", Dialect.COMPLETIONS)
ENDPOINTS: Final = (CHAT, COMPLETIONS)


def find_endpoint(method: str, path: str) -> Endpoint | None:
    """Return the endpoint a request addresses, or None when kvloop has no business with it."""
    if method != "POST":
        return None
    bare = path.partition("?")[0]
    return next((endpoint for endpoint in ENDPOINTS if endpoint.path == bare), None)
