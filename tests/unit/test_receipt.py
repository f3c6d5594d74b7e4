"""The receipt: one account of a request, for the client's header and for the access log."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.receipt import Outcome, Reason, Receipt

KEY = r"[a-z*][a-z0-9_\-.*]*"
TOKEN = r"[A-Za-z*][!#$%&'*+\-.^_`|~:/A-Za-z0-9]*"
NUMBER = r"-?(?:\d{1,15}|\d{1,12}\.\d{1,3})"
DICTIONARY = re.compile(rf"{KEY}=(?:{TOKEN}|{NUMBER})(?:, {KEY}=(?:{TOKEN}|{NUMBER}))*")
"""The part of RFC 9651 that a receipt uses: a dictionary of tokens, integers and decimals."""

counts = st.none() | st.integers(0, 10**7)
milliseconds = st.none() | st.floats(0, 10**8)


@given(
    st.builds(
        Receipt,
        st.sampled_from(Outcome),
        st.none() | st.sampled_from(Reason),
        counts,
        counts,
        counts,
        milliseconds,
        milliseconds,
        cached_tokens=counts,
    )
)
def test_any_receipt_is_a_structured_field_with_what_is_known(receipt: Receipt) -> None:
    value = receipt.header_value()
    assert DICTIONARY.fullmatch(value)
    told = dict(member.split("=") for member in value.split(", "))
    expected: dict[str, Any] = {
        "outcome": receipt.outcome,
        "reason": receipt.reason,
        "reused": receipt.reused_tokens,
        "prompt": receipt.prompt_tokens,
        "held": receipt.held_tokens,
        "cached": None if receipt.cached_tokens == receipt.reused_tokens else receipt.cached_tokens,
        "render_ms": None if receipt.render_ms is None else round(receipt.render_ms, 1),
        "prefill_ms": None if receipt.prefill_ms is None else round(receipt.prefill_ms, 1),
    }
    assert told == {key: str(known) for key, known in expected.items() if known is not None}
    assert {key: str(known) for key, known in receipt.metadata().items()} == told


@pytest.mark.parametrize("reason", Reason)
def test_a_reason_is_one_word_fit_for_a_label(reason: Reason) -> None:
    assert re.fullmatch(r"[a-z_]+", reason)


def test_an_untouched_request_says_so() -> None:
    assert Receipt().header_value() == "outcome=passed"
    assert Receipt().metadata() == {"outcome": "passed"}


def test_a_reuse_reads_well() -> None:
    receipt = Receipt(Outcome.REUSED, None, 3873, 3853, 3853, 4.04, 251.96)
    assert receipt.header_value() == (
        "outcome=reused, reused=3853, prompt=3873, held=3853, render_ms=4.0, prefill_ms=252.0"
    )


def test_the_conversation_and_removed_fields_are_for_the_log_only() -> None:
    receipt = Receipt(Outcome.COLD, Reason.NOTHING_KEPT, conversation="00ff", forbidden_fields_removed=2)
    assert receipt.header_value() == "outcome=cold, reason=nothing_kept"
    assert receipt.metadata() == {
        "outcome": "cold",
        "reason": "nothing_kept",
        "conversation": "00ff",
        "forbidden_fields_removed": 2,
    }


def test_a_metadata_of_its_own_is_made_each_time() -> None:
    receipt = Receipt()
    receipt.metadata()["outcome"] = "changed"
    assert receipt.metadata() == {"outcome": "passed"}
