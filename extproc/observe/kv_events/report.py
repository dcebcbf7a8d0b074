"""What is counted of KV events, as metrics: differences, twice a second, so that an event costs nothing of it."""

from __future__ import annotations

from extproc.observe.kv_events.entering import Counts
from extproc.observe.metrics import Metrics
from extproc.routing.holdings import Holdings, Tier


class Report:
    """For one registry."""

    def __init__(self, metrics: Metrics, holdings: Holdings) -> None:
        self._metrics = metrics
        self._holdings = holdings
        self._before: dict[str, dict[str, int]] = {}
        self._seen: dict[str, int] = {}
        self.on_lag = metrics.kv_event_lag_seconds.child()

    def tell(self, address: str, counts: Counts, publishers: int, unknown: int) -> None:
        """What was counted of an endpoint since the last time, and what it holds."""
        before = self._before.get(address, {})
        now: dict[str, int] = {**vars(counts), "unknown": unknown}
        self._before[address] = now

        def grown(name: str) -> int:
            return max(0, now[name] - before.get(name, 0))

        metrics = self._metrics
        metrics.kv_events.inc(address, by=grown("events"))
        for outcome in ("live", "replayed", "old", "faulty"):
            metrics.kv_event_batches.inc(address, outcome, by=grown(outcome))
        for kind in ("stored", "removed"):
            metrics.kv_event_blocks.inc(address, kind, by=grown(kind))
        metrics.kv_event_clears.inc(address, by=grown("cleared"))
        metrics.kv_event_gaps.inc(address, "filled", by=grown("gaps_filled"))
        metrics.kv_event_gaps.inc(address, "lost", by=grown("gaps_lost"))
        metrics.kv_event_replays.inc(address, "asked", by=grown("replays"))
        metrics.kv_event_replays.inc(address, "failed", by=grown("replays_failed"))
        metrics.kv_event_restarts.inc(address, by=grown("restarts"))
        metrics.kv_event_dropped_blocks.inc(address, by=grown("dropped"))
        metrics.kv_events_unknown.inc(address, "name", by=grown("unknown"))
        metrics.kv_events_unknown.inc(address, "medium", by=grown("other_tiers"))
        metrics.kv_in_step.labels(address).set(self._holdings.in_step(address))
        metrics.kv_event_publishers.labels(address).set(publishers)
        for tier, blocks in self.blocks(address).items():
            metrics.kv_index_blocks.labels(address, tier).set(blocks)

    def blocks(self, address: str) -> dict[str, int]:
        """Blocks that an endpoint holds, by tier."""
        sources = self._holdings.sources(address)
        return {tier.value: sum(each.blocks(tier) for each in sources) for tier in Tier}

    def index(self) -> None:
        """What the whole takes."""
        holdings, metrics = self._holdings, self._metrics
        metrics.kv_index_bytes.set(holdings.bytes)
        metrics.kv_index_max_bytes.set(holdings.max_bytes)
        now = {
            "evictions": holdings.evictions,
            "orphan": holdings.seen.orphans,
            "removed": holdings.seen.unknown_removed,
            "group": holdings.seen.other_groups,
        }
        metrics.kv_index_evictions.inc(by=now["evictions"] - self._seen.get("evictions", 0))
        for why in ("orphan", "removed", "group"):
            metrics.kv_index_ignored_blocks.inc(why, by=now[why] - self._seen.get(why, 0))
        self._seen = now

    def gone(self, address: str) -> None:
        """The endpoint is no more: so are its series."""
        if self._before.pop(address, None) is None:
            return
        metrics = self._metrics
        for tally in (
            metrics.kv_events,
            metrics.kv_event_batches,
            metrics.kv_event_blocks,
            metrics.kv_event_clears,
            metrics.kv_event_gaps,
            metrics.kv_event_replays,
            metrics.kv_event_restarts,
            metrics.kv_event_dropped_blocks,
            metrics.kv_events_unknown,
        ):
            tally.forget("endpoint", address)
        metrics.kv_in_step.remove(address)
        metrics.kv_event_publishers.remove(address)
        for tier in Tier:
            metrics.kv_index_blocks.remove(address, tier.value)
