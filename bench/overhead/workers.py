"""Fake workers that answer at once: what is left of a request's time is the way there and back."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import msgspec

from bench.overhead.bodies import MODEL
from bench.overhead.plain_envoy import Answer, answering
from extproc.stack import envoy_command, find_envoy
from workers.process import Child
from workers.ready import free_ports, wait_ready

_HOST = "127.0.0.1"
_START_TIMEOUT_S = 60.0
_PAGE = Path(__file__).parents[2] / "tests" / "cases" / "metrics" / "vllm-0.32.txt"
METRICS_ANSWER = _PAGE.read_text(encoding="utf-8")
MODELS_ANSWER = json.dumps(
    {"object": "list", "data": [{"id": MODEL, "object": "model", "root": MODEL, "max_model_len": 262144}]}
)
_RENDERED = Answer(
    "/v1/chat/completions/render",
    json.dumps(
        {
            "request_id": "chatcmpl-7f6e5d4c3b2a19080716253443526170",
            "token_ids": list(range(5, 1005)),
            "token_offsets": None,
            "features": None,
            "content_parts": None,
            "sampling_params": {"stop": [], "stop_token_ids": [], "bad_words": [], "skip_reading_prefix_cache": False},
            "model": MODEL,
            "output_mode": "tokens",
            "stream": False,
            "priority": 0,
        }
    ),
)
"""vllm-router asks for the tokens of each prompt, twice. A real answer grows with the prompt; this one is to its advantage."""
_HANDOFF = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [list(range(7, 71))],
    "remote_engine_id": "0f9d8c7b-6a5e-4d3c-2b1a-0f9e8d7c6b5a",
    "remote_request_id": "chatcmpl-7f6e5d4c3b2a19080716253443526170-0",
    "remote_host": _HOST,
    "remote_port": 5600,
    "tp_size": 1,
    "remote_num_tokens": 1024,
}


def chat_answer(text: str, tokens: int, **more: object) -> str:
    """The body of a chat completion, shaped like vLLM's."""
    message = {"role": "assistant", "content": text, "refusal": None, "annotations": None, "audio": None, "function_call": None}
    choice = {
        "index": 0,
        "message": {**message, "tool_calls": [], "reasoning": None},
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": None,
    }
    return json.dumps(
        {
            "id": "chatcmpl-7f6e5d4c3b2a19080716253443526170",
            "object": "chat.completion",
            "created": 1790000000,
            "model": MODEL,
            "choices": [choice],
            "service_tier": None,
            "system_fingerprint": None,
            "usage": {
                "prompt_tokens": 1024,
                "total_tokens": 1024 + tokens,
                "completion_tokens": tokens,
                "prompt_tokens_details": None,
            },
            "prompt_logprobs": None,
            "kv_transfer_params": None,
            **more,
        }
    )


PREFILL_ANSWER = chat_answer("The", 1, kv_transfer_params=_HANDOFF)
DECODE_ANSWER = chat_answer("The quick brown fox jumps over the lazy dog. " * 8, 80)


class Workers:
    """Two that prefill and two that decode, in one Envoy of one thread. Context manager."""

    def __init__(self, directory: Path, *, prefill: int = 2, decode: int = 2) -> None:
        self._directory = directory
        self._admin, *ports = free_ports(1 + prefill + decode)
        self.prefill_ports, self.decode_ports = ports[:prefill], ports[prefill:]

    @property
    def prefill(self) -> list[str]:
        """`ip:port` of each."""
        return [f"{_HOST}:{port}" for port in self.prefill_ports]

    @property
    def decode(self) -> list[str]:
        """`ip:port` of each."""
        return [f"{_HOST}:{port}" for port in self.decode_ports]

    def __enter__(self) -> Workers:
        page = Answer("/metrics", METRICS_ANSWER, "text/plain; version=0.0.4; charset=utf-8")
        common = [_RENDERED, page, Answer("/v1/models", MODELS_ANSWER), Answer("/health", "", "text/plain")]
        roles = (("prefill", self.prefill_ports, PREFILL_ANSWER), ("decode", self.decode_ports, DECODE_ANSWER))
        listeners = [
            (port, f"{role}-{number}", [*common, Answer("/", answer)])
            for role, ports, answer in roles
            for number, port in enumerate(ports)
        ]
        file = self._directory / "workers.json"
        file.write_bytes(msgspec.json.encode(answering(listeners, admin_port=self._admin)))
        self.child = Child("workers", envoy_command(find_envoy(), file), log=self._directory / "workers.log", grace_s=2.0)
        try:
            wait_ready(self.child, f"http://{_HOST}:{self._admin}/ready", _START_TIMEOUT_S)
        except BaseException:
            self.child.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.child.stop()

    def served(self) -> tuple[int, int]:
        """Requests that prefill and decode workers have answered so far, probes of routers included. Raises OSError."""
        url = f"http://{_HOST}:{self._admin}/stats?filter=downstream_rq_2xx$&format=json"
        with urllib.request.urlopen(url, timeout=5) as reply:
            stats = msgspec.json.decode(reply.read())["stats"]
        totals = {"prefill": 0, "decode": 0}
        for stat in stats:
            role = stat["name"].removeprefix("http.").partition("-")[0]
            if role in totals:
                totals[role] += stat["value"]
        return totals["prefill"], totals["decode"]
