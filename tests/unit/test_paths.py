"""Which path is treated how, in every spelling."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.paths import TABLE, Treatment, normalise, treatment

REFUSED = sorted(path for path, how in TABLE.items() if how is Treatment.REFUSED)


@pytest.mark.parametrize(
    ("method", "path", "how"),
    [
        ("POST", "/v1/chat/completions", Treatment.CHAT),
        ("POST", "/v1/chat/completions?a=b", Treatment.CHAT),
        ("GET", "/v1/chat/completions", Treatment.WHOLE),
        ("POST", "/v1/completions", Treatment.COMPLETIONS),
        ("POST", "/v1/completions/", Treatment.WHOLE),  # the engine redirects it: a handoff would be lost
        ("POST", "/V1/completions", Treatment.WHOLE),
        ("POST", "/v1%2Fcompletions", Treatment.WHOLE),
        ("GET", "/v1/models", Treatment.MODELS),
        ("GET", "/v1/models?x=1", Treatment.MODELS),
        ("POST", "/v1/models", Treatment.WHOLE),
        ("POST", "/v1/responses", Treatment.RESPONSES),
        ("GET", "/v1/responses/resp_1", Treatment.WHOLE),
        ("POST", "/v1/messages", Treatment.MESSAGES),
        ("POST", "/v1/messages/count_tokens", Treatment.WHOLE),
        ("GET", "/something/new", Treatment.WHOLE),
        ("POST", "/scale_elastic_ep", Treatment.REFUSED),
        ("GET", "/fault_tolerance/status", Treatment.REFUSED),
        ("POST", "/", Treatment.WHOLE),
        ("POST", "", Treatment.WHOLE),
    ],
)
def test_treatment(method: str, path: str, how: Treatment) -> None:
    assert treatment(method, path) is how


@given(
    st.sampled_from(REFUSED),
    st.sampled_from(["", "/", "//", "/.", "/x/..", "?q=1", "#f", "%2f"]),
    st.sampled_from(["", "/", "/.", "/a/..", "/%2e", "/v1/%2e%2e"]),
    st.booleans(),
)
def test_a_control_endpoint_is_refused_in_every_spelling(path: str, after: str, before: str, upper: bool) -> None:
    spelt = before + (path.upper() if upper else path) + after
    assert treatment("POST", spelt) is Treatment.REFUSED


@given(st.text(max_size=40))
def test_normalise_takes_anything_and_is_stable(path: str) -> None:
    once = normalise(path)
    assert once.startswith("/")
    if "%" not in once and "?" not in once and "#" not in once:
        assert normalise(once) == once
