"""Which policy holds for a request, and what the client may change of it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, get_args

import msgspec

from extproc.errors import ApiError
from extproc.policy_config import (
    OVERRIDE_PREFIX,
    PRIORITY_LIMIT,
    REGEX_VALUE_MAX_CHARS,
    SLO_LIMIT_S,
    HeaderMatch,
    Match,
    Override,
    PathMatch,
    PolicyRule,
    TokensMatch,
    models_of,
    pools_of,
)
from extproc.routing.job import Aims, Late, Mode, Objective

_PREFIX_LENGTH: Final = len(OVERRIDE_PREFIX)
_OVERRIDES: Final[frozenset[str]] = frozenset(get_args(Override))
_ID_MAX_CHARS: Final = 256
_POLICY_HEADER: Final = OVERRIDE_PREFIX + "policy"

OTHER_OVERRIDE: Final = "other"
"""Stands in ``Resolved.ignored_overrides`` for every ``x-baton-…`` header that is no override, so that the names are few."""


class Facts(NamedTuple):
    """What a policy can ask about a request."""

    headers: Mapping[str, str]
    """Lower-case name -> value."""
    path: str
    """Without its query."""
    model: str | None
    """As the client names it; None: it names none."""
    prompt_tokens: int | None
    """None: there is no prompt."""


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """What holds for the requests of one rule."""

    aims: Aims = Aims()
    """The part that the decision reads; ``aims.policy`` is the name."""
    session_header: str | None = None
    tenant_header: str | None = None
    shared_tenant: str = ""
    """Tenant of a request that names none."""
    on_prefill_failure: Literal["fail", "retry", "aggregate"] | None = None
    """None: as the configuration of the prefill says."""
    explain: bool = False
    sample: float | None = None
    """Share of the streams that are watched; None: as the configuration says."""
    pass_priority: bool = False
    """Set ``aims.priority`` in the engine's request."""
    pools: Mapping[str, float] = {}
    """Those whose workers may serve the request, with weights; none: any, by the model."""
    allow_overrides: frozenset[str] = frozenset()
    """Names without ``x-baton-``."""


DEFAULT: Final = Policy()
"""What holds where no rule matches."""


class Resolved(msgspec.Struct, frozen=True):
    """What holds for one request."""

    policy: Policy
    aims: Aims
    """Those of the policy, with the client's wishes."""
    session: str
    """Empty: none."""
    tenant: str
    """Empty: none."""
    affinity: str
    """What belongs together, for choices that must stay the same: the session, else the tenant that the client names. May be
    empty."""
    explain: bool
    sample: float | None
    """Share of such streams that are watched, 0 to 1; None: as the configuration says."""
    ignored_overrides: tuple[str, ...]
    """Overrides that the policy does not allow, by name; what is no override at all is one ``other``."""


class Policies:
    """Rules, compiled once. The first that matches is the one."""

    def __init__(self, rules: Sequence[PolicyRule], default: Policy = DEFAULT) -> None:
        self._rules = tuple((_tests(rule.match), _policy(rule)) for rule in rules)
        self._default = default
        self._by_name = {policy.aims.policy: policy for _, policy in self._rules if "policy" in policy.allow_overrides}
        """Those that a client may ask for."""

    def match(self, facts: Facts) -> Policy:
        """The policy of a request."""
        for tests, policy in self._rules:
            for test in tests:
                if not test(facts):
                    break
            else:
                return policy
        return self._default

    def resolve(self, headers: Mapping[str, str], path: str, model: str | None, prompt_tokens: int | None) -> Resolved:
        """The policy of a request, and what the client's headers make of it.

        ``headers`` have lower-case names, ``path`` no query. Raises ApiError (400) for an override that is allowed and has a
        value that it cannot have.
        """
        policy = self._asked_for(headers) or self.match(Facts(headers, path, model, prompt_tokens))
        aims, explain, sample = policy.aims, policy.explain, policy.sample
        ignored: tuple[str, ...] = ()
        session = _id(headers.get(policy.session_header, "")) if policy.session_header else ""
        tenant = _id(headers.get(policy.tenant_header, "")) if policy.tenant_header else ""
        if sent := override_headers(headers):
            wishes, ignored = _wishes(policy, headers, sent)
            if wishes.pop("policy", policy.aims.policy) != policy.aims.policy:
                ignored = tuple(sorted((*ignored, "policy")))  # it names another, which does not allow it
            session, tenant = _id(wishes.pop("session", session)), _id(wishes.pop("tenant", tenant))
            if "explain" in wishes:
                explain = _yes_or_no("explain", wishes.pop("explain"))
            if "observe" in wishes:
                sample = 1.0 if _yes_or_no("observe", wishes.pop("observe")) else 0.0
            if wishes:
                aims = _changed(aims, wishes)
        return Resolved(policy, aims, session, tenant or policy.shared_tenant, session or tenant, explain, sample, ignored)

    def _asked_for(self, headers: Mapping[str, str]) -> Policy | None:
        """The policy that the client names, where that policy lets it."""
        return self._by_name.get(headers.get(_POLICY_HEADER, "").strip()) if self._by_name else None


def override_headers(headers: Mapping[str, str]) -> list[str]:
    """Names of the client's ``x-baton-…`` headers: none of them may reach an engine."""
    return [name for name in headers if name[:_PREFIX_LENGTH] == OVERRIDE_PREFIX]


def _wishes(policy: Policy, headers: Mapping[str, str], sent: Sequence[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """The overrides that count, by name, and the names of the others."""
    names = {header[_PREFIX_LENGTH:] for header in sent}
    ignored = {name if name in _OVERRIDES else OTHER_OVERRIDE for name in names - policy.allow_overrides}
    allowed = {name: headers[OVERRIDE_PREFIX + name].strip() for name in sorted(names & policy.allow_overrides)}
    return allowed, tuple(sorted(ignored))


def _changed(aims: Aims, wishes: Mapping[str, str]) -> Aims:
    """``aims`` as the client wants them. Raises ApiError."""
    changes: dict[str, Any] = {}
    for name, value in wishes.items():
        field, read = _AIMS[name]
        changes[field] = read(name, value)
    if "max_wait_s" in changes:  # a limit: it can be made shorter, not longer
        changes["max_wait_s"] = min(aims.max_wait_s, changes["max_wait_s"])
    return msgspec.structs.replace(aims, **changes)


def _policy(rule: PolicyRule) -> Policy:
    limits = rule.limits
    return Policy(
        aims=Aims(
            policy=rule.name,
            mode=rule.mode,
            objective=rule.objective,
            held=rule.dispatch == "queue",
            ttft_slo_s=rule.slo.ttft_s,
            itl_slo_s=rule.slo.itl_s,
            threshold_uncached_tokens=rule.threshold_uncached_tokens,
            prefill_labels=rule.workers.prefill,
            decode_labels=rule.workers.decode,
            late=rule.when_late or Late.WAIT,
            max_wait_s=Aims().max_wait_s if limits.queue_wait_s is None else limits.queue_wait_s,
            max_in_flight=limits.max_in_flight,
            weight=1.0 if rule.weight is None else rule.weight,
            priority=rule.priority or 0,
        ),
        session_header=rule.session_header and rule.session_header.lower(),
        tenant_header=rule.tenant_header and rule.tenant_header.lower(),
        # A weight without tenants is one against the requests of the other policies.
        shared_tenant=f"policy:{rule.name}" if rule.weight is not None else "",
        on_prefill_failure=rule.on_prefill_failure,
        explain=rule.explain,
        sample=rule.observe.sample,
        pass_priority=rule.pass_priority,
        pools=pools_of(rule),
        allow_overrides=frozenset(rule.allow_overrides),
    )


_Test = Callable[[Facts], bool]


def _tests(match: Match) -> tuple[_Test, ...]:
    """One test a condition, the cheap ones first."""
    tests: list[_Test] = []
    if match.prompt_tokens is not None:
        tests.append(_tokens_test(match.prompt_tokens))
    if match.model is not None:
        tests.append(_model_test(models_of(match)))
    if match.path is not None:
        tests.append(_path_test(match.path))
    return (*tests, *(_header_test(name.lower(), how) for name, how in match.headers.items()))


def _header_test(name: str, how: HeaderMatch) -> _Test:
    exact, prefix, present = how.exact, how.prefix, how.present
    if exact is not None:
        return lambda facts: facts.headers.get(name) == exact
    if prefix is not None:
        return lambda facts: facts.headers.get(name, "").startswith(prefix)
    if present is not None:
        return lambda facts: (name in facts.headers) is present
    assert how.regex is not None
    fullmatch = re.compile(how.regex).fullmatch

    def matches(facts: Facts) -> bool:
        value = facts.headers.get(name)
        return value is not None and len(value) <= REGEX_VALUE_MAX_CHARS and fullmatch(value) is not None

    return matches


def _path_test(how: PathMatch) -> _Test:
    exact, prefix = how.exact, how.prefix
    if exact is not None:
        return lambda facts: facts.path == exact
    assert prefix is not None
    return lambda facts: facts.path.startswith(prefix)


def _model_test(patterns: Sequence[str]) -> _Test:
    names = frozenset(pattern for pattern in patterns if not pattern.endswith("*"))
    prefixes = tuple(pattern[:-1] for pattern in patterns if pattern.endswith("*"))
    return lambda facts: facts.model is not None and (facts.model in names or facts.model.startswith(prefixes))


def _tokens_test(how: TokensMatch) -> _Test:
    least = how.min or 0
    most = float("inf") if how.max is None else how.max
    return lambda facts: facts.prompt_tokens is not None and least <= facts.prompt_tokens <= most


def _id(value: str) -> str:
    """An id of a client's choosing, of bounded length: a long one is kept as its hash."""
    if len(value) <= _ID_MAX_CHARS:
        return value
    return "sha256:" + hashlib.sha256(value.encode("utf-8", "surrogatepass")).hexdigest()


def _bad(name: str, value: str, allowed: str) -> ApiError:
    header = OVERRIDE_PREFIX + name
    shown = value if len(value) <= 64 else f"{value[:64]}…"
    return ApiError("bad_override", f"{header}: {shown!r} is not {allowed}", param=header)


def _yes_or_no(name: str, value: str) -> bool:
    if value not in ("true", "false"):
        raise _bad(name, value, "true or false")
    return value == "true"


def _seconds(name: str, value: str) -> float:
    """Milliseconds -> seconds."""
    # float() would also take "inf", "1_0" and digits of other scripts.
    seconds = float(value) / 1e3 if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,6})?", value) else 0.0
    if not 0 < seconds <= SLO_LIMIT_S:
        raise _bad(name, value, f"a number of milliseconds above 0 and at most {SLO_LIMIT_S * 1e3:.0f}")
    return seconds


def _whole_number(name: str, value: str) -> int:
    number = int(value) if re.fullmatch(r"[+-]?[0-9]{1,4}", value) else PRIORITY_LIMIT + 1
    if abs(number) > PRIORITY_LIMIT:
        raise _bad(name, value, f"a whole number from -{PRIORITY_LIMIT} to {PRIORITY_LIMIT}")
    return number


def _one_of(kind: type[Mode] | type[Objective]) -> Callable[[str, str], Mode | Objective]:
    def read(name: str, value: str) -> Mode | Objective:
        try:
            return kind(value)
        except ValueError:
            raise _bad(name, value, f"one of {', '.join(member.value for member in kind)}") from None

    return read


_AIMS: Final[Mapping[str, tuple[str, Callable[[str, str], object]]]] = {
    "mode": ("mode", _one_of(Mode)),
    "objective": ("objective", _one_of(Objective)),
    "ttft-slo-ms": ("ttft_slo_s", _seconds),
    "itl-slo-ms": ("itl_slo_s", _seconds),
    "priority": ("priority", _whole_number),
    "queue-wait-ms": ("max_wait_s", _seconds),
}
"""Override -> the aim that it sets, and what reads its value."""
