"""``baton plan``: what hardware a workload needs, before any of it is bought. Reads options, prints what the parts work out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from extproc.plan import cli_ratio
from extproc.plan.errors import PlanError

if TYPE_CHECKING:
    from extproc.plan.kv import KvPlan
    from extproc.plan.roofline import Ridge, Roofline

_app = typer.Typer(help="KV sizes, rooflines, and how many workers of which role, before you buy.", no_args_is_help=True)

_JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
_ModelHelp = "A model of `baton plan kv --models`, or a config.json, or a folder with one."


def register(app: typer.Typer) -> None:
    """Add the commands to ``baton``."""
    cli_ratio.register(_app)
    app.add_typer(_app, name="plan")


def _show_models(wanted: bool) -> None:
    if not wanted:
        return
    from extproc.plan.kv import attention_of
    from extproc.plan.shapes import model_names, shape_of

    table = Table("model", "parameters", "active", "KV bytes a token", "attention", box=None, pad_edge=False)
    for name in model_names():
        shape = shape_of(name)
        table.add_row(
            name,
            _billions(shape.parameters),
            _billions(shape.active_parameters),
            f"{shape.kv_bytes_per_token():,.0f}",
            attention_of(name, shape.config)[0],
        )
    _print(table)
    raise typer.Exit


def _show_links(wanted: bool) -> None:
    if not wanted:
        return
    from extproc.plan.links import LINKS

    table = Table("link", "peak GB/s", "reached GB/s", "ports", "source", box=None, pad_edge=False)
    for each in LINKS.values():
        ports = "one a worker" if each.shared else "one a GPU"
        table.add_row(each.name, f"{each.peak_bytes_a_s / 1e9:g}", f"{each.bytes_a_s / 1e9:.3g}", ports, each.source)
    _print(table)
    raise typer.Exit


def _show_gpus(wanted: bool) -> None:
    if not wanted:
        return
    from extproc.plan.gpus import GPUS

    table = Table("GPU", "GB", "TB/s", "dense TFLOP/s", "USD an hour", "source", box=None, pad_edge=False)
    for each in GPUS.values():
        rates = ", ".join(f"{dtype} {rate / 1e12:,.5g}" for dtype, rate in each.dense_flops_a_s.items())
        numbers = (f"{each.memory_bytes / 1e9:g}", f"{each.memory_bytes_a_s / 1e12:g}", rates, f"{each.price_usd_a_hour:g}")
        table.add_row(each.name, *numbers, each.source)
    _print(table)
    typer.echo("Prices are assumptions: give your own where they matter.")
    raise typer.Exit


@_app.command(
    epilog="Examples:  baton plan kv --model llama-3.3-70b  ·  baton plan kv --model ./config.json --tokens 8192 "
    "--tokens 32768 --link ib-400 --link eth-25  ·  baton plan kv --model deepseek-v3 --gpus 8 --json"
)
def kv(
    model: Annotated[str, typer.Option("--model", "-m", help=_ModelHelp)],
    tokens: Annotated[
        list[int] | None, typer.Option(help="Length of a prompt. May come several times. Without it: 8192.")
    ] = None,
    kv_dtype: Annotated[
        list[str] | None,
        typer.Option(help="As vLLM's --kv-cache-dtype; auto: the model's own. May come several times. Without it: auto, fp8."),
    ] = None,
    link: Annotated[
        list[str] | None, typer.Option(help="A link of --links. May come several times. Without it: all of them.")
    ] = None,
    gpus: Annotated[int, typer.Option(help="GPUs of the worker that receives (tensor parallel); each has a port.")] = 1,
    json: _JsonOption = False,
    _models: Annotated[
        bool, typer.Option("--models", callback=_show_models, is_eager=True, help="Print the models that are known, and leave.")
    ] = False,
    _links: Annotated[
        bool, typer.Option("--links", callback=_show_links, is_eager=True, help="Print the links that are known, and leave.")
    ] = False,
) -> None:
    """How large a prompt's KV cache is, and how long it takes from a prefill to a decode worker."""
    from extproc.plan.kv import plan_kv
    from extproc.plan.links import LINKS
    from extproc.plan.links import link as link_of

    try:
        found = plan_kv(
            model,
            tokens=tokens or [8192],
            kv_dtypes=kv_dtype or ["auto", "fp8"],
            links=[link_of(name) for name in link] if link else list(LINKS.values()),
            gpus=gpus,
        )
    except PlanError as error:
        raise _fail(str(error)) from None
    if json:
        _print_json(found)
    else:
        _show_kv(found)


@_app.command(
    epilog="Examples:  baton plan roofline  ·  baton plan roofline --model llama-3.3-70b --gpu h100-sxm --weight-dtype fp8  ·  "
    "baton plan roofline --model ./config.json --gpu h200 --tensor-parallel 2 --picture roofline.svg"
)
def roofline(
    model: Annotated[str | None, typer.Option("--model", "-m", help=f"{_ModelHelp} Without it: ridge points only.")] = None,
    gpu: Annotated[
        str | None, typer.Option(help="A GPU of --gpus. Without it: h100-sxm, or all of them without --model.")
    ] = None,
    tensor_parallel: Annotated[
        int | None, typer.Option("--tensor-parallel", "--tp", help="GPUs of a worker. Without it: the fewest that will do.")
    ] = None,
    weight_dtype: Annotated[
        str, typer.Option(help="bf16, fp8, int8, fp4 or int4; auto: what the weights come in, by config.json.")
    ] = "auto",
    kv_dtype: Annotated[str, typer.Option(help="As vLLM's --kv-cache-dtype; auto: the model's own.")] = "auto",
    prompt: Annotated[
        list[int] | None, typer.Option(help="Tokens to prefill. May come several times. Without it: 128, 1024, 8192, 32768.")
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option(help="Sequences in a decode step. May come several times. Without it: 1, 8, 32, 128.")
    ] = None,
    context: Annotated[
        list[int] | None,
        typer.Option(help="Tokens that each of them has. May come several times. Without it: 1024, 8192, 32768."),
    ] = None,
    chunk_tokens: Annotated[int, typer.Option(help="vLLM's --max-num-batched-tokens.")] = 8192,
    prefill_efficiency: Annotated[float, typer.Option(help="Share of the dense peak FLOP/s that is reached.")] = 0.45,
    decode_efficiency: Annotated[float, typer.Option(help="Share of the memory's bandwidth that is reached.")] = 0.60,
    tp_efficiency: Annotated[
        float, typer.Option(help="Share of both that is left each time that the GPUs of a worker double.")
    ] = 0.87,
    step_overhead_ms: Annotated[float, typer.Option(help="Of each step: launching, scheduling.")] = 2.0,
    parameters: Annotated[
        float | None, typer.Option(help="Of the model, such as 52e9, where they cannot be counted from config.json.")
    ] = None,
    active_parameters: Annotated[
        float | None, typer.Option(help="Those that each token meets, of a model with experts.")
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw it, too: a file ending with .svg or .png.")] = None,
    json: _JsonOption = False,
    _gpus: Annotated[
        bool, typer.Option("--gpus", callback=_show_gpus, is_eager=True, help="Print the GPUs that are known, and leave.")
    ] = False,
) -> None:
    """Whether prefill and decode are limited by compute or by memory, and how fast they are."""
    from extproc.pictures import PictureError, check
    from extproc.plan.engines import engine, fewest_gpus
    from extproc.plan.gpus import GPUS
    from extproc.plan.gpus import gpu as gpu_of
    from extproc.plan.roofline import Assumed, ridges
    from extproc.plan.roofline import roofline as roofline_of
    from extproc.plan.roofline_picture import draw
    from extproc.plan.shapes import shape_of
    from extproc.routing.kv_size import own_dtype

    try:
        if picture is not None:
            check(picture)
        if model is None:
            if picture is not None:
                raise PlanError("--picture needs a --model")
            found = ridges([gpu_of(gpu)] if gpu else list(GPUS.values()))
            if json:
                _print_json(found)
            else:
                _show_ridges(found)
            return
        shape, each = shape_of(model, parameters=parameters, active_parameters=active_parameters), gpu_of(gpu or "h100-sxm")
        contexts = sorted(context or [1024, 8192, 32768])
        if contexts[0] < 1:
            raise PlanError(f"context tokens: at least 1, not {contexts[0]:,}")
        if tensor_parallel is None:
            tensor_parallel = fewest_gpus(
                shape, each, weight_dtype=weight_dtype, kv_dtype=kv_dtype, hold_tokens=max(*contexts, *(prompt or [1]))
            )
        assumed = Assumed(
            prefill_efficiency=prefill_efficiency,
            decode_efficiency=decode_efficiency,
            tp_efficiency=tp_efficiency,
            step_overhead_s=step_overhead_ms / 1e3,
        )
        worker = engine(
            shape,
            each,
            tensor_parallel=tensor_parallel,
            weight_dtype=weight_dtype,
            kv_dtype=kv_dtype,
            **msgspec.structs.asdict(assumed),
            step_tokens=chunk_tokens,
            context_tokens=contexts[len(contexts) // 2],
        )
        kv_name = own_dtype(shape.config) if kv_dtype == "auto" else kv_dtype
        plan = roofline_of(
            worker,
            each,
            worker=f"{shape.name}, {shape.weight_dtype(weight_dtype)} weights, {kv_name} KV, on {worker.gpus} x {each.name}",
            assumed=assumed,
            prompts=sorted(prompt or [128, 1024, 8192, 32768]),
            batches=sorted(batch or [1, 8, 32, 128]),
            contexts=contexts,
            chunk_tokens=chunk_tokens,
        )
        if json:
            _print_json(plan)
        else:
            _show_roofline(plan)
        if picture is not None:
            draw(plan, picture)
            typer.echo(f"wrote {picture}", err=True)
    except (PlanError, PictureError, OSError) as error:
        raise _fail(str(error)) from None


def _show_kv(found: KvPlan) -> None:
    typer.echo(f"{found.model}: {found.attention}\n")
    sizes = Table("tokens", "KV dtype", "bytes a token", "GB (10^9)", "GiB (2^30)", '"GB" (10^6 KiB)', box=None, pad_edge=False)
    for each in found.prompts:
        size = (f"{each.gb:.3g}", f"{each.gib:.3g}", f"{each.mixed_gb:.3g}")
        sizes.add_row(f"{each.tokens:,}", each.kv_dtype, f"{each.bytes_per_token:,.0f}", *size)
    _print(sizes)
    typer.echo("The last column mixes units of 1,000 and of 1,024, as many published tables do.\n")
    headings = [f"{each.tokens:,} {each.kv_dtype}" for each in found.prompts]
    times = Table("link", "GB/s", *headings, box=None, pad_edge=False)
    for number, first in enumerate(found.prompts[0].handoffs):
        moves = [_seconds(each.handoffs[number].move_s) for each in found.prompts]
        times.add_row(first.link, f"{_figures(first.bytes_a_s / 1e9)}", *moves)
    _print(times)
    overhead_ms = 1e3 * (found.prompts[0].handoffs[0].handoff_s - found.prompts[0].handoffs[0].move_s)
    typer.echo(
        f"The bytes alone, on a link without other traffic, to a worker of {_gpus_of(found.gpus)}. Add about "
        f"{overhead_ms:.0f} ms a handoff,\nand seconds for the first one between two engines. `baton plan kv --links` has the "
        "sources."
    )
    if any(each.moved_bytes > each.size_bytes for each in found.prompts):
        times_over = found.prompts[0].moved_bytes / found.prompts[0].size_bytes
        typer.echo(f"{times_over:.0f} GPUs of the worker need the same KV, and each gets its own copy.")
    if found.windows:
        typer.echo(
            "Layers with a window count so little only with vLLM's hybrid KV cache manager; without it they keep every token."
        )


def _show_ridges(found: list[Ridge]) -> None:
    table = Table("GPU", "dtype", "TFLOP/s, dense", "TB/s", "ridge, FLOP/byte", box=None, pad_edge=False)
    for each in found:
        rates = (f"{each.flops_a_s / 1e12:,.5g}", f"{each.memory_bytes_a_s / 1e12:g}", f"{each.flop_per_byte:,.0f}")
        table.add_row(each.gpu, each.dtype, *rates)
    _print(table)
    by_name = {(each.gpu, each.dtype): each.flop_per_byte for each in found}
    for (gpu, dtype), ridge in by_name.items():
        if gpu == "h100-sxm" and dtype == "bf16":
            fp8 = by_name[gpu, "fp8"]
            typer.echo(f"Some guides call the {ridge:.0f} of {gpu} its FP8 ridge point. It is BF16's; FP8's is {fp8:.0f}.")


def _show_roofline(found: Roofline) -> None:
    from extproc.plan.engines import SMALL_STEP_TOKENS

    assumed = found.assumed
    typer.echo(found.worker)
    typer.echo(
        f"{found.weight_bytes / 1e9:,.1f} GB of weights; {found.kv_bytes_per_token:,} bytes of KV a token, "
        f"room for {found.kv_tokens:,} tokens\n"
    )
    _show_ridges(found.ridges)
    typer.echo(
        f"Assumed to be reached: {assumed.prefill_efficiency:.0%} of the FLOP/s and {assumed.decode_efficiency:.0%} of the "
        f"bandwidth, so that the limits meet at {found.reached_flop_per_byte:,.0f} FLOP/byte.\n"
        f"{assumed.tp_efficiency:.0%} of both are left each time that the GPUs double; a step takes "
        f"{assumed.step_overhead_s * 1e3:g} ms and the time of {SMALL_STEP_TOKENS} prompt tokens more.\n"
    )
    columns = ("FLOP/byte", "limit", "time", "tokens/s")
    prefills = Table("prefill, tokens", *columns, "", box=None, pad_edge=False)
    decodes = Table("decode step, sequences", "tokens of each", *columns, "", box=None, pad_edge=False)
    for each in found.points:
        numbers = (_figures(each.flop_per_byte), each.bound, _seconds(each.time_s), f"{each.tokens_a_s:,.0f}")
        fits = "" if each.fits else "more than the KV cache holds"
        if each.what == "prefill":
            prefills.add_row(f"{each.context_tokens:,}", *numbers, fits)
        else:
            decodes.add_row(f"{each.batch:,}", f"{each.context_tokens:,}", *numbers, fits)
    _print(prefills)
    typer.echo(f"From {found.compute_bound_prefill_tokens:,} prompt tokens in a step on, compute is the limit.\n")
    _print(decodes)
    clash = found.clash
    typer.echo(
        f"\nA decode step of {clash.batch:,} sequences at {clash.context_tokens:,} tokens takes {_seconds(clash.alone_s)}; "
        f"with {clash.prefill_tokens:,} prompt tokens in the same step it takes {_seconds(clash.shared_s)}."
    )


def _seconds(time_s: float) -> str:
    return f"{_figures(time_s)} s" if time_s >= 1 else f"{_figures(time_s * 1e3)} ms"


def _figures(number: float) -> str:
    """Three of them, without an exponent."""
    return f"{float(f'{number:.3g}'):,.12g}"


def _billions(count: float) -> str:
    return f"{_figures(count / 1e9)}e9"


def _gpus_of(count: int) -> str:
    return "one GPU" if count == 1 else f"{count} GPUs"


def _print(table: Table) -> None:
    for column in table.columns:
        column.no_wrap = True
    console = Console(width=max(Console().width, 240), highlight=False)
    with console.capture() as captured:
        console.print(table)
    typer.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _print_json(found: object) -> None:
    typer.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())


def _fail(message: str) -> typer.Exit:
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"baton: {message}", markup=False)
    return typer.Exit(1)
