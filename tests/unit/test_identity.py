"""Whose turn it is: one key per (tenant, model, cache salt, conversation), and nobody else's."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.events import Headers
from extproc.identity import (
    ConversationKey,
    IdentityRules,
    InvalidConversationId,
    conversation_key,
    find_conversation,
    handle_key,
)

RULES = IdentityRules(
    headers=("x-conversation-id", "X-Session-Id"),
    fields=("conversation_id", "session_id"),
    tenant_header="Authorization",
    id_max_bytes=16,
)


def key(
    conversation: str = "c", tenant: str | None = "Bearer A", model: Any = "m", salt: Any = None
) -> ConversationKey | None:
    headers: Headers = (("x-conversation-id", conversation),)
    if tenant is not None:
        headers += (("authorization", tenant),)
    return find_conversation(headers, {"model": model, "cache_salt": salt}, RULES)


# Letters that can slide from one part into the next, and the bytes a length prefix is made of.
parts = st.text("ab", max_size=3)
identities = st.tuples(parts, parts, parts, st.text("ab", min_size=1, max_size=3))


@given(identities, identities)
def test_hazard_08_09_11_keys_are_equal_exactly_when_all_four_parts_are(
    one: tuple[str, str, str, str], other: tuple[str, str, str, str]
) -> None:
    def of(identity: tuple[str, str, str, str]) -> ConversationKey | None:
        tenant, model, salt, conversation = identity
        return key(conversation, tenant, model, salt)

    assert (of(one) == of(other)) == (one == other)


def test_hazard_08_one_id_is_one_conversation() -> None:
    assert key() == key()


def test_hazard_09_another_tenant_with_my_id_has_another_key() -> None:
    assert len({key(tenant=tenant) for tenant in ("Bearer A", "Bearer B", "bearer A", None)}) == 4


def test_hazard_09_a_key_tells_neither_id_nor_tenant() -> None:
    found = key("my-secret-chat", "Bearer sk-1")
    assert found is not None
    assert len(found.digest) == 16
    assert str(found) == found.digest.hex()
    assert "my-secret-chat" not in repr(found)


def test_hazard_11_a_changed_model_or_adapter_is_another_conversation() -> None:
    assert len({key(model=model) for model in ("base", "my-lora", None)}) == 3


def test_hazard_11_a_changed_cache_salt_is_another_conversation() -> None:
    assert len({key(salt=salt) for salt in ("a", "b", None)}) == 3


@pytest.mark.parametrize("value", [None, 7, ["m"], {}])
def test_a_model_or_salt_that_is_no_text_counts_as_none(value: Any) -> None:
    """The worker refuses such a request anyway."""
    assert key(model=value, salt=value) == key(model="", salt="")


def test_an_absent_tenant_is_the_anonymous_one() -> None:
    assert key(tenant=None) == key(tenant="")


# --- where the id is found ------------------------------------------------------------------------------------------


def found(headers: Headers = (), **fields: Any) -> ConversationKey | None:
    return find_conversation(headers, fields, RULES)


C = found((("x-conversation-id", "c"),))


@pytest.mark.parametrize(
    ("headers", "fields"),
    [
        ((("x-conversation-id", "c"), ("x-session-id", "other")), {"conversation_id": "other"}),
        ((("x-session-id", "other"), ("x-conversation-id", "c")), {}),
        ((("x-session-id", "c"),), {"conversation_id": "other"}),
        ((("x-conversation-id", ""), ("x-session-id", "c")), {}),
        ((), {"conversation_id": "c", "session_id": "other"}),
        ((), {"session_id": "c"}),
        ((), {"conversation_id": None, "session_id": "c"}),
        ((), {"conversation_id": "", "session_id": "c"}),
        ((("x-conversation-id", ""),), {"conversation_id": "c"}),
        ((("x-conversation-id", "c"), ("x-conversation-id", "c")), {}),
        ((("x-conversation-id", ""), ("x-conversation-id", "c")), {}),
    ],
)
def test_headers_come_before_fields_and_the_first_that_says_something_wins(
    headers: Headers, fields: dict[str, Any]
) -> None:
    assert found(headers, **fields) == C is not None


@pytest.mark.parametrize(
    ("headers", "fields"),
    [
        ((), {}),
        ((("x-conversation-id", ""),), {"conversation_id": "", "session_id": None}),
        ((("x-other", "c"),), {"other": "c"}),
    ],
)
def test_a_request_that_names_no_conversation_has_none(headers: Headers, fields: dict[str, Any]) -> None:
    assert found(headers, **fields) is None


def test_a_number_is_an_id_like_its_text() -> None:
    assert found(conversation_id=42) == found(conversation_id="42") != found(conversation_id="43")


@pytest.mark.parametrize("value", [True, False, 1.0, 1e30, [], ["c"], {}, {"id": "c"}])
def test_a_field_that_is_neither_text_nor_integer_is_refused(value: Any) -> None:
    with pytest.raises(InvalidConversationId):
        found(conversation_id=value, session_id="c")


def test_hazard_08_a_header_that_says_two_things_is_refused() -> None:
    with pytest.raises(InvalidConversationId):
        found((("x-conversation-id", "a"), ("x-conversation-id", "b")))


@pytest.mark.parametrize("value", ["a\x00", "a\nb", "\x7f", "\x85", "\u2028", "a\u200bb", "\ud800"])
def test_hazard_09_control_characters_are_refused(value: str) -> None:
    with pytest.raises(InvalidConversationId):
        found((("x-conversation-id", value),))
    with pytest.raises(InvalidConversationId):
        found(conversation_id=value)


@pytest.mark.parametrize(
    ("value", "is_accepted"),
    [("c" * 16, True), ("c" * 17, False), ("é" * 8, True), ("é" * 9, False), ("🧊" * 5, False)],
)
def test_hazard_09_ids_are_bounded_in_bytes(value: str, *, is_accepted: bool) -> None:
    try:
        accepted = found(conversation_id=value) is not None
    except InvalidConversationId:
        accepted = False
    assert accepted == is_accepted


def test_hazard_09_a_huge_number_is_bounded_like_text() -> None:
    with pytest.raises(InvalidConversationId):
        found(conversation_id=10**16)


@given(
    st.lists(st.tuples(st.sampled_from(["x-conversation-id", "x-session-id", "authorization"]), st.text(max_size=20))),
    st.dictionaries(
        st.sampled_from(["conversation_id", "session_id", "model", "cache_salt"]),
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.lists(st.integers()),
    ),
)
def test_any_request_has_a_key_or_none_or_an_invalid_id(headers: list[tuple[str, str]], fields: dict[str, Any]) -> None:
    try:
        outcome = find_conversation(tuple(headers), fields, RULES)
    except InvalidConversationId as error:
        assert str(error)  # noqa: PT017 - every way something is asserted
    else:
        assert outcome is None or len(outcome.digest) == 16


@pytest.mark.parametrize("text", ["", "00", "zz" * 16, "00" * 17, "0 " * 16 + "0" * 16, "chat-17"])
def test_a_key_is_read_back_from_its_hash_and_from_nothing_else(text: str) -> None:
    key = conversation_key("tenant", "m", "", "c1")
    assert ConversationKey.parse(str(key)) == ConversationKey.parse(str(key).upper()) == key
    assert ConversationKey.parse(text) is None


def test_a_key_can_be_made_from_its_parts_as_the_admin_port_does() -> None:
    found = find_conversation(
        (("x-conversation-id", "c1"), ("authorization", "Bearer a")),
        {"model": "m", "cache_salt": "s"},
        IdentityRules(("x-conversation-id",), (), "authorization", 256),
    )
    assert found == conversation_key("Bearer a", "m", "s", "c1")


IN_REQUEST_ID = dataclasses.replace(RULES, patterns={"X-Request-Id": r"^(?P<conversation>[a-z]+)?--"})


def named(**headers: str) -> ConversationKey | None:
    spelled: Headers = tuple((name.replace("_", "-"), value) for name, value in headers.items())
    return find_conversation(spelled, {}, IN_REQUEST_ID)


def test_the_id_may_be_a_part_of_another_header() -> None:
    assert named(x_request_id="chat--1") == named(x_request_id="chat--2") == named(x_session_id="chat") is not None
    assert named(x_request_id="other--1") != named(x_request_id="chat--1")


@pytest.mark.parametrize("request_id", ["", "no separator", "--1", "-" * 2000 + "chat--1"])
def test_a_header_that_does_not_match_names_no_conversation(request_id: str) -> None:
    assert named(x_request_id=request_id) is None


def test_a_header_of_its_own_comes_first_and_body_fields_come_last() -> None:
    assert named(x_request_id="a--1", x_session_id="b") == named(x_session_id="b")
    assert find_conversation((("x-request-id", "a--1"),), {"session_id": "b"}, IN_REQUEST_ID) == named(x_session_id="a")


def test_a_matched_id_is_bounded_too() -> None:
    with pytest.raises(InvalidConversationId):
        named(x_request_id="a" * 17 + "--1")


@given(parts, parts, parts, parts)
def test_a_handle_has_a_key_of_its_own(engine: str, request: str, other_engine: str, other_request: str) -> None:
    same = (engine, request) == (other_engine, other_request)
    assert (handle_key(engine, request) == handle_key(other_engine, other_request)) == same
    assert handle_key(engine, request) != key()
