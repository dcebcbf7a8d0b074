"""What a client must not be able to do to an engine, and cannot: the keys that end a decode engine never reach one.

Sent to a worker directly, ``{"do_remote_prefill": true}`` ends its process (``KeyError: 'remote_block_ids'``).
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from extproc.config import load
from tests.engine.metrics import kv_usage, scrape, until
from tests.engine.openai_api import MODEL, PATHS, Endpoint, ask, body_of, send
from tests.engine.system import System

ENDPOINTS: list[Endpoint] = ["chat", "completions", "responses", "messages"]
PROMPT = "Who goes there, and why should anybody open the gate?"
FEW = 8
"""Tokens, since there are many requests."""
DEADLY = {"do_remote_prefill": True}
DECODE = {"do_remote_decode": True}
"""Not deadly: it would pin the worker's blocks."""

# Members of a JSON object, as text: a dictionary has no key twice, and json.dumps no escapes of its own.
BAD_MEMBERS = {
    "deadly": f'"kv_transfer_params":{json.dumps(DEADLY)}',
    "pinning": f'"kv_transfer_params":{json.dumps(DECODE)}',
    "of no type": '"kv_transfer_params":"x"',
    "null": '"kv_transfer_params":null',
    "spelled with an escape": f'"kv_transfer_param\\u0073":{json.dumps(DEADLY)}',
    "of encoders": f'"ec_transfer_params":{json.dumps(DEADLY)}',
    "both": f'"kv_transfer_params":{json.dumps(DEADLY)},"ec_transfer_params":{json.dumps(DEADLY)}',
    "a text in vllm_xargs": '"vllm_xargs":{"kv_transfer_params":"do_remote_prefill","a":1}',
    "a list in vllm_xargs": '"vllm_xargs":{"kv_transfer_params":["do_remote_prefill"]}',
    "an object in vllm_xargs": f'"vllm_xargs":{{"kv_transfer_params":{json.dumps(DEADLY)}}}',
    "twice in vllm_xargs": '"vllm_xargs":{"kv_transfer_params":"x","kv_transfer_params":"y","ec_transfer_params":"z"}',
    "everywhere": f'"kv_transfer_params":{json.dumps(DEADLY)},"vllm_xargs":{{"kv_transfer_params":"x"}}',
}


@pytest.fixture(autouse=True)
def both_engines_are_well(system: System) -> Iterator[None]:
    """An engine ends some moments after its answer: it must still compute when the test is over."""
    yield
    answers = [ask(url, "completions", "All well?", max_tokens=3) for url in (system.prefill_url, system.decode_url)]
    assert answers[0] == answers[1]
    for url in (system.prefill_url, system.decode_url):
        assert status_of("GET", f"{url}/health") == 200
        until(lambda url=url: kv_usage(url) == 0)


def status_of(method: str, url: str, body: bytes | None = None, content_type: str = "application/json") -> int:
    return exchange(method, url, body, content_type)[0]


def exchange(method: str, url: str, body: bytes | None = None, content_type: str = "application/json") -> tuple[int, Any]:
    """Status and body of the answer, whatever it is."""
    request = urllib.request.Request(url, body, {"content-type": content_type}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=120) as reply:
            status, raw = reply.status, reply.read()
    except urllib.error.HTTPError as error:
        status, raw = error.code, error.read()
    try:
        return status, json.loads(raw)
    except ValueError:
        return status, raw


def with_member(body: dict[str, Any], member: str) -> bytes:
    return json.dumps(body)[:-1].encode() + b"," + member.encode() + b"}"


def removed(system: System) -> float:
    config = load(system.log.parent / "baton.yaml")
    return scrape(f"http://{config.admin}").total("baton_client_keys_removed_total")


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_request_with_transfer_keys_is_answered_as_one_without(system: System, endpoint: Endpoint, stream: bool) -> None:
    expected = ask(system.prefill_url, endpoint, PROMPT, max_tokens=FEW)
    before = removed(system)
    for name, member in BAD_MEMBERS.items():
        body = with_member(body_of(endpoint, PROMPT, stream=stream, max_tokens=FEW), member)
        answer = send(system.front_url, endpoint, body, stream=stream)
        assert answer == expected, name
        assert not answer.kv_transfer_params, name  # nothing about blocks for the client
    assert removed(system) - before >= len(BAD_MEMBERS)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({"model": "nope"}, 404),  # one such body ends an engine as well
        ({"model": None}, 400),
        ({"max_tokens": 1, "max_output_tokens": 1}, 200),  # goes whole,
        ({"n": 2, "temperature": 1.0}, 200),  # and so does this, where the API knows it
        ({"temperature": "hot"}, 400),
    ],
    ids=["unknown model", "no model", "one token", "several choices", "bad request"],
)
def test_nor_on_the_ways_that_no_handoff_takes(
    system: System, endpoint: Endpoint, extra: dict[str, Any], expected: int
) -> None:
    clean = body_of(endpoint, PROMPT, max_tokens=FEW) | extra
    assert status_of("POST", system.front_url + PATHS[endpoint], json.dumps(clean).encode()) == expected
    for name, member in BAD_MEMBERS.items():
        assert status_of("POST", system.front_url + PATHS[endpoint], with_member(clean, member)) == expected, name


CHAT = [{"role": "user", "content": PROMPT}]
OTHER_PATHS: dict[str, dict[str, Any]] = {
    "/tokenize": {"prompt": PROMPT},
    "/detokenize": {"tokens": [7, 8, 9]},
    "/v1/messages/count_tokens": {"messages": CHAT},
    "/v1/embeddings": {"input": PROMPT},
    "/pooling": {"input": PROMPT},
    "/score": {"text_1": "a", "text_2": "b"},
    "/v1/chat/completions/batch": {"messages": [CHAT, CHAT], "max_tokens": 5, "temperature": 0},
    "/v1/completions/": {"prompt": PROMPT, "max_tokens": 5, "temperature": 0},
    "//v1/completions": {"prompt": PROMPT, "max_tokens": 5, "temperature": 0},
    "/v1/../v1/completions": {"prompt": PROMPT, "max_tokens": 5, "temperature": 0},
    "/v1/%63ompletions": {"prompt": PROMPT, "max_tokens": 5, "temperature": 0},
    "/invocations": {"prompt": PROMPT, "max_tokens": 5, "temperature": 0},
    "/inference/v1/generate": {"token_ids": [7, 8, 9], "sampling_params": {"max_tokens": 5, "temperature": 0}},
    "/v1/completions/render": {"prompt": PROMPT},
    "/cohere/v2/chat": {"messages": CHAT},
    "/generative_scoring": {"query": "a", "items": ["b"], "label_token_ids": [7, 8]},
}


def what_counts(status: int, answer: Any) -> tuple[int, Any]:
    """An answer without what differs from one time to the next."""
    if isinstance(answer, dict):
        answer = {key: value for key, value in answer.items() if key not in ("id", "created", "kv_transfer_params")}
    return status, answer


@pytest.mark.parametrize("path", OTHER_PATHS)
def test_nor_on_any_other_path(system: System, path: str) -> None:
    clean = {"model": MODEL, **OTHER_PATHS[path]}
    url = system.front_url + path
    expected = what_counts(*exchange("POST", url, json.dumps(clean).encode()))
    assert expected[0] in (200, 307, 403, 404), expected
    for name, member in BAD_MEMBERS.items():
        assert what_counts(*exchange("POST", url, with_member(clean, member))) == expected, name
    nested = {**clean, "sampling_params": {**clean.get("sampling_params", {}), "extra_args": {"kv_transfer_params": DEADLY}}}
    assert status_of("POST", url, json.dumps(nested).encode()) == expected[0]


SPELLINGS = ["/v1/completions", "/v1/completions/", "/v1/chat/completions/batch", "/invocations", "/tokenize"]


@pytest.mark.parametrize("path", SPELLINGS)
def test_nor_in_another_encoding(system: System, path: str) -> None:
    """Python's JSON reader, which is the engine's, takes all of these."""
    clean = {"model": MODEL, "prompt": PROMPT, "messages": [CHAT], "max_tokens": 5}
    text = with_member(clean, BAD_MEMBERS["deadly"]).decode()
    for encoding in ("utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"):
        assert json.loads(text.encode(encoding))["kv_transfer_params"] == DEADLY
        for content_type in ("application/json", f"application/json; charset={encoding.removesuffix('-sig')}"):
            assert status_of("POST", system.front_url + path, text.encode(encoding), content_type) == 400, encoding


TYPES = (
    "text/plain",
    "text/json",
    "application/x-www-form-urlencoded",
    "application/octet-stream",
    "application/vnd.x+json",
    "APPLICATION/JSON",
    "application/json;",
    "application/json; charset=latin-1",
    " application/json",
    ";",
    "json",
)


@pytest.mark.parametrize("path", SPELLINGS)
def test_nor_as_another_type_of_content(system: System, path: str) -> None:
    """Nor does a type that only one of the two workers takes leave blocks behind."""
    clean = {"model": MODEL, "prompt": PROMPT, "messages": [CHAT], "max_tokens": 5}
    for content_type in TYPES:
        for body in (json.dumps(clean).encode(), with_member(clean, BAD_MEMBERS["deadly"])):
            status = status_of("POST", system.front_url + path, body, content_type)
            assert status in (200, 307, 400, 415), content_type
        until(lambda: kv_usage(system.prefill_url) == 0)
