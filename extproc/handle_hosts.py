"""Which hosts a handle may point P at.

P connects to whatever host and port a handle names. A decode worker that was taken over, or somebody in its place, could
so make P call any address it can reach. Where the decode workers live is for the operator to say: ``KVLOOP_HANDLE_HOSTS``.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_OLD_SPELLING: Final = re.compile(r"(0x[0-9a-f]*|\d+)(\.(0x[0-9a-f]*|\d+)){0,3}")
"""Of an IPv4 address, as in 127.1 or 2130706433: resolvers take it, and no worker gives it."""

_NAME: Final = re.compile(r"(\*\.)?[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*")


@dataclass(frozen=True, slots=True)
class HostRules:
    """Names, endings of names (``.pool.svc``) and networks. None of all: any host that can be a worker's."""

    names: frozenset[str]
    endings: tuple[str, ...]
    networks: tuple[Network, ...]

    def allows(self, host: str) -> bool:
        """Tell whether a handle may name this host (as D spelt it: a name or an address)."""
        plain = _plain(host)
        try:
            address = ipaddress.ip_address(plain)
        except ValueError:
            if not _NAME.fullmatch(plain) or _OLD_SPELLING.fullmatch(plain):
                return False
            return self._is_empty or plain in self.names or plain.endswith(self.endings)
        address = getattr(address, "ipv4_mapped", None) or address
        if self._is_empty:
            # Cloud metadata services live at link-local addresses, and no worker does.
            return not (address.is_link_local or address.is_multicast or address.is_unspecified)
        return any(address in network for network in self.networks)

    @property
    def _is_empty(self) -> bool:
        return not (self.names or self.endings or self.networks)


@lru_cache(maxsize=8)
def host_rules(rules: tuple[str, ...]) -> HostRules:
    """Read rules as the setting spells them: ``d-0.pool``, ``*.pool.svc``, ``10.1.0.0/16``; raises ``ValueError``."""
    names, endings, networks = set(), [], []
    for rule in rules:
        plain = _plain(rule)
        try:
            networks.append(ipaddress.ip_network(plain, strict=False))
        except ValueError:
            if not _NAME.fullmatch(plain):
                msg = f"{rule!r} is neither a host name, nor *.domain, nor an address or network"
                raise ValueError(msg) from None
            if plain.startswith("*"):
                endings.append(plain[1:])
            else:
                names.add(plain)
    return HostRules(frozenset(names), tuple(endings), tuple(networks))


def _plain(host: str) -> str:
    return host.lower().strip("[]").removesuffix(".")
