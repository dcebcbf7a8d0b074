"""``baton plan ratio``: options in, an answer out."""

from __future__ import annotations

import os
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from extproc.plan.engines import DECODE_EFFICIENCY, PREFILL_EFFICIENCY, STEP_OVERHEAD_S, TP_EFFICIENCY
from extproc.plan.errors import PlanError

if TYPE_CHECKING:
    from extproc.plan.candidates import Kind
    from extproc.plan.ratio import Effort
    from extproc.plan.workload import AnyWorkload

_LENGTHS = "TOKENS, uniform:LOW-HIGH, lognormal:mean=TOKENS,cv=RATIO[,max=TOKENS] or percentiles:p50=TOKENS,p90=TOKENS"
_SAY_EVERY_S = 2.0
_FEWEST_REQUESTS = 100
"""Of a trace: fewer are over before queues build up, and say nothing of a rate that lasts."""


def register(app: typer.Typer) -> None:
    """Add ``ratio`` to the commands of ``baton plan``."""
    app.command(
        epilog="Examples:  baton plan ratio --model llama-3.3-70b --gpu h200 --gpus 16 --isl 4096 --osl 512 --quick  ·  "
        "baton plan ratio --model llama-3.3-70b --weight-dtype fp8 --gpu h200 --gpus 64 --isl lognormal:mean=28000,cv=0.3 "
        "--osl 650 --prefix-share 0.4 --ttft-slo 2.5 --itl-slo 0.045 --picture ratio.svg  ·  "
        "baton plan ratio --model ./config.json --gpu h100 --gpus 8 --trace trace.jsonl.gz --rate 4 --json"
    )(ratio)


def ratio(
    model: Annotated[
        str, typer.Option("--model", "-m", help="A model of `baton plan kv --models`, or a config.json, or a folder with one.")
    ],
    gpu: Annotated[str, typer.Option(help="Kind of GPU; `baton plan roofline --gpus` names them.")],
    gpus: Annotated[int, typer.Option(help="How many there are.")],
    isl: Annotated[str | None, typer.Option(help=f"Length of prompts: {_LENGTHS}.")] = None,
    osl: Annotated[str | None, typer.Option(help="Length of answers, in the same words.")] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Instead of both: a trace, JSON lines of timestamp, input_length, output_length, hash_ids."),
    ] = None,
    prefix_share: Annotated[float, typer.Option(help="Of a prompt, what the requests of its group share; 0 to 1.")] = 0.0,
    prefix_groups: Annotated[int, typer.Option(help="Groups of requests that share a prefix.")] = 64,
    rate: Annotated[
        float | None,
        typer.Option(help="Requests a second at which times are shown. Without it: the highest of each arrangement."),
    ] = None,
    ttft_slo: Annotated[float, typer.Option(help="Seconds to the first token that count as good.")] = 2.5,
    itl_slo: Annotated[float, typer.Option(help="Seconds between tokens (p99 of a request) that count as good.")] = 0.045,
    share: Annotated[float, typer.Option(help="Of the requests, those that must be good.")] = 0.9,
    link: Annotated[
        str, typer.Option(help="What KV takes from worker to worker; `baton plan kv --links` names them.")
    ] = "ib-400",
    tcp_link: Annotated[str, typer.Option(help="What it takes in the row `TCP transfer`.")] = "tcp",
    weight_dtype: Annotated[str, typer.Option(help="bf16, fp8, int8, fp4 or int4; auto: what they come in.")] = "auto",
    kv_dtype: Annotated[str, typer.Option(help="As vLLM's --kv-cache-dtype; auto: the model's own.")] = "auto",
    prefill_tp: Annotated[
        list[int] | None, typer.Option(help="GPUs of a prefill worker. May come several times. Without it: 1, 2, 4, 8.")
    ] = None,
    decode_tp: Annotated[
        list[int] | None, typer.Option(help="The same of a decode worker, or one that does both. Without it: 1, 2, 4, 8.")
    ] = None,
    arrangement: Annotated[
        list[str] | None,
        typer.Option(help="Only these: colocated, chunked, tcp, nixl, nixl-cache-fp8. May come several times."),
    ] = None,
    enough: Annotated[float, typer.Option(help="A gain in goodput up to which it is not worth to disaggregate.")] = 0.10,
    price: Annotated[
        float | None, typer.Option(help="US dollars a GPU-hour. Without it: an assumption, see `baton plan roofline --gpus`.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Draws of the requests, at least 2.", show_default="5; --quick 3")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer candidates and requests; wider intervals.")] = False,
    all_splits: Annotated[
        bool, typer.Option("--all-splits", help="Simulate each split of the best TP sizes, not only those near the best.")
    ] = False,
    sensitivity: Annotated[
        bool, typer.Option("--sensitivity", help="Ask again with engines that are faster and slower than assumed.")
    ] = False,
    prefill_efficiency: Annotated[
        float, typer.Option(help="Share of the dense peak FLOP/s that is reached.")
    ] = PREFILL_EFFICIENCY,
    decode_efficiency: Annotated[
        float, typer.Option(help="Share of the memory's bandwidth that is reached.")
    ] = DECODE_EFFICIENCY,
    tp_efficiency: Annotated[float, typer.Option(help="What is left of both each time TP doubles.")] = TP_EFFICIENCY,
    step_overhead_ms: Annotated[float, typer.Option(help="Of each step: launching, scheduling.")] = STEP_OVERHEAD_S * 1e3,
    max_num_seqs: Annotated[int, typer.Option(help="vLLM's --max-num-seqs.")] = 256,
    chunk_tokens: Annotated[
        int, typer.Option(help="vLLM's --max-num-batched-tokens; chunked prefill is tried with smaller ones, too.")
    ] = 8192,
    cache_gb: Annotated[float, typer.Option(help="Host memory for LMCache, a GPU of prefill workers.")] = 128.0,
    parameters: Annotated[
        float | None, typer.Option(help="Of the model, such as 52e9, where they cannot be counted from config.json.")
    ] = None,
    active_parameters: Annotated[
        float | None, typer.Option(help="Those that each token meets, of a model with experts.")
    ] = None,
    processes: Annotated[int | None, typer.Option(help="So many simulations at once.", show_default="one a core")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw it, too: a file ending with .svg or .png.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """How many GPUs for prefill and for decode, with which TP, and whether to disaggregate at all. By simulation."""
    from extproc.pictures import PictureError, check
    from extproc.plan import ratio_report as report
    from extproc.plan.gpus import gpu as gpu_of
    from extproc.plan.links import link as link_of
    from extproc.plan.question import TENSOR_PARALLEL, Assumptions, Question
    from extproc.plan.ratio import study
    from extproc.plan.ratio_picture import draw
    from extproc.plan.robust import robust
    from extproc.plan.runs import runner
    from extproc.plan.shapes import shape_of
    from extproc.plan.simulate import Slos
    from extproc.plan.verdict import verdict

    try:
        if picture is not None:
            check(picture)
        question = Question(
            shape=shape_of(model, parameters=parameters, active_parameters=active_parameters),
            gpu=gpu_of(gpu),
            gpus=gpus,
            workload=_workload(isl, osl, trace, prefix_share, prefix_groups),
            slos=Slos(ttft_slo, itl_slo),
            link=link_of(link),
            tcp=link_of(tcp_link),
            weight_dtype=weight_dtype,
            kv_dtype=kv_dtype,
            share=share,
            rate_per_s=rate,
            prefill_tp=tuple(sorted(set(prefill_tp or TENSOR_PARALLEL))),
            decode_tp=tuple(sorted(set(decode_tp or TENSOR_PARALLEL))),
            usd_a_gpu_hour=price,
            enough=enough,
            assume=Assumptions(
                prefill_efficiency=prefill_efficiency,
                decode_efficiency=decode_efficiency,
                tp_efficiency=tp_efficiency,
                step_overhead_s=step_overhead_ms / 1e3,
                max_num_seqs=max_num_seqs,
                step_tokens=chunk_tokens,
                cache_gb_a_gpu=cache_gb,
            ),
        )
        effort, kinds = _effort(seeds, quick, all_splits), _kinds(arrangement)
        with runner(_processes(processes)) as runs:
            say = _Progress()
            answer = study(question, kinds=kinds, effort=effort, runner=runs, progress=say)
            changed = robust(question, _effort(None, True, False), runner=runs, progress=say) if sensitivity else ()
        if picture is not None:
            draw(answer, picture)
    except (PlanError, PictureError, OSError) as error:
        raise _fail(str(error)) from None
    judged = verdict(answer)
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(report.document(answer, judged, changed)), indent=2).decode())
    else:
        typer.echo(f"{report.headline(answer)}\n{report.work_done(answer)}\n")
        _print(report.rates_table(answer))
        typer.echo("\nat that rate, means over seeds:" if rate is None else f"\nat {rate:g} requests/s, means over seeds:")
        _print(report.times_table(answer))
        typer.echo()
        for line in report.notes(answer):
            _wrapped(line)
        if judged is not None:
            typer.echo()
            _wrapped(judged.text)
        for line in report.robust_lines(changed):
            _wrapped(line)
        typer.echo()
        _wrapped(report.assumptions(answer))
    if picture is not None:
        typer.echo(f"wrote {picture}", err=True)


def _workload(isl: str | None, osl: str | None, trace: Path | None, share: float, groups: int) -> AnyWorkload:
    from extproc.plan.lengths import parse
    from extproc.plan.workload import Workload, of_trace

    if trace is not None:
        if isl is not None or osl is not None or share:
            raise PlanError("--trace has lengths and prefixes of its own: leave out --isl, --osl and --prefix-share")
        found = of_trace(trace)
        if len(found.trace) < _FEWEST_REQUESTS:
            raise PlanError(f"{trace}: a trace of at least {_FEWEST_REQUESTS} requests is needed, there are {len(found.trace)}")
        return found
    if isl is None or osl is None:
        raise PlanError("what is asked? Give --isl and --osl, or --trace")
    return Workload(inputs=parse(isl, "--isl"), outputs=parse(osl, "--osl"), prefix_share=share, prefix_groups=groups)


def _effort(seeds: int | None, quick: bool, all_splits: bool) -> Effort:
    from dataclasses import replace

    from extproc.plan.ratio import QUICK, Effort

    effort = replace(QUICK if quick else Effort(), all_splits=all_splits)
    return effort if seeds is None else replace(effort, seeds=seeds)


def _kinds(names: list[str] | None) -> tuple[Kind, ...]:
    from extproc.plan.candidates import Kind
    from extproc.plan.errors import unknown

    words = {
        "colocated": Kind.COLOCATED,
        "chunked": Kind.CHUNKED,
        "tcp": Kind.TCP,
        "nixl": Kind.NIXL,
        "nixl-cache-fp8": Kind.NIXL_CACHE_FP8,
    }
    for name in names or ():
        if name.strip().lower() not in words:
            raise unknown("the arrangement", name, words)
    return tuple(words[name.strip().lower()] for name in names) if names else tuple(Kind)


def _processes(wanted: int | None) -> int:
    if wanted is not None and not 1 <= wanted <= 256:
        raise PlanError(f"processes: from 1 to 256, not {wanted}")
    return wanted or len(os.sched_getaffinity(0))


class _Progress:
    """Lines on standard error, not more often than one reads them."""

    def __init__(self) -> None:
        self._next_s = time.monotonic() + _SAY_EVERY_S

    def __call__(self, text: str) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + _SAY_EVERY_S
            typer.echo(f"simulated {text}", err=True)


def _wrapped(text: str) -> None:
    typer.echo(textwrap.fill(text, 118, subsequent_indent="  "))


def _print(table: Table) -> None:
    for column in table.columns:
        column.no_wrap = True
    console = Console(width=240, highlight=False)
    with console.capture() as captured:
        console.print(table)
    typer.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _fail(message: str) -> typer.Exit:
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"baton: {message}", markup=False)
    return typer.Exit(1)
