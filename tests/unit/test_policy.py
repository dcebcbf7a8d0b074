"""Which policy holds for which request, what a client may change of it, and which rules are refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from extproc.config import ConfigError, parse
from extproc.errors import ApiError
from extproc.policy import OTHER_OVERRIDE, Facts, Policies, Resolved, override_headers
from extproc.policy_config import Match, PolicyRule, covers
from extproc.routing.job import Aims, Late, Mode, Objective

ROOT = Path(__file__).parents[2]

WORKERS = """\
workers:
  prefill: [{address: '10.0.0.1:8100', labels: {tier: gold, zone: a}}, '10.0.0.2:8100']
  decode: [{address: '10.0.1.1:8200', labels: {tier: gold}}, '10.0.1.2:8200']
"""


def rules(text: str) -> list[PolicyRule]:
    """A list of policies in YAML -> the rules."""
    return parse(WORKERS + "policies:\n" + text, source="baton.yaml").policies


def policies(text: str) -> Policies:
    return Policies(rules(text))


def resolve(text: str, headers: dict[str, str], *, model: str | None = "llama", tokens: int | None = 100) -> Resolved:
    return policies(text).resolve(headers, "/v1/completions", model, tokens)


def facts(
    headers: dict[str, str] | None = None, path: str = "/v1/completions", model: str | None = "llama", tokens: int | None = 100
) -> Facts:
    return Facts(headers or {}, path, model, tokens)


MATCHES: dict[str, tuple[str, Facts, bool]] = {
    "nothing asked matches everything": ("{}", facts(), True),
    "nothing asked matches what has no model and no prompt": ("{}", facts(model=None, tokens=None), True),
    "exact value": ("{headers: {x-tier: {exact: gold}}}", facts({"x-tier": "gold"}), True),
    "exact is not prefix": ("{headers: {x-tier: {exact: gold}}}", facts({"x-tier": "golden"}), False),
    "exact needs the header": ("{headers: {x-tier: {exact: gold}}}", facts(), False),
    "an empty exact value needs the header too": ("{headers: {x-tier: {exact: ''}}}", facts(), False),
    "the name of a header in any case": ("{headers: {X-Tier: {exact: gold}}}", facts({"x-tier": "gold"}), True),
    "the value of a header in its case": ("{headers: {x-tier: {exact: gold}}}", facts({"x-tier": "Gold"}), False),
    "prefix": ("{headers: {x-tier: {prefix: go}}}", facts({"x-tier": "gold"}), True),
    "no prefix": ("{headers: {x-tier: {prefix: go}}}", facts({"x-tier": "ago"}), False),
    "regex over the whole value": ("{headers: {x-team: {regex: 'team-[0-9]+'}}}", facts({"x-team": "team-12"}), True),
    "regex is not a search": ("{headers: {x-team: {regex: 'team-[0-9]+'}}}", facts({"x-team": "team-12b"}), False),
    "regex of a missing header": ("{headers: {x-team: {regex: '.*'}}}", facts(), False),
    "regex of a value as long as allowed": ("{headers: {x-team: {regex: 'a*'}}}", facts({"x-team": "a" * 256}), True),
    "regex of a value that is too long": ("{headers: {x-team: {regex: 'a*'}}}", facts({"x-team": "a" * 257}), False),
    "present": ("{headers: {x-team: {present: true}}}", facts({"x-team": ""}), True),
    "not present": ("{headers: {x-team: {present: true}}}", facts(), False),
    "absent": ("{headers: {x-team: {present: false}}}", facts(), True),
    "not absent": ("{headers: {x-team: {present: false}}}", facts({"x-team": ""}), False),
    "host": ("{headers: {':authority': {exact: llm.example}}}", facts({":authority": "llm.example"}), True),
    "all headers must match": (
        "{headers: {x-a: {exact: '1'}, x-b: {exact: '2'}}}",
        facts({"x-a": "1", "x-b": "3"}),
        False,
    ),
    "path": ("{path: {exact: /v1/completions}}", facts(), True),
    "another path": ("{path: {exact: /v1/completions}}", facts(path="/v1/chat/completions"), False),
    "path prefix": ("{path: {prefix: /v1/chat/}}", facts(path="/v1/chat/completions"), True),
    "model": ("{model: llama}", facts(), True),
    "model of a list": ("{model: [gpt, llama]}", facts(), True),
    "model of none of a list": ("{model: [gpt, qwen]}", facts(), False),
    "model by prefix": ("{model: [gpt, 'lla*']}", facts(), True),
    "a name is no prefix": ("{model: lla}", facts(), False),
    "any model": ("{model: '*'}", facts(), True),
    "any model is still one": ("{model: '*'}", facts(model=None), False),
    "long enough": ("{prompt_tokens: {min: 100}}", facts(), True),
    "too short": ("{prompt_tokens: {min: 101}}", facts(), False),
    "short enough": ("{prompt_tokens: {max: 100}}", facts(), True),
    "too long": ("{prompt_tokens: {max: 99}}", facts(), False),
    "in between": ("{prompt_tokens: {min: 99, max: 101}}", facts(), True),
    "a length is asked and there is no prompt": ("{prompt_tokens: {max: 100}}", facts(tokens=None), False),
    "all conditions must hold": ("{model: llama, prompt_tokens: {min: 200}}", facts(), False),
}


@pytest.mark.parametrize("case", MATCHES)
def test_a_rule_matches_when_all_of_its_conditions_hold(case: str) -> None:
    match, about, expected = MATCHES[case]
    found = policies(f"- {{name: it, match: {match}}}").match(about)
    assert found.aims.policy == ("it" if expected else "default")


def test_the_first_rule_that_matches_is_the_one() -> None:
    both = policies(
        "- {name: long, match: {prompt_tokens: {min: 50}}}\n- {name: gold, match: {headers: {x-tier: {exact: gold}}}}\n"
        "- {name: rest}"
    )
    gold = {"x-tier": "gold"}
    assert both.match(facts(gold)).aims.policy == "long"
    assert both.match(facts(gold, tokens=10)).aims.policy == "gold"
    assert both.match(facts(tokens=10)).aims.policy == "rest"


def test_without_rules_the_defaults_hold() -> None:
    found = Policies([]).resolve({}, "/v1/completions", "llama", 100)
    assert found == Resolved(found.policy, Aims(), "", "", "", False, None, ())


def test_all_of_a_rule_is_in_its_policy() -> None:
    (rule,) = rules(
        """
- name: gold
  mode: disaggregate
  objective: least-load
  slo: {ttft_s: 2, itl_s: 0.05}
  workers: {prefill: {tier: gold, zone: a}, decode: {tier: gold}}
  session_header: X-Session
  tenant_header: X-Tenant
  weight: 3
  priority: -5
  pass_priority: true
  on_prefill_failure: retry
  when_late: reject
  limits: {max_in_flight: 7, queue_wait_s: 9}
  explain: true
"""
    )
    policy = Policies([rule]).match(facts())
    assert policy.aims == Aims(
        policy="gold",
        mode=Mode.DISAGGREGATE,
        objective=Objective.LEAST_LOAD,
        held=True,
        ttft_slo_s=2.0,
        itl_slo_s=0.05,
        prefill_labels={"tier": "gold", "zone": "a"},
        decode_labels={"tier": "gold"},
        late=Late.REJECT,
        max_wait_s=9.0,
        max_in_flight=7,
        weight=3.0,
        priority=-5,
    )
    assert (policy.session_header, policy.tenant_header) == ("x-session", "x-tenant")
    assert (policy.on_prefill_failure, policy.explain, policy.pass_priority) == ("retry", True, True)
    auto = Policies(rules("- {name: a, threshold_uncached_tokens: 512, dispatch: immediate}")).match(facts()).aims
    assert (auto.threshold_uncached_tokens, auto.held) == (512, False)


def test_session_and_tenant_come_from_the_headers_of_the_policy() -> None:
    rule = "- {name: a, session_header: X-Session, tenant_header: x-tenant}"
    both = resolve(rule, {"x-session": "s1", "x-tenant": "t1"})
    assert (both.session, both.tenant, both.affinity) == ("s1", "t1", "s1")
    tenant = resolve(rule, {"x-tenant": "t1"})
    assert (tenant.session, tenant.tenant, tenant.affinity) == ("", "t1", "t1")
    neither = resolve(rule, {})
    assert (neither.session, neither.tenant, neither.affinity) == ("", "", "")


def test_requests_without_a_tenant_are_one_under_a_policy_with_a_weight_but_do_not_belong_together() -> None:
    found = resolve("- {name: batch, weight: 0.1}", {})
    assert (found.tenant, found.affinity) == ("policy:batch", "")


def test_an_id_that_a_client_makes_very_long_is_kept_as_its_hash() -> None:
    found = resolve("- {name: a, session_header: x-session}", {"x-session": "s" * 50_000})
    assert found.session.startswith("sha256:")
    assert len(found.session) < 80
    assert found.session != resolve("- {name: a, session_header: x-session}", {"x-session": "s" * 50_001}).session


ALL = (
    "- {name: a, session_header: x-session, allow_overrides: "
    "[mode, objective, ttft-slo-ms, itl-slo-ms, priority, session, tenant, explain, queue-wait-ms]}"
)


def test_what_the_policy_allows_the_client_can_change() -> None:
    found = resolve(
        ALL,
        {
            "x-session": "from-the-policy",
            "x-baton-mode": "aggregate",
            "x-baton-objective": "round-robin",
            "x-baton-ttft-slo-ms": "1500",
            "x-baton-itl-slo-ms": " 12.5 ",
            "x-baton-priority": "-7",
            "x-baton-session": "s",
            "x-baton-tenant": "t",
            "x-baton-explain": "true",
            "x-baton-queue-wait-ms": "250",
        },
    )
    assert found.aims == Aims(
        policy="a",
        mode=Mode.AGGREGATE,
        objective=Objective.ROUND_ROBIN,
        ttft_slo_s=1.5,
        itl_slo_s=0.0125,
        priority=-7,
        max_wait_s=0.25,
    )
    assert (found.session, found.tenant, found.explain, found.ignored_overrides) == ("s", "t", True, ())
    assert found.policy.aims == Aims(policy="a"), "the policy itself is for all"


def test_a_client_can_turn_explanations_off() -> None:
    assert not resolve("- {name: a, explain: true, allow_overrides: [explain]}", {"x-baton-explain": "false"}).explain


def test_a_client_can_shorten_its_wait_but_not_prolong_it() -> None:
    rule = "- {name: a, limits: {queue_wait_s: 5}, allow_overrides: [queue-wait-ms]}"
    assert resolve(rule, {"x-baton-queue-wait-ms": "1000"}).aims.max_wait_s == 1.0
    assert resolve(rule, {"x-baton-queue-wait-ms": "9000"}).aims.max_wait_s == 5.0


def test_how_many_streams_are_watched_is_the_policys_or_the_clients_where_it_may() -> None:
    policies = Policies(
        rules("""
        - {name: all, match: {model: a}, observe: {sample: 1}, allow_overrides: [observe]}
        - {name: rest}
        """)
    )
    assert policies.resolve({}, "/", "a", 1).sample == 1
    assert policies.resolve({"x-baton-observe": "false"}, "/", "a", 1).sample == 0
    assert policies.resolve({}, "/", "b", 1).sample is None
    assert policies.resolve({"x-baton-observe": "true"}, "/", "b", 1).sample is None, "not allowed there"
    with pytest.raises(ApiError, match="x-baton-observe: 'yes' is not true or false"):
        policies.resolve({"x-baton-observe": "yes"}, "/", "a", 1)
    with pytest.raises(ConfigError, match=r"sample: 1.5 is not from 0 to 1"):
        rules("- {name: a, observe: {sample: 1.5}}")


def test_what_the_policy_does_not_allow_is_ignored_whatever_its_value_and_named() -> None:
    headers = {"x-baton-mode": "nonsense", "x-baton-priority": "1", "x-baton-explain": "true", "x-batonic": "1"}
    found = resolve("- {name: a, allow_overrides: [priority]}", headers)
    assert found.ignored_overrides == ("explain", "mode")
    assert (found.aims.mode, found.aims.priority, found.explain) == (Mode.AUTO, 1, False)
    assert resolve(" []", headers).ignored_overrides == ("explain", "mode", "priority")


def test_headers_that_are_no_override_are_one_name_so_that_a_client_cannot_make_up_many() -> None:
    found = resolve(ALL, {f"x-baton-{number}": "1" for number in range(50)})
    assert found.ignored_overrides == (OTHER_OVERRIDE,)


def test_every_override_header_is_found_for_removal_whether_it_counts_or_not() -> None:
    headers = {"x-baton-mode": "auto", "x-baton-nothing": "1", "x-batonic": "1", "x-session": "1"}
    assert override_headers(headers) == ["x-baton-mode", "x-baton-nothing"]


BAD_VALUES = {
    "a mode that there is not": ("mode", "fast", "one of auto, disaggregate, aggregate"),
    "two modes, since the header came twice": ("mode", "auto,aggregate", "one of auto, disaggregate, aggregate"),
    "an objective that there is not": ("objective", "TTFT", "one of balanced, ttft, throughput, prefix"),
    "words for a number": ("ttft-slo-ms", "soon", "a number of milliseconds above 0"),
    "nothing": ("ttft-slo-ms", "", "a number of milliseconds above 0"),
    "zero": ("ttft-slo-ms", "0", "a number of milliseconds above 0"),
    "below zero": ("itl-slo-ms", "-5", "a number of milliseconds above 0"),
    "not a number": ("itl-slo-ms", "nan", "a number of milliseconds above 0"),
    "without end": ("queue-wait-ms", "inf", "a number of milliseconds above 0"),
    "over a day": ("queue-wait-ms", "86400001", "at most 86400000"),
    "digits with underscores": ("queue-wait-ms", "1_0", "a number of milliseconds above 0"),
    "digits of another script": ("priority", "٣", "a whole number from -1000 to 1000"),
    "a fraction": ("priority", "1.5", "a whole number from -1000 to 1000"),
    "too high": ("priority", "1001", "a whole number from -1000 to 1000"),
    "too many digits": ("priority", "1" * 5000, "a whole number from -1000 to 1000"),
    "neither yes nor no": ("explain", "maybe", "true or false"),
}


@pytest.mark.parametrize("case", BAD_VALUES)
def test_a_bad_value_of_an_allowed_override_is_the_clients_error(case: str) -> None:
    name, value, allowed = BAD_VALUES[case]
    with pytest.raises(ApiError) as caught:
        resolve(ALL, {f"x-baton-{name}": value})
    error = caught.value
    assert (error.status, error.code, error.param) == (400, "bad_override", f"x-baton-{name}")
    assert f"x-baton-{name}: " in error.message
    assert allowed in error.message
    assert len(error.message) < 250


REFUSED = {
    "no name": ("- {mode: auto}", "baton.yaml:5: policies[0].name: this field is required"),
    "a name with a space": ("- {name: a b}", "baton.yaml:5: policies[0].name: 'a b' is not 1 to 64"),
    "a name that stands twice": (
        "- {name: a, match: {model: x}}\n- name: a",
        "baton.yaml:6: policies[1].name: a stands there twice",
    ),
    "the default with conditions": ("- name: default\n  match: {model: x}", "baton.yaml:5: policies[0].name: default is what"),
    "an unknown key": (
        "- name: a\n  objectiv: ttft",
        "baton.yaml:6: policies[0].objectiv: unknown field; did you mean objective?",
    ),
    "an unknown key of a condition": (
        "- name: a\n  match:\n    headers:\n      x-a: {exact: '1'}\n      x-b: {exakt: '1'}",
        "baton.yaml:9: policies[0].match.headers.x-b.exakt: unknown field; did you mean exact?",
    ),
    "a number as a header's value": (
        "- name: a\n  match:\n    headers: {x-a: {exact: 1}}",
        "baton.yaml:7: policies[0].match.headers.x-a.exact: Expected str | null, got int",
    ),
    "a mode that there is not": ("- name: a\n  mode: fast", "baton.yaml:6: policies[0].mode: Invalid enum value 'fast'"),
    "an override that there is not": (
        "- name: a\n  allow_overrides:\n  - mode\n  - model",
        "baton.yaml:8: policies[0].allow_overrides[1]: Invalid enum value 'model'",
    ),
    "an override twice": (
        "- name: a\n  allow_overrides: [mode, mode]",
        "baton.yaml:6: policies[0].allow_overrides: mode stands",
    ),
    "two conditions on one header": (
        "- {name: a, match: {headers: {x: {exact: a, prefix: b}}}}",
        "policies[0].match.headers.x: exactly one of exact, prefix, regex, present is needed, not exact and prefix",
    ),
    "no condition on a header": ("- {name: a, match: {headers: {x: {}}}}", "headers.x: exactly one of"),
    "an empty prefix": ("- {name: a, match: {headers: {x: {prefix: ''}}}}", "headers.x.prefix: it is empty"),
    "one header in two cases": ("- {name: a, match: {headers: {x: {exact: '1'}, X: {exact: '1'}}}}", "stands twice"),
    "a header that cannot be": (
        "- name: a\n  match:\n    headers:\n      'x y': {exact: '1'}",
        "baton.yaml:8: policies[0].match.headers['x y']: 'x y' is not a name of a header",
    ),
    "a condition on an override": (
        "- {name: a, match: {headers: {x-baton-mode: {exact: auto}}}}",
        "policies[0].match.headers.x-baton-mode: headers x-baton-… are overrides",
    ),
    "a session header that is an override": (
        "- {name: a, session_header: X-Baton-Session}",
        "policies[0].session_header: headers",
    ),
    "a regex that is none": ("- {name: a, match: {headers: {x: {regex: '('}}}}", "headers.x.regex: '(': missing )"),
    "a regex that could run for ever": ("- {name: a, match: {headers: {x: {regex: '(a+b?)+'}}}}", "a repeat inside a repeat"),
    "a regex with too many repeats": ("- {name: a, match: {headers: {x: {regex: 'a*b*c*'}}}}", "3 open repeats"),
    "a regex that is too long": (f"- {{name: a, match: {{headers: {{x: {{regex: '{'a' * 257}'}}}}}}}}", "over 256 characters"),
    "a path with a query": (
        "- {name: a, match: {path: {exact: '/v1?x=1'}}}",
        "path.exact: '/v1?x=1' does not begin with / or has",
    ),
    "a path without a slash": ("- {name: a, match: {path: {prefix: v1}}}", "path.prefix: 'v1' does not begin with /"),
    "no model": ("- {name: a, match: {model: []}}", "match.model: 0 names"),
    "a star inside a name": ("- {name: a, match: {model: 'a*b'}}", "match.model: 'a*b' is neither a name nor a prefix"),
    "min over max": (
        "- name: a\n  match:\n    prompt_tokens: {min: 5,\n      max: 3}",
        "baton.yaml:7: policies[0].match.prompt_tokens.min: 5",
    ),
    "no bound": ("- {name: a, match: {prompt_tokens: {}}}", "prompt_tokens: neither min nor max"),
    "an SLO of nothing": ("- {name: a, slo: {ttft_s: 0}}", "slo.ttft_s: 0 is not above 0"),
    "an SLO without end": ("- {name: a, slo: {itl_s: .inf}}", "slo.itl_s: inf is not above 0 and at most"),
    "no request at all": ("- {name: a, limits: {max_in_flight: 0}}", "limits.max_in_flight: 0 is not from 1"),
    "a wait below zero": ("- {name: a, limits: {queue_wait_s: -1}}", "limits.queue_wait_s: -1 is not from 0"),
    "a weight of nothing": ("- {name: a, weight: 0}", "weight: 0 is not from 0.001"),
    "a priority out of range": ("- {name: a, priority: 5000}", "priority: 5000 is not from -1000 to 1000"),
    "labels that no worker has": (
        "- name: a\n  workers:\n    prefill: {tier: gold, zone: b}",
        "baton.yaml:7: policies[0].workers.prefill: no prefill worker has these labels",
    ),
    "labels that only the other role has": ("- {name: a, workers: {decode: {zone: a}}}", "no decode worker has these labels"),
    # Contradictions.
    "prefill workers for what is never handed over": (
        "- {name: a, mode: aggregate, workers: {prefill: {tier: gold}}}",
        "policies[0].workers.prefill: mode is aggregate, so there is no prefill worker",
    ),
    "a prefill failure of what is never handed over": (
        "- {name: a, mode: aggregate, on_prefill_failure: fail}",
        "policies[0].on_prefill_failure: mode is aggregate",
    ),
    "late is what it is anyway": (
        "- {name: a, mode: aggregate, slo: {ttft_s: 1}, when_late: aggregate}",
        "policies[0].when_late: mode is aggregate already",
    ),
    "a threshold for what is never handed over": (
        "- {name: a, mode: aggregate, threshold_uncached_tokens: 5}",
        "policies[0].threshold_uncached_tokens: mode is aggregate; only auto asks for it",
    ),
    "a threshold for what is always handed over": (
        "- {name: a, mode: disaggregate, threshold_uncached_tokens: 5}",
        "policies[0].threshold_uncached_tokens: mode is disaggregate",
    ),
    "late for nothing": (
        "- name: a\n  slo: {itl_s: 1}\n  when_late: reject",
        "baton.yaml:7: policies[0].when_late: there is no slo.ttft_s",
    ),
    "waiting where nothing waits": (
        "- {name: a, dispatch: immediate, slo: {ttft_s: 1}, when_late: wait}",
        "policies[0].when_late: dispatch is immediate, so nothing waits here",
    ),
    "a wait where nothing waits": (
        "- {name: a, dispatch: immediate, limits: {queue_wait_s: 1}}",
        "limits.queue_wait_s: dispatch is",
    ),
    "a share of no queue": ("- {name: a, dispatch: immediate, weight: 2}", "policies[0].weight: dispatch is immediate"),
    "a band of no queue": (
        "- {name: a, dispatch: immediate, priority: 2}",
        "priority: dispatch is immediate, so nothing waits here, and",
    ),
    "a client's wait where nothing waits": (
        "- {name: a, dispatch: immediate, allow_overrides: [queue-wait-ms]}",
        "policies[0].allow_overrides: queue-wait-ms: dispatch is immediate",
    ),
    "a client's band of no queue": (
        "- {name: a, dispatch: immediate, allow_overrides: [priority]}",
        "policies[0].allow_overrides: priority: dispatch is immediate",
    ),
    "no priority to pass": ("- {name: a, pass_priority: true}", "policies[0].pass_priority: there is no priority to pass"),
    "a retry where there is none": (
        "- name: a\n  on_prefill_failure: retry\nprefill: {retries: 0}",
        "baton.yaml:6: policies[0].on_prefill_failure: retry, but prefill.retries is 0",
    ),
    "a rule behind one that takes everything": (
        "- {name: gold, match: {headers: {x-tier: {exact: gold}}}}\n- name: all\n- name: late\n  match: {model: x}",
        "baton.yaml:8: policies[2].match: late can never match: all, before it, takes every request",
    ),
    "a rule behind a wider one": (
        "- {name: wide, match: {model: 'llama*'}}\n- name: narrow\n  match: {model: llama-3, prompt_tokens: {min: 5}}",
        "baton.yaml:7: policies[1].match: narrow can never match: wide, before it, takes every request that it is for",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_at_load_with_file_line_and_field(case: str) -> None:
    text, message = REFUSED[case]
    with pytest.raises(ConfigError) as caught:
        rules(text)
    assert str(caught.value).startswith("baton.yaml:")
    assert message in str(caught.value)


NO_CONTRADICTIONS = {
    "the client may ask for a handoff": (
        "- {name: a, mode: aggregate, workers: {prefill: {tier: gold}}, on_prefill_failure: fail, "
        "threshold_uncached_tokens: 5, allow_overrides: [mode]}"
    ),
    "the client may bring the SLO": "- {name: a, when_late: reject, allow_overrides: [ttft-slo-ms]}",
    "the client may bring the priority": "- {name: a, pass_priority: true, allow_overrides: [priority]}",
    "the engine has a queue": "- {name: a, dispatch: immediate, priority: 5, pass_priority: true, allow_overrides: [priority]}",
    "nothing waits, and late is refused": "- {name: a, dispatch: immediate, slo: {ttft_s: 1}, when_late: reject}",
    "a priority of 0 is one": "- {name: a, pass_priority: true, priority: 0}",
    "always handed over, but for what is late": "- {name: a, mode: disaggregate, slo: {ttft_s: 1}, when_late: aggregate}",
    "the default by name": "- {name: a, match: {model: x}}\n- {name: default, mode: disaggregate}",
    "fixed repeats": "- {name: a, match: {headers: {x-id: {regex: '[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}'}}}}",
    "signs that are escaped or in a class": r"- {name: a, match: {headers: {x: {regex: '([*+(]x\))+\*\+\{'}}}}",
}


@pytest.mark.parametrize("case", NO_CONTRADICTIONS)
def test_what_makes_sense_is_taken(case: str) -> None:
    assert rules(NO_CONTRADICTIONS[case])


def test_labels_of_workers_that_are_found_later_are_not_judged() -> None:
    text = WORKERS.replace("workers:", "workers:\n  file: more.yaml") + "policies: [{name: a, workers: {prefill: {tier: new}}}]"
    assert parse(text).policies[0].workers.prefill == {"tier": "new"}


COVERS = {
    "the same": ("{model: a}", "{model: a}", True),
    "fewer conditions": ("{model: a}", "{model: a, path: {exact: /x}}", True),
    "more conditions": ("{model: a, path: {exact: /x}}", "{model: a}", False),
    "a list and a part of it": ("{model: [a, b]}", "{model: b}", True),
    "a part of a list and the list": ("{model: b}", "{model: [a, b]}", False),
    "a prefix and a longer one": ("{model: 'a*'}", "{model: ['ab*', 'ac']}", True),
    "a prefix and a shorter one": ("{model: 'ab*'}", "{model: 'a*'}", False),
    "a name and the prefix of it": ("{model: a}", "{model: 'a*'}", False),
    "any model and none asked": ("{model: '*'}", "{}", False),
    "a range and one inside": ("{prompt_tokens: {min: 5}}", "{prompt_tokens: {min: 5, max: 9}}", True),
    "a range and one that sticks out": ("{prompt_tokens: {max: 9}}", "{prompt_tokens: {min: 5}}", False),
    "a range from 0": ("{prompt_tokens: {max: 9}}", "{prompt_tokens: {max: 9}}", True),
    "present and any value": ("{headers: {x: {present: true}}}", "{headers: {X: {regex: 'a'}}}", True),
    "present and absent": ("{headers: {x: {present: true}}}", "{headers: {x: {present: false}}}", False),
    "absent twice": ("{headers: {x: {present: false}}}", "{headers: {x: {present: false}}}", True),
    "absent and a value": ("{headers: {x: {present: false}}}", "{headers: {x: {exact: a}}}", False),
    "a header's prefix and a value": ("{headers: {x: {prefix: a}}}", "{headers: {x: {exact: ab}}}", True),
    "a header's prefix and a regex": ("{headers: {x: {prefix: a}}}", "{headers: {x: {regex: 'ab'}}}", False),
    "a value and another": ("{headers: {x: {exact: a}}}", "{headers: {x: {exact: b}}}", False),
    "another header": ("{headers: {x: {present: true}}}", "{headers: {y: {present: true}}}", False),
    "a path's prefix and a path": ("{path: {prefix: /v1}}", "{path: {exact: /v1/completions}}", True),
    "a path and its prefix": ("{path: {exact: /v1}}", "{path: {prefix: /v1}}", False),
}


@pytest.mark.parametrize("case", COVERS)
def test_a_rule_is_only_called_unreachable_when_it_surely_is(case: str) -> None:
    earlier, later, expected = COVERS[case]

    def match(text: str) -> Match:
        return rules(f"- {{name: it, match: {text}}}")[0].match

    assert covers(match(earlier), match(later)) is expected


PAGE = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
MESSAGES = re.findall(r"```yaml no\n(.*?)```\n+```text\n(.*?)```", PAGE, re.DOTALL)


def test_the_page_has_its_examples() -> None:
    assert len(EXAMPLES) == PAGE.count("```yaml\n") == 3
    assert len(MESSAGES) == PAGE.count("```yaml no") == 2


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_of_the_page_can_be_used(example: str) -> None:
    config = parse(WORKERS + example)
    assert config.policies or config.models.aliases


@pytest.mark.parametrize(("text", "message"), MESSAGES)
def test_a_fault_of_the_page_has_the_message_that_stands_there(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text + WORKERS, source="baton.yaml")
    assert str(caught.value) == message.strip()


def test_every_field_and_override_is_on_the_page() -> None:
    for field in PolicyRule.__struct_fields__:
        assert f"`{field}`" in PAGE or f"{field}:" in PAGE
    for name in ("mode", "objective", "ttft-slo-ms", "itl-slo-ms", "priority", "session", "tenant", "explain", "queue-wait-ms"):
        assert f"`x-baton-{name}`" in PAGE
