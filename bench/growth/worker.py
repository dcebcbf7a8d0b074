"""Fake workers in a process of their own, which cost next to nothing: ``python -m bench.growth.worker``.

A prefill whose body holds the word :data:`HELD` is answered when it is said so, any other after ``--prefill-s``. Talked to over
standard input: ``held N`` is answered ``held`` when N prefills wait, ``go`` lets them go.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from typing import Final, cast

import httptools
import uvloop

HELD: Final = b"holdthisprefill"
_PARAMS: Final = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [list(range(64))],
    "remote_engine_id": "engine-0",
    "remote_request_id": "cmpl-0",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
    "remote_num_tokens": 1024,
}
_USAGE: Final = {"prompt_tokens": 1024, "completion_tokens": 1, "total_tokens": 1025}
_CHOICE: Final = {"index": 0, "text": "x", "finish_reason": "length"}
_ANSWER: Final = json.dumps({"id": "c", "choices": [_CHOICE], "usage": _USAGE, "kv_transfer_params": _PARAMS}).encode()
_MODELS: Final = json.dumps({"object": "list", "data": [{"id": "m", "object": "model"}]}).encode()


def say(word: str) -> None:
    """To whoever started this."""
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


class Gate:
    """Where prefills wait."""

    def __init__(self) -> None:
        self._waiting: dict[Connection, None] = {}
        self._asked = 0

    def wait(self, connection: Connection) -> None:
        """Until :meth:`open`."""
        self._waiting[connection] = None
        self._tell()

    def leave(self, connection: Connection) -> None:
        """It is gone."""
        self._waiting.pop(connection, None)

    def tell_at(self, many: int) -> None:
        """Say ``held`` when so many wait."""
        self._asked = many
        self._tell()

    def open(self) -> None:
        """Answer them all."""
        waiting, self._waiting = self._waiting, {}
        for connection in waiting:
            connection.answer(_ANSWER)

    def _tell(self) -> None:
        if self._asked and len(self._waiting) >= self._asked:
            self._asked = 0
            say("held")


class Connection(asyncio.Protocol):
    """One, kept alive."""

    def __init__(self, gate: Gate, prefill_s: float | None) -> None:
        """``prefill_s``: None for a decode worker, which answers at once."""
        self._gate = gate
        self._prefill_s = prefill_s
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._path = b""
        self._held = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Of asyncio.Protocol."""
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, _: Exception | None) -> None:
        """Of asyncio.Protocol."""
        self._transport = None
        self._gate.leave(self)

    def data_received(self, data: bytes) -> None:
        """Of asyncio.Protocol."""
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        """Of the parser."""
        self._path, self._held = b"", False

    def on_url(self, url: bytes) -> None:
        """Of the parser."""
        self._path += url

    def on_body(self, body: bytes) -> None:
        """Of the parser. The word is at the beginning of a body, which comes whole in one piece."""
        self._held = self._held or HELD in body[:256]

    def on_message_complete(self) -> None:
        """Of the parser."""
        if not self._path.startswith(b"/v1/completions"):
            self.answer(_MODELS if self._path == b"/v1/models" else b"vllm:num_requests_running 0\n")
        elif self._prefill_s is None:
            self.answer(_ANSWER)
        elif self._held:
            self._gate.wait(self)
        elif self._prefill_s > 0:
            asyncio.get_running_loop().call_later(self._prefill_s, self.answer, _ANSWER)
        else:
            self.answer(_ANSWER)

    def answer(self, body: bytes) -> None:
        """If anybody is there."""
        if self._transport is not None:
            head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
            self._transport.write(head + body)


async def work(prefill: list[int], decode: list[int], prefill_s: float) -> None:
    """Serve until standard input ends."""
    loop, gate = asyncio.get_running_loop(), Gate()
    for ports, takes_s in ((prefill, prefill_s), (decode, None)):
        for port in ports:
            await loop.create_server(lambda takes_s=takes_s: Connection(gate, takes_s), "127.0.0.1", port, backlog=4096)  # type: ignore[misc]
    said = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(said), sys.stdin)
    say("ready")
    while line := await said.readline():
        word, _, number = line.decode().strip().partition(" ")
        if word == "held":
            gate.tell_at(int(number))
        elif word == "go":
            gate.open()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prefill", type=int, nargs="+", required=True, help="ports")
    parser.add_argument("--decode", type=int, nargs="+", required=True, help="ports")
    parser.add_argument("--prefill-s", type=float, default=0.0, help="seconds that a prefill takes (default: 0)")
    arguments = parser.parse_args()
    uvloop.run(work(arguments.prefill, arguments.decode, arguments.prefill_s))


if __name__ == "__main__":
    main()
