"""Draws panels of the fleet dashboard from a real run: ``python -m bench.dashboard_picture docs/images/dashboard-fleet.png``.

Real Envoy, filter and Prometheus; simulated engines under a load that rises above what two prefill workers can do. The queries
are those of the dashboard's own JSON. Takes four minutes; needs matplotlib (pip install matplotlib), as nothing else here does.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import sys
import time
from typing import Any

import aiohttp

from tests.cases.promql import DASHBOARDS, Prometheus, panels
from tests.cases.sims import SimStack
from tests.stack.test_prometheus import plain
from workers.sim.options import SimOptions

RUN_S = 200.0
RATES = (1.0, 10.0)
"""Requests a second, at the beginning and at the end."""
SHOWN = (
    "Goodput by policy",
    "What became of the SLO",
    "TTFT by policy",
    "Single gaps between tokens",
    "Load of the two roles",
    "Time in the queue",
    "How prompts are served",
    "KV that moves",
)
SETTINGS: dict[str, Any] = {
    "policies": [
        {
            "name": "chat",
            "match": {"headers": {"x-class": {"exact": "chat"}}},
            "slo": {"ttft_s": 1.5, "itl_s": 0.05},
        },
        {"name": "default", "slo": {"ttft_s": 5.0, "itl_s": 0.1}},
    ],
    "scrape": {"interval_s": 0.5},
    "observe": {"sample": 0.2},
}


async def ask(stack: SimStack, dice: random.Random) -> None:
    """One request of some length."""
    chat = dice.random() < 0.6
    words = dice.randint(150, 900) if chat else dice.randint(1500, 4500)
    body = {
        "model": "m",
        "prompt": " ".join(f"w{dice.randrange(5000)}" for _ in range(words)),
        "max_tokens": dice.randint(40, 160),
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    try:
        headers = {"x-class": "chat"} if chat else {}
        async with stack.http.post("/v1/completions", json=body, headers=headers) as response:
            await response.read()
    except aiohttp.ClientError as error:
        sys.stderr.write(f"{error!r}\n")


async def run() -> dict[str, Any]:
    """The panels' data: title -> (panel, [(labels, points)] for each query)."""
    options = SimOptions(served_model_name=("m",), speed=1.0, num_blocks=12_000, max_model_len=32_768, handshake_s=0.0)
    dice = random.Random(7)  # noqa: S311
    async with SimStack(prefill=2, decode=3, options=options, settings=SETTINGS, keep=False) as stack:
        targets = {"filter": [stack.admin.removeprefix("http://")], "prefill": [], "decode": []}
        async with Prometheus(stack.directory, targets) as prometheus:
            began, tasks = time.time(), []
            while (passed := time.time() - began) < RUN_S:
                tasks.append(asyncio.create_task(ask(stack, dice)))
                rate = RATES[0] + (RATES[1] - RATES[0]) * passed / RUN_S
                await asyncio.sleep(dice.expovariate(rate))
            await asyncio.wait(tasks, timeout=30)
            (fleet,) = (file for file in DASHBOARDS if file.stem == "baton-overview")
            found: dict[str, Any] = {}
            for panel in panels(fleet):
                if panel["title"] not in SHOWN:
                    continue
                series = []
                for target in panel["targets"]:
                    expr = plain(target["expr"].replace("$__rate_interval", "15s"))
                    data = await prometheus.api(
                        "query_range", query=expr, start=str(began + 15), end=str(began + RUN_S), step="2"
                    )
                    for each in data["result"]:
                        name = target.get("legendFormat", "")
                        for label, value in each["metric"].items():
                            name = name.replace("{{" + label + "}}", value)
                        series.append((name, [(float(t) - began, float(v)) for t, v in each["values"]]))
                found[panel["title"]] = (panel, series)
            return found


def draw(found: dict[str, Any], file: str) -> None:
    """As Grafana would, more or less."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    units = {"percentunit": "%", "s": "ms", "Bps": "MB/s", "reqps": "1/s"}
    scale = {"percentunit": 100.0, "s": 1000.0, "Bps": 1e-6}
    pyplot.style.use("dark_background")
    figure, axes = pyplot.subplots(4, 2, figsize=(15, 15), facecolor="#111217")
    for title, axis in zip(SHOWN, axes.flat, strict=True):
        panel, series = found[title]
        defaults = panel["fieldConfig"]["defaults"]
        factor = scale.get(defaults["unit"], 1.0)
        stacked = defaults["custom"].get("stacking", {}).get("mode") == "normal"
        axis.set_facecolor("#181b1f")
        lines = [(name, [(t, v * factor) for t, v in points if math.isfinite(v)]) for name, points in series]
        lines = [(name, points) for name, points in lines if points and (not stacked or max(v for _, v in points) > 0)]
        if stacked:
            times = sorted({t for _, points in lines for t, _ in points})
            values = [[dict(points).get(t, 0.0) for t in times] for _, points in lines]
            axis.stackplot(times, values, labels=[name for name, _ in lines], alpha=0.6)
        for name, points in [] if stacked else lines:
            style = {"color": "#f2495c", "linestyle": "--"} if name.startswith("SLO") else {}
            axis.plot(*zip(*points, strict=True), label=name, linewidth=1.5, **style)
        axis.set_title(f"{title}, {units.get(defaults['unit'], '')}", loc="left", fontsize=11)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.15)
        axis.legend(fontsize=8, loc="upper left", framealpha=0.4)
    figure.tight_layout()
    figure.savefig(file, dpi=80)


def main() -> None:
    """Run, and draw."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m bench.dashboard_picture FILE.png")
    sys.stdout.write(f"a run of {RUN_S:g} s\n")
    found = asyncio.run(run())
    draw(found, sys.argv[1])
    sys.stdout.write(json.dumps({title: len(series) for title, (_, series) in found.items()}) + "\n")


if __name__ == "__main__":
    main()
