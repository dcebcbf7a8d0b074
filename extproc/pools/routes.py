"""The headers by which Envoy chooses the route of a request, once its workers are chosen.

The pool is that of the decode worker itself, not what sent the request there: the route is a function of the pin.
"""

from __future__ import annotations

from collections.abc import Mapping

from extproc.headers import MODEL_HEADER, POOL_HEADER
from extproc.routing.partition import DEFAULT_POOL, POOL_LABEL

_NONE: Mapping[str, str] = {}
_MOST_CHARS = 256


class RouteHeaders:
    """For the requests of one filter."""

    def __init__(self, *, model: bool = False, pools: bool = False) -> None:
        self._model = model
        self._pools = pools
        self.wanted = model or pools
        """Whether a route is ever chosen anew."""

    def of(self, model: str | None, labels: Mapping[str, str]) -> Mapping[str, str]:
        """``model``: the one that serves the request, if it names one. ``labels``: those of its worker, or of its aims."""
        if not self.wanted:
            return _NONE
        headers: dict[str, str] = {}
        if self._pools:
            headers[POOL_HEADER] = labels.get(POOL_LABEL, DEFAULT_POOL)
        if self._model and model is not None and fits_a_header(model):
            headers[MODEL_HEADER] = model
        return headers


def fits_a_header(text: str) -> bool:
    """Whether it can be the value of a header as it is. A client may name a model whatever it likes."""
    return 0 < len(text) <= _MOST_CHARS and text.isascii() and text.isprintable() and text == text.strip()
