"""Decide which conversation a request belongs to, and keep tenants, models and cache salts apart.

The id only *finds* a handle; whether it may be used is the proof's business. So a colliding or guessed id costs a cold
turn, never a wrong answer. Ids are hashed at once: neither stores nor logs ever hold one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

from extproc.events import Headers, header

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_KEY_BYTES: Final = 16
_TENANT_BYTES: Final = 8
_SEARCHED_CHARACTERS: Final = 1024
"""Of a header with a pattern no more is looked at, so that none can keep a slow pattern busy."""


@dataclass(frozen=True, slots=True)
class ConversationKey:
    """Hash of (tenant, model, cache salt, conversation id), 16 bytes."""

    digest: bytes

    def __str__(self) -> str:
        return self.digest.hex()

    @classmethod
    def parse(cls, text: str) -> ConversationKey | None:
        """Read what ``str`` wrote, None for anything else."""
        try:
            digest = bytes.fromhex(text)
        except ValueError:
            return None
        return cls(digest) if len(digest) == _KEY_BYTES and digest.hex() == text.lower() else None


class InvalidConversationId(ValueError):
    """The client named its conversation in a way kvloop does not accept; the turn goes cold."""


@dataclass(frozen=True, slots=True)
class IdentityRules:
    """Where to look for the conversation id and the tenant; names in lower case, first present wins."""

    headers: Sequence[str]
    fields: Sequence[str]
    tenant_header: str
    id_max_bytes: int
    patterns: Mapping[str, str] = field(default_factory=dict)
    """Header name to regular expression: what its group ``conversation`` matches is the id."""


def find_conversation(headers: Headers, fields: dict[str, Any], rules: IdentityRules) -> ConversationKey | None:
    """Return the key of the request's conversation, None if it names none.

    The model name stands for LoRA adapters as well, because vLLM addresses an adapter by it. Raises
    ``InvalidConversationId`` for an id that is too long, contradictory or not text.
    """
    conversation_id = _conversation_id(headers, fields, rules)
    if conversation_id is None:
        return None
    tenant = header(headers, rules.tenant_header.lower()) or ""
    return conversation_key(tenant, _text(fields.get("model")), _text(fields.get("cache_salt")), conversation_id)


def tenant_hash(headers: Headers, tenant_header: str) -> str:
    """Return a short name for the tenant, to tell tenants' habits apart; it identifies nobody."""
    tenant = header(headers, tenant_header.lower()) or ""
    return blake2b(tenant.encode(), digest_size=_TENANT_BYTES).hexdigest()


def conversation_key(tenant: str, model: str, cache_salt: str, conversation_id: str) -> ConversationKey:
    """Hash what tells conversations apart; ``tenant`` is the whole value of the tenant header."""
    return _key((tenant, model, cache_salt, conversation_id))


def handle_key(engine_id: str, request_id: str) -> ConversationKey:
    """Return the key of a handle itself, for orchestrators that carry handles from turn to turn on their own."""
    return _key(("handle", engine_id, request_id))


def _key(texts: Iterable[str]) -> ConversationKey:
    parts = [text.encode() for text in texts]
    digest = blake2b(digest_size=_KEY_BYTES)
    for part in parts:
        # The length keeps ("ab", "c") apart from ("a", "bc").
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return ConversationKey(digest.digest())


def _conversation_id(headers: Headers, fields: dict[str, Any], rules: IdentityRules) -> str | None:
    for name in rules.headers:
        values = {value for key, value in headers if key == name.lower() and value}
        if len(values) > 1:
            raise InvalidConversationId(f"{name} was sent twice")
        if values:
            return _checked(values.pop(), rules)
    for name, pattern in rules.patterns.items():
        match = re.search(pattern, (header(headers, name.lower()) or "")[:_SEARCHED_CHARACTERS])
        if match is not None and match["conversation"]:
            return _checked(match["conversation"], rules)
    for name in rules.fields:
        value = fields.get(name)
        if value is None or value == "":
            continue
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise InvalidConversationId(f"{name} is neither a string nor an integer")
        return _checked(str(value), rules)
    return None


def _checked(conversation_id: str, rules: IdentityRules) -> str:
    if not conversation_id.isprintable():
        raise InvalidConversationId("the conversation id holds control characters")
    if len(conversation_id.encode()) > rules.id_max_bytes:
        raise InvalidConversationId("the conversation id is too long")
    return conversation_id


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
