"""Forms that could carry transfer keys to an engine are refused; audio passes."""

from __future__ import annotations

import pytest

from extproc.errors import ApiError
from extproc.forms import refuse_transfer_fields

MULTIPART = "multipart/form-data; boundary=x"


def form(*headers: bytes) -> bytes:
    parts = b"".join(b"--x\r\n" + header + b'\r\n\r\n{"kv_transfer_params":"y"}\r\n' for header in headers)
    return parts + b"--x--\r\n"


FILE = b"Content-Disposition: form-data; name=\"file\"; filename*=UTF-8''a%20b.wav"


@pytest.mark.parametrize(
    "header",
    [
        b'Content-Disposition: form-data; name="vllm_xargs"',
        b"content-disposition:form-data;name=vllm_xargs",
        b'CONTENT-DISPOSITION: form-data; NAME="vllm_xargs"',
        b"Content-Disposition: form-data; name*=UTF-8''vllm%5Fxargs",
        b'Content-Disposition: form-data; name*0="vllm_"; name*1="xargs"',
        b'X-Other: 1\r\nContent-Disposition: form-data; name="vllm_xargs"',
    ],
)
def test_a_field_that_the_engine_merges_into_its_sampling_arguments_is_refused(header: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        refuse_transfer_fields(form(FILE, header), MULTIPART)
    assert (caught.value.code, caught.value.status) == ("field_not_allowed", 400)


@pytest.mark.parametrize("body", [b"vllm_xargs=%7B%7D", b"a=1&vllm%5Fxargs=1", b"%76llm_xargs=1"])
def test_the_same_in_a_form_of_the_other_kind(body: bytes) -> None:
    with pytest.raises(ApiError):
        refuse_transfer_fields(body, "application/x-www-form-urlencoded")


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (form(FILE, b'Content-Disposition: form-data; name="model"'), MULTIPART),
        (form(FILE + b"\r\nContent-Type: audio/wav"), MULTIPART),
        (b"vllm_xargs in the sound of a voice", "audio/wav"),
        (b"", MULTIPART),
        (b"Content-Disposition:", MULTIPART),
        (b"a=1&b=2", "application/x-www-form-urlencoded"),
    ],
)
def test_other_forms_pass(body: bytes, kind: str) -> None:
    refuse_transfer_fields(body, kind)
