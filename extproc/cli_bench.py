"""``baton bench``: an open-loop load on any OpenAI-compatible address, and how well it was served."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import msgspec
import typer
from rich.console import Console

from workers.goodput import ITL_SLO_S, TTFT_SLO_S

if TYPE_CHECKING:
    from extproc.loadgen.account import Report
    from extproc.loadgen.run import Progress

_FAILED = 3
_GOODPUT_MISSED = 4
_INTERRUPTED = 130
"""Exit statuses, beside 1 for what cannot begin."""

_ROUNDING = 1e-6
"""0.29 of 100 is a little less than 29."""
_TELL_EVERY_S = 10.0
"""Where nobody watches a terminal."""


def register(app: typer.Typer) -> None:
    """Add the command to ``baton``."""
    app.command(
        "bench",
        epilog="Examples:  baton bench http://127.0.0.1:8000 --rate 2 --duration 60  ·  "
        "baton bench http://gateway --stages 1:30,1-20:120 --isl lognormal:mean=4000,cv=1 --osl 300 --picture run.svg  ·  "
        "baton bench http://gateway --trace trace.jsonl.gz --requests 500 --rate 4 --vary x-tenant=gold:1,bronze:4 --json  ·  "
        "baton bench https://gateway --api-key-env KEY --requests 200 --require-goodput 0.95  ·  "
        "Exit status: 0, or 1: it could not begin, 3: requests failed, 4: goodput was missed, 130: interrupted.",
    )(bench)


def bench(
    address: Annotated[str, typer.Argument(help="http://host:port of Envoy, an engine or any server of the API.")],
    api: Annotated[str, typer.Option(help="chat or completions.")] = "chat",
    model: Annotated[str | None, typer.Option(help="Without it: the one model that is there.")] = None,
    rate: Annotated[float | None, typer.Option(help="Requests a second, 1 without it; scales a trace.")] = None,
    duration: Annotated[
        float | None, typer.Option(help="Seconds in which requests are sent; 30 without it and without --requests.")
    ] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="So many at most.")] = None,
    stages: Annotated[
        str | None,
        typer.Option(
            help="RATE:SECONDS or RATE-RATE:SECONDS (a ramp), with commas between, in place of --rate and --duration."
        ),
    ] = None,
    arrivals: Annotated[
        str, typer.Option(help="poisson, constant or gamma:VARIATION (of the gaps; above 1: bursts).")
    ] = "poisson",
    trace: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines, or gzipped: timestamp, input_length, output_length, hash_ids; prefixes are shared as told."
        ),
    ] = None,
    offset: Annotated[int, typer.Option(min=0, help="Requests of the trace to leave out at its start.")] = 0,
    isl: Annotated[
        str,
        typer.Option(
            help="Tokens of prompts: 512, uniform:100-900, lognormal:mean=4000,cv=0.8 or percentiles:p50=1000,p99=8000."
        ),
    ] = "512",
    osl: Annotated[str, typer.Option(help="Tokens of answers, likewise.")] = "128",
    prefix_share: Annotated[
        float, typer.Option(min=0, max=1, help="Of a prompt, what others of its group begin with, too.")
    ] = 0,
    prefix_groups: Annotated[int, typer.Option(min=1, help="So many different beginnings.")] = 64,
    header: Annotated[list[str] | None, typer.Option(help="name=value, of all requests; may come several times.")] = None,
    policy: Annotated[str | None, typer.Option(help="The policy to ask for: header x-baton-policy.")] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            help="name=value:weight,value:weight: drawn for each request, and reported apart; may come several times."
        ),
    ] = None,
    by_answer: Annotated[str | None, typer.Option(help="Header of the answers that the report is broken down by, too.")] = None,
    body: Annotated[str | None, typer.Option(help="JSON object: more fields of every request.")] = None,
    ignore_eos: Annotated[
        bool, typer.Option(help="Ask for answers of exactly the stated length; vLLM's field, which others may refuse.")
    ] = True,
    tokens_per_word: Annotated[
        float | None,
        typer.Option(min=1, help="Of the engine's tokenizer; without it, two short requests find out before the run."),
    ] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="File with the key.")] = None,
    api_key_env: Annotated[str | None, typer.Option(help="Name of the variable with the key.")] = None,
    ca_file: Annotated[Path | None, typer.Option(help="PEM: whom to trust, in place of the system's.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Trust any certificate.")] = False,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds for one request, to its end; then it has failed.")] = 600,
    max_in_flight: Annotated[
        int | None, typer.Option(min=1, help="With so many under way, the next is not sent, and counts as failed.")
    ] = None,
    fresh_connections: Annotated[bool, typer.Option("--fresh-connections", help="One for each request.")] = False,
    ttft_slo: Annotated[float, typer.Option(min=0, help="Seconds to the first token that count as good.")] = TTFT_SLO_S,
    itl_slo: Annotated[
        float, typer.Option(min=0, help="Seconds between tokens (p99 of a request) that count as good.")
    ] = ITL_SLO_S,
    require_goodput: Annotated[
        float | None, typer.Option(min=0, max=1, help="Exit with 4 where fewer of the requests are good.")
    ] = None,
    max_failed: Annotated[float, typer.Option(min=0, max=1, help="Exit with 3 where more of the requests fail.")] = 0,
    seed: Annotated[
        int, typer.Option(min=0, help="Of whatever is drawn. Another one also gives prompts that no cache knows.")
    ] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    save: Annotated[Path | None, typer.Option(help="Write each request as a line of JSON.")] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw latencies over time and their distributions: .svg or .png (extra: pictures).")
    ] = None,
) -> None:
    """Send requests at their own times, whatever becomes of those before them, and say how well they were served."""
    from extproc import pictures
    from extproc.loadgen import bench as run
    from extproc.loadgen import headers, report
    from extproc.loadgen.arrivals import parse_gaps, parse_stages
    from extproc.loadgen.picture import draw
    from extproc.loadgen.prompts import api_of, extra_fields
    from extproc.loadgen.target import Target, base_of
    from extproc.plan import lengths
    from extproc.plan.workload import Workload

    try:
        if picture is not None:
            pictures.check(picture)
        if save is not None and not save.absolute().parent.is_dir():
            raise ValueError(f"--save {save}: there is no such folder")
        load = run.Load(
            gaps=parse_gaps(arrivals),
            rate_per_s=rate,
            duration_s=duration,
            limit=requests,
            stages=None if stages is None else parse_stages(stages),
            trace=trace,
            offset=offset,
            workload=Workload(
                inputs=lengths.parse(isl, "--isl"),
                outputs=lengths.parse(osl, "--osl"),
                prefix_share=prefix_share,
                prefix_groups=prefix_groups,
            )
            if trace is None
            else None,
            seed=seed,
        )
        options = run.Options(
            target=Target(
                base=base_of(address),
                key=headers.key_headers(key_file=None if api_key_file is None else str(api_key_file), key_env=api_key_env),
                ca_file=ca_file,
                verify=not insecure,
            ),
            load=load,
            api=api_of(api),
            model=model,
            headers=dict(headers.parse_header(text) for text in header or ())
            | ({} if policy is None else {"x-baton-policy": policy}),
            drawn=[headers.parse_drawn(text) for text in vary or ()],
            answer_header=None if by_answer is None else by_answer.lower(),
            extra=extra_fields(body),
            ignore_eos=ignore_eos,
            tokens_per_word=tokens_per_word,
            timeout_s=timeout,
            max_in_flight=max_in_flight,
            keep_alive=not fresh_connections,
            ttft_slo_s=ttft_slo,
            itl_slo_s=itl_slo,
        )
        found, samples = run.bench(options, say=_say, progress=_Telling())
        if save is not None:
            with save.open("wb") as file:
                file.writelines(report.lines(samples))
            _say(f"wrote {save}")
        if picture is not None:
            draw(picture, found, samples)
            _say(f"wrote {picture}")
    except (ValueError, OSError) as error:
        _fail(str(error))
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        Console(width=max(Console().width, 110), highlight=False).print(report.shown(found))
    _leave(found, require_goodput, max_failed)


def _leave(found: Report, require_goodput: float | None, max_failed: float) -> None:
    """The exit status, with a sentence."""
    if found.interrupted:
        raise typer.Exit(_INTERRUPTED)
    every = found.all
    failed = every.requests - every.served
    if failed > max_failed * every.requests + _ROUNDING:
        _say(f"{failed} of {every.requests} requests were not served")
        raise typer.Exit(_FAILED)
    if require_goodput is not None and every.goodput < require_goodput:
        _say(f"goodput: {every.goodput:.1%} of the requests, {require_goodput:.1%} are wanted")
        raise typer.Exit(_GOODPUT_MISSED)


class _Telling:
    """A line that changes, or one from time to time where there is no terminal."""

    def __init__(self) -> None:
        self._said_s = 0.0

    def __call__(self, now: Progress) -> None:
        line = _line(now)
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[K{line}")
            sys.stderr.flush()
        elif now.at_s - self._said_s >= _TELL_EVERY_S:
            self._said_s = now.at_s
            _say(line)


def _line(now: Progress) -> str:
    counts = f"sent {now.sent} of {now.of}, {now.in_flight} in flight, {now.served} served, {now.failed} not served"
    return f"{now.at_s:6.0f} s  {counts}"


def _say(line: str) -> None:
    clear = "\r\x1b[K" if sys.stderr.isatty() else ""
    typer.echo(f"{clear}baton: {line}", err=True)


def _fail(message: str) -> NoReturn:
    _say(message)
    raise typer.Exit(1)
