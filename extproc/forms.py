"""Bodies that are forms, not JSON: they pass as they are, but for a field that could carry transfer keys to an engine.

vLLM 0.32 reads audio requests from forms, and takes a field `vllm_xargs`, a JSON text, into the place where its KV connector
looks for `kv_transfer_params`. A form cannot be edited as safely as JSON, so one with such a field is refused.
"""

from __future__ import annotations

import re
from urllib.parse import unquote_to_bytes

from extproc.errors import ApiError

_FIELD = b"vllm_xargs"
_DISPOSITION = b"content-disposition:"
# RFC 2231 lets a name be written in pieces and in percent codes; no client that means well does so for a field's name.
_NAME_IN_PIECES = re.compile(rb";\s*name\*")


def refuse_transfer_fields(body: bytes, content_type: str) -> None:
    """Raises ApiError if this form has a field that could carry transfer keys."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind == "application/x-www-form-urlencoded":
        found = _FIELD in unquote_to_bytes(body)
    elif kind == "multipart/form-data":
        found = any(_FIELD in header or _NAME_IN_PIECES.search(header) for header in _dispositions(body))
    else:
        found = False
    if found:
        raise ApiError("field_not_allowed", "a form may not have the field vllm_xargs", param="vllm_xargs")


def _dispositions(body: bytes) -> list[bytes]:
    """The Content-Disposition lines in a multipart body, in lower case."""
    lower = body.lower()
    lines: list[bytes] = []
    start = lower.find(_DISPOSITION)
    while start >= 0:
        end = lower.find(b"\n", start)
        lines.append(lower[start : end if end >= 0 else None])
        start = lower.find(_DISPOSITION, start + len(_DISPOSITION))
    return lines
