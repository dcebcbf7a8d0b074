"""``python -m bench.routing.oracle --config baton.yaml``: the filter, but whenever it asks what the simulated engines hold, it
looks into their caches. All else is as served: only where it knows this from differs from a filter that hears events.
"""

from __future__ import annotations

import select
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from extproc import cli, server
from extproc.config import load
from extproc.routing.holdings import Held, Holdings
from extproc.routing.token_chain import TokenChain
from workers.sim import hashing

_TIMEOUT_S = 5.0
_KEPT_PROMPTS = 512


class Looking(Holdings):
    """What the engines hold at the moment of the question, by their own debug endpoint. It waits for them: see the module."""

    addresses_asked: tuple[str, ...] = ()
    engine_block_tokens = 16

    def __init__(self, max_blocks: int) -> None:
        super().__init__(max_blocks)
        self._links: dict[str, socket.socket] = {}
        self._hashes: dict[int, bytes] = {}

    def lookup(self, chain: TokenChain) -> dict[str, Held]:
        """All are asked at once, and then read one after the other."""
        body = self._digests(chain)
        if not body:
            return {}
        head = f"POST /sim/held HTTP/1.1\r\nhost: engine\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        asked = [address for address in self.addresses_asked if self._ask(address, head + body)]
        found = {address: self._read(address) for address in asked}
        return {address: held for address, held in found.items() if held.tokens}

    def in_step(self, address: str) -> bool:
        """Always."""
        return address in self.addresses_asked

    def addresses(self) -> list[str]:
        """All engines."""
        return list(self.addresses_asked)

    def block_sizes(self) -> tuple[int, ...]:
        """One size."""
        return (self.engine_block_tokens,)

    def block_tokens(self, address: str) -> int | None:
        """The same for all."""
        return self.engine_block_tokens if address in self.addresses_asked else None

    def correct(self, address: str, chain: TokenChain, tokens: int) -> int:  # noqa: ARG002
        """There is nothing to be corrected."""
        return 0

    def close(self) -> None:
        """End the connections."""
        for address in list(self._links):
            self._drop(address)

    def _digests(self, chain: TokenChain) -> bytes:
        """The engines' own hashes of the blocks of a prompt."""
        size = self.engine_block_tokens
        keys = chain.keys(size)
        if not len(keys):
            return b""
        known = self._hashes.get(keys[-1])
        if known is None:
            digest, parts, ids = hashing.root_hash(), [], chain.token_ids.tolist()
            for at in range(0, len(keys) * size, size):
                digest = hashing.block_hash(digest, ids[at : at + size])
                parts.append(digest)
            known = self._hashes[keys[-1]] = b"".join(parts)
            if len(self._hashes) > _KEPT_PROMPTS:
                del self._hashes[next(iter(self._hashes))]
        return known

    def _ask(self, address: str, request: bytes) -> bool:
        for _ in range(2):  # the engine closes a connection that was idle for long
            link = self._links.get(address)
            try:
                if link is None:
                    host, _, port = address.partition(":")
                    link = self._links[address] = socket.create_connection((host, int(port)), _TIMEOUT_S)
                    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                elif _closed(link):
                    raise ConnectionResetError
                link.sendall(request)
                return True
            except OSError:
                self._drop(address)
        return False

    def _read(self, address: str) -> Held:
        link, got = self._links[address], b""
        try:
            while b"}" not in got:
                more = link.recv(4096)
                if not more:
                    raise ConnectionResetError
                got += more
            answer, size = msgspec.json.decode(got[got.index(b"{") :]), self.engine_block_tokens
            return Held(answer["blocks"] * size, answer["host_blocks"] * size)
        except (OSError, ValueError):
            self._drop(address)
            return Held(0)

    def _drop(self, address: str) -> None:
        link = self._links.pop(address, None)
        if link is not None:
            with suppress(OSError):
                link.close()


def _closed(link: socket.socket) -> bool:
    """Nothing is due on an idle connection: what can be read is its end."""
    return bool(select.select([link], [], [], 0)[0])


def main(arguments: Sequence[str]) -> None:
    """As ``baton serve``, with the engines of its configuration."""
    config = load(Path(arguments[arguments.index("--config") + 1]))
    Looking.addresses_asked = tuple(str(each) for each in (*config.workers.prefill, *config.workers.decode))
    Looking.engine_block_tokens = config.routing.block_tokens
    vars(server)["Holdings"] = Looking
    cli.app(["serve", *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
