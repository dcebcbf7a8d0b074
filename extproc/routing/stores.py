"""What cache servers (LMCache) hold for the workers that use them: by a directory's word, else by what was stored there. Pure.

A worker stores every prompt that it computes in its server, in chunks; a server evicts the chunks used least recently. That is
a prediction, unlike a worker's events: nobody tells what a server drops. Where a directory was asked, only its word counts, but
for what a worker did not find there a moment ago.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from extproc.routing.pool import Endpoint
from extproc.routing.prefix import Chain, PrefixIndex
from extproc.routing.token_chain import TokenChain

SHARED = ""
"""The one server of all workers, where none are told apart."""

EVERYONE = "*"
"""In what a directory says: every server, beside those that it names."""

ABSENT_S = 30.0
"""A directory is not believed for so long about a chunk that a worker did not find: it takes that long, with LMCache's default
(`--instance-timeout`), to notice that a server is gone. A server that is there has stored the chunk again by then."""

_MOST_ABSENT = 4096


class Stores:
    """All servers, by name: that is the value of a label of the workers that share it."""

    def __init__(self, *, label: str | None, chunk_tokens: int, capacity_tokens: int) -> None:
        """``label`` of the workers names their server, and who has none has no server; None: all share one.

        ``capacity_tokens``: what one server holds. Raises ValueError below 1.
        """
        self._label = label
        self.chunk_tokens = chunk_tokens
        self._capacity_chunks = max(1, capacity_tokens // chunk_tokens)
        self._index = PrefixIndex(max(1, 16 * self._capacity_chunks))
        self._absent: OrderedDict[tuple[str, int], float] = OrderedDict()
        """Server and key of a chunk that was not found -> until when that counts. In the order of time."""

    @property
    def chunks(self) -> int:
        """Remembered, all servers together."""
        return self._index.blocks

    def server_of(self, endpoint: Endpoint) -> str | None:
        """The server of a worker; None: it has none."""
        return SHARED if self._label is None else endpoint.labels.get(self._label)

    def stored(self, endpoint: Endpoint, chain: TokenChain) -> None:
        """A worker has computed a prompt, and stored it."""
        server = self.server_of(endpoint)
        keys = chain.keys(self.chunk_tokens)
        if server is not None and len(keys):
            self._index.set_capacity(server, self._capacity_chunks)
            self._index.insert(server, Chain(keys, float(self.chunk_tokens)))

    def missed(self, endpoint: Endpoint, chain: TokenChain, tokens: int, *, expected_tokens: int, now_s: float) -> None:
        """A server had but the first ``tokens`` of ``expected_tokens`` that were held to be there."""
        server = self.server_of(endpoint)
        if server is None:
            return
        keys, held_chunks = chain.keys(self.chunk_tokens), tokens // self.chunk_tokens
        self._index.correct(server, Chain(keys, 1.0), held_chunks)
        # A worker computes the last tokens of a prompt even if all of it is found: that is no chunk that is not there.
        if held_chunks < len(keys) and 2 * (expected_tokens - tokens) > self.chunk_tokens:
            self._absent[server, keys[held_chunks]] = now_s + ABSENT_S
            self._absent.move_to_end((server, keys[held_chunks]))
            if len(self._absent) > _MOST_ABSENT:
                self._absent.popitem(last=False)

    def held(self, endpoint: Endpoint, chain: TokenChain, told: Mapping[str, int] | None, now_s: float) -> int:
        """Leading tokens in the server of one worker. ``told`` as in :meth:`lookup`."""
        server = self.server_of(endpoint)
        if server is None:
            return 0
        found = self.lookup(chain, told, now_s)
        return found.get(server, found.get(EVERYONE, 0))

    def lookup(self, chain: TokenChain, told: Mapping[str, int] | None, now_s: float) -> Mapping[str, int]:
        """Server -> leading tokens. ``told``: what a directory says, if it was asked."""
        if told is not None:
            return self._without_absent(chain, told, now_s)
        found = self._index.lookup(Chain(chain.keys(self.chunk_tokens), 1.0))
        return {server: chunks * self.chunk_tokens for server, chunks in found.items()}

    def _without_absent(self, chain: TokenChain, told: Mapping[str, int], now_s: float) -> Mapping[str, int]:
        absent = self._absent
        while absent and next(iter(absent.values())) <= now_s:
            absent.popitem(last=False)
        if not absent or not told:
            return told
        believed, keys = dict(told), chain.keys(self.chunk_tokens)
        for server in {server for server, _ in absent}:
            tokens = told.get(server, told.get(EVERYONE, 0))
            for at in range(tokens // self.chunk_tokens):
                if (server, keys[at]) in absent:
                    believed[server] = at * self.chunk_tokens
                    break
        return believed
