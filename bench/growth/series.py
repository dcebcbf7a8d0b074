"""What one experiment yields: costs by the size of its input."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from bench.growth.judge import Cost, Step, steps

Tell = Callable[[str], None]
"""Says what is being done."""


class Series(msgspec.Struct, kw_only=True):
    """A table: a row for each size, a column for each cost."""

    title: str
    input: str
    """What the sizes are of."""
    costs: Sequence[Cost]
    rows: dict[float, dict[str, float]] = {}
    """Size -> cost by its name."""
    faults: list[str] = []
    """What should not have happened at all, such as an answer that is an error."""

    def note(self, size: float, costs: dict[str, float]) -> None:
        """One measurement of a size. Of several, the least counts: what disturbs a measurement only ever adds to it."""
        row = self.rows.setdefault(size, {})
        for name, value in costs.items():
            row[name] = min(value, row.get(name, value))

    def steps(self) -> list[Step]:
        """Every step that is judged."""
        return [
            step
            for cost in self.costs
            for step in steps(cost, {size: row[cost.name] for size, row in self.rows.items() if cost.name in row})
        ]
