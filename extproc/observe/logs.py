"""Structured logs: one JSON object a line. Never a prompt, never a secret: callers pass names, counts and ids only."""

from __future__ import annotations

import logging
import sys
from typing import Any, TextIO

import msgspec
import structlog

Logger = structlog.typing.FilteringBoundLogger


def make_logger(level: str = "info", stream: TextIO | None = None) -> Logger:
    """A logger that writes to ``stream`` (default: standard error) from ``level`` on."""
    return structlog.wrap_logger(  # type: ignore[no-any-return]
        structlog.PrintLogger(stream or sys.stderr),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
            structlog.processors.format_exc_info,
            _render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
    )


def _render(_logger: Any, _method: str, event: Any) -> str:
    return msgspec.json.encode(event, enc_hook=str).decode()
