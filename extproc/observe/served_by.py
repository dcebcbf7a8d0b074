"""Who can have given an answer, as a label."""

from __future__ import annotations

from typing import Final, Literal

By = Literal["chosen", "listed", "pool", "stranger", "unknown"]

BY: Final[dict[By, str]] = {
    "chosen": "the worker that was chosen",
    "listed": "one that was named behind it",
    "pool": "another decode worker of the pool",
    "stranger": "no decode worker of the pool: a prefill worker, or one that is not known here",
    "unknown": "Envoy itself, or it does not say",
}
