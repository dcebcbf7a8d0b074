"""How many leading blocks of a prompt each holder has in each tier. Pure."""

from __future__ import annotations

from array import array

from extproc.routing.block_store import PLACE, TIERS, Store, bits


def leading(store: Store, keys: array[int]) -> dict[int, list[int]]:
    """Number of a holder -> leading blocks by tier, for all that hold the first block somewhere."""
    found: dict[int, list[int]] = {}
    slower = [tier for tier in range(1, TIERS) if store.totals[tier]]
    gpu, masks = store.alive, store.masks[0]
    at = 0
    if not slower:
        for key in keys:
            now = masks[key >> PLACE].get(key, 0) & gpu
            if now != gpu:
                if at:
                    for number in bits(gpu ^ now):
                        found[number] = [at, 0, 0, 0]
                if not now:
                    return found
                gpu = now
            at += 1
        if at:
            for number in bits(gpu):
                found[number] = [at, 0, 0, 0]
        return found
    tiers = [(tier, store.masks[tier]) for tier in slower]
    # Who has left the GPU's part, and where it stands in the slower ones: each block counts in the fastest.
    behind = 0
    since: dict[int, int] = {}
    before: list[int] = [0] * TIERS
    for key in keys:
        place = key >> PLACE
        now = masks[place].get(key, 0) & gpu
        if now != gpu:
            left = gpu ^ now
            behind |= left
            gpu = now
            if at:
                for number in bits(left):
                    found[number] = [at, 0, 0, 0]
        if behind:
            rest = behind
            for tier, shards in tiers:
                here = shards[place].get(key, 0) & rest
                rest ^= here
                if here != before[tier]:
                    for number in bits(before[tier] & ~here):
                        found[number][tier] += at - since.pop(number * TIERS + tier)
                    for number in bits(here & ~before[tier]):
                        found.setdefault(number, [0, 0, 0, 0])
                        since[number * TIERS + tier] = at
                    before[tier] = here
            behind ^= rest
        if not gpu and not behind:
            break
        at += 1
    for number in bits(gpu):
        if at:
            found[number] = [at, 0, 0, 0]
    for tier in slower:
        for number in bits(before[tier]):
            found[number][tier] += at - since.pop(number * TIERS + tier)
    return found
