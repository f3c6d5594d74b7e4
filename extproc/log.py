"""Structured logs: one JSON object per line on standard output, past-tense events with keys. Bodies and ids never."""

from __future__ import annotations

import logging

import structlog


def configure_logging(level: str) -> None:
    """Set structlog up for this process; ``level`` is a standard level name in lower case."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(),
        cache_logger_on_first_use=True,
    )
