"""One real handoff between two workers, for its own sake: so that the first transfer, which takes so long, is behind them.

It goes to the workers themselves, not through Envoy, which may be waiting for this filter to be ready. Its prompt is like no
other, so neither worker has any of it in its cache, and longer than a KV block, so that blocks are moved.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial

import aiohttp
import msgspec

from extproc import bounded
from extproc.config import Config, WarmUp
from extproc.errors import ApiError, RelayedError
from extproc.handoff import Connector, Flow, Handoff, HandoffError, Pair
from extproc.handoff.nixl_turn import kept_after
from extproc.handoff.remote_hosts import RemoteHosts
from extproc.observe.load import Scrape, parse
from extproc.observe.pulse import Pulse
from extproc.prefill import PrefillClient
from extproc.release import Releaser
from extproc.tls.reasons import described, tls_reason
from extproc.tls.workers import PLAIN, WorkerLink

_PATH = "/v1/completions"
_WORDS = ("red", "one", "sun", "day", "hot", "big", "sea", "top", "new", "cat", "ice", "old", "air", "far", "two", "cup")
"""None is less than a token."""
_SHOWN_CHARS = 200
"""Of what a worker says about an error."""


class MeetingError(Exception):
    """The handoff did not come about; the message says which worker did what."""


class Meeting:
    """Lets two workers meet. Use as an async context manager."""

    def __init__(
        self,
        config: Config,
        connector: Connector,
        releaser: Releaser,
        pulse: Pulse,
        own_headers: Mapping[str, str],
        link: WorkerLink = PLAIN,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``own_headers``: see :mod:`extproc.worker_key`."""
        self._settings: WarmUp = config.warm_up
        self._connector = connector
        self._releaser = releaser
        self._pulse = pulse
        self._clock = clock
        self._max_bytes = config.prefill.max_reply_bytes
        self._metrics_max_bytes = config.scrape.max_bytes
        self._max_age_s = config.handoff.lease_s * config.handoff.max_age_share
        self._hosts = RemoteHosts(config.handoff.remote_hosts) if config.handoff.next_turn.enabled else None
        self._connect_s = config.prefill.connect_timeout_s
        self._client = PrefillClient(msgspec.structs.replace(config.prefill, via="direct"), link)
        self._link = link
        self._headers = own_headers

    async def __aenter__(self) -> Meeting:
        await self._client.__aenter__()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_s),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()
        await self._client.__aexit__()

    async def hold(self, prefill: str, decode: str, model: str | None) -> None:
        """One handoff from ``prefill`` to ``decode`` (both ``ip:port``). Raises MeetingError."""
        pair = Pair(prefill, decode, uuid.uuid4().hex)
        prompt = " ".join((pair.request_id, *random.choices(_WORDS, k=self._settings.prompt_tokens)))  # noqa: S311 (no secret)
        body: dict[str, object] = {"prompt": prompt, "temperature": 0, "stream": False}
        if model is not None:
            body["model"] = model
        flow = {Flow.SEQUENTIAL: self._in_turn, Flow.CONCURRENT: self._at_once, Flow.DELEGATED: self._decode_only}
        before = await self._look(decode)
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                await flow[self._connector.flow](pair, body)
        except TimeoutError:
            raise MeetingError(f"not done within {self._settings.timeout_s:g} s") from None
        except KeyError as error:
            raise MeetingError(f"handoff.{self._settings_name()} has no entry for {error.args[0]}") from None
        now = await self._look(decode)
        failed = (now.failed_transfers or 0) > (before.failed_transfers or 0)
        if failed and (now.transfer_count or 0) <= (before.transfer_count or 0):
            # With `kv_load_failure_policy: recompute` the answer is right all the same.
            raise MeetingError(f"{decode}: it counts a failed transfer, and computed the prompt itself")

    def _settings_name(self) -> str:
        return self._connector.name.replace("-", "_")

    # -- one function a flow -----------------------------------------------------------------------------------------------

    async def _in_turn(self, pair: Pair, body: Mapping[str, object]) -> None:
        sent_s = self._clock()
        reply = await self._prefill(pair, body)
        since_s = max(sent_s, self._pulse.not_before())
        try:
            handoff = self._connector.accept(reply, pair)
        except HandoffError as error:
            raise MeetingError(f"{pair.prefill}: its answer cannot be handed over: {error}") from None
        age_s = self._clock() - since_s
        if age_s > self._max_age_s:
            self._releaser.release(handoff)
            raise MeetingError(f"{pair.prefill}: its handoff may be {age_s:.1f} s old, over {self._max_age_s:g} s")
        await self._decode(pair, body, handoff)

    async def _at_once(self, pair: Pair, body: Mapping[str, object]) -> None:
        calls = (self._prefill(pair, body), self._decode(pair, body, self._connector.announce(pair)))
        tasks = [asyncio.ensure_future(call) for call in calls]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _decode_only(self, pair: Pair, body: Mapping[str, object]) -> None:
        await self._decode(pair, body, self._connector.announce(pair))

    # -- the calls ---------------------------------------------------------------------------------------------------------

    async def _prefill(self, pair: Pair, body: Mapping[str, object]) -> bytes:
        params = msgspec.Raw(self._connector.prefill_params(pair))
        sent = msgspec.json.encode({**body, "max_tokens": 1, "kv_transfer_params": params})
        try:
            return await self._client.run(pair.prefill, _PATH, sent, {**self._headers, "x-request-id": pair.request_id})
        except ApiError as error:
            raise MeetingError(f"{pair.prefill}: {error.message}") from None
        except RelayedError as error:
            raise MeetingError(f"{pair.prefill}: the prefill worker answered {error.status}: {_shown(error.body)}") from None

    async def _decode(self, pair: Pair, body: Mapping[str, object], handoff: Handoff) -> None:
        """The blocks are given back unless they were read."""
        sent = {**body, "max_tokens": self._settings.answer_tokens}
        if handoff.params is not None:
            sent["kv_transfer_params"] = msgspec.Raw(handoff.params)
        headers = {**self._headers, "x-request-id": pair.request_id, **handoff.headers, "content-type": "application/json"}
        with ExitStack() as unread:
            # A worker that has the request and is cut off gives them back itself; it must have the time to.
            give_back: Callable[[], object] = partial(self._releaser.release_later, handoff)
            unread.callback(lambda: give_back())
            try:
                async with self._session.post(
                    self._link.url(pair.decode, _PATH), data=msgspec.json.encode(sent), headers=headers, **self._link.how
                ) as response:
                    answer = await bounded.read(response, self._max_bytes)
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                give_back = partial(self._releaser.release, handoff)
                why = tls_reason(error)
                said = "" if why is None else f": {why}"
                raise MeetingError(f"{pair.decode}: the decode worker cannot be reached{said}") from None
            except (aiohttp.ClientError, OSError, bounded.TooLargeError) as error:
                raise MeetingError(f"{pair.decode}: {described(error)}") from None
            if response.status != 200:
                give_back = partial(self._releaser.release, handoff)
                raise MeetingError(f"{pair.decode}: the decode worker answered {response.status}: {_shown(answer)}")
            unread.pop_all()
        kept = None if self._hosts is None else kept_after(answer, pair.decode, self._hosts)
        if kept is not None:
            self._releaser.release(kept)  # there is no next turn

    async def _look(self, decode: str) -> Scrape:
        """What the worker counts; nothing, if it does not say."""
        try:
            async with (
                asyncio.timeout(self._connect_s),
                self._session.get(self._link.url(decode, "/metrics"), **self._link.how) as response,
            ):
                return parse(await bounded.read(response, self._metrics_max_bytes))
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, bounded.TooLargeError):
            return Scrape()


def _shown(answer: bytes) -> str:
    return answer[:_SHOWN_CHARS].decode("utf-8", "replace")
