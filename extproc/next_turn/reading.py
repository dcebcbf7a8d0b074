"""One answer on its way through the filter: what it says of its blocks is kept, and nothing of that reaches the client."""

from __future__ import annotations

import asyncio
from array import array
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from extproc.handoff import HandoffError
from extproc.handoff.nixl_turn import KeptBlocks, release_of
from extproc.next_turn.answer import Events, Told, Whole
from extproc.paths import Treatment
from extproc.tokens.ids import AT_ONCE_BYTES, unpack

if TYPE_CHECKING:
    from extproc.next_turn.store import NextTurns
    from extproc.tokens.source import Wanted
    from extproc.wire import ResponseHeaders

_OK = 200

_Ids: TypeAlias = "array[int] | None"


class Reading:
    """The answer to one handed-over request."""

    def __init__(
        self,
        turns: NextTurns,
        wanted: Wanted | None,
        *,
        treatment: Treatment,
        model: str,
        streamed: bool,
        hide_ids: bool,
        sent_s: float,
    ) -> None:
        """``wanted``: what is known of the prompt. ``hide_ids``: token ids were asked for by us, and not by the client.
        ``sent_s``: when the request went to its decode worker."""
        self._turns = turns
        self._wanted = wanted
        self._treatment = treatment
        self._model = model
        self._streamed = streamed
        self._hide_ids = hide_ids
        self._sent_s = sent_s
        self._edit: Whole | Events | None = None

    def begins(self, answer: ResponseHeaders, *, shown: bool) -> bool:
        """The answer begins: whether its body has to come through here. ``shown``: it can."""
        if answer.status != _OK:
            return False
        if not shown:
            self._turns.note("not_shown")
            return False
        if not answer.streamed:
            self._edit = Whole(self._treatment, hide_ids=self._hide_ids)
            return True
        # Of streams only those of the Responses API name blocks. The others keep theirs without a word (vLLM 0.32).
        self._turns.note("streamed")
        if self._treatment is Treatment.RESPONSES:
            self._edit = Events()
        return self._edit is not None

    def feed(self, piece: bytes, *, last: bool, decode: str | None) -> bytes:
        """A piece of its body, from ``decode`` (``ip:port``): what goes on to the client now."""
        edit = self._edit
        if edit is None:
            return piece
        out = edit.feed(piece, last=last)
        if last:
            self._edit = None
            self._ended(edit, decode)
        return out

    def _ended(self, edit: Whole | Events, decode: str | None) -> None:
        if edit.too_large:
            self._turns.note("too_large")
            return
        told = edit.told
        if told is None or told.params is None or decode is None:
            if not self._streamed:
                self._turns.note("no_blocks")
            return
        try:
            blocks = KeptBlocks(told.params, decode, self._turns.hosts)
        except HandoffError:
            self._turns.give_back(release_of(told.params, decode, self._turns.hosts), "unusable")
            return
        self._keep(blocks, told)

    def _keep(self, blocks: KeptBlocks, told: Told) -> None:
        wanted = self._wanted
        since_s = self._turns.since_s(self._sent_s)
        if wanted is None or not wanted.circumstances or wanted.media or told.prompt_ids is None or told.answer_ids is None:
            self._turns.give_back(blocks.release(), "no_ids")
        elif len(told.prompt_ids) + len(told.answer_ids) <= AT_ONCE_BYTES:
            self._put(blocks, wanted, since_s, unpack(told.prompt_ids), unpack(told.answer_ids))
        else:
            work = asyncio.get_running_loop().run_in_executor(None, _both, told.prompt_ids, told.answer_ids)
            work.add_done_callback(partial(self._unpacked, blocks, wanted, since_s))

    def _unpacked(self, blocks: KeptBlocks, wanted: Wanted, since_s: float, work: asyncio.Future[tuple[_Ids, _Ids]]) -> None:
        if not work.cancelled():
            self._put(blocks, wanted, since_s, *work.result())

    def _put(self, blocks: KeptBlocks, wanted: Wanted, since_s: float, prompt: _Ids, answer: _Ids) -> None:
        if not prompt or not answer:
            self._turns.give_back(blocks.release(), "no_ids")
            return
        self._turns.keep(
            blocks,
            prompt + answer,
            len(prompt),
            model=self._model,
            lora=wanted.lora,
            cache_salt=wanted.salt,
            since_s=since_s,
        )


def _both(prompt: bytes, answer: bytes) -> tuple[_Ids, _Ids]:
    return unpack(prompt), unpack(answer)
