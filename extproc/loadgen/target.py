"""What is asked: its address, TLS and key; its models; and how its tokenizer counts our text."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import msgspec

from extproc.loadgen.answer import Usage, error_of
from extproc.loadgen.errors import BenchError
from extproc.loadgen.prompts import PATHS, Api, Scale
from workers.trace_text import block_text
from workers.traces import BLOCK_TOKENS

_ASK_S = 60.0
_IDLE_S = 3.0
"""Idle connections are closed by us before servers close them (uvicorn: 5 s): else requests meet connections that are going."""
_SHORT_WORDS = 64


@dataclass(frozen=True, kw_only=True)
class Target:
    """An OpenAI-compatible address."""

    base: str
    """``http://host:port``, with whatever stands before ``/v1``."""
    key: Mapping[str, str] = field(default_factory=dict, repr=False)
    ca_file: Path | None = None
    verify: bool = True

    def session(self, *, timeout_s: float, keep_alive: bool = True) -> aiohttp.ClientSession:
        """Without a limit of connections: what limits the load must be the other side. Raises BenchError for the CA file."""
        secure: ssl.SSLContext | bool = True
        if self.base.startswith("https:"):
            try:
                context = ssl.create_default_context(cafile=self.ca_file)
            except OSError as error:
                raise BenchError(f"ca file {self.ca_file}: {error.strerror or error}") from None
            if not self.verify:
                context.check_hostname = False
                context.verify_mode = ssl.CERT_NONE
            secure = context
        keeping = {"keepalive_timeout": _IDLE_S} if keep_alive else {"force_close": True}
        connector = aiohttp.TCPConnector(limit=0, ssl=secure, **keeping)
        return aiohttp.ClientSession(
            connector=connector,
            headers={**self.key, "user-agent": "baton-bench", "accept-encoding": "identity"},
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )


def base_of(address: str) -> str:
    """``http://host:port/prefix`` of what was given, without ``/v1``. Raises BenchError."""
    text = address if "://" in address else f"http://{address}"
    try:
        parts = urlsplit(text)
        _ = parts.port  # raises where it is no number
    except ValueError as error:
        raise BenchError(f"address {address!r}: {error}") from None
    fault = "" if parts.hostname else "there is no host in it"
    if parts.scheme not in ("http", "https"):
        fault = "it begins with http:// or https://"
    if parts.username or parts.password:
        fault = "a key goes into a file or a variable, not into the address"
    if parts.query or parts.fragment:
        fault = "it has no query"
    if fault:
        shown = text if not (parts.username or parts.password) else "with a password in it"
        raise BenchError(f"address {shown}: {fault}")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _Whole(msgspec.Struct):
    usage: Usage | None = None


async def only_model(http: aiohttp.ClientSession, base: str, headers: Mapping[str, str]) -> str:
    """The name of the one model that is there. Raises BenchError where there are none, or several."""
    body = await _asked(http, "GET", f"{base}/v1/models", headers, None)
    try:
        names = [model.id for model in msgspec.json.decode(body, type=_Models).data]
    except msgspec.MsgspecError as error:
        raise BenchError(f"{base}/v1/models: {error}: name a model with --model") from None
    if len(names) != 1:
        raise BenchError(f"{base} has {', '.join(names) or 'no model'}: name one with --model")
    return names[0]


async def measured_scale(http: aiohttp.ClientSession, base: str, api: Api, model: str, headers: Mapping[str, str]) -> Scale:
    """How the engine counts our words, from the usage of two short requests (one block and a part of it, one token out).

    Raises BenchError where it does not answer, or says nothing of its usage.
    """
    counted = []
    # Two texts that have no beginning in common with each other, nor with any block of a run.
    for name, words in ((-1, _SHORT_WORDS), (-2, BLOCK_TOKENS)):
        text = block_text(name)[: 4 * words]
        fields: dict[str, object] = {"model": model, "max_tokens": 1}
        fields |= {"messages": [{"role": "user", "content": text}]} if api == "chat" else {"prompt": text}
        url = base + PATHS[api]
        body = await _asked(http, "POST", url, {**headers, "content-type": "application/json"}, msgspec.json.encode(fields))
        try:
            usage = msgspec.json.decode(body, type=_Whole).usage
        except msgspec.MsgspecError as error:
            raise BenchError(f"{url}: the answer cannot be read: {error}") from None
        if usage is None or not usage.prompt_tokens:
            raise BenchError(f"{url}: the answer has no usage, so nobody knows how long prompts are: --tokens-per-word says it")
        counted.append(usage.prompt_tokens)
    per_word = (counted[1] - counted[0]) / (BLOCK_TOKENS - _SHORT_WORDS)
    around = round(counted[0] - per_word * _SHORT_WORDS)
    return Scale(tokens_per_word=max(1.0, per_word), around_tokens=max(0, around))


async def _asked(http: aiohttp.ClientSession, method: str, url: str, headers: Mapping[str, str], body: bytes | None) -> bytes:
    """The body of a good answer. Raises BenchError."""
    try:
        async with http.request(
            method, url, headers=headers, data=body, allow_redirects=False, timeout=aiohttp.ClientTimeout(total=_ASK_S)
        ) as response:
            answer = await response.read()
            if response.status != 200:
                code, message = error_of(answer)
                raise BenchError(f"{url}: status {response.status} {code} {message}".rstrip())
            return answer
    except TimeoutError:
        raise BenchError(f"{url}: no answer within {_ASK_S:g} s") from None
    except aiohttp.ClientError as error:
        raise BenchError(f"{url}: {error}") from None
