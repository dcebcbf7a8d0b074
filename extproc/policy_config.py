"""The YAML of policies: which requests a rule is for, and what holds for them. What contradicts itself is refused."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, Literal

import msgspec

from extproc.routing.job import Late, Mode, Objective
from extproc.routing.partition import DEFAULT_POOL, POOL_LABEL, UNDECIDED
from workers.yaml_lines import path_of

OVERRIDE_PREFIX: Final = "x-baton-"
"""Request headers that begin so are the client's wishes. No engine sees them."""

Override = Literal[
    "mode",
    "objective",
    "ttft-slo-ms",
    "itl-slo-ms",
    "priority",
    "session",
    "tenant",
    "explain",
    "queue-wait-ms",
    "observe",
    "policy",
]
"""What a client can wish for, by the header ``x-baton-<name>``."""

PRIORITY_LIMIT: Final = 1000
"""Priorities are from minus this to this."""

SLO_LIMIT_S: Final = 86_400.0
"""Longest time of an SLO or a wait."""

REGEX_VALUE_MAX_CHARS: Final = 256
"""A longer header value matches no regex: it bounds what a client's header can cost."""

_REGEX_MAX_CHARS = 256
_REGEX_MAX_REPEATS = 2
_MAX_RULES = 256
_MAX_CONDITIONS = 64
_MAX_MODELS = 256
_MAX_SHARES = 16

# A sign after a repeat (`*?`, `*+`) belongs to it.
_REGEX_PART = re.compile(r"[()]|(?:[*+]|\{[0-9]+\}|\{[0-9]*,[0-9]*\})[?+]?")

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
# RFC 9110's token, and Envoy's pseudo headers (`:authority`).
_HEADER_NAME = re.compile(r":?[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}")


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Raises ValueError when it cannot work; the message may begin with the field, ``"min: …"``."""


class HeaderMatch(_Section, frozen=True, kw_only=True):
    """Exactly one of these. A header that came several times has its values joined by commas."""

    exact: str | None = None
    """The value is this."""
    prefix: str | None = None
    """The value begins with this."""
    regex: str | None = None
    """The whole value matches this Python regular expression of at most 256 characters. It can have two open repeats (`*`, `+`,
    `{1,9}`), no group with one may be repeated, and a value over 256 characters never matches: a client chooses the value."""
    present: bool | None = None
    """true: the header is there; false: it is not."""

    def __post_init__(self) -> None:
        """Raises ValueError."""
        _exactly_one(self, ("exact", "prefix", "regex", "present"))
        if self.prefix == "":
            raise ValueError("prefix: it is empty; use present: true")
        if self.regex is not None:
            _check_regex(self.regex)


class PathMatch(_Section, frozen=True, kw_only=True):
    """Exactly one of these; the path is the one of the request, without its query."""

    exact: str | None = None
    """The path is this."""
    prefix: str | None = None
    """The path begins with this."""

    def __post_init__(self) -> None:
        """Raises ValueError."""
        _exactly_one(self, ("exact", "prefix"))
        for field, path in (("exact", self.exact), ("prefix", self.prefix)):
            if path is not None and (not path.startswith("/") or "?" in path):
                raise ValueError(f"{field}: {path!r} does not begin with / or has a query")


class TokensMatch(_Section, frozen=True, kw_only=True):
    """Length of the prompt in tokens, estimated where it is not known. Both ends are included."""

    min: int | None = None
    """Not shorter than this."""
    max: int | None = None
    """Not longer than this."""

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if self.min is None and self.max is None:
            raise ValueError("neither min nor max is given")
        for field, value in (("min", self.min), ("max", self.max)):
            if value is not None and value < 0:
                raise ValueError(f"{field}: {value} is below 0")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min: {self.min} is over max, which is {self.max}")


class Match(_Section, frozen=True, kw_only=True):
    """Which requests a policy is for: all of what is given must hold. Nothing given: every request."""

    headers: dict[str, HeaderMatch] = {}
    """Name of a header, in any case -> what it must be. `:authority` is the host, `:method` the method."""
    path: PathMatch | None = None
    model: str | list[str] | None = None
    """The model as the client names it, before `models.aliases`: a name, or `prefix*`, or a list of these."""
    prompt_tokens: TokensMatch | None = None

    def __post_init__(self) -> None:
        """Raises ValueError."""
        names = [name.lower() for name in self.headers]
        for name in self.headers:
            field = path_of(("headers", name))
            _check_header_name(field, name)
            if names.count(name.lower()) > 1:
                raise ValueError(f"{field}: stands twice, in different cases")
        if len(names) > _MAX_CONDITIONS:
            raise ValueError(f"headers: over {_MAX_CONDITIONS} of them")
        if self.model is not None:
            _check_models(models_of(self))


class Slo(_Section, frozen=True, kw_only=True):
    """What the answer should keep to, as far as the choice of workers can see to it."""

    ttft_s: float | None = None
    """Time to the first token, from the request's arrival."""
    itl_s: float | None = None
    """Time from token to token."""

    def __post_init__(self) -> None:
        """Raises ValueError."""
        for field, value in (("ttft_s", self.ttft_s), ("itl_s", self.itl_s)):
            if value is not None and not 0 < value <= SLO_LIMIT_S:
                raise ValueError(f"{field}: {value:g} is not above 0 and at most {SLO_LIMIT_S:g}")


class WorkerLabels(_Section, frozen=True, kw_only=True):
    """Only workers with all of these labels serve the request."""

    prefill: dict[str, str] = {}
    """Label -> value, of the prefill worker."""
    decode: dict[str, str] = {}
    """Label -> value, of the decode worker."""


class PolicyLimits(_Section, frozen=True, kw_only=True):
    """Over these, a request is answered 429."""

    max_in_flight: int | None = None
    """Requests under this policy at once; null: no limit."""
    queue_wait_s: float | None = None
    """Longest wait in our queue; null: 60. With 0 a request goes at once or not at all."""

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if self.max_in_flight is not None and not 1 <= self.max_in_flight <= 10_000_000:
            raise ValueError(f"max_in_flight: {self.max_in_flight} is not from 1 to 10000000")
        if self.queue_wait_s is not None and not 0 <= self.queue_wait_s <= SLO_LIMIT_S:
            raise ValueError(f"queue_wait_s: {self.queue_wait_s:g} is not from 0 to {SLO_LIMIT_S:g}")


class PolicyObserve(_Section, frozen=True, kw_only=True):
    """How closely the answers are looked at."""

    sample: float | None = None
    """Share of the streamed answers whose chunks are watched, 0 to 1; null: `observe.sample` of the configuration."""

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if self.sample is not None and not 0 <= self.sample <= 1:
            raise ValueError(f"sample: {self.sample:g} is not from 0 to 1")


class PolicyRule(_Section, frozen=True, kw_only=True):
    """What holds for the requests that it matches. The first policy that matches is the one; see [policies](policies.md)."""

    name: str
    """In metrics, logs and explanations: letters, digits, `.`, `_`, `-`, at most 64. `default` may only match every request."""
    match: Match = Match()
    mode: Mode = Mode.AUTO
    """`auto`: handed over where that costs less. `disaggregate`: always handed over. `aggregate`: never."""
    objective: Objective = Objective.BALANCED
    """What the choice of workers minimises."""
    dispatch: Literal["queue", "immediate"] = "queue"
    """`queue`: a prompt waits here until a prefill worker has room. `immediate`: it is sent at once, and the engine queues."""
    slo: Slo = Slo()
    threshold_uncached_tokens: int | None = None
    """With `mode: auto`, hand over from so many uncached tokens on; null: weigh the costs."""
    workers: WorkerLabels = WorkerLabels()
    pool: str | dict[str, float] | None = None
    """The pool whose workers serve the request, or several with weights (a canary): `{stable: 95, next: 5}`. A conversation
    stays in one. null: by the model, see [routes](routes.md)."""
    session_header: str | None = None
    """Header with the conversation's id; the worker that holds the conversation is preferred."""
    tenant_header: str | None = None
    """Header with the tenant; tenants share the queue by weight. Only behind something that sets it: a client can write
    anything there."""
    weight: float | None = None
    """Share of a tenant against other tenants; null: 1. Requests without a tenant are then one tenant, that of the policy."""
    priority: int | None = None
    """Band in our queue, -1000 to 1000: a lower number goes first, as in vLLM; null: 0."""
    pass_priority: bool = False
    """Set the engine's `priority` to it as well. The engine needs `--scheduling-policy priority`, or it answers 400."""
    on_prefill_failure: Literal["fail", "retry", "aggregate"] | None = None
    """`fail`: an error at the first failure. `retry`: up to `prefill.retries` other prefill workers, then an error.
    `aggregate`: the same, then the decode worker does it all. null: as `prefill.retries` and `prefill.fallback` say."""
    when_late: Late | None = None
    """Once the TTFT SLO cannot be met any more. `wait`: behind those that still can. `reject`: 429. `aggregate`: the decode
    worker does it all. null: wait."""
    limits: PolicyLimits = PolicyLimits()
    observe: PolicyObserve = PolicyObserve()
    explain: bool = False
    """The decision is in the response header `x-baton-decision`. It names workers."""
    allow_overrides: list[Override] = []
    """What the client may set by `x-baton-<name>`; without it, such a header is ignored and counted. `policy`: `x-baton-policy`
    with the name of this policy puts a request under it, whatever matches."""

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"name: {self.name!r} is not 1 to 64 letters, digits, dots, dashes or underscores")
        if self.name == "default" and self.match != Match():
            raise ValueError("name: default is what holds where nothing matches; a policy of this name cannot have a match")
        for field, header in (("session_header", self.session_header), ("tenant_header", self.tenant_header)):
            if header is not None:
                _check_header_name(field, header)
        for role, labels in (("prefill", self.workers.prefill), ("decode", self.workers.decode)):
            if len(labels) > _MAX_CONDITIONS:
                raise ValueError(f"workers.{role}: over {_MAX_CONDITIONS} labels")
        if self.threshold_uncached_tokens is not None and not 0 <= self.threshold_uncached_tokens < 1 << 40:
            raise ValueError(f"threshold_uncached_tokens: {self.threshold_uncached_tokens} is below 0 or without use")
        if self.weight is not None and not 1e-3 <= self.weight <= 1e6:
            raise ValueError(f"weight: {self.weight:g} is not from 0.001 to 1000000")
        if self.priority is not None and abs(self.priority) > PRIORITY_LIMIT:
            raise ValueError(f"priority: {self.priority} is not from -{PRIORITY_LIMIT} to {PRIORITY_LIMIT}")
        twice = next((name for name in self.allow_overrides if self.allow_overrides.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"allow_overrides: {twice} stands there twice")
        if isinstance(self.pool, dict):
            _check_shares(self.pool)
        for field, why in _contradictions(self):
            raise ValueError(f"{field}: {why}")


def models_of(match: Match) -> Sequence[str]:
    """The patterns of ``match.model`` as a list; empty if there is none."""
    return [match.model] if isinstance(match.model, str) else match.model or []


def pools_of(rule: PolicyRule) -> Mapping[str, float]:
    """The pools that a rule names, with their weights; empty if it names none."""
    if rule.pool is None:
        return {}
    return {rule.pool: 1.0} if isinstance(rule.pool, str) else {name: weight for name, weight in rule.pool.items() if weight}


def check_policies(
    rules: Sequence[PolicyRule],
    *,
    prefill_retries: int,
    prefill_labels: Sequence[Mapping[str, str]] | None,
    decode_labels: Sequence[Mapping[str, str]] | None,
    pools: Collection[str] = (),
) -> None:
    """Refuse what only shows among all rules, or beside the rest of the configuration.

    The labels are those of each worker, with its pool; None: not known yet. ``pools``: all names; none: there are no pools.
    Raises ValueError that begins with the field.
    """
    if len(rules) > _MAX_RULES:
        raise ValueError(f"policies: {len(rules)} of them; at most {_MAX_RULES} are allowed")
    for index, rule in enumerate(rules):
        for earlier in rules[:index]:
            if earlier.name == rule.name:
                raise ValueError(f"policies[{index}].name: {rule.name} stands there twice")
            if covers(earlier.match, rule.match) and "policy" not in rule.allow_overrides:
                what = "every request" if earlier.match == Match() else "every request that it is for"
                raise ValueError(
                    f"policies[{index}].match: {rule.name} can never match: {earlier.name}, before it, takes {what}"
                )
        _check_pools(f"policies[{index}].pool", rule.pool, pools)
        if rule.on_prefill_failure == "retry" and prefill_retries == 0:
            raise ValueError(f"policies[{index}].on_prefill_failure: retry, but prefill.retries is 0")
        for role, wanted, known in (
            ("prefill", rule.workers.prefill, prefill_labels),
            ("decode", rule.workers.decode, decode_labels),
        ):
            if not wanted or known is None:
                continue
            for pool in pools_of(rule) or (None,):
                inside = [labels for labels in known if pool is None or labels.get(POOL_LABEL) in (pool, UNDECIDED)]
                if not any(wanted.items() <= labels.items() for labels in inside):
                    where = "" if pool is None else f" in the pool {pool}"
                    raise ValueError(f"policies[{index}].workers.{role}: no {role} worker{where} has these labels")


def _check_pools(field: str, named: str | Mapping[str, float] | None, pools: Collection[str]) -> None:
    for name in [named] if isinstance(named, str) else named or ():
        if not pools:
            raise ValueError(f"{field}: {name}, but there are no pools")
        if name != DEFAULT_POOL and name not in pools:
            close = difflib.get_close_matches(name, pools, 1)
            hint = f"; did you mean {close[0]}?" if close else f"; there are {', '.join(pools)}"
            raise ValueError(f"{field}: there is no pool {name}{hint}")


def _check_shares(shares: Mapping[str, float]) -> None:
    if not 1 <= len(shares) <= _MAX_SHARES:
        raise ValueError(f"pool: {len(shares)} pools; 1 to {_MAX_SHARES} are allowed")
    for name, weight in shares.items():
        if not 0 <= weight <= 1e6:
            raise ValueError(f"{path_of(('pool', name))}: {weight:g} is not from 0 to 1000000")
    if not any(shares.values()):
        raise ValueError("pool: all weights are 0")


def covers(earlier: Match, later: Match) -> bool:
    """Whether ``earlier`` surely matches all that ``later`` does."""
    later_headers = {name.lower(): match for name, match in later.headers.items()}
    return (
        all(_header_covers(match, later_headers.get(name.lower())) for name, match in earlier.headers.items())
        and (earlier.path is None or _text_covers(earlier.path, later.path))
        and (earlier.model is None or _models_cover(models_of(earlier), models_of(later)))
        and (earlier.prompt_tokens is None or _tokens_cover(earlier.prompt_tokens, later.prompt_tokens))
    )


def _header_covers(earlier: HeaderMatch, later: HeaderMatch | None) -> bool:
    if later is None:
        return False
    if earlier.present:
        return later.present is not False
    return earlier == later or _text_covers(earlier, later)


def _text_covers(earlier: HeaderMatch | PathMatch, later: HeaderMatch | PathMatch | None) -> bool:
    if later is None:
        return False
    start = later.exact if later.exact is not None else later.prefix
    if earlier.prefix is not None:
        return start is not None and start.startswith(earlier.prefix)
    return earlier.exact is not None and earlier.exact == later.exact


def _models_cover(earlier: Sequence[str], later: Sequence[str]) -> bool:
    def taken(pattern: str) -> bool:
        return any(
            pattern.startswith(wider[:-1]) if wider.endswith("*") else pattern == wider  # a prefix covers longer ones too
            for wider in earlier
        )

    return bool(later) and all(taken(pattern) for pattern in later)


def _tokens_cover(earlier: TokensMatch, later: TokensMatch | None) -> bool:
    if later is None:
        return False
    low = (earlier.min or 0) <= (later.min or 0)
    return low and (earlier.max is None or (later.max is not None and later.max <= earlier.max))


def _contradictions(rule: PolicyRule) -> Iterable[tuple[str, str]]:
    """Field, and why it cannot stand beside the others. What a client may override is not held against a rule."""
    free = rule.allow_overrides
    if rule.mode is Mode.AGGREGATE and "mode" not in free:
        why = "mode is aggregate, so there is no prefill worker"
        if rule.workers.prefill:
            yield "workers.prefill", why
        if rule.on_prefill_failure is not None:
            yield "on_prefill_failure", why
        if rule.when_late is Late.AGGREGATE:
            yield "when_late", "mode is aggregate already"
    if rule.mode is not Mode.AUTO and rule.threshold_uncached_tokens is not None and "mode" not in free:
        yield "threshold_uncached_tokens", f"mode is {rule.mode.value}; only auto asks for it"
    if rule.when_late is not None and rule.slo.ttft_s is None and "ttft-slo-ms" not in free:
        yield "when_late", "there is no slo.ttft_s to be late for"
    if rule.dispatch == "immediate":
        why = "dispatch is immediate, so nothing waits here"
        if rule.when_late is Late.WAIT:
            yield "when_late", why
        if rule.limits.queue_wait_s is not None:
            yield "limits.queue_wait_s", why
        if rule.weight is not None:
            yield "weight", why
        if rule.priority is not None and not rule.pass_priority:
            yield "priority", f"{why}, and pass_priority is false"
        if "queue-wait-ms" in free:
            yield "allow_overrides", f"queue-wait-ms: {why}"
        if "priority" in free and not rule.pass_priority:
            yield "allow_overrides", f"priority: {why}, and pass_priority is false"
    if rule.pass_priority and rule.priority is None and "priority" not in free:
        yield "pass_priority", "there is no priority to pass"


def _exactly_one(section: HeaderMatch | PathMatch, fields: tuple[str, ...]) -> None:
    given = [field for field in fields if getattr(section, field) is not None]
    if len(given) != 1:
        raise ValueError(f"exactly one of {', '.join(fields)} is needed, not {' and '.join(given) or 'none'}")


def _check_header_name(field: str, name: str) -> None:
    if not _HEADER_NAME.fullmatch(name):
        raise ValueError(f"{field}: {name!r} is not a name of a header")
    if name.lower().startswith(OVERRIDE_PREFIX):
        raise ValueError(f"{field}: headers {OVERRIDE_PREFIX}… are overrides; list what a client may set in allow_overrides")


def _check_models(patterns: Sequence[str]) -> None:
    if not 1 <= len(patterns) <= _MAX_MODELS:
        raise ValueError(f"model: {len(patterns)} names; 1 to {_MAX_MODELS} are allowed")
    for pattern in patterns:
        if not pattern or "*" in pattern[:-1]:
            raise ValueError(f"model: {pattern!r} is neither a name nor a prefix with * at its end")


def _check_regex(pattern: str) -> None:
    """Raises ValueError for what is not a regex, and for what could take very long on a value that a client chooses."""
    if len(pattern) > _REGEX_MAX_CHARS:
        raise ValueError(f"regex: over {_REGEX_MAX_CHARS} characters")
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"regex: {pattern!r}: {error}") from None
    repeats, nested = _repeats(pattern)
    if nested:
        raise ValueError(f"regex: {pattern!r}: a repeat inside a repeat can take for ever")
    if repeats > _REGEX_MAX_REPEATS:
        raise ValueError(
            f"regex: {pattern!r}: {repeats} open repeats (*, +, {{m,n}}); at most {_REGEX_MAX_REPEATS} are allowed"
        )


def _repeats(pattern: str) -> tuple[int, bool]:
    """How many open repeats (``*``, ``+``, ``{m,n}``) a regex has, and whether a group that has one is repeated itself."""
    # Escapes and character classes count as one plain character.
    bare = re.sub(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", "x", pattern, flags=re.DOTALL)
    count, closed, groups = 0, 0, [0]
    for found in _REGEX_PART.finditer(bare):
        part = found[0]
        if part == "(":
            groups.append(count)
        elif part == ")":
            closed = count - (groups.pop() if groups else 0)
        else:
            if closed and bare[found.start() - 1] == ")":
                return count, True
            count += "," in part or part[0] in "*+"
    return count, False
