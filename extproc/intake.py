"""What a prompt asks for: its policy, its model, its chain of blocks; and the job that the router gets. No I/O.

The filter reads requests with it, and `baton explain` reads them the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import msgspec

from extproc.chains import KnownChains
from extproc.config import Config
from extproc.handoff import Flow
from extproc.handoff.choose import connector
from extproc.inference import InferenceRequest
from extproc.models import Names
from extproc.policy import Policies, Resolved
from extproc.pools.choice import PoolChoice, within
from extproc.prompt import Prompt, PromptSettings, read_prompt
from extproc.routing.job import Aims, Job


class TextSizes(Protocol):
    """What is known of the bytes that a token stands for."""

    def of(self, model: str) -> float:
        """In texts for one model."""
        ...


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """One request, read."""

    request: InferenceRequest
    """As the engines get it: the model's own name, the policy's priority."""
    model_asked: str
    """As the client named it."""
    job: Job
    prompt: Prompt
    resolved: Resolved
    whole_reason: str | None
    """Why it cannot be handed over, or None if it can."""
    retries: int
    """How many other prefill workers are tried after a failure."""
    fallback: bool
    """Whether a decode worker does it all when no prefill could be had."""


class Other(NamedTuple):
    """A request that is no prompt."""

    request: InferenceRequest | None
    """As the worker gets it; None: it has no JSON body."""
    model: str | None
    """That serves it; None: any."""
    aims: Aims


class Intake:
    """Reads requests under one configuration."""

    def __init__(self, config: Config, bytes_per_token: TextSizes, *, block_tokens: int | None = None) -> None:
        """``block_tokens`` of the prefix index, if it is not that of the configuration."""
        self.names = Names(config.models)
        self._prefill = config.prefill
        self._policies = Policies(config.policies)
        self.prompts = PromptSettings(block_tokens=block_tokens or config.routing.block_tokens)
        handoff = connector(config.handoff)
        self._apis = handoff.apis
        # Whoever else makes a leg, or may be sent it in the place of the chosen worker, would take the rank for its own. And
        # where the blocks' way is bound to what is configured of a worker, that is one of its engines.
        by_us = handoff.flow is Flow.SEQUENTIAL and not handoff.bound
        self._takes_rank = by_us and not (config.epp.enabled and config.epp.fallback_endpoints)
        self._bytes_per_token = bytes_per_token
        self._chains = KnownChains()
        self._choice = PoolChoice(config.pools) if config.pools else None
        self._rename_all = self._choice is not None or config.routes.asks_for_model

    def read(
        self,
        request: InferenceRequest,
        *,
        headers: Mapping[str, str],
        path: str,
        size_bytes: int,
        request_id: str,
        arrived_s: float,
        deadline_s: float,
    ) -> Asked:
        """``headers`` have lower-case names, ``path`` no query. Raises ApiError.

        ``request_id`` draws between the models of a canary where nothing else does.
        """
        model_asked = request.model()
        prompt = self._prompt(request, model_asked)
        resolved = self._policies.resolve(headers, path, model_asked, prompt.tokens)
        model = self.names.resolve(model_asked, resolved.affinity or request_id)
        if model != model_asked:
            request = request.with_model(model)
            prompt = self._prompt(request, model)
        policy, aims = resolved.policy, resolved.aims
        if self._choice is not None:
            pool = self._choice.pool(policy.pools, aims.policy, model, resolved.affinity or request_id)
            aims = within(aims, pool)
        if policy.pass_priority:
            request = request.with_priority(resolved.aims.priority)
        whole_reason = request.whole_reason()
        if whole_reason is None and request.treatment not in self._apis:
            whole_reason = "connector"
        on_failure = policy.on_prefill_failure
        return Asked(
            request=request,
            model_asked=model_asked,
            job=Job(
                model=model,
                chain=prompt.chain,
                tokens=max(prompt.tokens, 1),
                aims=aims,
                arrived_s=arrived_s,
                deadline_s=deadline_s,
                tenant=resolved.tenant,
                session=resolved.session,
                answer_tokens=request.answer_tokens(),
                size_bytes=size_bytes,
                handoff=whole_reason is None,
                takes_rank=self._takes_rank and request.takes_rank,
            ),
            prompt=prompt,
            resolved=resolved,
            whole_reason=whole_reason,
            retries=0 if on_failure == "fail" else self._prefill.retries,
            fallback=self._prefill.fallback == "aggregate" if on_failure is None else on_failure == "aggregate",
        )

    def read_other(
        self,
        request: InferenceRequest | None,
        *,
        headers: Mapping[str, str],
        path: str,
        request_id: str,
        aims: Aims,
    ) -> Other:
        """A request that is no prompt, where it matters which model it is for. ``aims``: those of all such requests."""
        if not self._rename_all:
            return Other(request, None, aims)
        asked = None if request is None else request.names_model()
        resolved = self._policies.resolve(headers, path, asked, None)
        key = resolved.affinity or request_id
        model = None if asked is None else self.names.resolve(asked, key)
        if request is not None and model is not None and model != asked:
            request = request.with_model(model)
        if self._choice is None:
            return Other(request, model, aims)
        if model is None and not resolved.policy.pools:
            return Other(request, None, aims)  # any worker can tell what has to do with no model
        return Other(request, model, within(aims, self._choice.pool(resolved.policy.pools, resolved.aims.policy, model, key)))

    def _prompt(self, request: InferenceRequest, model: str) -> Prompt:
        size = self._bytes_per_token.of(model)
        return read_prompt(request, self.prompts, model=model, bytes_per_token=size, known=self._chains)
