"""The process that sees the chunks of sampled answers, and holds none: the second ext_proc service, in observability mode.

A process of its own, because a few thousand chunks a second fill one, and the filter's requests must not wait behind them. It
writes one JSON line an answer (:class:`Sighting`) to its standard output, and ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import TYPE_CHECKING, Any, Final

import msgspec
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from extproc.headers import TAGS_NAMESPACE
from extproc.observe.events import EventReader
from extproc.observe.log_lines import ID_KEY
from extproc.observe.quantiles import Counts, bucket_of
from extproc.observe.sighting import Sighting
from extproc.transport.call import Call
from extproc.transport.choose import Kind, make_server

if TYPE_CHECKING:  # what they import is not needed in plaintext
    from extproc.config import Tls
    from extproc.tls.files import Followed

SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"

# A write of so much to a pipe is whole, or does not happen.
_PIPE_BYTES = 4096
_SPARE_STREAMS = 64
_MESSAGE_BYTES = 4 << 20
"""More than Envoy reads from a worker at once."""
_GRACE_S = 1.0


class Watch:
    """One answer: when its tokens came."""

    def __init__(self) -> None:
        self.reader = EventReader()
        self.gaps: Counts = {}
        self.gaps_s = 0.0
        self.longest_s = 0.0
        self._last_s: float | None = None

    def chunk(self, body: bytes, now_s: float) -> None:
        """A piece of the answer passed at ``now_s``."""
        tokens = self.reader.feed(body)
        if not tokens:
            return
        if self._last_s is None:
            tokens -= 1  # the first has no gap before it
        else:
            self._gap(now_s - self._last_s)
            tokens -= 1
        for _ in range(tokens):
            self._gap(0.0)
        self._last_s = now_s

    def _gap(self, seconds: float) -> None:
        bucket = bucket_of(seconds)
        self.gaps[bucket] = self.gaps.get(bucket, 0) + 1
        self.gaps_s += seconds
        self.longest_s = max(self.longest_s, seconds)

    def sighting(self, key: str, *, whole: bool) -> Sighting:
        """What is to be told of it."""
        reader = self.reader
        return Sighting(
            key=key,
            whole=whole,
            failed=reader.failed,
            finish_reason=reader.finish_reason,
            tokens=reader.tokens if reader.stated_tokens is None else reader.stated_tokens,
            events=reader.tokens,
            prompt_tokens=reader.prompt_tokens,
            gaps=self.gaps,
            gaps_s=round(self.gaps_s, 6),
            longest_s=round(self.longest_s, 6),
            oversized=reader.oversized,
        )


async def _serve(call: Call) -> None:
    watch, key, whole = Watch(), "", False
    try:
        while not whole and (data := await call.receive()) is not None:
            now_s = time.perf_counter()
            message = pb.ProcessingRequest.FromString(data)
            kind = message.WhichOneof("request")
            if kind == "response_body":
                watch.chunk(message.response_body.body, now_s)
                whole = message.response_body.end_of_stream
            elif kind == "response_headers":
                key = _key(message)
                whole = message.response_headers.end_of_stream
            elif kind == "response_trailers":
                whole = True
    finally:
        # Also where the call is cancelled, which is how Envoy ends it for a client that left.
        if key:
            _tell(watch.sighting(key, whole=whole))


def _key(message: Any) -> str:
    metadata = message.metadata_context.filter_metadata
    if TAGS_NAMESPACE not in metadata:
        return ""
    fields = metadata[TAGS_NAMESPACE].fields
    return str(fields[ID_KEY].string_value) if ID_KEY in fields else ""


def _tell(sighting: Sighting) -> None:
    """Write it, if the filter reads; otherwise it is lost, and the filter notices that it did not come."""
    line = msgspec.json.encode(sighting) + b"\n"
    if len(line) > _PIPE_BYTES:
        line = msgspec.json.encode(msgspec.structs.replace(sighting, gaps={})) + b"\n"
    try:
        os.write(sys.stdout.fileno(), line)
    except (BlockingIOError, BrokenPipeError):
        return


async def watch_streams(listen: str, max_streams: int, transport: Kind, tls: Tls | None = None) -> None:
    """Serve until standard input ends; ``tls``: None is plaintext. Raises RuntimeError if the address cannot be used,
    KeysError."""
    os.set_blocking(sys.stdout.fileno(), False)
    server = make_server(transport, max_message_bytes=_MESSAGE_BYTES, max_streams=max_streams + _SPARE_STREAMS)
    server.serve(f"/{SERVICE}/Process", _serve)
    following = None
    if tls is None:
        server.add_insecure_port(listen)
    else:
        from extproc.transport.tls.ring import KeyRing

        ring = KeyRing(tls, from_files=tls.mode == "files")
        server.add_secure_port(listen, ring)
        following = asyncio.create_task(_follow(ring.followed()))
    await server.start()
    over = asyncio.Event()
    stdin = sys.stdin.fileno()
    asyncio.get_running_loop().add_reader(stdin, lambda: None if os.read(stdin, 64) else over.set())
    await over.wait()
    if following is not None:
        following.cancel()
    await server.stop(_GRACE_S)


async def _follow(keys: Followed) -> None:
    """Use new certificates. What is wrong with them the filter says, which reads the same files."""
    from extproc.tls.files import POLL_S

    while True:
        await asyncio.sleep(POLL_S)
        await asyncio.to_thread(keys.look)


def main() -> None:
    """``python -m extproc.observe.stream_watch LISTEN MAX_STREAMS TRANSPORT [TLS]``; started by the filter, not by people."""
    import uvloop

    listen, max_streams, transport, *more = sys.argv[1:]
    tls = None
    if more:
        from extproc.config import Tls

        tls = msgspec.json.decode(more[0], type=Tls)
    try:
        uvloop.run(watch_streams(listen, int(max_streams), "lean" if transport == "lean" else "grpc", tls))
    except (RuntimeError, ValueError) as error:
        sys.exit(f"observe.listen: {listen}: {error}")


if __name__ == "__main__":
    main()
