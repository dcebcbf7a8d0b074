"""Two workers side by side, and one thing that does not fit between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import msgspec

from workers.profile import ModelFacts, Profile
from workers.spec import WorkerSpec


class Severity(str, Enum):  # noqa: UP042  (as the preflight's)
    """How bad a finding is. In this order."""

    INFO = "info"
    WARN = "warn"
    """It works, but worse than it could, or with a risk that is named."""
    ERROR = "error"
    """It does not start, or no handoff between the two succeeds."""


class Misfit(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that does not fit."""

    rule: str
    """Stable; docs/workers.md lists all of them."""
    severity: Severity
    prefill: str
    """What the prefill worker has."""
    decode: str
    """What the decode worker has."""
    why: str
    source: str
    """Where the rule is from."""
    fix: str


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the two workers."""

    name: str
    profile: Profile
    spec: WorkerSpec


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A prefill worker and a decode worker that it would hand over to."""

    prefill: Side
    decode: Side

    @property
    def sides(self) -> tuple[Side, Side]:
        """Both, prefill first."""
        return self.prefill, self.decode

    @property
    def facts(self) -> ModelFacts | None:
        """What either profile says of the model."""
        return self.decode.profile.facts or self.prefill.profile.facts

    @property
    def hybrid(self) -> bool:
        """Whether the model has layers of several kinds, as far as a profile says."""
        return self.facts is not None and self.facts.hybrid

    def misfit(
        self, rule: str, severity: Severity, shown: Callable[[WorkerSpec], object], why: str, source: str, fix: str
    ) -> Misfit:
        """A finding that shows the same of both."""
        return Misfit(
            rule=rule,
            severity=severity,
            prefill=text(shown(self.prefill.spec)),
            decode=text(shown(self.decode.spec)),
            why=why,
            source=source,
            fix=fix,
        )


def text(value: object) -> str:
    """A value as it is shown."""
    return "not set" if value is None else str(value)
