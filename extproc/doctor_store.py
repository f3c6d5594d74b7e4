"""The doctor's look at a shared store: whether it can be used, and whether it takes once."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from extproc.doctor_findings import Store
from extproc.errors import ConfigError
from extproc.redis_link import PASSING, CommandRefused, Link, connection_maker

if TYPE_CHECKING:
    from extproc.settings import GatewaySettings


async def examine_store(settings: GatewaySettings) -> Store:
    """Connect as the gateway would, put a value of no meaning there and take it twice."""
    try:
        link = await Link.open(connection_maker(settings))
        name = f"kvloop:doctor:{secrets.token_hex(8)}"
        try:
            answers = await link.request(("SET", name, "1", "PX", 5000), ("GETDEL", name), ("GETDEL", name))
        finally:
            await link.close()
    except ConfigError as error:
        return Store(error=str(error))
    except PASSING as error:
        return Store(error=f"it is away ({str(error) or type(error).__name__}): start it, or mend KVLOOP_STORE_URL")
    refused = next((answer for answer in answers if isinstance(answer, CommandRefused)), None)
    if refused is not None:
        return Store(error=f"it refused a command: {refused}")
    return Store(version=link.facts.version, eviction=link.facts.eviction, takes_once=answers[1:] == [b"1", None])
