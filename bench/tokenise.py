"""What it takes to know a chat's token ids: first time, next turn, seen before; against transformers in the same run.

``python -m bench.tokenise`` uses the demo model's tokenizer (``--folder`` another one). Times are processor time of all
threads, so that other processes do not count; "on the loop" is the part of the event loop's own thread. Everything goes
through :class:`extproc.tokens.source.TokenSource`, as in the filter.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from extproc.inference import InferenceRequest, parse
from extproc.observe.logs import make_logger
from extproc.observe.metrics import Metrics
from extproc.paths import Treatment
from extproc.prompt import PromptSettings, read_prompt
from extproc.routing.endpoint_spec import EndpointSet
from extproc.routing.pool import Pool
from extproc.tokens.settings import ModelTokenizer, TokenSettings
from extproc.tokens.source import TokenSource
from workers.model import default_cache_dir, smollm2

_SIZES_KB = (4, 32, 128)
_ROUNDS = 7
_TURN_BYTES = 2000
_BLOCK_TOKENS = 16
_PROMPTS = PromptSettings()
_WORDS = Path(__file__).read_text().split() + "The worker reads a prompt once, and keeps what it made of it in blocks.".split()


class Cost(NamedTuple):
    """Of one prompt, in microseconds of processor time."""

    all_us: float
    loop_us: float
    """Of the event loop's thread."""


def _chat(size_bytes: int, seed: int) -> list[dict[str, str]]:
    """Turns of two kilobytes, of words in an order that no other seed has."""
    draw = random.Random(seed)  # noqa: S311  # the same words each time
    turns = max(2, size_bytes // _TURN_BYTES)
    text = [" ".join(draw.choices(_WORDS, k=size_bytes // turns // 7)) for _ in range(turns)]
    return [{"role": "user" if turn % 2 == 0 else "assistant", "content": each} for turn, each in enumerate(text)]


def _request(messages: Sequence[dict[str, str]]) -> InferenceRequest:
    return parse(json.dumps({"model": "m", "messages": messages}).encode(), Treatment.CHAT)


def _next(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    return [*messages, {"role": "assistant", "content": "It does. " * 20}, {"role": "user", "content": "And then? " * 20}]


async def _find(source: TokenSource, request: InferenceRequest, expected: str) -> Cost:
    blocks = read_prompt(request, _PROMPTS, model="m").chain.hashes
    all_s, loop_s = time.process_time(), time.thread_time()
    found = await source.find(request, "m", blocks)
    cost = Cost((time.process_time() - all_s) * 1e6, (time.thread_time() - loop_s) * 1e6)
    if found.source != expected:
        raise AssertionError(f"{found.source}, not {expected}")
    return cost


def _source(settings: TokenSettings) -> TokenSource:
    return TokenSource(
        settings,
        pool=Pool(EndpointSet()),
        prompts=_PROMPTS,
        metrics=Metrics(),
        log=make_logger("critical", io.StringIO()),
        own_headers={},
        block_sizes=lambda: (_BLOCK_TOKENS,),
    )


async def measure(folder: Path, size_bytes: int) -> dict[str, tuple[Cost, str]]:
    """What is measured -> its cost and its share of what transformers takes for the same."""
    from transformers import AutoTokenizer

    theirs: Any = AutoTokenizer.from_pretrained(folder)
    models = {"m": ModelTokenizer(folder=str(folder))}
    rounds: dict[str, list[Cost]] = {}
    plain: dict[str, list[float]] = {}

    def transformers(name: str, messages: list[dict[str, str]]) -> list[int]:
        began_s = time.process_time()
        text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids: list[int] = theirs(text, add_special_tokens=False)["input_ids"]
        plain.setdefault(name, []).append((time.process_time() - began_s) * 1e6)
        return ids

    tokenizer = _source(TokenSettings(models=models, timeout_ms=10_000.0, learn=False, learn_prefixes=False))
    learned = _source(TokenSettings(timeout_ms=10_000.0, learn_prefixes=False))
    for each in (tokenizer, learned):
        await each.open()
    for seed in range(_ROUNDS):
        messages = _chat(size_bytes, seed)
        following = _next(messages)
        first, turn = _request(messages), _request(following)
        rounds.setdefault("tokenizer, first time", []).append(await _find(tokenizer, first, "tokenizer"))
        rounds.setdefault("tokenizer, next turn", []).append(await _find(tokenizer, turn, "tokenizer"))
        rounds.setdefault("tokenizer, seen before", []).append(await _find(tokenizer, first, "tokenizer"))
        ids = transformers("first", messages)
        transformers("next", following)
        unknown = await learned.find(first, "m", read_prompt(first, _PROMPTS, model="m").chain.hashes)
        listed = msgspec.json.encode(ids)
        all_s, loop_s = time.process_time(), time.thread_time()
        learned.replied(unknown, listed)
        while learned.status()["learned_prompts"] <= seed:  # noqa: ASYNC110  # nobody is told, and nobody else would want to be
            await asyncio.sleep(0.001)
        rounds.setdefault("learned, from a reply", []).append(
            Cost((time.process_time() - all_s) * 1e6, (time.thread_time() - loop_s) * 1e6)
        )
        rounds.setdefault("learned, seen before", []).append(await _find(learned, first, "learned"))
    for each in (tokenizer, learned):
        await each.close()

    def middle(costs: Sequence[Cost]) -> Cost:
        return Cost(*(statistics.median(each) for each in zip(*costs, strict=True)))

    reference = {name: statistics.median(each) for name, each in plain.items()}
    table: dict[str, tuple[Cost, str]] = {"transformers, each time": (Cost(reference["first"], reference["first"]), "1")}
    for name, costs in rounds.items():
        cost = middle(costs)
        of = reference["next" if "next" in name else "first"]
        table[name] = (cost, f"{cost.all_us / of:.3f}")
    return table


def _shown(console: Console, size_kb: int, table: dict[str, tuple[Cost, str]]) -> None:
    shown = Table(title=f"A chat of {size_kb} KB", title_justify="left")
    for name in ("", "processor µs", "of them on the loop", "of transformers' time"):
        shown.add_column(name, justify="left" if not name else "right")
    for name, (cost, share) in table.items():
        shown.add_row(name, f"{cost.all_us:,.0f}", f"{cost.loop_us:,.0f}", share)
    console.print(shown)


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.tokenise", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, help="Hugging Face folder of a model; the demo model's if not given")
    parser.add_argument("--size", type=int, action="append", help="kilobytes of a chat; may repeat (4, 32, 128)")
    given = parser.parse_args(argv)
    folder = given.folder or smollm2(default_cache_dir())
    console = Console(width=100)
    for size_kb in given.size or _SIZES_KB:
        console.print(f"{_ROUNDS} chats of {size_kb} KB ...")
        _shown(console, size_kb, asyncio.run(measure(folder, size_kb << 10)))


if __name__ == "__main__":
    main()
