"""Two real workers have made a handoff before ``baton up`` says that the system is up."""

from __future__ import annotations

import json
import urllib.request

from extproc.config import load
from tests.engine.metrics import scrape
from tests.engine.system import System


def test_the_workers_met_before_the_first_question(system: System) -> None:
    admin = load(system.log.parent / "baton.yaml").admin
    with urllib.request.urlopen(f"http://{admin}/healthz", timeout=60) as reply:
        shown = json.load(reply)["warm_up"]
    assert (shown["pairs_warm"], shown["pairs"], shown["warming"]) == (1, 1, {})

    lines = [json.loads(line) for line in (system.log.parent / "filter.log").read_text().splitlines() if line.startswith("{")]
    events = ["handoff" if line.get("outcome") == "handoff" else line["event"] for line in lines]
    assert events.index("pair_warm") < events.index("handoff")

    filter_ = scrape(f"http://{admin}")
    made = filter_.total("baton_warm_up_total", outcome="ok")
    assert made >= 1
    received = scrape(system.decode_url).total("vllm:nixl_bytes_transferred_count")
    assert received >= made + filter_.total("baton_handoffs_total"), "its blocks moved, as those of clients' prompts did"
