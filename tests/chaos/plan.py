"""What happens in a run: requests, clients that leave, faults, and when. A pure function of the seed and the size."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from tests.cases.corpus import without_transfer_keys
from workers.sim.errors import ApiError
from workers.sim.faults import Fault
from workers.sim.prompts import Model, expected_answers

MODEL = Model(("m",), {"sql-lora": "/adapters/sql"}, 8192, 24)

_COMPLETIONS, _CHAT, _RESPONSES, _MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
_WORDS = (
    "the of and to in is that for it with as was on be at by had not are but from or have an they which one you were".split()
)


@dataclass(frozen=True)
class Request:
    """One client."""

    at_s: float
    kind: str
    path: str
    body: bytes
    headers: dict[str, str]
    texts: tuple[str, ...] | None
    """The right answers, one a choice; None where the answer is no text."""
    status: int
    """What a healthy system answers."""
    code: str | None
    """Baton's code, for what Baton refuses."""
    stream: bool
    leave_after_s: float | None = None
    leave_after_chunks: int | None = None


@dataclass(frozen=True)
class WorkerFault:
    """A switch on one worker. ``again``: the process is gone and started anew, which no switch does in a test's own process."""

    at_s: float
    worker: int
    fault: Fault
    again: bool = False

    @property
    def kind(self) -> str:
        return "exit" if self.again else self.fault.kind

    @property
    def until_s(self) -> float:
        return self.at_s + (self.fault.duration_s or 0.0)


@dataclass(frozen=True)
class FilterFault:
    """The filter stands still for a while, or is told to end and started again."""

    at_s: float
    kind: str
    duration_s: float = 0.0


@dataclass(frozen=True)
class Plan:
    """A run."""

    duration_s: float
    requests: list[Request]
    faults: list[WorkerFault | FilterFault]


def make(seed: int, *, requests: int, duration_s: float, prefill: int, decode: int) -> Plan:
    """The same for the same arguments, on every machine."""
    dice = random.Random(seed)
    prefixes = [_prose(dice, dice.randint(40, 250)) for _ in range(12)]
    # Whatever the dice say, these are part of every run.
    always = [
        FilterFault(1.5, "stop", 1.3),
        FilterFault(duration_s * 0.5 // 10 * 10 + 1.0, "stop", 2.3),
        FilterFault(duration_s * 0.8 // 10 * 10 + 4.5, "restart"),
    ]
    # A prefill takes some milliseconds: these are under way when the filter stands still.
    times = [fault.at_s - dice.uniform(0.0, 0.04) for fault in always for _ in range(10)]
    times += [dice.uniform(0.0, duration_s) for _ in range(requests - len(times))]
    made = [_request(dice, prefixes, at_s) for at_s in times]
    faults: list[WorkerFault | FilterFault] = []
    at_s = 1.0
    while at_s < duration_s - 1.0:
        # Some seconds of peace in every ten: what fails then has no excuse.
        if at_s % 10.0 < 5.5:
            faults.append(_fault(dice, at_s, prefill, decode))
        at_s += dice.uniform(0.1, 0.8)
    faults += always
    faults.sort(key=lambda fault: fault.at_s)
    return Plan(duration_s, sorted(made, key=lambda request: request.at_s), faults)


def calm(seed: int, requests: int) -> list[Request]:
    """Requests that must all succeed, when nothing is wrong any more."""
    dice = random.Random(f"{seed} calm")
    prefixes = [_prose(dice, 80)]
    made: list[Request] = []
    while len(made) < requests:
        request = _request(dice, prefixes, 0.0)
        if request.leave_after_s is None and request.leave_after_chunks is None:
            made.append(request)
    return made


# -- requests --------------------------------------------------------------------------------------------------------------


def _prose(dice: random.Random, words: int) -> str:
    return " ".join(dice.choice(_WORDS) for _ in range(words))


def _request(dice: random.Random, prefixes: list[str], at_s: float) -> Request:
    text = (
        dice.choice(prefixes) + " " + _prose(dice, dice.randint(1, 60))
        if dice.random() < 0.5
        else _prose(dice, dice.randint(1, 300))
    )
    path = dice.choices((_COMPLETIONS, _CHAT, _RESPONSES, _MESSAGES), (4, 4, 2, 2))[0]
    stream = dice.random() < 0.5
    cap = dice.choice((2, 5, 12, 30, 60))
    body: dict[str, Any] = {"model": "sql-lora" if dice.random() < 0.1 else "m"}
    kind = path.rpartition("/")[2] if path != _CHAT else "chat"
    if path == _COMPLETIONS:
        body |= {"prompt": text, "max_tokens": cap}
    elif path == _CHAT:
        body |= {"messages": [{"role": "user", "content": text}], dice.choice(("max_tokens", "max_completion_tokens")): cap}
    elif path == _RESPONSES:
        body |= {"input": text, "max_output_tokens": cap}
    else:
        body |= {"messages": [{"role": "user", "content": text}], "max_tokens": cap}
    if stream:
        body["stream"] = True
    kind += _variation(dice, path, body, cap)
    headers = {"content-type": "application/json"}
    if dice.random() < 0.1:
        headers["x-request-id"] = dice.choice(("same-id", "another-id"))
    encoded = json.dumps(body, ensure_ascii=dice.random() < 0.5, separators=dice.choice(((",", ":"), (", ", ": ")))).encode()
    if dice.random() < 0.06:
        return _refused(dice, at_s, path, encoded, headers)
    if dice.random() < 0.06:
        return _passed(dice, at_s, text, headers)
    status, texts = 200, None
    try:
        texts = tuple(expected_answers(path, without_transfer_keys(encoded), MODEL))
    except ApiError as error:
        status = error.status
    leave_s = leave_chunks = None
    leaving = dice.random()
    if leaving < 0.12:
        leave_s = dice.choice((0.0, 0.002, 0.01)) + dice.expovariate(1 / 0.03)
        kind += " leaves"
    elif leaving < 0.18 and stream:
        leave_chunks = dice.randint(1, 8)
        kind += " leaves the stream"
    return Request(at_s, kind, path, encoded, headers, texts, status, None, bool(body.get("stream")), leave_s, leave_chunks)


def _variation(dice: random.Random, path: str, body: dict[str, Any], cap: int) -> str:
    """Change a plain request a little; what was done, as a word."""
    choice = dice.random()
    openai = path in (_COMPLETIONS, _CHAT)
    if choice < 0.45:
        return ""
    if choice < 0.5:
        body["kv_transfer_params"] = {"do_remote_prefill": True, "remote_host": "127.0.0.1"}
        return " smuggling"
    if choice < 0.55 and openai:
        body["n"] = 2
        return " n=2"
    if choice < 0.6 and path == _COMPLETIONS:
        body["prompt"] = [body["prompt"], "and another one"]
        return " two prompts"
    if choice < 0.65 and openai:
        body["min_tokens"] = min(cap, 10)
        return " min_tokens"
    if choice < 0.7 and path != _RESPONSES:
        body["stop_sequences" if path == _MESSAGES else "stop"] = [dice.choice("aeiou")]
        return " stop"
    if choice < 0.75 and openai and body.get("stream"):
        body["stream_options"] = {"include_usage": True}
        return " usage"
    if choice < 0.8 and path != _COMPLETIONS:
        function = {"name": "f", "parameters": {"z": 1, "a": 2}}
        body["tools"] = {
            _CHAT: [{"type": "function", "function": function}],
            _RESPONSES: [{"type": "function", **function}],
            _MESSAGES: [{"name": "f", "input_schema": function["parameters"]}],
        }[path]
        return " tools"
    if choice < 0.85:
        body["cache_salt"] = dice.choice(("a", "b"))
        return " salt"
    if choice < 0.88 and openai:
        body["echo"] = True
        return " echo"
    if choice < 0.92:
        body["temperature"] = 3
        return " refused by the engine"
    if choice < 0.95:
        body[{_COMPLETIONS: "max_tokens", _RESPONSES: "max_output_tokens"}.get(path, "max_tokens")] = 0
        body.pop("max_completion_tokens", None)
        return " cap of zero"
    if choice < 0.98:
        body[{_COMPLETIONS: "max_tokens", _RESPONSES: "max_output_tokens"}.get(path, "max_tokens")] = "many"
        body.pop("max_completion_tokens", None)
        return " cap of a wrong type"
    return ""


def _refused(dice: random.Random, at_s: float, path: str, body: bytes, headers: dict[str, str]) -> Request:
    """What Baton refuses by itself."""
    status, code, bad, more = dice.choice(
        (
            (400, "invalid_json", body[:-1], {}),
            (400, "empty_body", b"", {}),
            (400, "not_an_object", b"[1]", {}),
            (400, "duplicate_key", b'{"model":"m",' + body[1:], {}),
            (400, "model_missing", b'{"x":1}', {}),
            (404, "model_not_found", b'{"model":"gpt-x","prompt":"a"}', {}),
            (415, "unsupported_media_type", body, {"content-type": "text/plain"}),
            (400, "bad_timeout", body, {"x-request-timeout-ms": "soon"}),
        )
    )
    return Request(at_s, "refused by Baton", path, bad, {**headers, **more}, None, status, code, False)


def _passed(dice: random.Random, at_s: float, text: str, headers: dict[str, str]) -> Request:
    path, body = dice.choice(
        (
            ("/v1/embeddings", {"model": "m", "input": text}),
            ("/tokenize", {"model": "m", "prompt": text}),
            ("/v1/messages/count_tokens", {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": text}]}),
        )
    )
    return Request(at_s, "passed", path, json.dumps(body).encode(), headers, None, 200, None, False)


# -- faults ----------------------------------------------------------------------------------------------------------------


def _fault(dice: random.Random, at_s: float, prefill: int, decode: int) -> WorkerFault | FilterFault:
    if dice.random() < 0.06:
        return FilterFault(at_s, "stop", dice.uniform(0.1, 0.9))
    worker = dice.randrange(prefill + decode)
    kind = dice.choice(
        "refuse hang reset status slow eos_first null_params side_channel_dead crash restart exit reset status".split()
    )
    duration_s = round(dice.uniform(0.2, 1.5), 3)
    phase = dice.choice(("prefill", "decode", "any"))
    seed = dice.randrange(1 << 30)
    share = dice.choice((1.0, 0.5, 0.2))
    if kind in ("crash", "refuse", "side_channel_dead"):
        return WorkerFault(at_s, worker, Fault(kind=kind, duration_s=duration_s))
    if kind in ("restart", "exit"):
        return WorkerFault(at_s, worker, Fault(kind="restart"), again=kind == "exit")
    if kind in ("eos_first", "null_params"):
        # An EOS on decode would be the end of an answer, not a fault of the prefill.
        return WorkerFault(at_s, worker, Fault(kind=kind, phase="prefill", duration_s=duration_s, probability=share, seed=seed))
    if kind == "hang":
        return WorkerFault(
            at_s, worker, Fault(kind=kind, phase=phase, duration_s=duration_s, count=3, probability=share, seed=seed)
        )
    fault = Fault(
        kind=kind,
        phase=phase,
        duration_s=duration_s,
        probability=share,
        seed=seed,
        status=dice.choice((500, 503, 429, 400)),
        after_chunks=dice.choice((0, 1, 3, 8)),
        factor=dice.choice((2.0, 6.0)),
        # Longer, and a decode worker would sit on a handoff beyond its lease, which no router can see.
        delay_s=round(dice.uniform(0.0, 0.5), 3),
    )
    return WorkerFault(at_s, worker, fault)
