"""The ways a request can go wrong, sorted by who has to act.

A refused reuse is none of them: the turn goes cold, is counted with its ``Reason`` (see ``receipt``), and nobody is told.
"""

from __future__ import annotations

import orjson


class ConfigError(Exception):
    """Start-up cannot go on. The message is one line and says what to change."""


class EnvoyProtocolError(Exception):
    """Envoy sent something the agreed processing mode rules out; the stream is aborted rather than guessed at."""


class ClientError(Exception):
    """The client's request cannot be served; it gets this status and an OpenAI-style error body."""

    headers: tuple[tuple[str, str], ...] = ()

    def __init__(self, status: int, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param

    @property
    def body(self) -> bytes:
        """The error as the JSON OpenAI's SDKs parse: https://platform.openai.com/docs/guides/error-codes."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"  # noqa: PLR2004 - HTTP classes
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return orjson.dumps({"error": error})


class Overloaded(ClientError):
    """There is no room for the request now; the client may come again."""

    headers = (("retry-after", "1"),)

    def __init__(self, message: str) -> None:
        super().__init__(503, f"{message} Try again.", code="overloaded")
