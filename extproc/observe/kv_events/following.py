"""What the rest of the filter needs of whoever follows the workers' KV events. Imports nothing of ZMQ, which few have."""

from __future__ import annotations

from typing import Any, Protocol


class Following(Protocol):
    """See :class:`extproc.observe.kv_events.subscriber.Subscriber`."""

    async def run(self) -> None:
        """Until cancelled."""

    def sync(self) -> None:
        """The pool has changed."""

    def restarted(self, address: str) -> None:
        """Another engine may be there now."""

    def distrusted(self, address: str) -> None:
        """What was known of it has proved wrong."""

    def status(self) -> dict[str, Any]:
        """For people."""
