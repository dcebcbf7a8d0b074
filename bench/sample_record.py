"""The record of a typical request, for benchmarks of what is logged of it."""

from __future__ import annotations

from extproc.journey import Record
from extproc.paths import Treatment


def sample_record() -> Record:
    """A chat prompt that was handed over after a wait."""
    return Record(
        request_id="6f1c8a2e-6e0a-4b0e-9d8e-0a1b2c3d4e5f",
        method="POST",
        path="/v1/chat/completions",
        treatment=Treatment.CHAT,
        outcome="handoff",
        prefill="10.0.0.1:8100",
        decode="10.0.0.2:8200",
        policy="default",
        queued_ms=12.5,
        prefill_ms=250.0,
        blocks=75,
        tokens=1200,
        cached_tokens=1000,
        body_bytes=5000,
    )
