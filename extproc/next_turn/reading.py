"""One answer on its way through the filter: what it says of its blocks is kept, and nothing of that reaches the client."""

from __future__ import annotations

from typing import TYPE_CHECKING

from extproc.handoff import HandoffError
from extproc.handoff.nixl_turn import KeptBlocks, release_of
from extproc.next_turn.answer import Events, Told, Whole
from extproc.paths import Treatment
from extproc.tokens.ids import unpack

if TYPE_CHECKING:
    from extproc.next_turn.store import NextTurns
    from extproc.tokens.source import Wanted
    from extproc.wire import ResponseHeaders

_OK = 200


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
        prompt = answer = None
        if wanted is not None and wanted.circumstances and not wanted.media and told.prompt_ids and told.answer_ids:
            prompt, answer = unpack(told.prompt_ids), unpack(told.answer_ids)
        if wanted is None or not prompt or not answer:
            self._turns.give_back(blocks.release(), "no_ids")
            return
        self._turns.keep(
            blocks,
            prompt + answer,
            len(prompt),
            model=self._model,
            lora=wanted.lora,
            cache_salt=wanted.salt,
            sent_s=self._sent_s,
        )
