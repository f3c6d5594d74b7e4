"""Which hosts a handle may name: P connects to them, so the operator says."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.handle_hosts import host_rules

RULES = ("d-0.pool", "*.pool.svc.cluster.local", "10.1.0.0/16", "192.168.7.9", "fd00::/8")


@pytest.mark.parametrize(
    "host",
    [
        *("d-0.pool", "D-0.POOL", "d-0.pool."),
        *("a.pool.svc.cluster.local", "a.b.pool.svc.cluster.local"),
        *("10.1.0.0", "10.1.255.255", "::ffff:10.1.2.3", "192.168.7.9", "fd00::1", "[fd00::1]"),
    ],
)
def test_what_a_rule_names_is_allowed(host: str) -> None:
    assert host_rules(RULES).allows(host)


@pytest.mark.parametrize(
    "host",
    [
        *("d-1.pool", "xd-0.pool", "d-0.pool.evil", "pool.svc.cluster.local", "evilpool.svc.cluster.local"),
        *("10.2.0.0", "192.168.7.8", "fe80::1", "169.254.169.254", "metadata.google.internal"),
        *("10.1", "0x0a010001", "167837697", "10.1.0.1:80", "10.1.0.1@evil", "", "*.pool.svc.cluster.local/"),
    ],
)
def test_everything_else_is_not(host: str) -> None:
    assert not host_rules(RULES).allows(host)


@pytest.mark.parametrize(
    "host",
    [
        "169.254.169.254",
        "fe80::1",
        "224.0.0.1",
        "ff02::1",
        "0.0.0.0",
        "::ffff:169.254.1.1",
        "127.1",
        "2852039166",
        "0xa9fea9fe",
        "0251.0376.0251.0376",
        "a b",
        "a/b",
        "a@b",
        "",
    ],
)
def test_without_rules_only_what_cannot_be_a_worker_s_is_refused(host: str) -> None:
    rules = host_rules(())
    assert not rules.allows(host)
    assert rules.allows("10.0.0.7")
    assert rules.allows("d-0.pool")


@given(st.ip_addresses(), st.ip_addresses(v=4, network="10.1.0.0/16"))
def test_an_address_is_allowed_exactly_if_a_network_holds_it(any_address, inside) -> None:
    rules = host_rules(("10.1.0.0/16",))
    mapped = getattr(any_address, "ipv4_mapped", None) or any_address
    assert rules.allows(str(any_address)) == (mapped in ipaddress.ip_network("10.1.0.0/16"))
    assert rules.allows(str(inside))


@pytest.mark.parametrize("rule", ["", "10.0.0.0/33", "a b", "*", "*.", "a.*", "http://d-0", "d-0:5600", "-a"])
def test_a_rule_that_says_nothing_clear_is_refused(rule: str) -> None:
    with pytest.raises(ValueError, match="is neither a host name"):
        host_rules((rule,))
