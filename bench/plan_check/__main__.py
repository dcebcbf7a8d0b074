"""``python -m bench.plan_check``: predict every published number, write results.json and the picture, print the table."""

from __future__ import annotations

import json
import time
from pathlib import Path

from bench.plan_check.check import DEFAULT, TUNED, Case, cases, predicted_a_s, spread
from extproc.pictures import BLUE, GREY, ORANGE, check, picture

RESULTS = Path(__file__).with_name("results.json")
PICTURE = Path(__file__).parents[2] / "docs" / "plan-check.svg"
_SAY_EVERY_S = 2.0


def table(results: list[dict[str, object]]) -> str:
    """A row for each model, GPU and parallelism, in Markdown: predicted over measured."""
    lines = [
        "| measured on | numbers | lowest, middle, highest with the defaults (45 %, 60 %) | with 60 % and 90 % |",
        "|---|---|---|---|",
    ]
    workers = list(dict.fromkeys((each["model"], each["gpu"], each["tensor_parallel"]) for each in results))
    groups = [
        (f"{model}, {tp} x {gpu}", [each for each in results if (each["model"], each["gpu"], each["tensor_parallel"]) == key])
        for key in workers
        for model, gpu, tp in [key]
    ]
    for name, group in [*groups, ("all", results)]:
        texts = []
        for field in ("default_a_s", "tuned_a_s"):
            low, middle, high = spread([float(str(each[field])) / float(str(each["measured_a_s"])) for each in group])
            texts.append(f"{low:.2f}, {middle:.2f}, {high:.2f}")
        lines.append(f"| {name} | {len(group)} | {texts[0]} | {texts[1]} |")
    return "\n".join(lines)


def draw(results: list[dict[str, object]], path: Path) -> None:
    """Predicted over measured."""
    with picture(path, width_in=6.5, height_in=4.6) as (_, (axes,)):
        measured = [float(str(each["measured_a_s"])) for each in results]
        ends = [min(measured) / 1.5, max(measured) * 1.5]
        axes.plot(ends, ends, color=GREY, linewidth=1, label="as measured")
        axes.fill_between(ends, [end / 1.2 for end in ends], [end * 1.2 for end in ends], color=GREY, alpha=0.15, linewidth=0)
        for field, label, colour, mark in (
            ("default_a_s", "defaults: 45 % and 60 %", ORANGE, "o"),
            ("tuned_a_s", "60 % and 90 %", BLUE, "s"),
        ):
            axes.scatter(measured, [float(str(each[field])) for each in results], color=colour, marker=mark, s=16, label=label)
        axes.set_xscale("log")
        axes.set_yscale("log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: f"{value:,.10g}")
        axes.set_xlabel("measured by NVIDIA, output tokens/s (TensorRT-LLM 1.0, FP8)")
        axes.set_ylabel("predicted, output tokens/s")
        axes.set_title("Highest throughput of one worker: grey is within 20 %")
        axes.legend(loc="upper left")


def predict(case: Case) -> dict[str, object]:
    """One number, as it stands in results.json."""
    return {
        **case._asdict(),
        "default_a_s": round(predicted_a_s(case, DEFAULT), 1),
        "tuned_a_s": round(predicted_a_s(case, TUNED), 1),
    }


def main() -> None:
    """Two minutes of one core."""
    check(PICTURE)
    every = list(cases())
    print(f"predicting {len(every)} published throughputs, twice each")  # noqa: T201
    results, said_s = [], time.monotonic()
    for number, case in enumerate(every, start=1):
        results.append(predict(case))
        if time.monotonic() - said_s >= _SAY_EVERY_S:
            print(f"{number} of {len(every)}", flush=True)  # noqa: T201
            said_s = time.monotonic()
    RESULTS.write_text("[\n" + ",\n".join(f" {json.dumps(each)}" for each in results) + "\n]\n", encoding="utf-8")
    draw(results, PICTURE)
    print(f"wrote {RESULTS} and {PICTURE}\n\n{table(results)}")  # noqa: T201


if __name__ == "__main__":
    main()
