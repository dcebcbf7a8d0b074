"""Whose tokens they were: by model and tenant, for whoever shares out the bill."""

from __future__ import annotations

import hashlib

from extproc.observe.instruments import Bounded, Tally
from extproc.observe.tags import NONE

TENANTS = 100
"""Tenants with series of their own: the first that come. Later ones are ``other``."""

_SECRETS = frozenset(("authorization", "proxy-authorization", "x-api-key", "cookie"))
"""A tenant that is named by one of these headers is shown as a short hash of it."""

_HASH_CHARS = 12


class Accounts:
    """Adds to one counter with the labels model, tenant, kind. Label values that it is given come from itself or from tags."""

    def __init__(self, tokens: Tally) -> None:
        self._tokens = tokens
        self._tenants = Bounded(TENANTS)

    def tenant(self, name: str, header: str | None = None) -> str:
        """The label value of a tenant, as a client or a policy names it; ``header`` is where the policy looks for it."""
        if name and header in _SECRETS:
            name = f"sha256:{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:_HASH_CHARS]}"
        return self._tenants.of(name)

    def note_prompt(self, model: str, tenant: str, prompt_tokens: int, cached_tokens: int | None) -> None:
        """A prompt was served. ``cached_tokens``: None where nobody said."""
        self._tokens.inc(model, tenant, "prompt", by=prompt_tokens)
        if cached_tokens:
            self._tokens.inc(model, tenant, "cached", by=cached_tokens)

    def note_completion(self, model: str, tenant: str, tokens: int) -> None:
        """An answer of so many tokens ended. ``model`` and ``tenant`` are those of the request's tags: the filter chose them.

        A tenant that this process does not know (it came with the tags of another filter) is bounded like any other.
        """
        self._tokens.inc(model, tenant if tenant == NONE else self._tenants.of(tenant), "completion", by=tokens)
