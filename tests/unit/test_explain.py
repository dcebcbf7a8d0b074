"""What `baton explain` says: each reason in its words, what would happen, the policy and the model; and clear errors."""

from __future__ import annotations

import io
import json
import random
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from extproc import explain_command as command
from extproc.cli import app
from extproc.config import Config, parse
from extproc.errors import ApiError
from extproc.explain import Explainer, Question, Report, SavedSnapshot, snapshot_of
from extproc.prompt import BytesPerToken
from extproc.routing.endpoint_spec import EndpointSet, EndpointSpec
from extproc.routing.explain import Explanation, Weighed, explain
from extproc.routing.job import Aims, Job, Late, Mode, Objective
from extproc.routing.pool import Pool, Role
from extproc.routing.prefix import Chain
from extproc.routing.router import Router
from extproc.routing.settings import Routing

P0, P1 = "10.0.0.0:1", "10.0.0.1:1"
D0, D1 = "10.0.1.0:1", "10.0.1.1:1"
DISAGGREGATE = Aims(mode=Mode.DISAGGREGATE)


def a_router(settings: Routing | None = None, **specs: dict[str, Any]) -> Router:
    """Two workers of each role that have met; ``specs`` by p0, p1, d0, d1."""
    known = {"p0": P0, "p1": P1, "d0": D0, "d1": D1}
    made = {name: EndpointSpec(address=address, **specs.get(name, {})) for name, address in known.items()}
    pool = Pool(EndpointSet((made["p0"], made["p1"]), (made["d0"], made["d1"])))
    for endpoint in pool.endpoints:
        pool.set_live(endpoint, True)
    router = Router(pool, settings or Routing())
    for prefill in (P0, P1):
        for decode in (D0, D1):
            router.costs.pairs.succeeded(prefill, decode)
    return router


def a_job(aims: Aims = DISAGGREGATE, *, tokens: int = 8_192, text: int = 0, **fields: Any) -> Job:
    rng = random.Random(text)
    chain = Chain(array("Q", [rng.getrandbits(64) for _ in range(tokens // 64)]), 64.0)
    return Job(model=None, chain=chain, tokens=tokens, aims=aims, arrived_s=0.0, deadline_s=100.0, **fields)


def give(router: Router, address: str, role: Role, *, tokens: int = 100, work_s: float = 0.0, times: int = 1) -> None:
    endpoint = router.pool.get(address)
    assert endpoint is not None
    for _ in range(times):
        endpoint.leg(role).claim(tokens=tokens, work_s=work_s, now_s=0.0, turn=0)


def row(found: Explanation, prefill: str | None, decode: str) -> Weighed:
    return next(each for each in found.candidates if (each.prefill, each.decode) == (prefill, decode))


def out(found: Explanation) -> dict[tuple[str, Role], str]:
    return {(each.endpoint, each.role): each.why for each in found.left_out}


# --- why a choice lost --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("held", [True, False])
def test_the_busier_prefill_worker_makes_one_wait(held: bool) -> None:
    router = a_router()
    give(router, P0, Role.PREFILL, work_s=1.9)
    found = explain(router, a_job(Aims(mode=Mode.DISAGGREGATE, held=held)), 0.0)
    assert found.decision is not None and found.decision.prefill == P1
    assert row(found, P0, found.decision.decode).why == "waits 1.9 s longer for the prefill worker"
    assert row(found, P1, found.decision.decode).chosen


@pytest.mark.parametrize("held", [True, False])
def test_the_colder_prefill_worker_holds_less(held: bool) -> None:
    router, job = a_router(), a_job(Aims(mode=Mode.DISAGGREGATE, held=held))
    router.index.insert(P1, job.chain, 64)
    found = explain(router, job, 0.0)
    assert found.decision is not None and found.decision.prefill == P1
    assert row(found, P0, found.decision.decode).why == "holds 4,096 tokens less of the prompt"
    assert row(found, P1, D0).cached_prefill_tokens == 4_096


def test_the_slower_prefill_worker_is_slower() -> None:
    router = a_router(p0={"prefill_tokens_per_s": 2_000.0}, p1={"prefill_tokens_per_s": 10_000.0})
    found = explain(router, a_job(Aims(mode=Mode.DISAGGREGATE, held=False)), 0.0)
    assert row(found, P0, D0).why.startswith("computes the prompt 3.3 s more slowly")


def test_the_decode_worker_that_holds_less_gets_a_longer_transfer() -> None:
    router, job = a_router(), a_job()
    router.index.insert(D1, job.chain, 64)
    found = explain(router, job, 0.0)
    assert found.decision is not None and found.decision.decode == D1
    assert row(found, found.decision.prefill, D0).why == (
        "its decode worker holds 4,096 tokens less of the prompt: the transfer takes 54 ms longer"
    )


def test_a_pair_that_never_met_needs_a_handshake() -> None:
    router = a_router()
    router.costs.pairs.forget(D0)
    found = explain(router, a_job(), 0.0)
    assert found.decision is not None
    assert row(found, found.decision.prefill, D0).why == "the two have never met: a handshake takes 500 ms"


def test_a_pair_that_failed_is_charged() -> None:
    router = a_router()
    for prefill in (P0, P1):
        router.costs.pairs.failed(prefill, D0, 0.0)
    found = explain(router, a_job(), 0.0)
    assert found.decision is not None
    assert row(found, found.decision.prefill, D0).why == "the pair failed a while ago: charged 5.0 s"


def test_a_decode_worker_with_more_answers_is_slower() -> None:
    router = a_router()
    give(router, D0, Role.DECODE, times=20)
    found = explain(router, a_job(), 0.0)
    assert found.decision is not None
    assert row(found, found.decision.prefill, D0).why == "its answer would take 1.6 s longer beside the others there"


def test_a_prefill_on_a_busy_decode_worker_holds_up_its_streams() -> None:
    router = a_router()
    for decode in (D0, D1):
        give(router, decode, Role.DECODE, times=10)
    found = explain(router, a_job(Aims()), 0.0)
    assert found.decision is not None and found.decision.prefill is not None
    assert row(found, None, D0).why == "its streams would stand still for 8.2 s, all together"


def test_the_itl_slo_of_streams_refuses_a_prefill_beside_them() -> None:
    router = a_router()
    for decode in (D0, D1):
        give(router, decode, Role.DECODE, times=2)
    found = explain(router, a_job(Aims(itl_slo_s=0.05), tokens=1_900), 0.0)
    assert row(found, None, D0).why == "its streams would stand still for 211 ms, over the ITL SLO"


def test_a_handoff_costs_something_by_itself() -> None:
    found = explain(a_router(), a_job(Aims(), tokens=640), 0.0)
    assert found.decision is not None and found.decision.prefill is None
    assert row(found, P0, found.decision.decode).why == "a handoff takes 30 ms by itself"


def test_work_for_a_busy_pool_counts_more() -> None:
    router = a_router()
    give(router, P0, Role.PREFILL, work_s=1.9)
    found = explain(router, a_job(Aims(), tokens=2_500), 0.0)
    assert found.decision is not None and found.decision.prefill is None
    assert row(found, P1, D0).why == "prefill workers are busy: its work counts 250 ms more"


def test_what_is_the_same_was_anothers_turn() -> None:
    found = explain(a_router(), a_job(), 0.0)
    assert found.decision is not None and (found.decision.prefill, found.decision.decode) == (P0, D0)
    assert row(found, P1, D0).why == "costs the same; it was another's turn"
    assert row(found, P0, D1).why == "costs the same; it was another's turn"


RULES: dict[str, tuple[Aims, dict[str, Any], tuple[str | None, str], str]] = {
    "always apart": (DISAGGREGATE, {}, (None, D0), "the policy always hands over"),
    "never apart": (Aims(mode=Mode.AGGREGATE), {}, (P0, D0), "the policy never hands over"),
    "cannot": (Aims(), {"handoff": False}, (P0, D0), "the request cannot be handed over"),
    "over the threshold": (
        Aims(threshold_uncached_tokens=8_000),
        {},
        (None, D0),
        "8,000 tokens or more are not cached: handed over",
    ),
    "under the threshold": (
        Aims(threshold_uncached_tokens=9_000),
        {},
        (P0, D0),
        "fewer than 9,000 tokens are not cached: not handed over",
    ),
    "turns": (Aims(mode=Mode.DISAGGREGATE, objective=Objective.ROUND_ROBIN), {}, (P1, D0), "it was another's turn"),
    "late": (
        Aims(mode=Mode.DISAGGREGATE, ttft_slo_s=0.01, late=Late.AGGREGATE),
        {},
        (P0, D0),
        "its SLO is out of reach, and the policy then lets a decode worker do it all",
    ),
}


@pytest.mark.parametrize("case", RULES)
def test_a_rule_is_named_where_no_cost_decided(case: str) -> None:
    aims, fields, pair, why = RULES[case]
    assert row(explain(a_router(), a_job(aims, **fields), 0.0), *pair).why == why


def test_a_drawn_worker_was_drawn() -> None:
    found = explain(a_router(), a_job(Aims(mode=Mode.DISAGGREGATE, objective=Objective.RANDOM)), 0.0)
    assert {each.why for each in found.candidates if each.prefill and not each.chosen} == {"not drawn"}


def test_least_load_and_prefix_say_what_they_look_at() -> None:
    router, job = a_router(), a_job(Aims(mode=Mode.DISAGGREGATE, objective=Objective.LEAST_LOAD))
    give(router, P0, Role.PREFILL, tokens=5_000)
    give(router, D0, Role.DECODE, times=2)
    found = explain(router, job, 0.0)
    assert row(found, P0, D1).why == "has 5,000 tokens more to compute"
    assert row(found, P1, D0).why == "runs 2 answers more"
    job.aims = Aims(mode=Mode.DISAGGREGATE, objective=Objective.PREFIX)
    router.index.insert(P0, job.chain, 100)
    assert row(explain(router, job, 0.0), P1, D1).why == "holds 6,400 tokens less of the prompt"


def test_a_conversation_stays_where_it_is() -> None:
    router, job = a_router(), a_job(session="ann")
    router.picker.remember("ann", D1)
    found = explain(router, job, 0.0)
    assert found.decision is not None and found.decision.decode == D1
    assert row(found, P0, D0).why == f"the conversation is on {D1}"


# --- who was not weighed ------------------------------------------------------------------------------------------------


def test_workers_that_cannot_get_it_say_why() -> None:
    router = a_router(
        Routing(breaker_failures=1, breaker_pause_s=3.2),
        p1={"labels": {"tier": "gold"}},
        d0={"models": ["other"]},
        d1={"labels": {"tier": "gold"}},
    )
    aims = Aims(mode=Mode.DISAGGREGATE, prefill_labels={"tier": "gold"})
    job = a_job(aims)
    job.model = "m"
    assert out(explain(router, job, 0.0)) == {
        (P0, Role.PREFILL): "label tier=gold missing",
        (D0, Role.DECODE): "does not serve the model 'm'",
    }
    job = a_job()
    first, second = (router.pool.get(address) for address in (P0, D1))
    assert first is not None and second is not None
    router.pool.set_live(second, False)
    ticket = router.submit(a_job(Aims(mode=Mode.DISAGGREGATE, held=False)), 0.0)
    assert ticket.prefill is first
    router.prefill_failed(ticket, 0.0, blame=True)
    assert out(explain(router, job, 0.0)) == {
        (P0, Role.PREFILL): "breaker open for 3.2 s after 1 failures",
        (D1, Role.DECODE): "not live",
    }


def test_where_all_have_failed_all_are_weighed() -> None:
    router = a_router()
    for address in (P0, P1):
        endpoint = router.pool.get(address)
        assert endpoint is not None
        endpoint.prefill.blocked_until_s = 10.0
    found = explain(router, a_job(), 0.0)
    assert found.outcome == "placed" and found.left_out == []
    assert router.picker.panics == 0, "the real one was not asked"


def test_a_full_decode_worker_says_of_what() -> None:
    router = a_router(d0={"max_seqs": 3}, d1={"kv_tokens": 10_000})
    give(router, D0, Role.DECODE, times=3)
    give(router, D1, Role.DECODE, tokens=9_000)
    found = explain(router, a_job(), 0.0)
    assert out(found) == {
        (D0, Role.DECODE): "full: 3 of 3 sequences",
        (D1, Role.DECODE): "full: 9,000 KV tokens are taken",
    }
    assert (found.outcome, found.waits_for) == ("waits", None)


def test_very_many_choices_are_counted_not_listed() -> None:
    specs = [[EndpointSpec(address=f"10.{role}.{i // 200}.{i % 200}:1") for i in range(300)] for role in range(2)]
    pool = Pool(EndpointSet(tuple(specs[0]), tuple(specs[1])))
    for endpoint in pool.endpoints:
        pool.set_live(endpoint, True)
    found = explain(Router(pool, Routing()), a_job(), 0.0)
    assert len(found.candidates) == 420 and found.candidates[0].chosen
    assert found.not_shown == {"candidates": 300 * 300 + 300 - 420}


# --- what would happen ---------------------------------------------------------------------------------------------------


def test_one_that_waits_says_behind_whom_and_about_how_long() -> None:
    router = a_router(Routing(step_tokens=1))
    aims = Aims(mode=Mode.DISAGGREGATE, ttft_slo_s=50.0)
    for number in range(6):
        router.submit(a_job(aims, text=number), 0.0)
    found = explain(router, a_job(aims, text=9), 0.0)
    assert (found.outcome, found.behind, found.queue_requests) == ("waits", 4, 4)
    assert found.queue_work_s == pytest.approx(4 * 0.8192)
    assert found.expected_wait_s == pytest.approx(0.8192 + 4 * 0.8192 / 2)
    assert found.waits_for in (P0, P1)
    assert found.candidates[0].prefill == found.waits_for and found.candidates[0].chosen


def test_one_that_is_turned_away_says_why() -> None:
    router = a_router()
    late = a_job(Aims(mode=Mode.DISAGGREGATE, ttft_slo_s=0.1, late=Late.REJECT))
    refusal = explain(router, late, 0.0).refusal
    assert refusal is not None and (refusal.reason, refusal.retry_after_s) == ("late", 1.0)
    assert refusal.message == "the first token would come after 1.0 s, and the TTFT SLO is 0.1 s"
    for endpoint in router.pool.endpoints:
        if endpoint.address in (P0, P1):
            router.pool.set_live(endpoint, False)
    found = explain(router, a_job(), 0.0)
    assert found.refusal is not None
    assert (found.refusal.reason, found.refusal.role) == ("no_endpoint", Role.PREFILL)
    assert [each.prefill for each in found.candidates] == [None, None]


# --- a request under a configuration -------------------------------------------------------------------------------------

CONFIG = """\
workers: {prefill: ['10.0.0.0:1', '10.0.0.1:1'], decode: ['10.0.1.0:1', '10.0.1.1:1']}
models: {aliases: {chat: m}}
policies:
- name: gold
  match: {headers: {x-tier: {exact: gold}}, prompt_tokens: {min: 100}}
  mode: disaggregate
- name: silver
  match: {headers: {x-tier: {present: true}}}
  mode: aggregate
  allow_overrides: [mode]
- name: lean
  match: {model: lean}
  on_prefill_failure: aggregate
  mode: disaggregate
"""

TEXT = "the secret of the prompt " * 400


def config(text: str = CONFIG) -> Config:
    return parse(text)


def ask(body: object, *, router: Router | None = None, path: str | None = None, **headers: str) -> Report:
    question = Question(
        path=path,
        headers={name.replace("_", "-"): value for name, value in headers.items()},
        body=msgspec.Raw(json.dumps(body).encode()),
    )
    explainer = Explainer(config())
    return explainer.by_router(explainer.read(question, BytesPerToken()), router or a_router(), 0.0)


def saved(router: Router, path: Path) -> Path:
    taken = snapshot_of(router, 0.0, 1.7e9, BytesPerToken(), index_blocks=1_000)
    path.write_bytes(msgspec.json.encode(taken))
    return path


def test_the_policy_is_named_with_its_reason_and_those_before_it_with_theirs() -> None:
    report = ask({"model": "m", "prompt": "short"}, x_tier="gold")
    assert (report.policy.name, report.policy.why) == ("silver", "header x-tier is there")
    assert report.policy.passed_over == {"gold": ["prompt from 100 tokens"]}
    report = ask({"model": "m", "prompt": TEXT}, x_tier="gold")
    assert (report.policy.name, report.policy.passed_over) == ("gold", {})
    assert report.policy.why == "header x-tier exact 'gold'; prompt from 100 tokens"
    report = ask({"model": "m", "prompt": TEXT})
    assert (report.policy.name, report.policy.why) == ("default", "no policy matches: the defaults hold")
    assert set(report.policy.passed_over) == {"gold", "silver", "lean"}


def test_overrides_count_where_they_are_allowed() -> None:
    body = {"model": "m", "prompt": TEXT}
    assert ask(body, x_tier="any", x_baton_mode="disaggregate").policy.mode == "disaggregate"
    report = ask(body, x_tier="any", x_baton_priority="-9")
    assert (report.policy.mode, report.policy.ignored_overrides) == ("aggregate", ["priority"])


def test_the_model_behind_an_alias_and_the_size_of_the_prompt_are_shown() -> None:
    report = ask({"model": "chat", "messages": [{"role": "user", "content": TEXT}]})
    assert (report.path, report.model_asked, report.model) == ("/v1/chat/completions", "chat", "m")
    assert report.prompt.tokens > 2_000 and not report.prompt.exact and report.prompt.blocks > 30
    report = ask({"model": "m", "prompt": list(range(640))})
    assert (report.path, report.prompt.tokens, report.prompt.exact, report.prompt.blocks) == ("/v1/completions", 640, True, 10)


def test_what_cannot_be_handed_over_says_why() -> None:
    report = ask({"model": "m", "prompt": TEXT, "n": 2})
    assert report.whole_reason == "n" and report.decision.decision is not None
    assert report.decision.decision.reason == "cannot_hand_over"


def test_the_error_is_the_one_that_the_client_would_read() -> None:
    router = a_router(p0={"models": ["m"]}, p1={"models": ["m"]}, d0={"models": ["m"]}, d1={"models": ["m"]})
    error = ask({"model": "no", "prompt": TEXT}, router=router).error
    assert error is not None and (error.status, error.code) == (404, "model_not_found")
    for address in (P0, P1):
        endpoint = router.pool.get(address)
        assert endpoint is not None
        router.pool.set_live(endpoint, False)
    error = ask({"model": "m", "prompt": TEXT}, router=router, x_tier="gold").error
    assert error is not None and (error.status, error.code) == (503, "no_prefill_worker")


def test_without_prefill_workers_a_policy_may_let_a_decode_worker_do_it() -> None:
    router = a_router()
    for address in (P0, P1):
        endpoint = router.pool.get(address)
        assert endpoint is not None
        router.pool.set_live(endpoint, False)
    report = ask({"model": "lean", "prompt": TEXT}, router=router)
    assert report.error is None and report.decision.outcome == "placed"
    assert report.notes == ["there is no prefill worker, and the policy then lets a decode worker do it all"]


@pytest.mark.parametrize(
    ("body", "path", "code"),
    [
        ({"prompt": "x"}, None, "model_missing"),
        ([1], None, "not_an_object"),
        ({"model": "m"}, "/v1/embeddings", "not_found"),
        ({"model": "m"}, "/metrics", "not_found"),
    ],
)
def test_what_the_filter_would_refuse_is_refused(body: object, path: str | None, code: str) -> None:
    with pytest.raises(ApiError) as caught:
        ask(body, path=path)
    assert caught.value.code == code


def test_neither_answer_nor_snapshot_holds_any_of_the_prompt(tmp_path: Path) -> None:
    router, body = a_router(), {"model": "m", "prompt": TEXT}
    explainer = Explainer(config())
    job = explainer.read(Question(body=msgspec.Raw(json.dumps(body).encode())), BytesPerToken()).asked.job
    router.submit(job, 0.0)
    assert b"secret" not in msgspec.json.encode(ask(body, router=router))
    assert b"secret" not in saved(router, tmp_path / "then.json").read_bytes()


# --- the command ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    router = a_router()
    give(router, P0, Role.PREFILL, work_s=1.9)
    (tmp_path / "baton.yaml").write_text(CONFIG)
    (tmp_path / "request.json").write_text(json.dumps({"model": "m", "prompt": TEXT}))
    saved(router, tmp_path / "then.json")
    return {name: str(tmp_path / name) for name in ("baton.yaml", "request.json", "then.json", "gone.json")}


def run(*argv: str, stdin: str | None = None) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["explain", *argv], input=stdin)
    return result.exit_code, result.stdout, result.stderr


def test_a_snapshot_is_explained_as_a_table(files: dict[str, str]) -> None:
    code, shown, _ = run(
        files["request.json"], "--snapshot", files["then.json"], "-c", files["baton.yaml"], "--header", "x-tier=gold"
    )
    assert code == 0
    assert f"be placed now: prefill on {P1}, decode on {D0} (reason: policy)" in shown
    assert "waits 1.9 s longer for the prefill worker" in shown
    assert "gold: header x-tier exact 'gold'; prompt from 100 tokens" in shown
    assert "2,500 tokens (estimated)" in shown


def test_json_holds_the_whole_report_and_standard_input_is_read(files: dict[str, str]) -> None:
    code, shown, _ = run(
        *("-", "--json", "--snapshot", files["then.json"], "-c", files["baton.yaml"]),
        stdin=Path(files["request.json"]).read_text(),
    )
    assert code == 0
    report = msgspec.json.decode(shown, type=Report)
    assert report.decision.outcome == "placed" and len(report.decision.candidates) == 6


MISTAKES: dict[str, tuple[list[str], str]] = {
    "nothing": ([], "which request?"),
    "snapshot alone": (["request.json", "--snapshot", "then.json"], "--snapshot and --config go together"),
    "config alone": (["request.json", "-c", "baton.yaml"], "--snapshot and --config go together"),
    "two sources": (
        ["request.json", "--snapshot", "then.json", "-c", "baton.yaml", "--admin", "http://127.0.0.1:9003"],
        "--snapshot asks no filter",
    ),
    "no request file": (["gone.json"], "No such file"),
    "no snapshot file": (["request.json", "--snapshot", "gone.json", "-c", "baton.yaml"], "No such file"),
    "no snapshot": (["request.json", "--snapshot", "request.json", "-c", "baton.yaml"], "not a snapshot of this version"),
    "no JSON": (["baton.yaml"], "not a JSON body"),
    "no header": (["request.json", "--header", "x-tier"], "name=value"),
    "nobody there": (["request.json", "--admin", "http://127.0.0.1:1"], "the admin port of the filter cannot be asked"),
    "no address": (["request.json", "--admin", "http://"], "the admin port of the filter cannot be asked"),
    "no socket": (["request.json", "--admin", "unix:/nowhere.sock"], "the admin port of the filter cannot be asked"),
    "a path without a prompt": (
        ["request.json", "--path", "/metrics", "--snapshot", "then.json", "-c", "baton.yaml"],
        "/metrics takes no prompt",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_ends_with_one_and_says_what_is_wrong(files: dict[str, str], case: str) -> None:
    argv, message = MISTAKES[case]
    code, shown, error = run(*(files.get(word, word) for word in argv))
    assert (code, shown) == (1, "")
    assert message in error and error.startswith("baton: ") and "Traceback" not in error


def test_a_snapshot_with_broken_hashes_is_refused(files: dict[str, str]) -> None:
    file = Path(files["then.json"])
    broken = msgspec.json.decode(file.read_bytes())
    broken["index"] = {P0: "AAAA"}
    file.write_bytes(msgspec.json.encode(broken))
    code, _, error = run(files["request.json"], "--snapshot", str(file), "-c", files["baton.yaml"])
    assert code == 1 and "the snapshot contradicts itself" in error


def test_what_is_missing_in_a_snapshot_is_noted() -> None:
    taken = snapshot_of(a_router(), 0.0, 1.7e9, BytesPerToken(), index_blocks=0)
    assert isinstance(taken, SavedSnapshot)
    body = msgspec.Raw(json.dumps({"model": "m", "prompt": TEXT}).encode())
    report = Explainer(config()).by_snapshot(Question(body=body), msgspec.structs.replace(taken, cut={"sessions": 7}))
    assert report.notes == [
        "the snapshot is without a prefix index: nothing counts as cached",
        "7 entries are not in the snapshot: sessions",
    ]


def test_addresses_in_brackets_are_shown_as_they_are() -> None:
    pool = Pool(EndpointSet((EndpointSpec(address="[fe80::1]:1"),), (EndpointSpec(address="[fe80::2]:1"),)))
    for endpoint in pool.endpoints:
        pool.set_live(endpoint, True)
    assert pool.endpoints[0].address == "[fe80::1]:1"
    report = ask({"model": "m", "prompt": TEXT}, router=Router(pool, Routing()), x_tier="gold")
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(command.as_table(report))
    shown = console.export_text()
    assert shown.count("[fe80::1]:1") == 2 and shown.count("[fe80::2]:1") == 3, "in the head, and in each row"


def test_the_table_says_when_a_request_would_wait_or_be_refused() -> None:
    router = a_router(Routing(step_tokens=1))
    for number in range(6):
        router.submit(a_job(Aims(mode=Mode.DISAGGREGATE, ttft_slo_s=50.0), text=number), 0.0)
    report = ask({"model": "m", "prompt": TEXT}, router=router, x_tier="gold")
    assert command.outcome_words(report).startswith(f"wait for {report.decision.waits_for}, behind 4 others, about 2.5 s")
    router.settings = msgspec.structs.replace(router.settings, queue_requests=4)
    refused = ask({"model": "m", "prompt": TEXT}, router=router, x_tier="gold")
    assert command.outcome_words(refused) == (
        "be answered 429 queue_full, try again after 2 s: 4 prompts wait already (routing.queue_requests)"
    )
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(command.as_table(refused))
    assert "429 queue_full" in console.export_text()
