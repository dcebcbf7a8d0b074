"""The body of a decode worker's answer -> what it says of its blocks, and the same body without a word of them. Pure.

Only the JSON's top level and its choice are taken apart; the bytes of every other value stay the worker's.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from extproc.paths import Treatment

_Fields = dict[str, msgspec.Raw]

_decoder = msgspec.json.Decoder(_Fields)
_choices_decoder = msgspec.json.Decoder(list[_Fields])
_encode = msgspec.json.Encoder().encode

_PARAMS: Final = "kv_transfer_params"
_MARK: Final = b'"kv_transfer_params"'
_NULL: Final = b"null"
_IDS_OF: Final = (Treatment.CHAT, Treatment.COMPLETIONS)

MOST_BYTES: Final = 64 << 20
"""Of an answer without a stream, or of one event of a stream. More is not held."""


class Told(NamedTuple):
    """What an answer says."""

    params: bytes | None = None
    """Its ``kv_transfer_params``; None: it has none."""
    prompt_ids: bytes | None = None
    """A JSON list."""
    answer_ids: bytes | None = None


class Whole:
    """An answer that is one JSON object: held until its end, and sent on without its transfer parameters."""

    def __init__(self, treatment: Treatment, *, hide_ids: bool) -> None:
        """``hide_ids``: the client did not ask for token ids."""
        self._treatment = treatment
        self._hide_ids = hide_ids
        self._pieces: list[bytes] = []
        self._bytes = 0
        self.told: Told | None = None
        """Once the end was there; None for an answer that is no JSON object."""
        self.too_large = False

    def feed(self, piece: bytes, *, last: bool) -> bytes:
        """What goes on to the client now."""
        self._bytes += len(piece)
        if self._bytes > MOST_BYTES:
            # Not a word of it goes on: where the parameters begin in it, nobody can know.
            self.too_large, self._pieces = True, []
            return b""
        self._pieces.append(piece)
        if not last:
            return b""
        body, self._pieces = b"".join(self._pieces), []
        self.told, body = _taken_out(body, self._treatment, hide_ids=self._hide_ids)
        return body


def _taken_out(body: bytes, treatment: Treatment, *, hide_ids: bool) -> tuple[Told | None, bytes]:
    try:
        fields = _decoder.decode(body)
        params = _take(fields, _PARAMS)
        prompt_ids = answer_ids = None
        if treatment in _IDS_OF:
            choices = _choices_decoder.decode(fields.get("choices", b"[]"))
            if len(choices) == 1:
                of_prompt = fields if treatment is Treatment.CHAT else choices[0]
                prompt_ids, answer_ids = _ids(of_prompt, "prompt_token_ids"), _ids(choices[0], "token_ids")
                if hide_ids:
                    for where, name in ((of_prompt, "prompt_token_ids"), (choices[0], "token_ids")):
                        _take(where, name)
                    fields["choices"] = msgspec.Raw(_encode(choices))
    except (msgspec.DecodeError, RecursionError):
        return None, body
    if params is None and not hide_ids:
        return Told(None, prompt_ids, answer_ids), body
    return Told(params, prompt_ids, answer_ids), _encode(fields)


def _take(fields: _Fields, name: str) -> bytes | None:
    """The value, with null in its place; None where it has none."""
    raw = fields.get(name)
    if raw is None or bytes(raw) == _NULL:
        return None
    fields[name] = msgspec.Raw(_NULL)
    return bytes(raw)


def _ids(fields: _Fields, name: str) -> bytes | None:
    value = bytes(fields.get(name, _NULL))
    return value if value.startswith(b"[") and value != b"[]" else None


class Events:
    """A stream of the Responses API, whose last event has the parameters (vLLM 0.32): events go on one by one, without them."""

    def __init__(self) -> None:
        self._held = b""
        self.told: Told | None = Told()
        self.too_large = False

    def feed(self, piece: bytes, *, last: bool) -> bytes:
        """What goes on to the client now: whole events."""
        held = self._held + piece
        end = len(held) if last else held.rfind(b"\n\n") + 2
        if end < 2 and not last:
            end = 0
        ready, self._held = held[:end], held[end:]
        if len(self._held) > MOST_BYTES:
            self.too_large, self._held = True, b""
        if _MARK not in ready:
            return ready
        return b"\n\n".join(self._without(event) if _MARK in event else event for event in ready.split(b"\n\n"))

    def _without(self, event: bytes) -> bytes:
        lines = event.split(b"\n")
        for index, line in enumerate(lines):
            if not line.startswith(b"data:") or _MARK not in line:
                continue
            try:
                fields = _decoder.decode(line[5:])
                response = _decoder.decode(fields["response"])
                params = _take(response, _PARAMS)
            except (msgspec.DecodeError, RecursionError, KeyError):
                continue
            if params is not None:
                self.told = Told(params)
                fields["response"] = msgspec.Raw(_encode(response))
                lines[index] = b"data: " + _encode(fields)
        return b"\n".join(lines)
