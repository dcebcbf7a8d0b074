"""Give back the KV blocks of handoffs that no decode worker will fetch.

An engine has no call for that. But a decode worker that turns a request down tells the prefill worker to let go of the blocks
which the request names (vLLM 0.32: the rejection clean-up of its generate endpoints). So a request that must be turned down,
for a model that does not exist, releases them at once; left alone they stay pinned until the lease ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping

import aiohttp
import msgspec

from extproc.config import Handoff as Settings
from extproc.handoff import Handoff
from extproc.observe.logs import Logger
from extproc.observe.metrics import Metrics
from extproc.tls.reasons import tls_reason
from extproc.tls.workers import PLAIN, WorkerLink

_NO_SUCH_MODEL = "baton-release-no-such-model"
_PATH = "/v1/completions"
_CALLS_AT_ONCE = 8
_WORKERS_ASKED = 3
"""How many decode workers are asked for one release: the one that failed may be the first of them."""


class Releaser:
    """A bounded queue of handoffs to release, and the tasks that work it off. Use as an async context manager."""

    def __init__(
        self,
        settings: Settings,
        decode_worker: Callable[[str, Collection[str]], str | None],
        metrics: Metrics,
        log: Logger,
        *,
        own_headers: Mapping[str, str],
        link: WorkerLink = PLAIN,
    ) -> None:
        """``decode_worker`` names a live decode worker for a prefill worker, both ``ip:port``, none of the others that it is
        given; ``own_headers``: see
        :mod:`extproc.worker_key`."""
        self._settings = settings
        self._own_headers = own_headers
        self._link = link
        self._decode_worker = decode_worker
        self._metrics = metrics
        self._log = log
        self._queue: asyncio.Queue[Handoff] = asyncio.Queue(settings.release_queue)
        self._tasks: list[asyncio.Task[None]] = []
        self._later: dict[object, tuple[asyncio.TimerHandle, Handoff]] = {}

    async def __aenter__(self) -> Releaser:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self._settings.release_timeout_s))
        self._tasks = [asyncio.create_task(self._work()) for _ in range(_CALLS_AT_ONCE)]
        return self

    async def __aexit__(self, *_: object) -> None:
        """Work off what is queued, for as long as one call may take, and end. What was put off is put off no longer."""
        for timer, handoff in self._later.values():
            timer.cancel()
            self._queue_up(handoff)
        try:
            await asyncio.wait_for(self._queue.join(), self._settings.release_timeout_s)
        except TimeoutError:
            self._log.warning("releases_left", handoffs=self._queue.qsize())
        for task in self._tasks:
            task.cancel()
        await self._session.close()

    def release(self, handoff: Handoff) -> None:
        """Queue it; returns at once. Only for a handoff that surely no decode worker reads."""
        if self._settings.release and handoff.releasable and handoff.params is not None:
            self._queue_up(handoff)

    def release_later(self, handoff: Handoff) -> object:
        """The same for a handoff that a decode worker may just have got and dropped.

        If it has, it gives the blocks back itself, and this changes nothing. But it must have the time to: blocks that are
        freed under a transfer would leave it with others' KV in its prefix cache. The result is for :meth:`never_mind`.
        """
        if self._settings.release and handoff.releasable and handoff.params is not None:
            key = object()
            timer = asyncio.get_running_loop().call_later(self._settings.release_delay_s, self._due, key)
            self._later[key] = (timer, handoff)
            return key
        return None

    def never_mind(self, key: object) -> None:
        """What was put off need not be done: a decode worker has taken the handoff."""
        if key in self._later:
            self._later.pop(key)[0].cancel()

    def _due(self, key: object) -> None:
        _, handoff = self._later.pop(key)
        self._queue_up(handoff)

    def _queue_up(self, handoff: Handoff) -> None:
        try:
            self._queue.put_nowait(handoff)
        except asyncio.QueueFull:
            self._metrics.releases.labels("dropped").inc()

    async def _work(self) -> None:
        while True:
            handoff = await self._queue.get()
            try:
                fault = await self._call(handoff)
            finally:
                self._queue.task_done()
            self._metrics.releases.labels("failed" if fault else "released").inc()
            self._log.info("release", prefill=handoff.prefill, engine_request=handoff.request_id, fault=fault)

    async def _call(self, handoff: Handoff) -> str | None:
        """None if the blocks are free, else what went wrong with the last of the workers that were asked."""
        body = msgspec.json.encode(
            {
                "model": _NO_SUCH_MODEL,
                "prompt": "x",
                "max_tokens": 1,
                "kv_transfer_params": msgspec.Raw(handoff.params or b"null"),
            }
        )
        fault: str | None = "no decode worker is live"
        asked: list[str] = []
        while len(asked) < _WORKERS_ASKED and (worker := self._decode_worker(handoff.prefill, asked)) is not None:
            fault = await self._ask(worker, body)
            if fault is None:
                return None
            asked.append(worker)
        return fault

    async def _ask(self, worker: str, body: bytes) -> str | None:
        try:
            headers = {"content-type": "application/json", **self._own_headers}
            async with self._session.post(
                self._link.url(worker, _PATH), data=body, headers=headers, **self._link.how
            ) as response:
                return None if response.status == 404 else f"{worker} answered {response.status}"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return f"{worker}: {tls_reason(error) or type(error).__name__}"
