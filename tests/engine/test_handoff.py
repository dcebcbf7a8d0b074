"""The answer through prefill and decode apart is the answer of one worker, and the KV blocks really moved."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.engine.kv_proof import BLOCK_SIZE_TOKENS, assert_kv_moved, block_bytes, blocks, kv_use, kv_use_since
from tests.engine.openai_api import Answer, Endpoint, Prompt, ask
from tests.engine.system import forget_prefixes

ENDPOINTS: list[Endpoint] = ["chat", "completions", "responses", "messages"]
STREAM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
ENDPOINT = pytest.mark.parametrize("endpoint", ENDPOINTS)

SHORT = "What now?"
PREFIX = " ".join(f"Stone {number} weighs {number * 37 % 101} pounds." for number in range(20))
LONG = f"{PREFIX} Which of them is the heaviest, and who carried it?"
SIBLING = f"{PREFIX} No more of this."
"""Begins like LONG."""


def alone(prefill_url: str, endpoint: Endpoint, prompt: Prompt) -> Answer:
    """The answer of a single worker asked directly. Not the decode worker: it must not have seen the prompt before."""
    return ask(prefill_url, endpoint, prompt)


def assert_served_by(answer: Answer, prefill_url: str, decode_url: str) -> None:
    assert answer.headers["x-decode-endpoint"] == decode_url.removeprefix("http://")
    transfer = answer.headers["x-kv-transfer"]
    assert f'prefill="{prefill_url.removeprefix("http://")}"' in transfer
    assert f"blocks={blocks(answer.prompt_tokens)}" in transfer.split(";")


@STREAM
@ENDPOINT
@pytest.mark.parametrize("prompt", [SHORT, LONG], ids=["shorter than a block", "several blocks"])
def test_a_cold_prompt_is_answered_as_by_one_worker_and_its_kv_moved(
    front_url: str, prefill_url: str, decode_url: str, tiny_model: Path, endpoint: Endpoint, stream: bool, prompt: str
) -> None:
    expected = alone(prefill_url, endpoint, prompt)
    forget_prefixes(prefill_url, decode_url)
    prefill_before, decode_before = kv_use(prefill_url), kv_use(decode_url)

    answer = ask(front_url, endpoint, prompt, stream=stream)

    assert answer == expected
    assert (expected.prompt_tokens < BLOCK_SIZE_TOKENS) == (prompt is SHORT)
    assert prompt is SHORT or expected.prompt_tokens > 5 * BLOCK_SIZE_TOKENS
    assert_served_by(answer, prefill_url, decode_url)
    decode = kv_use_since(decode_url, decode_before, prompt_tokens=expected.prompt_tokens)
    assert_kv_moved(decode, prompt_tokens=expected.prompt_tokens, block_size_bytes=block_bytes(tiny_model))
    prefill = kv_use_since(prefill_url, prefill_before, prompt_tokens=expected.prompt_tokens)
    assert prefill.computed_tokens == expected.prompt_tokens


@STREAM
@ENDPOINT
def test_a_prefix_that_the_prefill_worker_holds_is_not_computed_again(
    front_url: str, prefill_url: str, decode_url: str, tiny_model: Path, endpoint: Endpoint, stream: bool
) -> None:
    expected = alone(prefill_url, endpoint, LONG)
    forget_prefixes(prefill_url, decode_url)
    ask(prefill_url, endpoint, SIBLING)
    prefill_before, decode_before = kv_use(prefill_url), kv_use(decode_url)

    answer = ask(front_url, endpoint, LONG, stream=stream)

    assert answer == expected
    prefill = kv_use_since(prefill_url, prefill_before, prompt_tokens=expected.prompt_tokens)
    assert prefill.cached_tokens > 4 * BLOCK_SIZE_TOKENS
    assert prefill.computed_tokens == expected.prompt_tokens - prefill.cached_tokens
    # The decode worker has nothing yet: all of it moves, the cached part too.
    decode = kv_use_since(decode_url, decode_before, prompt_tokens=expected.prompt_tokens)
    assert_kv_moved(decode, prompt_tokens=expected.prompt_tokens, block_size_bytes=block_bytes(tiny_model))


@STREAM
@ENDPOINT
def test_a_prefix_that_the_decode_worker_holds_does_not_move_again(
    front_url: str, prefill_url: str, decode_url: str, tiny_model: Path, endpoint: Endpoint, stream: bool
) -> None:
    expected = alone(prefill_url, endpoint, LONG)
    forget_prefixes(prefill_url, decode_url)
    # A handoff of its own, so that what the decode worker holds came over the wire too.
    ask(front_url, endpoint, SIBLING)
    forget_prefixes(prefill_url)
    decode_before = kv_use(decode_url)

    answer = ask(front_url, endpoint, LONG, stream=stream)

    assert answer == expected
    decode = kv_use_since(decode_url, decode_before, prompt_tokens=expected.prompt_tokens)
    assert decode.cached_tokens > 4 * BLOCK_SIZE_TOKENS
    assert_kv_moved(
        decode,
        prompt_tokens=expected.prompt_tokens,
        block_size_bytes=block_bytes(tiny_model),
        cached_tokens=decode.cached_tokens,
    )


@pytest.mark.parametrize("tokens", [BLOCK_SIZE_TOKENS - 1, BLOCK_SIZE_TOKENS, BLOCK_SIZE_TOKENS + 1, 3 * BLOCK_SIZE_TOKENS])
def test_a_prompt_that_ends_near_the_end_of_a_block_moves_whole(
    front_url: str, prefill_url: str, decode_url: str, tiny_model: Path, tokens: int
) -> None:
    prompt = [3 + number * 7 % 250 for number in range(tokens)]
    expected = alone(prefill_url, "completions", prompt)
    forget_prefixes(prefill_url, decode_url)
    before = kv_use(decode_url)

    answer = ask(front_url, "completions", prompt)

    assert answer == expected
    assert expected.prompt_tokens == tokens
    use = kv_use_since(decode_url, before, prompt_tokens=tokens)
    assert_kv_moved(use, prompt_tokens=tokens, block_size_bytes=block_bytes(tiny_model))


def test_prompts_at_the_same_time_do_not_get_each_others_kv(
    front_url: str, prefill_url: str, decode_url: str, tiny_model: Path
) -> None:
    prompts = [f"Tale {number}: {LONG[number:]}" for number in range(8)]
    expected = [alone(prefill_url, "completions", prompt) for prompt in prompts]
    assert len({answer.text for answer in expected}) == len(prompts)
    forget_prefixes(prefill_url, decode_url)
    before = kv_use(decode_url)

    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: ask(front_url, "completions", prompt), prompts))

    assert answers == expected
    tokens = sum(answer.prompt_tokens for answer in expected)
    use = kv_use_since(decode_url, before, prompt_tokens=tokens)
    assert use.computed_tokens == 0
    assert use.external_tokens + use.cached_tokens == tokens
    moved = sum(blocks(answer.prompt_tokens) for answer in expected) - use.cached_tokens // BLOCK_SIZE_TOKENS
    assert use.transferred_bytes == moved * block_bytes(tiny_model)


def test_the_proof_fails_when_the_decode_worker_gets_no_kv_transfer_params(decode_url: str, tiny_model: Path) -> None:
    forget_prefixes(decode_url)
    before = kv_use(decode_url)
    answer = ask(decode_url, "completions", LONG)
    use = kv_use_since(decode_url, before, prompt_tokens=answer.prompt_tokens)

    assert use.computed_tokens == answer.prompt_tokens
    assert use.transfers == use.transferred_bytes == use.external_tokens == 0
    with pytest.raises(AssertionError):
        assert_kv_moved(use, prompt_tokens=answer.prompt_tokens, block_size_bytes=block_bytes(tiny_model))


def test_the_proof_fails_when_a_warm_decode_worker_gets_no_kv_transfer_params(decode_url: str, tiny_model: Path) -> None:
    forget_prefixes(decode_url)
    ask(decode_url, "completions", LONG)
    before = kv_use(decode_url)
    answer = ask(decode_url, "completions", LONG)
    use = kv_use_since(decode_url, before, prompt_tokens=answer.prompt_tokens)

    assert use.cached_tokens > 0
    with pytest.raises(AssertionError):
        assert_kv_moved(
            use,
            prompt_tokens=answer.prompt_tokens,
            block_size_bytes=block_bytes(tiny_model),
            cached_tokens=use.cached_tokens,
        )


def test_another_prompts_kv_gives_another_text(prefill_url: str, decode_url: str) -> None:
    """The comparison of texts would notice a wrong handoff: the model's answer depends on the blocks."""
    other = LONG.replace("pounds", "stones")
    expected = alone(prefill_url, "completions", LONG)
    forget_prefixes(prefill_url, decode_url)
    prefilled = ask(prefill_url, "completions", other, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
    assert prefilled.kv_transfer_params is not None
    answer = ask(decode_url, "completions", LONG, kv_transfer_params=prefilled.kv_transfer_params)
    assert answer.text != expected.text
    forget_prefixes(prefill_url, decode_url)
