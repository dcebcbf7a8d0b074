"""A stream of events is read for its tokens and its end, wherever it is cut, whatever its API, and whatever the model says."""

from __future__ import annotations

import json

import pytest

from extproc.observe.events import EventReader
from extproc.observe.quantiles import bucket_of
from extproc.observe.stream_watch import Watch


def data(payload: object, *, spaces: bool = False) -> bytes:
    return b"data: " + json.dumps(payload, separators=None if spaces else (",", ":")).encode() + b"\n\n"


def chat(content: str, finish: str | None = None, **more: object) -> dict[str, object]:
    return {"id": "c", "choices": [{"index": 0, "delta": {"content": content}, "finish_reason": finish}], **more}


ROLE = {"id": "c", "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
USAGE = {"id": "c", "choices": [], "usage": {"prompt_tokens": 12, "completion_tokens": 3, "total_tokens": 15}}
DONE = b"data: [DONE]\n\n"

CHAT = data(ROLE) + data(chat("one")) + data(chat(" two")) + data(chat("", "stop")) + data(USAGE) + DONE
COMPLETIONS = (
    data({"choices": [{"index": 0, "text": "one", "finish_reason": None}]})
    + data({"choices": [{"index": 0, "text": "", "finish_reason": None}]})
    + data({"choices": [{"index": 0, "text": " two", "finish_reason": "length"}]})
    + DONE
)
MESSAGES = (
    b'event: message_start\ndata: {"type":"message_start","message":{"usage":{"input_tokens":12,"output_tokens":0}}}\n\n'
    b'event: content_block_start\ndata: {"type":"content_block_start","index":0}\n\n'
    b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"type":"text_delta","text":"one"}}\n\n'
    b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"type":"text_delta","text":" two"}}\n\n'
    b'event: content_block_stop\ndata: {"type":"content_block_stop","index":0}\n\n'
    b'event: message_delta\ndata: {"delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":2}}\n\n'
    b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
)
RESPONSES = (
    b'event: response.created\ndata: {"type":"response.created"}\n\n'
    b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"one"}\n\n'
    b'event: response.output_text.done\ndata: {"type":"response.output_text.done","text":"one"}\n\n'
    b'event: response.completed\ndata: {"response":{"usage":{"input_tokens":12,"output_tokens":1}}}\n\n'
)


@pytest.mark.parametrize(
    ("stream", "tokens", "stated", "prompt", "finish"),
    [
        pytest.param(CHAT, 3, 3, 12, "stop", id="chat"),
        pytest.param(COMPLETIONS, 3, None, None, "length", id="completions"),
        pytest.param(MESSAGES, 2, 2, 12, "end_turn", id="messages"),
        pytest.param(RESPONSES, 1, 1, 12, None, id="responses"),
    ],
)
@pytest.mark.parametrize("piece", [1, 7, 100_000])
def test_tokens_counts_and_end_are_found_wherever_the_stream_is_cut(
    stream: bytes, tokens: int, stated: int | None, prompt: int | None, finish: str | None, piece: int
) -> None:
    reader = EventReader()
    found = sum(reader.feed(stream[at : at + piece]) for at in range(0, len(stream), piece))
    assert (found, reader.tokens, reader.stated_tokens, reader.prompt_tokens) == (tokens, tokens, stated, prompt)
    assert (reader.finish_reason, reader.done, reader.failed) == (finish, True, False)


def test_spaces_and_other_line_ends_change_nothing() -> None:
    reader = EventReader()
    spaced = (
        data(ROLE, spaces=True)
        + data(chat("one"), spaces=True)
        + data(chat("", "stop"), spaces=True)
        + data(USAGE, spaces=True)
    )
    reader.feed(spaced.replace(b"\n", b"\r\n"))
    assert (reader.tokens, reader.stated_tokens, reader.finish_reason) == (2, 3, "stop")


def test_what_the_model_says_is_not_taken_for_the_api() -> None:
    reader = EventReader()
    said = '"finish_reason":"length","usage":{"completion_tokens":999},"choices":[] data: [DONE]\n\nevent: error\n\n'
    reader.feed(data(chat(said)))
    assert (reader.tokens, reader.stated_tokens, reader.finish_reason, reader.done, reader.failed) == (
        1,
        None,
        None,
        False,
        False,
    )


def test_the_counts_of_every_chunk_end_with_the_last() -> None:
    reader = EventReader()
    for number in (1, 2, 3):
        reader.feed(data(chat("x", usage={"prompt_tokens": 5, "completion_tokens": number})))
    assert (reader.tokens, reader.stated_tokens) == (3, 3)


def test_the_first_chunk_of_a_tool_call_or_of_reasoning_is_a_token() -> None:
    reader = EventReader()
    reader.feed(data({"choices": [{"delta": {"role": "assistant", "content": None, "tool_calls": [{"index": 0}]}}]}))
    reader.feed(data({"choices": [{"delta": {"role": "assistant", "reasoning": "Let"}}]}))
    assert reader.tokens == 2


def test_an_error_in_the_stream_is_no_token() -> None:
    reader = EventReader()
    reader.feed(data(chat("one")) + data({"error": {"message": "gone", "code": 500}}) + DONE)
    assert (reader.tokens, reader.failed) == (1, True)


def test_a_finish_reason_of_an_unknown_kind_is_other() -> None:
    reader = EventReader()
    reader.feed(data(chat("x", "a_reason_of_a_client")))
    assert reader.finish_reason == "other"


def test_an_event_without_end_takes_bounded_memory() -> None:
    reader = EventReader()
    for _ in range(100):
        reader.feed(b"data: " + b"x" * 10_000)
    assert len(reader._tail) <= 64 << 10
    assert reader.oversized >= 10
    reader.feed(b"\n\n" + data(chat("one")))
    assert reader.tokens >= 1


def test_gaps_are_from_chunk_to_chunk_and_zero_inside_one() -> None:
    watch = Watch()
    watch.chunk(data(ROLE), 0.0)
    watch.chunk(data(chat("a")), 1.0)
    watch.chunk(data(chat("b")), 1.02)
    watch.chunk(data(chat("c")) + data(chat("d")), 1.05)
    watch.chunk(data(USAGE) + DONE, 9.0)
    seen = watch.sighting("k", whole=True)
    assert seen.gaps == {bucket_of(0.02): 1, bucket_of(0.03): 1, bucket_of(0.0): 1}
    assert seen.gaps_s == pytest.approx(0.05)
    assert seen.longest_s == pytest.approx(0.03)
    assert (seen.tokens, seen.events) == (3, 4)


def test_several_tokens_in_the_first_chunk_have_no_gap_before_them() -> None:
    watch = Watch()
    watch.chunk(data(chat("a")) + data(chat("b")), 5.0)
    seen = watch.sighting("k", whole=False)
    assert seen.gaps == {bucket_of(0.0): 1}
    assert seen.gaps_s == 0
    assert not seen.whole
