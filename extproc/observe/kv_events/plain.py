"""A batch of which all events are alike, as nearly all batches are, into the holdings at once.

Its events store blocks of one cache group on the GPU, with all their tokens and nothing beside them, or remove such blocks.
What follows from them is what :mod:`extproc.observe.kv_events.entering` would do, in one loop and without stops.
"""

from __future__ import annotations

from array import array

from extproc.observe.kv_events.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from extproc.routing.engine_holdings import Source
from extproc.routing.stored_blocks import PIECE_BLOCKS
from extproc.routing.token_chain import KEY_MASK

_SIZES = range(1, 1 << 16)


def enter(source: Source, events: list[Event], media: frozenset[str | None]) -> tuple[int, int] | None:
    """How many blocks were stored and removed; None: nothing was done, for the batch is another one or a long one. ``media``:
    what the GPU's memory is called.
    """
    hashes: list[int | bytes] = []
    parents: list[int | None] = []
    gone: list[int | bytes] = []
    tokens = array("I")
    pack, mask = tokens.fromlist, KEY_MASK
    first = events[0] if events else None
    if first is None or isinstance(first, AllBlocksCleared) or first.medium not in media:
        return None
    medium, group = first.medium, first.group_idx
    size, kind = 0, None
    try:
        for event in events:
            if type(event) is BlockStored:
                names, ids, extras = event.block_hashes, event.token_ids, event.extra_keys
                count = len(names)
                if event.block_size != size or event.kv_cache_spec_kind != kind:
                    if hashes or event.block_size not in _SIZES:
                        return None
                    size, kind = event.block_size, event.kv_cache_spec_kind
                if len(ids) != count * size or event.group_idx != group or event.medium != medium:
                    return None
                if extras and (extras[0] if count == 1 else any(extras)):
                    return None
                parent = event.parent_block_hash
                parents.append(parent & mask if type(parent) is int else source.name_before(event))
                hashes += names
                pack(ids)
                if count != 1:
                    parents += [None] * (count - 1)
            elif type(event) is BlockRemoved:
                if event.group_idx != group or event.medium != medium:
                    return None
                gone += event.block_hashes
            else:
                return None
    except (OverflowError, TypeError):
        return None
    if len(hashes) > PIECE_BLOCKS or len(gone) > PIECE_BLOCKS or len(parents) != len(hashes):
        return None
    if hashes and not source.enter_plain(group or 0, kind, size, hashes, parents, tokens):
        return None
    if gone:
        source.removed(gone, 0, group or 0)
    return len(hashes), len(gone)
