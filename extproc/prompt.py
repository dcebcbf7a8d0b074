"""The prompt of a request, as far as the choice of workers needs it: its chain of blocks, and how many tokens it has.

Nothing is tokenised. The chain is over the bytes as the client spelt them: an estimate of what the engine's own cache can
share, wrong only where a client spells the same text in another way. What is no prompt has an empty chain: refusing it is
the engine's task.

Facts about vLLM are those of 0.32.
"""

from __future__ import annotations

import re
from array import array
from collections import OrderedDict
from collections.abc import Callable

import msgspec
import xxhash

from extproc.chains import KnownChains
from extproc.find import holds
from extproc.inference import Fields, InferenceRequest
from extproc.paths import Treatment
from extproc.routing.prefix import Chain, chain_of

DEFAULT_BYTES_PER_TOKEN = 4.0

Text = bytes | memoryview
"""Of a request; a view where it need not be copied."""

_BLOCK_BYTES_PER_TOKEN = 4
"""Fixed, so that chains stay comparable while the estimate of a token's bytes moves; and the size of a token id in a chain."""


class PromptSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How prompts are cut and estimated."""

    block_tokens: int = 64
    """Tokens of a block, nominal: it is so many token ids, or four times as many bytes of text."""
    image_tokens: int = 1024
    """What an image, sound or video counts that is in the body itself."""
    max_tokens: int = 1_000_000
    """A chain ends after so many nominal tokens."""

    @property
    def block_bytes(self) -> int:
        """Of text."""
        return self.block_tokens * _BLOCK_BYTES_PER_TOKEN


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt."""

    chain: Chain
    tokens: int
    """Its length; 0 for what is no prompt."""
    exact: bool
    """The client sent token ids, and ``tokens`` is no estimate."""
    size_bytes: int
    """As the client sent it, media included."""
    text_bytes: int
    """Bytes of text that ``tokens`` was estimated from, to learn from (:class:`BytesPerToken`). 0: nothing can be learned,
    because there are token ids or media in it."""


# What makes two equal texts different from the first token on. Each with its reason.
IDENTITY: tuple[str, ...] = (
    "cache_salt",  # the engine's own way to keep caches apart
    "chat_template",  # other text around every message
    "chat_template_kwargs",  # most templates put them at the very beginning
    "reasoning_effort",  # likewise
    "reasoning",  # the same in the responses API
    "thinking",  # the same in the messages API
    "output_config",  # the messages API's effort
    "add_special_tokens",  # a BOS token or none
    "truncate_prompt_tokens",  # may cut the beginning, which moves every block
    "truncation_side",  # likewise
    "mm_processor_kwargs",  # another number of tokens for the same image
    "media_io_kwargs",  # likewise: frames of a video
    "prompt_embeds",  # go before the text
    "previous_response_id",  # stands for turns that are not in the body
    "previous_input_messages",  # likewise
)
# Not here: `tools` and `documents`, which are part of the text (_front); `add_generation_prompt` and
# `continue_final_message`, which change the end only; `tool_choice` and `response_format`, which one model family of vLLM
# reads, and which a conversation changes from turn to turn; the LoRA adapter, which is the model's name.

_IDENTITY = frozenset(IDENTITY)

_FRONT = ("tools", "documents")
"""What templates render behind the system prompt."""

_NOTHING = (b"null", b"[]", b"{}", b'""')
_NOTHING_BYTES = 4
"""The longest of them."""

_MEDIA_FROM_BYTES = 16 << 10
"""A smaller prompt is not searched for media: they could not change its estimate by much."""

# A data: URL, or the bare base64 of input_audio and of the messages API. Possessive, so that no text is walked twice.
_MEDIA = re.compile(rb'"data(?::[\w.+/;=-]{1,128};base64,[^"]{256,}+|"\s{0,4}+:\s{0,4}+"[A-Za-z0-9+/=\\_-]{1024,}+)"')

# A mark for the client's own provider, which the engine does not show to the model, and which moves on with every turn.
_CACHE_MARK = re.compile(
    rb',\s{0,4}+"cache_control"\s{0,4}+:\s{0,4}+\{[^{}]{0,256}+\}|"cache_control"\s{0,4}+:\s{0,4}+\{[^{}]{0,256}+\}\s{0,4}+,'
)


def read_prompt(
    request: InferenceRequest,
    settings: PromptSettings,
    *,
    model: str,
    bytes_per_token: float = DEFAULT_BYTES_PER_TOKEN,
    known: KnownChains | None = None,
) -> Prompt:
    """The prompt of ``request``. Never raises for what a client sent.

    ``model`` is the name that the engine gets, after aliases: the adapter's, where there is one. ``bytes_per_token`` is what
    is known of that model's texts. ``known``: chains of earlier prompts, which save time and change nothing.
    """
    seed = _seed(request, model)
    ids = token_ids_sent(request)
    if ids:
        return _of_token_ids(ids, seed, settings)
    text = _text_of(request)
    make = chain_of if known is None else known.chain_of
    return _of_text(text, request.body, seed, settings, bytes_per_token, make)


def text_of(request: InferenceRequest, settings: PromptSettings) -> Text:
    """The text that the chain of ``request`` is made of, whole; nothing where it is made of token ids."""
    return b"" if token_ids_sent(request) else _compared(_text_of(request), request.body, settings)[0]


def token_ids_sent(request: InferenceRequest) -> Text:
    """The token ids that a client sent as its prompt, a JSON list; nothing where it sent none."""
    if request.treatment is not Treatment.COMPLETIONS:
        return b""
    value = _single(_value(request.fields, "prompt"))
    return value if value[:1] == b"[" else b""


def _text_of(request: InferenceRequest) -> Text:
    fields = request.fields
    if request.treatment is Treatment.COMPLETIONS:
        return _text(_single(_value(fields, "prompt")))
    if request.treatment is Treatment.CHAT:
        return _chat(fields)
    if request.treatment is Treatment.RESPONSES:
        return _after(_value(fields, "instructions"), fields, _value(fields, "input"))
    if request.treatment is Treatment.MESSAGES:
        return _after(_value(fields, "system"), fields, _value(fields, "messages"))
    return b""


class BytesPerToken:
    """Learned from the engine's counts: how many bytes of a request's text a token of each model stands for.

    Old counts fade, and long prompts count more than short ones.
    """

    LOWEST, HIGHEST = 1.0, 8.0
    _KEPT = 0.98
    """Of all earlier counts, at each new one."""
    _FIRST_GUESS_TOKENS = 1000.0
    """The weight of the first guess."""
    _SHORT_TOKENS = 32
    """Shorter prompts say more about the chat template than about the text."""

    def __init__(self, max_models: int = 256) -> None:
        """Of more than ``max_models`` models, the one not seen for longest is forgotten."""
        self._max_models = max_models
        self._sums: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def note(self, model: str, text_bytes: int, tokens: int) -> None:
        """A prompt of ``text_bytes`` (:attr:`Prompt.text_bytes`) was ``tokens`` tokens."""
        if text_bytes <= 0 or tokens < self._SHORT_TOKENS:
            return
        guess = self._FIRST_GUESS_TOKENS
        all_bytes, all_tokens = self._sums.get(model, (guess * DEFAULT_BYTES_PER_TOKEN, guess))
        self._sums[model] = (all_bytes * self._KEPT + text_bytes, all_tokens * self._KEPT + tokens)
        self._sums.move_to_end(model)
        if len(self._sums) > self._max_models:
            self._sums.popitem(last=False)

    def of(self, model: str) -> float:
        """Bytes of a token, within LOWEST and HIGHEST."""
        sums = self._sums.get(model)
        if sums is None:
            return DEFAULT_BYTES_PER_TOKEN
        return min(self.HIGHEST, max(self.LOWEST, sums[0] / sums[1]))


def _value(fields: Fields, key: str) -> Text:
    """The bytes of a value; none where it says nothing."""
    raw = fields.get(key)
    if raw is None:
        return b""
    value = memoryview(raw)
    return b"" if len(value) <= _NOTHING_BYTES and bytes(value) in _NOTHING else value


def _seed(request: InferenceRequest, model: str) -> bytes:
    """Everything but the text. A NUL cannot stand in JSON, so the parts cannot run into each other."""
    parts: list[Text] = [request.treatment.value.encode(), model.encode(errors="surrogatepass")]
    if not _IDENTITY.isdisjoint(request.fields):
        for key in IDENTITY:
            if key in request.fields and (value := _value(request.fields, key)):
                parts += (key.encode(), value)
    return b"\0".join(parts)


def _text(value: Text) -> Text:
    """What is between the quotes of a JSON string, or a JSON list without the end that its next turn will not have."""
    first = value[:1]
    if first == b'"':
        return value[1:-1]
    if first == b"[":
        return bytes(value[:-1]).rstrip() if value[-2] in _SPACE else value[:-1]
    return b""


_SPACE = b" \t\r\n"
"""Of JSON."""


def _front(fields: Fields) -> bytes:
    return b"\0".join(filter(None, (_value(fields, key) for key in _FRONT)))


def _after(system: Text, fields: Fields, turns: Text) -> Text:
    """System prompt, tools, turns; nothing if there are no turns."""
    text = _text(turns)
    if not text:
        return b""
    before = [part for part in (_text(system), _front(fields)) if part]
    return b"\0".join((*before, text)) if before else text


class _Message(msgspec.Struct, frozen=True):
    role: str = ""


_list_decoder = msgspec.json.Decoder(list[msgspec.Raw])
_message_decoder = msgspec.json.Decoder(_Message)


def _chat(fields: Fields) -> Text:
    """The messages, with the tools behind a system message, where a template puts them, or before everything else."""
    messages = _value(fields, "messages")
    if messages[:1] != b"[":
        return b""
    front = _front(fields)
    text = _text(messages)
    if not front:
        return text
    text, messages = bytes(text), bytes(messages)
    end = 0
    try:
        first = bytes(_list_decoder.decode(messages)[0])
        if _message_decoder.decode(first).role in ("system", "developer"):
            end = messages.index(first) + len(first)
    except (msgspec.DecodeError, RecursionError, IndexError):
        pass  # the engine will say what is wrong with it
    return b"".join((text[:end], b"\0", front, b"\0", text[end:]))


def _single(value: Text) -> Text:
    """The one prompt of a list of one; of a list of several, none: they would be several chains."""
    inside = value[1:2]
    if inside and inside[0] in _SPACE:
        inside = bytes(value[1:]).lstrip()[:1]
    if value[:1] != b"[" or inside not in (b'"', b"["):
        return value
    try:
        prompts = _list_decoder.decode(value)
    except (msgspec.DecodeError, RecursionError):
        return b""
    return memoryview(prompts[0]) if len(prompts) == 1 else b""


_ids_decoder = msgspec.json.Decoder(list[int])


def _of_token_ids(value: Text, seed: bytes, settings: PromptSettings) -> Prompt:
    try:
        ids = _ids_decoder.decode(value)
        packed = array("I", ids[: settings.max_tokens]).tobytes()
    except (msgspec.DecodeError, RecursionError, OverflowError):
        ids, packed = [], b""
    block_bytes = settings.block_tokens * array("I").itemsize
    return Prompt(
        chain=chain_of(packed, b"ids\0" + seed, block_bytes, settings.block_tokens),
        tokens=len(ids),
        exact=bool(ids),
        size_bytes=len(value),
        text_bytes=0,
    )


def _of_text(
    text: Text,
    body: bytes,
    seed: bytes,
    settings: PromptSettings,
    bytes_per_token: float,
    make: Callable[[Text, bytes, int, float], Chain],
) -> Prompt:
    """``body`` is what ``text`` is from: what is not in the one is not in the other, and it can be searched without a copy."""
    sent_bytes = len(text)
    text, media = _compared(text, body, settings)
    block_bytes = settings.block_bytes
    return Prompt(
        chain=make(text[: settings.max_tokens * _BLOCK_BYTES_PER_TOKEN], seed, block_bytes, block_bytes / bytes_per_token),
        tokens=round(len(text) / bytes_per_token),
        exact=False,
        size_bytes=sent_bytes,
        text_bytes=0 if media else len(text),
    )


def _compared(text: Text, body: bytes, settings: PromptSettings) -> tuple[Text, int]:
    """The text without what moves on with every turn, and with stand-ins for media; and how many of these there are."""
    media = 0
    if holds(body, b'"cache_control"'):
        text = _CACHE_MARK.sub(b"", bytes(text))
    if len(text) >= _MEDIA_FROM_BYTES and holds(body, b'"data'):
        text, media = _MEDIA.subn(lambda found: _stand_in(found[0], settings.image_tokens), bytes(text))
    return text, media


def _stand_in(media: bytes, tokens: int) -> bytes:
    """As many bytes as text of so many tokens, and other ones for other media."""
    size_bytes = tokens * _BLOCK_BYTES_PER_TOKEN
    digest = xxhash.xxh3_128_digest(media)
    return (digest * (size_bytes // len(digest) + 1))[:size_bytes]
