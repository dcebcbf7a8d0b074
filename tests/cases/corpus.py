"""What a case file says: a request, and what both legs, one worker or the client must get.

A file's name is the failure that it prevents. Bodies stand there byte for byte: as text, or as a list of pieces of which
``[piece, count]`` is repeated (``fill``: so often that the body is exactly as long as the limit, ``fill+1``: one more).
In what is expected, ``@ask@`` stands for the params that a prefill leg is asked with, ``@params@`` for those of its reply,
``@ids@`` for the prompt's token ids in it, ``@params+ids@`` for both in one object. Only reading and rendering live here.
"""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import msgspec
from ruamel.yaml import YAML

FOLDER = Path(__file__).parent
LIMIT_BYTES = 1 << 20
"""limits.max_body_bytes of the stack that the cases run through."""

Text = str | list[str | list[Any]]

_ASK = b'{"do_remote_decode":true,"do_remote_prefill":false}'
_FILL = re.compile(r"fill([+-][0-9]+)?")


class Error(msgspec.Struct, forbid_unknown_fields=True):
    """An error of Baton's own."""

    status: int
    code: str
    shape: str = "openai"


class Refusal(msgspec.Struct, forbid_unknown_fields=True):
    """An error of a worker's, passed on as it is."""

    by: str
    """prefill or decode"""
    status: int
    says: str


class Case(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One file."""

    why: str
    path: str
    method: str = "POST"
    headers: dict[str, str] = {}
    content_type: str | None = "application/json"
    body: Text | None = None
    base64: str | None = None
    encoding: str = "utf-8"
    chunked: bool = False
    times: int = 1
    """So often in a row; what is expected holds for each."""

    prefill: Text | None = None
    decode: Text | None = None
    whole: Text | None = None
    """What the one worker gets; ``same``: the client's bytes."""
    reason: str | None = None
    """Under which a request that goes whole is counted."""
    error: Error | None = None
    refused: Refusal | None = None
    models: list[str] | None = None

    arrives: str | None = None
    """The path that the workers see, if it is another one than the client's."""
    prefill_headers: dict[str, str | None] = {}
    """Value on that leg; null: absent; ``!x``: anything but x."""
    decode_headers: dict[str, str | None] = {}
    status: int = 200
    says: str | None = None
    """Stands in the answer."""
    cached: list[int] | None = None
    """Cached prompt tokens that each of ``times`` answers reports."""
    choices: int | None = None
    answer: bool = True
    """Whether the answer's text is a function of the client's body alone."""

    def request_body(self) -> bytes | None:
        """What the client sends."""
        if self.base64 is not None:
            return base64.b64decode(self.base64)
        return None if self.body is None else _joined(self.body, _fill(self.body), self.encoding)

    def leg(self, text: Text, params: bytes = b"", ids: bytes = b"") -> bytes:
        """A body as it must arrive, its placeholders filled in."""
        both = params[:-1] + b',"prompt_token_ids":' + ids + b"}"
        filled = _joined(text, _fill(self.body or ""))
        for name, value in ((b"@ask@", _ASK), (b"@params+ids@", both), (b"@params@", params), (b"@ids@", ids)):
            filled = filled.replace(name, value)
        return filled


def _fill(body: Text) -> int:
    """How often the piece to fill up with stands in a client's body."""
    pieces = [body] if isinstance(body, str) else body
    more = [match for piece in pieces if isinstance(piece, list) and (match := _FILL.fullmatch(str(piece[1])))]
    if not more:
        return 0
    return LIMIT_BYTES - sum(len(piece.encode()) for piece in pieces if isinstance(piece, str)) + int(more[0][1] or 0)


def _joined(text: Text, fill: int, encoding: str = "utf-8") -> bytes:
    pieces = [text] if isinstance(text, str) else text
    plain = [
        piece if isinstance(piece, str) else piece[0] * (piece[1] if isinstance(piece[1], int) else fill) for piece in pieces
    ]
    return "".join(plain).encode(encoding)


def load(file: Path) -> Case:
    """Read one file. Raises msgspec.ValidationError for a key that no case has."""
    case = msgspec.convert(YAML(typ="safe").load(file.read_text(encoding="utf-8")), Case)
    outcomes = (case.prefill, case.whole, case.error, case.refused, case.models)
    assert sum(outcome is not None for outcome in outcomes) == 1 or case.refused, f"{file}: one outcome a case"
    assert (case.prefill is None) == (case.decode is None) or case.refused, f"{file}: prefill and decode go together"
    return case


def files() -> list[Path]:
    """All case files, sorted."""
    return sorted(FOLDER.rglob("*.yaml"))


def without_transfer_keys(body: bytes) -> dict[str, Any]:
    """What of a client's body counts for the answer."""
    value: dict[str, Any] = json.loads(body)
    for key in ("kv_transfer_params", "ec_transfer_params"):
        value.pop(key, None)
    return value
