"""Headers of the conformance suite of the Gateway API inference extension: a test chooses the endpoint and reads who served.

Facts: the suite's reference picker (pkg/lwepp in kubernetes-sigs/gateway-api-inference-extension). Only where
``epp.conformance_headers`` is on: any client could steer its requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

SELECTION_HEADER: Final = "test-epp-endpoint-selection"
"""On a request: ``ip`` or ``ip:port``, several with commas between them. Only these are chosen among."""

SERVED_HEADER: Final = "x-conformance-test-served-endpoint"
SELECTED_HEADER: Final = "x-conformance-test-selected-endpoint"

_UNKNOWN: Final = "fail: missing destination endpoint served metadata"
"""What the suite expects of a picker whose gateway does not say who served."""

_MOST: Final = 1000


def selection(value: str, addresses: Iterable[str]) -> frozenset[str]:
    """Those of ``addresses`` (``ip:port``) that the header names, by address or by IP."""
    named = {each.strip() for each in value.split(",", _MOST)[:_MOST]}
    return frozenset(each for each in addresses if each in named or host_of(each) in named)


def host_of(address: str) -> str:
    """``10.0.0.1:8000`` -> ``10.0.0.1``, ``[::1]:8000`` -> ``::1``."""
    return address.rpartition(":")[0].removeprefix("[").removesuffix("]")


def answer_headers(chosen: str, served: str | None) -> dict[str, str]:
    """What the answer gets."""
    return {SELECTED_HEADER: chosen, SERVED_HEADER: served or _UNKNOWN}
