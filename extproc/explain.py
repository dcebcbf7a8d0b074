"""A request that is not served but explained: its policy, its model, its prompt, and what would be decided for it.

Nothing is counted, placed or remembered. The filter answers with this at ``POST /debug/explain``; ``baton explain --snapshot``
works it out by itself, from what a filter knew (``GET /debug/snapshot``) and the configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import msgspec

from extproc.config import Config
from extproc.dispatcher import as_api_error
from extproc.errors import ApiError
from extproc.inference import parse
from extproc.intake import Asked, Intake, TextSizes
from extproc.paths import treatment
from extproc.policy import Facts, Policies, Policy
from extproc.policy_config import Match, PolicyRule
from extproc.pools.choice import pool_of
from extproc.prompt import DEFAULT_BYTES_PER_TOKEN, BytesPerToken
from extproc.routing.explain import Explanation, explain, explain_snapshot
from extproc.routing.job import Job
from extproc.routing.router import Router
from extproc.routing.snapshot import Snapshot, take

_NO_MATCH = Policy()
_MOST_MODELS = 1_000
_NO_TOKENS = "workers say what they hold, but this prompt's token ids are not known: "


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A request, as ``POST /debug/explain`` takes it."""

    path: str | None = None
    """None: by what is in the body, ``messages`` or ``prompt``."""
    headers: dict[str, str] = {}
    body: msgspec.Raw
    """A JSON object; its bytes count, not only its values."""


class PolicyShown(msgspec.Struct, frozen=True, kw_only=True):
    """Which policy holds."""

    name: str
    why: str
    pool: str | None = None
    """That its workers are of; null: there are no pools."""
    passed_over: dict[str, list[str]] = {}
    """Policies before it -> the conditions that did not hold."""
    mode: str
    objective: str
    dispatch: str
    ignored_overrides: list[str] = []
    """Of the client's `x-baton-…` headers, those that the policy does not allow."""


class PromptShown(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the prompt."""

    tokens: int
    exact: bool
    """False: estimated from its bytes."""
    blocks: int
    """Of the prefix index."""
    token_ids: Literal["whole", "beginning"] | None = None
    """What is known of its token ids, by which it is compared with what workers say that they hold. null: nothing."""


class ErrorShown(msgspec.Struct, frozen=True, kw_only=True):
    """What the client would be told."""

    status: int
    code: str
    message: str
    retry_after_s: float | None = None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a :class:`Question`."""

    path: str
    model_asked: str
    model: str
    """That workers are asked for, after aliases."""
    policy: PolicyShown
    prompt: PromptShown
    whole_reason: str | None = None
    """Why it cannot be handed over whatever the costs; None: it can."""
    decision: Explanation
    error: ErrorShown | None = None
    notes: list[str] = []


class SavedSnapshot(Snapshot, frozen=True, kw_only=True):
    """What ``GET /debug/snapshot`` answers: what the router knows, and what prompts are read with."""

    time: float
    """Unix time."""
    bytes_per_token: Mapping[str, float] = msgspec.field(default_factory=dict)
    """Learned, by model."""


class _Known(msgspec.Struct, frozen=True):
    """Bytes a token, from a snapshot."""

    models: Mapping[str, float]

    def of(self, model: str) -> float:
        return self.models.get(model, DEFAULT_BYTES_PER_TOKEN)


class Read(msgspec.Struct, frozen=True, kw_only=True):
    """A question that was read, on a clock that stands at 0 when it came."""

    asked: Asked
    path: str
    passed_over: dict[str, list[str]]


class Explainer:
    """Explains requests under one configuration."""

    def __init__(self, config: Config, *, block_tokens: int | None = None) -> None:
        """``block_tokens`` of the prefix index, if it is not that of the configuration."""
        self._config = config
        self._alone = [(rule, Policies([rule], default=_NO_MATCH)) for rule in config.policies]
        self._block_tokens = block_tokens

    def read(self, question: Question, bytes_per_token: TextSizes, request_id: str = "") -> Read:
        """A question -> what is asked of the router, as the filter reads it. Raises ApiError.

        ``request_id`` draws between the models of a canary where nothing else does.
        """
        body = bytes(question.body)
        headers = {name.lower(): value for name, value in question.headers.items()}
        path = (question.path or _path_of(body)).partition("?")[0]
        how = treatment("POST", path)
        if not how.apart:
            raise ApiError("not_found", f"{path} takes no prompt: there is no decision to explain")
        asked = Intake(self._config, bytes_per_token, block_tokens=self._block_tokens).read(
            parse(body, how),
            headers=headers,
            path=path,
            size_bytes=len(body),
            request_id=request_id,
            arrived_s=0.0,
            deadline_s=self._config.prefill.timeout_s,
        )
        facts = Facts(headers, path, asked.model_asked, asked.prompt.tokens)
        return Read(asked=asked, path=path, passed_over=self._passed_over(facts))

    def by_router(self, read: Read, router: Router, now_s: float) -> Report:
        """What ``router`` would do. It stays as it is."""

        def ask(job: Job) -> Explanation:
            timed = msgspec.structs.replace(job, arrived_s=now_s, deadline_s=now_s + job.deadline_s)
            return explain(router, timed, now_s)

        report = self._report(read, ask(read.asked.job), ask, list(router.pool.models()))
        if router.known is not None and read.asked.job.token_chain is None:
            counts = "what counts as cached is predicted" if router.known.predicts else "nothing counts as cached"
            return msgspec.structs.replace(report, notes=[*report.notes, _NO_TOKENS + counts])
        return report

    def by_snapshot(self, question: Question, saved: SavedSnapshot) -> Report:
        """What the router would have done that the snapshot is of. Raises ApiError, and ValueError for a bad snapshot."""
        read = self.read(question, _Known(saved.bytes_per_token))
        known = [model for endpoint in saved.endpoints if endpoint.live for model in endpoint.models or ()]
        report = self._report(read, explain_snapshot(saved, read.asked.job), lambda job: explain_snapshot(saved, job), known)
        notes = list(report.notes)
        if saved.index is None:
            notes.append("the snapshot is without a prefix index: nothing counts as cached")
        if any(endpoint.in_step is not None for endpoint in saved.endpoints):
            notes.append("the snapshot is without what workers say they hold: what counts as cached is predicted")
        notes += [f"{count:,} entries are not in the snapshot: {what}" for what, count in saved.cut.items()]
        return msgspec.structs.replace(report, notes=notes)

    def _passed_over(self, facts: Facts) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for rule, alone in self._alone:
            if alone.match(facts) is not _NO_MATCH:
                break
            found[rule.name] = [text for text, one in _conditions(rule) if Policies([one], _NO_MATCH).match(facts) is _NO_MATCH]
        return found

    def _report(self, read: Read, decision: Explanation, ask: Callable[[Job], Explanation], known_models: list[str]) -> Report:
        notes = []
        refusal = decision.refusal
        if refusal is not None and read.asked.fallback:
            error = as_api_error(refusal.error(), known_models)
            if error.code == "no_prefill_worker":
                notes.append("there is no prefill worker, and the policy then lets a decode worker do it all")
                decision = ask(msgspec.structs.replace(read.asked.job, handoff=False))
                refusal = decision.refusal
        shown = None
        if refusal is not None:
            error = as_api_error(refusal.error(), known_models)
            shown = ErrorShown(status=error.status, code=error.code, message=error.message, retry_after_s=error.retry_after_s)
        aliases = self._config.models.aliases.get(read.asked.model_asked)
        if isinstance(aliases, list) and len(aliases) > 1 and not read.asked.resolved.affinity:
            notes.append("each request draws its model: there is no session and no tenant that it could go by")
        job, aims = read.asked.job, read.asked.resolved.aims
        return Report(
            path=read.path,
            model_asked=read.asked.model_asked,
            model=job.model or "",
            policy=PolicyShown(
                name=aims.policy,
                why=self._why(aims.policy, len(read.passed_over)),
                passed_over=read.passed_over,
                mode=aims.mode.value,
                objective=aims.objective.value,
                pool=pool_of(job.aims.decode_labels),
                dispatch="queue" if aims.held else "immediate",
                ignored_overrides=list(read.asked.resolved.ignored_overrides),
            ),
            prompt=PromptShown(
                tokens=job.tokens,
                exact=read.asked.prompt.exact or (job.token_chain is not None and job.token_chain_whole),
                blocks=len(read.asked.prompt.chain.hashes),
                token_ids=None if job.token_chain is None else "whole" if job.token_chain_whole else "beginning",
            ),
            whole_reason=read.asked.whole_reason,
            decision=decision,
            error=shown,
            notes=notes,
        )

    def _why(self, policy: str, passed_over: int) -> str:
        rules = self._config.policies
        if policy != (rules[passed_over].name if passed_over < len(rules) else _NO_MATCH.aims.policy):
            return "x-baton-policy asks for it, and it allows that"
        if passed_over >= len(rules):
            return "no policy matches: the defaults hold" if rules else "there are no policies: the defaults hold"
        conditions = [text for text, _ in _conditions(rules[passed_over])]
        return "; ".join(conditions) if conditions else "it takes every request that comes to it"


def snapshot_of(
    router: Router, now_s: float, time: float, bytes_per_token: BytesPerToken, *, index_blocks: int
) -> SavedSnapshot:
    """What ``GET /debug/snapshot`` answers."""
    taken = take(router, now_s, index_blocks=index_blocks)
    models = {model for endpoint in taken.endpoints for model in endpoint.models or endpoint.spec.models or ()}
    learned = {model: bytes_per_token.of(model) for model in sorted(models)[:_MOST_MODELS]}
    return SavedSnapshot(**msgspec.structs.asdict(taken), time=time, bytes_per_token=learned)


def _path_of(body: bytes) -> str:
    try:
        keys = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except msgspec.MsgspecError:
        return "/v1/chat/completions"  # which says what is wrong with it
    return "/v1/completions" if "prompt" in keys and "messages" not in keys else "/v1/chat/completions"


def _conditions(rule: PolicyRule) -> list[tuple[str, PolicyRule]]:
    """Each condition of a rule, in words, and a rule that has no other."""
    match = rule.match
    found: list[tuple[str, Match]] = []
    for name, how in match.headers.items():
        [(verb, value)] = [(key, value) for key, value in msgspec.structs.asdict(how).items() if value is not None]
        words = f"{'is there' if value else 'is not there'}" if verb == "present" else f"{verb} {value!r}"
        found.append((f"header {name} {words}", Match(headers={name: how})))
    if match.path is not None:
        words = f"is {match.path.exact}" if match.path.exact is not None else f"begins with {match.path.prefix}"
        found.append((f"path {words}", Match(path=match.path)))
    if match.model is not None:
        names = match.model if isinstance(match.model, str) else ", ".join(match.model)
        found.append((f"model {names}", Match(model=match.model)))
    if match.prompt_tokens is not None:
        low, high = match.prompt_tokens.min, match.prompt_tokens.max
        words = f"from {low or 0:,}" + (f" to {high:,}" if high is not None else "") + " tokens"
        found.append((f"prompt {words}", Match(prompt_tokens=match.prompt_tokens)))
    return [(text, PolicyRule(name=rule.name, match=one)) for text, one in found]
