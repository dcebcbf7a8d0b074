"""Ask a running system one question and show the answer as it comes: what ``baton up`` does when everything is ready."""

from __future__ import annotations

import http.client
import json
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rich.console import Console

from extproc.stack import UpError

_QUESTION = "What is the capital of France?"
_POLL_S = 0.2
_MAX_TOKENS = 40


@dataclass(frozen=True)
class _Reply:
    """The response's first part."""

    status: int
    headers: dict[str, str]


@dataclass(frozen=True)
class _Text:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True)
class _End:
    """No more will come; ``error`` says why if the answer is not whole."""

    error: str = ""


def show(
    console: Console, *, host: str, port: int, model: str, names: Mapping[str, str], timeout_s: float, check: Callable[[], None]
) -> None:
    """Ask through Envoy and print the answer as it comes. It also connects the workers to each other.

    ``names``: ``ip:port`` of a worker -> what to call it. ``check`` is called all the while and raises when a part has ended.
    Raises UpError when there is no whole answer within ``timeout_s``.
    """
    body = {
        "model": model,
        "messages": [{"role": "user", "content": _QUESTION}],
        "temperature": 0,
        "max_tokens": _MAX_TOKENS,
        "stream": True,
    }
    url = f"http://{host}:{port}/v1/chat/completions"
    console.print(f"\n{url} is up. Ask it:\n", highlight=False)
    console.print(
        f"  curl -N {url} -H 'content-type: application/json' -d '{json.dumps(body)}'\n", highlight=False, markup=False
    )
    console.print("A first question:", highlight=False)
    console.print(f"> {_QUESTION}\n< ", end="", highlight=False)
    events: queue.Queue[_Reply | _Text | _End] = queue.Queue()
    sent_at = time.monotonic()
    # In a thread, so that a part that dies in the meantime is noticed here.
    threading.Thread(target=_stream, args=(host, port, body, timeout_s, events), daemon=True).start()
    headers: dict[str, str] = {}
    first_token_s: float | None = None
    while True:
        check()
        try:
            event = events.get(timeout=_POLL_S)
        except queue.Empty:
            if time.monotonic() - sent_at > timeout_s:
                raise UpError(f"no complete answer within {timeout_s:g} s") from None
            continue
        if isinstance(event, _Reply):
            headers = event.headers
        elif isinstance(event, _Text):
            if first_token_s is None:
                first_token_s = time.monotonic() - sent_at
            console.print(event.text, end="", markup=False, highlight=False)
        else:
            console.print()
            if event.error or first_token_s is None:
                raise UpError(f"the first request failed: {event.error or 'the answer is empty'}")
            break
    total_s = time.monotonic() - sent_at
    console.print(f"\ntime to first token {first_token_s:.2f} s, whole answer {total_s:.2f} s", highlight=False)
    console.print(_served_by(headers, names), highlight=False)


def _served_by(headers: Mapping[str, str], names: Mapping[str, str]) -> str:
    def name(address: str) -> str:
        return f"{names[address]} ({address})" if address in names else address or "an unknown worker"

    decode = name(headers.get("x-decode-endpoint", ""))
    transfer = re.search(r'prefill="([^"]+)"', headers.get("x-kv-transfer", ""))
    if transfer is None:
        return f"prefill and decode by {decode}"
    return f"prefill by {name(transfer[1])}, decode by {decode}"


def _stream(
    host: str,
    port: int,
    body: dict[str, object],
    timeout_s: float,
    events: queue.Queue[_Reply | _Text | _End],
) -> None:
    """Send the request; the events of its answer go into the queue, an :class:`_End` always last."""
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers={"content-type": "application/json"})
        response = connection.getresponse()
        events.put(_Reply(response.status, {key.lower(): value for key, value in response.getheaders()}))
        if response.status != 200:
            events.put(_End(f"{response.status} {response.read(4096).decode(errors='replace')}"))
            return
        for line in response:
            data = line.decode(errors="replace").removeprefix("data:").strip()
            if data == "[DONE]":
                events.put(_End())
                return
            if not data:
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                events.put(_End(json.dumps(chunk["error"])))
                return
            for choice in chunk["choices"]:
                if text := choice["delta"].get("content"):
                    events.put(_Text(text))
        events.put(_End("the answer broke off"))
    except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
        events.put(_End(f"{type(error).__name__}: {error}"))
    finally:
        connection.close()
