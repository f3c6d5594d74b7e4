"""Read a receipt as a client may: it is an RFC 9651 dictionary of bare tokens and numbers."""

from __future__ import annotations


def receipt_value(receipt: str, key: str) -> str | None:
    """Return one member's value as text, if the receipt has it."""
    members = (member.strip().partition("=") for member in receipt.split(","))
    return next((value for name, _, value in members if name == key), None)
