"""`baton plan ratio`: confidence, cost, bounds by arithmetic, the search among candidates, the verdict, what is printed."""

import json
import math
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from extproc.cli import app
from extproc.plan import confidence, ratio_report, robust
from extproc.plan.candidates import Candidate, Kind, candidates
from extproc.plan.confidence import Interval, interval, t_quantile, told_apart
from extproc.plan.cost import usd_per_million_tokens
from extproc.plan.demand import Demand, Part, demand_of, prefill_s, rate_within_wait
from extproc.plan.errors import PlanError
from extproc.plan.goodput_search import Stretch
from extproc.plan.gpus import gpu
from extproc.plan.lengths import parse
from extproc.plan.question import Assumptions, Question
from extproc.plan.ratio import Answer, Best, Effort, Finalist, study
from extproc.plan.runs import Runner, Search, search
from extproc.plan.shapes import shape_of
from extproc.plan.simulate import Slos
from extproc.plan.verdict import Choice, verdict
from extproc.plan.workload import TraceWorkload, Workload
from workers.traces import Request

SMALL = Effort(seeds=2, requests=40, counted_s=5.0, keep=2, finalists=2, screen_resolution=0.2, resolution=0.1)
HERE = Runner(None)


def asked(isl: str = "4000", osl: str = "20", **changed) -> Question:
    workload = Workload(inputs=parse(isl, "isl"), outputs=parse(osl, "osl"), prefix_share=changed.pop("prefix_share", 0.0))
    given = {"shape": shape_of("llama-3.1-8b"), "gpu": gpu("h100"), "gpus": 4, "slos": Slos(1.0, 0.045), **changed}
    return Question(workload=workload, **given)


def of_kind(question: Question, kind: Kind = Kind.NIXL) -> tuple[Candidate, ...]:
    return candidates(question, demand_of(question.workload), kind).able


# -- how sure --------------------------------------------------------------------------------------------------------------


def test_students_t_is_what_the_tables_say():
    for freedom, value in ((1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (30, 2.042), (1_000, 1.962)):
        assert t_quantile(0.975, freedom) == pytest.approx(value, abs=0.001)
    assert t_quantile(0.95, 4) == pytest.approx(2.132, abs=0.001)
    assert t_quantile(0.5, 7) == pytest.approx(0, abs=1e-9)
    for share, freedom in ((0.4, 3), (1.0, 3), (0.9, 0)):
        with pytest.raises(PlanError):
            t_quantile(share, freedom)


def test_an_interval_is_the_one_worked_out_by_hand_and_wider_by_the_resolution():
    # mean 10, standard deviation 1, of the mean 1 / sqrt(3); t of 2 degrees of freedom 4.303
    found = interval([9.0, 10.0, 11.0])
    assert (found.mean, found.low, found.high) == pytest.approx(
        (10, 10 - 4.302653 / math.sqrt(3), 10 + 4.302653 / math.sqrt(3))
    )
    assert interval([9.0, 10.0, 11.0], resolution=0.1).high == pytest.approx(found.high * 1.1)
    assert interval([5.0]) == Interval(5.0, 0.0, math.inf), "one seed says nothing of the spread"
    assert math.isnan(interval([]).mean)


def test_pairs_are_told_apart_though_seeds_differ_more_than_candidates():
    ones, others = [10.0, 20.0, 30.0, 40.0], [9.0, 18.1, 26.9, 36.0]
    compared = confidence.ratio(ones, others)
    assert compared.mean == pytest.approx(1.111, abs=0.005)
    assert told_apart(compared)
    assert not told_apart(confidence.ratio(ones, others, resolution=0.2)), "closer than the searches were"
    assert not told_apart(confidence.ratio([10.0, 9.0, 11.0], [9.5, 10.0, 10.0]))
    assert confidence.ratio([1.0, 2.0], [0.0, 1.0]).high == math.inf
    with pytest.raises(PlanError, match="not pairs"):
        confidence.ratio([1.0], [1.0, 2.0])


def test_cost_is_gpu_hours_over_good_tokens():
    # 16 x 4.5 USD an hour are 0.02 USD a second, for 5,000 tokens
    assert usd_per_million_tokens(gpus=16, usd_a_gpu_hour=4.5, good_tokens_per_s=5_000) == pytest.approx(4.0)
    assert usd_per_million_tokens(gpus=16, usd_a_gpu_hour=4.5, good_tokens_per_s=0) == math.inf
    with pytest.raises(PlanError):
        usd_per_million_tokens(gpus=1, usd_a_gpu_hour=-1, good_tokens_per_s=1)


# -- arithmetic ------------------------------------------------------------------------------------------------------------


def test_demand_is_what_one_works_out_by_hand():
    demand = Demand(((1_000, 1_000, 100), (3_000, 2_000, 300)), 3_300)
    assert demand.answer_tokens == 200
    assert demand.uncached_tokens == 1_500
    # long answers are decoded for longer: (1000 + 50 + 256) x 100 and (3000 + 150 + 256) x 300, over 400
    assert demand.held_tokens == pytest.approx((1_306 * 100 + 3_406 * 300) / 400)
    assert demand.prompt_at(0.5) == (1_000, 1_000)
    assert demand.prompt_at(0.9) == (3_000, 2_000)
    shared = demand_of(asked("5120", prefix_share=0.5).workload)
    assert shared.uncached_tokens == 2_560


def test_full_steps_of_long_prompts_take_as_long_as_the_engine_says():
    question = asked("32768")
    engine = question.engine(1, "auto", 32_768, 8_192)
    demand = demand_of(question.workload)
    assert demand.prefills_s(engine, 8_192) == pytest.approx(prefill_s(engine, 32_768, 32_768, 8_192), rel=0.01)
    half = prefill_s(engine, 32_768, 16_384, 8_192)
    assert half < prefill_s(engine, 32_768, 32_768, 8_192)
    assert half > prefill_s(engine, 16_384, 16_384, 8_192), "the half that is cached is attended to"


def test_a_larger_batch_within_the_slo_is_not_one_more():
    question = asked()
    demand, engine = demand_of(question.workload), question.engine(1, "auto", 4_000)
    batch = demand.batch_within(engine, 0.02, 1_000)
    assert 0 < batch < 1_000
    assert demand.decode_step_s(engine, batch) <= 0.02 < demand.decode_step_s(engine, batch + 1)
    assert demand.batch_within(engine, 0.001, 1_000) == 0


def test_waiting_is_what_queueing_theory_says():
    # One server, exponential waits of half the mean: load x exp(-2 (1 - load) slack / service) is the share that waits longer.
    rate = rate_within_wait(1, 2.0, 3.0, 0.1)
    load = rate * 2.0
    assert load * math.exp(-2 * (1 - load) * 3.0 / 2.0) == pytest.approx(0.1)
    assert rate_within_wait(8, 2.0, 3.0, 0.1) > 8 * rate, "servers that share a queue help each other out"
    assert rate_within_wait(4, 2.0, 300.0, 0.1) == pytest.approx(2.0, rel=0.01), "who may wait for ever can fill them"


def test_every_split_uses_what_gpus_there_are_and_none_is_beaten_by_one_more_prefill_worker():
    question = asked(gpus=7)
    found = of_kind(question)
    assert {each.family for each in found} == {(p, d) for p in (1, 2, 4) for d in (1, 2, 4) if p + d <= 7}
    assert len({(each.family, each.place) for each in found}) == len(found)
    for each in found:
        assert each.arrangement.gpus + each.idle_gpus == 7
        assert each.idle_gpus < min(each.prefill_tp, each.decode_tp)
    assert [each.expected_per_s for each in found] == sorted((each.expected_per_s for each in found), reverse=True)


def test_more_prefill_workers_raise_the_prefill_bound_and_lower_those_of_decoding():
    splits = {each.arrangement.prefill: each.limits for each in of_kind(asked()) if each.family == (1, 1)}
    assert splits[2][Part.PREFILL] == pytest.approx(2 * splits[1][Part.PREFILL])
    assert splits[1][Part.KV] == pytest.approx(3 * splits[3][Part.KV])
    assert splits[1][Part.BANDWIDTH] == pytest.approx(3 * splits[3][Part.BANDWIDTH])
    slow = {each.arrangement.prefill: each.limits for each in of_kind(asked(), Kind.TCP) if each.family == (1, 1)}
    assert slow[2][Part.LINK] < splits[2][Part.LINK] / 10


def test_long_prompts_want_prefill_workers_and_long_answers_decode_workers():
    one_size = {"prefill_tp": (2,), "decode_tp": (2,), "slos": Slos(4.0, 0.025)}
    large = {"shape": shape_of("llama-3.3-70b"), "gpu": gpu("h200"), "gpus": 16, "weight_dtype": "fp8", **one_size}
    splits = [of_kind(asked(isl, osl, **large))[0].arrangement.prefill for isl, osl in (("12000", "4"), ("700", "400"))]
    assert splits[0] == 7
    assert splits[1] <= 4


def test_the_cache_tier_belongs_to_the_prefill_workers_and_halves_the_kv():
    plain = {each.arrangement.prefill: each for each in of_kind(asked()) if each.family == (1, 1)}
    cached = {each.arrangement.prefill: each for each in of_kind(asked(), Kind.NIXL_CACHE_FP8) if each.family == (1, 1)}
    tier = cached[2].arrangement.shared_cache
    assert tier is not None
    assert tier.capacity_tokens == int(2 * 128e9 / 65_536), "Llama 3.1 8B in FP8: 32 layers x 2 x 8 heads x 128"
    assert plain[2].arrangement.shared_cache is None
    assert cached[2].limits[Part.KV] > 1.5 * plain[2].limits[Part.KV]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"slos": Slos(0.01, 0.045)},
            r"TTFT SLO 0\.01 s: the fastest idle worker \(TP 4\) needs 0\.\d\d s for .* \(4,000 tokens\)",
        ),
        (
            {"slos": Slos(1.0, 0.002)},
            r"ITL SLO 2 ms: the fastest worker \(TP 4\) takes [\d.]+ ms a token .*16\.1 GB of weights",
        ),
    ],
)
def test_slos_that_no_worker_can_meet_are_refused_with_the_bound_and_by_how_much(changed, said):
    with pytest.raises(PlanError, match=said) as caught:
        study(asked(**changed), effort=SMALL, runner=HERE)
    assert str(caught.value).count("%) too long") == 5
    assert len(str(caught.value).splitlines()) == 6, "one line a kind"


def test_a_model_that_does_not_fit_is_refused_with_what_each_size_lacks():
    with pytest.raises(PlanError) as caught:
        study(asked(shape=shape_of("llama-3.3-70b"), gpu=gpu("l4")), effort=SMALL, runner=HERE)
    text = str(caught.value)
    assert "141.1 GB of weights" in text
    assert "4 x l4 are 81.6 GB" in text
    assert "TP 8 is more than the 4 GPUs" in text
    with pytest.raises(PlanError, match=r"does not hold the longest request of 900,020 tokens"):
        study(asked("900000", gpus=1), effort=SMALL, runner=HERE)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"gpus": 0}, "GPUs: at least 1"),
        ({"gpus": 5_000}, "GPUs: at most 4096"),
        ({"slos": Slos(0, 1)}, "TTFT SLO: above 0"),
        ({"slos": Slos(1, math.nan)}, "ITL SLO: above 0"),
        ({"share": 1.5}, "share of good requests"),
        ({"rate_per_s": 0.0}, "rate: more than 0"),
        ({"enough": -1.0}, "not worth it"),
        ({"prefill_tp": (0,)}, "TP of prefill workers"),
        ({"usd_a_gpu_hour": -1.0}, "price of a GPU-hour"),
    ],
)
def test_a_question_that_makes_no_sense_is_refused_with_the_value(changed, said):
    with pytest.raises(PlanError, match=said):
        asked(**changed)


def test_assumptions_that_make_no_sense_are_refused():
    for wrong in ({"tp_efficiency": 1.2}, {"max_num_seqs": 0}, {"cache_gb_a_gpu": 0.0}):
        with pytest.raises(PlanError):
            Assumptions(**wrong)
    for wrong in ({"seeds": 1}, {"requests": 3}):
        with pytest.raises(PlanError):
            Effort(**wrong)


# -- simulation ------------------------------------------------------------------------------------------------------------


def test_what_is_simulated_stays_below_what_arithmetic_allows():
    question = asked(gpus=2, prefill_tp=(1,), decode_tp=(1,))
    (candidate,) = of_kind(question)
    stretch = Stretch(warm_up_s=3, counted_s=8, cool_down_s=1)
    task = Search(question=question, candidate=candidate, stretch=stretch, seed=0, guess_per_s=5, resolution=0.1, step=1.4)
    found = search(task)
    assert 0.4 * candidate.bound_per_s < found.rate_per_s <= candidate.hard_bound_per_s / question.share
    assert search(pickle.loads(pickle.dumps(task))) == found, "another process finds the same"


def test_results_do_not_depend_on_how_many_simulations_run_at_once():
    question = asked("8000", "4", gpus=2)
    alone = study(question, kinds=(Kind.NIXL,), effort=SMALL, runner=HERE)
    with ThreadPoolExecutor(3) as threads:
        together = study(question, kinds=(Kind.NIXL,), effort=SMALL, runner=Runner(threads))
    assert alone.best == together.best
    assert alone.simulations == together.simulations


def test_at_a_rate_that_was_asked_for_times_and_cost_are_those_of_that_rate():
    question = asked("8000", "4", gpus=2, rate_per_s=1.0, usd_a_gpu_hour=3.6)
    best = study(question, kinds=(Kind.NIXL,), effort=SMALL, runner=HERE).best[0]
    assert best.finalist is not None
    assert best.finalist.rate_per_s.mean > 2
    assert {seen.rate_per_s for seen in best.seen} == {1.0}
    assert all(seen.good == 1.0 for seen in best.seen), "far below the highest"
    # 2 GPUs x 3.6 USD an hour are 0.002 USD a second, for 4 tokens: 500 USD a million
    assert best.usd_per_million is not None
    assert best.usd_per_million.mean == pytest.approx(500, rel=1e-6)


# -- the verdict -----------------------------------------------------------------------------------------------------------


def answered(chunked: tuple[float, ...] | None, nixl: tuple[float, ...] | None, **changed) -> Answer:
    """An answer as if candidates had these rates, seed by seed; None: they can do none."""
    question = asked(**changed)

    def best(kind: Kind, rates: tuple[float, ...] | None) -> Best:
        if rates is None:
            return Best(kind=kind, finalist=None, why_none="TTFT SLO 1 s: too long")
        finalist = Finalist(candidate=of_kind(question, kind)[0], rates_per_s=rates, rate_per_s=interval(rates))
        return Best(kind=kind, finalist=finalist)

    return Answer(
        question=question,
        effort=replace(SMALL, seeds=3, resolution=0.01),
        stretch=Stretch(warm_up_s=1, counted_s=1, cool_down_s=1),
        demand=demand_of(question.workload),
        best=(best(Kind.CHUNKED, chunked), best(Kind.NIXL, nixl)),
        considered=2,
        simulations=6,
    )


@pytest.mark.parametrize(
    ("chunked", "nixl", "choice", "said"),
    [
        ((10.0, 11.0, 9.0), (15.0, 16.4, 13.6), Choice.DISAGGREGATE, "Disaggregate: NIXL"),
        ((10.0, 11.0, 9.0), (10.1, 11.0, 9.0), Choice.TOGETHER, "the two cannot be told apart"),
        ((10.0, 11.0, 9.0), (10.5, 11.5, 9.45), Choice.TOGETHER, "Chunked prefill is enough"),
        ((10.0, 11.0, 9.0), (9.0, 14.0, 11.0), Choice.UNSURE, "the 1.10 from which on it would be worth it lies within"),
        (None, (1.0, 1.0, 1.0), Choice.DISAGGREGATE, "TTFT SLO 1 s: too long"),
        ((1.0, 1.0, 1.0), (0.0, 0.0, 0.0), Choice.TOGETHER, "NIXL does not keep 90% of the requests within the SLOs"),
        ((0.0, 0.0, 0.0), (0.0, 0.0, 0.0), Choice.UNSURE, "No arrangement of 4 GPUs"),
    ],
)
def test_whether_to_disaggregate_follows_from_the_gain_and_from_how_sure_it_is(chunked, nixl, choice, said):
    found = verdict(answered(chunked, nixl))
    assert found is not None
    assert found.choice is choice
    assert said in found.text


@pytest.mark.parametrize(
    ("chunked", "nixl"), [((900.0, 910.0, 890.0), (10.0, 11.0, 9.0)), ((5.0, 5.1, 4.9), (900.0, 910.0, 890.0))]
)
def test_there_is_no_verdict_on_a_rate_that_cannot_last(chunked, nixl):
    answer = answered(chunked, nixl)
    found = verdict(answer)
    assert found is not None
    assert (found.choice, found.gain) == (Choice.UNSURE, None)
    kind = Kind.CHUNKED if chunked[0] > 100 else Kind.NIXL
    bound = answer.of(kind).finalist.candidate.hard_bound_per_s
    assert found.text.startswith(f"Cannot be told: 900 requests/s of {kind.value} (")
    assert f"cannot last, its bound is {bound:.3g}; the simulation was too short" in found.text
    (note,) = [line for line in ratio_report.notes(answer) if "cannot last" in line]
    assert note.startswith(f"{kind.value}: more than {bound:.3g} requests/s cannot last: the simulation was too short")


def test_where_a_trace_ends_before_the_simulation_does_it_is_said_and_a_longer_one_is_asked_for():
    trace = tuple(Request(float(number), 4_000, 20, ()) for number in range(100))
    short = TraceWorkload(path=Path("trace.jsonl"), trace=trace)

    def on(rates: tuple[float, ...], duration_s: float) -> Answer:
        answer = answered((5.0, 5.0, 5.0), rates)
        stretch = Stretch(warm_up_s=1, counted_s=duration_s - 2, cool_down_s=1)
        return replace(answer, question=replace(answer.question, workload=short), stretch=stretch)

    lines = ratio_report.notes(on((10.0, 11.0, 9.0), 25.0))
    assert [line for line in lines if "the trace ends" in line] == [
        "chunked prefill: at 5 requests/s the trace ends after 20 s of the 25 s that are to be simulated: the rate that lasts "
        "may be lower. Give a longer trace.",
        "NIXL: at 10 requests/s the trace ends after 10 s of the 25 s that are to be simulated: the rate that lasts "
        "may be lower. Give a longer trace.",
    ]
    assert not [line for line in ratio_report.notes(on((10.0, 11.0, 9.0), 9.0)) if "the trace ends" in line]
    assert not [line for line in ratio_report.notes(on((0.0, 0.0, 0.0), 9.0)) if "the trace ends" in line]
    assert "over 3 seeds of a trace that ends before the simulation does" in verdict(on((10.0, 11.0, 9.0), 25.0)).text
    assert "of a trace" not in verdict(on((10.0, 11.0, 9.0), 9.0)).text
    found = verdict(on((900.0, 910.0, 890.0), 25.0))
    assert found is not None
    assert found.text.endswith("; give a longer trace.")


def test_assumptions_name_the_cache_tier_where_there_is_a_row_of_it():
    answer = answered((10.0, 11.0, 9.0), (15.0, 16.4, 13.6), assume=Assumptions(cache_gb_a_gpu=64))
    assert "LMCache" not in ratio_report.assumptions(answer)
    cached = replace(answer, best=(*answer.best, Best(kind=Kind.NIXL_CACHE_FP8, finalist=None, why_none="none")))
    assert "USD a GPU-hour; LMCache 64 GB and 25 GB/s a GPU. " in ratio_report.assumptions(cached)


def test_what_gain_is_worth_it_is_the_askers_to_say():
    rates = (10.0, 11.0, 9.0), (12.0, 13.2, 10.8)
    assert verdict(answered(*rates)).choice is Choice.DISAGGREGATE
    assert verdict(answered(*rates, enough=0.5)).choice is Choice.TOGETHER
    one_sided = answered(*rates)
    assert verdict(replace(one_sided, best=one_sided.best[:1])) is None


def test_sensitivity_changes_one_efficiency_at_a_time_and_never_beyond_the_peak():
    found = list(robust.changes(Assumptions(prefill_efficiency=0.5, decode_efficiency=0.9)))
    assert [(each.prefill_efficiency, each.decode_efficiency) for _, each in found] == [
        (0.4, 0.9),
        (0.5, pytest.approx(0.72)),
        (0.625, 0.9),
        (0.5, 1.0),
    ]


def test_under_other_assumptions_the_verdict_is_asked_for_again_or_it_is_said_that_none_can_do(monkeypatch):
    asked_for = []

    def studied(question, *, kinds, effort, runner, progress):
        asked_for.append((question.assume.prefill_efficiency, question.assume.decode_efficiency))
        if question.assume.decode_efficiency < 0.5:
            raise PlanError("too slow")
        return answered((10.0, 11.0, 9.0), (15.0, 16.4, 13.6))

    monkeypatch.setattr(robust, "study", studied)
    found = robust.robust(asked(), SMALL, runner=HERE)
    assert asked_for == [(pytest.approx(0.36), 0.6), (0.45, pytest.approx(0.48)), (0.5625, 0.6), (0.45, pytest.approx(0.75))]
    assert [each.verdict.choice if each.verdict else each.why_none for each in found] == [
        Choice.DISAGGREGATE,
        "too slow",
        Choice.DISAGGREGATE,
        Choice.DISAGGREGATE,
    ]
    lines = ratio_report.robust_lines(found)
    assert lines[1] == "decode slower, at 48% of the bandwidth: too slow"


def test_programs_get_a_document_without_numbers_that_are_none():
    answer = answered((10.0, 11.0, 9.0), None)
    document = ratio_report.document(answer, verdict(answer), ())
    again = msgspec.json.decode(msgspec.json.encode(document))
    assert again["question"]["gpus"] == 4
    assert again["arrangements"][0]["rate_per_s"]["mean"] == 10
    assert again["arrangements"][0]["used"] is None
    assert again["arrangements"][1]["why_none"] == "TTFT SLO 1 s: too long"
    assert again["verdict"]["choice"] == "do not disaggregate"


# -- the command -----------------------------------------------------------------------------------------------------------

BASE = ("plan", "ratio", "--model", "llama-3.1-8b", "--gpu", "h100", "--gpus", "2", "--processes", "1")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "Give --isl and --osl, or --trace"),
        (("--isl", "100"), "Give --isl and --osl, or --trace"),
        (("--isl", "wat:1", "--osl", "5"), "--isl: 'wat:1': there is no distribution 'wat'"),
        (("--isl", "100", "--osl", "0"), "--osl: '0': the length: whole tokens from 1"),
        (("--trace", "/nowhere.jsonl"), "/nowhere.jsonl: No such file"),
        (("--trace", "/nowhere.jsonl", "--isl", "5"), "leave out --isl"),
        (("--isl", "100", "--osl", "5", "--arrangement", "magic"), "the arrangement 'magic' is not known; known are chunked"),
        (("--isl", "100", "--osl", "5", "--link", "string"), "the link 'string' is not known"),
        (("--isl", "100", "--osl", "5", "--picture", "a.gif"), "a.gif: the name of a picture ends with .svg"),
        (("--isl", "100", "--osl", "5", "--processes", "0"), "processes: from 1 to 256"),
        (("--isl", "100", "--osl", "5", "--seeds", "1"), "seeds: from 2"),
        (("--isl", "100", "--osl", "5", "--prefix-share", "1.5"), "prefix share: from 0 to 1"),
    ],
)
def test_the_command_says_what_is_wrong_and_fails(arguments, said):
    found = CliRunner().invoke(app, [*BASE, *arguments])
    assert found.exit_code == 1
    assert said in found.stderr
    assert not found.stdout


def trace_file(path: Path, count: int, blocks: int = 2) -> str:
    """A request a second, of so many blocks of 512 tokens, and an answer of 50."""
    lines = [
        {
            "timestamp": 1000 * number,
            "input_length": 512 * blocks,
            "output_length": 50,
            "hash_ids": list(range(blocks * number, blocks * (number + 1))),
        }
        for number in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_a_trace_that_is_too_short_to_say_anything_is_refused(tmp_path):
    path = trace_file(tmp_path / "short.jsonl", 60)
    found = CliRunner().invoke(app, [*BASE, "--trace", path, "--quick"])
    assert found.exit_code == 1
    assert found.stderr == f"baton: {path}: a trace of at least 100 requests is needed, there are 60\n"
    assert not found.stdout


SIMPLE = (
    "--arrangement",
    "chunked",
    "--arrangement",
    "nixl",
    "--quick",
    "--seeds",
    "2",
    "--prefill-tp",
    "1",
    "--decode-tp",
    "1",
)


def test_of_a_short_trace_there_is_no_verdict_but_a_note_that_it_ended(tmp_path):
    found = CliRunner().invoke(app, [*BASE, "--trace", trace_file(tmp_path / "burst.jsonl", 100, 8), *SIMPLE])
    assert found.exit_code == 0, found.stderr
    printed = found.stdout.replace("\n  ", " ")
    assert "requests/s the trace ends after " in printed
    assert "Cannot be told: " in printed
    assert "cannot last, its bound is " in printed
    assert "give a longer trace." in printed
    assert "is enough" not in printed


def test_a_trace_whose_requests_are_all_served_in_time_at_once_is_too_short_for_a_rate(tmp_path):
    path = trace_file(tmp_path / "small.jsonl", 100, 1)
    found = CliRunner().invoke(app, [*BASE, "--trace", path, *SIMPLE])
    assert found.exit_code == 1
    assert found.stderr.startswith(f"baton: {path}: at ")
    assert found.stderr.endswith("s are to be simulated: a longer trace is needed\n")


def test_a_model_whose_layers_cannot_be_counted_is_planned_with_the_number_that_is_given(tmp_path):
    config = {**shape_of("llama-3.1-8b").config, "layer_types": ["mamba"] * 16 + ["full_attention"] * 16}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    asked_for = ("--model", str(path), "--isl", "100", "--osl", "5", "--arrangement", "nixl", "--itl-slo", "0.0001")
    found = CliRunner().invoke(app, [*BASE, *asked_for])
    assert "give the number of parameters" in found.stderr
    found = CliRunner().invoke(app, [*BASE, *asked_for, "--parameters", "30e9"])
    assert "it must read 60.0 GB of weights a step" in found.stderr
    found = CliRunner().invoke(app, [*BASE, *asked_for, "--parameters", "30e9", "--active-parameters", "40e9"])
    assert "make no sense" in found.stderr


def test_the_command_prints_json_for_programs():
    small = ("--isl", "8000", "--osl", "4", "--arrangement", "nixl", "--quick", "--seeds", "2", "--prefill-tp", "1")
    found = CliRunner().invoke(app, [*BASE, *small, "--json"])
    assert found.exit_code == 0, found.stderr
    document = msgspec.json.decode(found.stdout)
    (arrangement,) = document["arrangements"]
    assert arrangement["split"]["text"] == "1 x TP1 : 1 x TP1"
    assert len(arrangement["rates_per_s_by_seed"]) == document["effort"]["seeds"] == 2
    assert arrangement["rate_per_s"]["mean"] == pytest.approx(sum(arrangement["rates_per_s_by_seed"]) / 2)
    assert arrangement["limits_per_s"]["prefill compute"] > arrangement["rate_per_s"]["mean"] * 0.9
    assert arrangement["seen"]["ttft_s"]["p50"] <= arrangement["seen"]["ttft_s"]["p90"] <= 2.5
    assert document["verdict"] is None, "there is nothing to compare with"
