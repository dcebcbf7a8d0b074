"""``baton up`` with real workers: what it shows, and what it does when a part dies."""

from __future__ import annotations

import re
from pathlib import Path

from tests.engine.system import assert_ends, start_system


def test_it_shows_the_first_answer_and_ends_everything_when_an_engine_dies(tiny_model: Path, run_dir: Path) -> None:
    system = start_system(tiny_model, run_dir)
    output = system.output()
    assert f"curl -N {system.front_url}/v1/chat/completions" in output
    assert re.search(r"\n> What is the capital of France\?\n< \S", output), output
    assert re.search(r"time to first token \d+\.\d\d s, whole answer \d+\.\d\d s", output)
    prefill, decode = (url.removeprefix("http://") for url in (system.prefill_url, system.decode_url))
    assert f"prefill by prefill-0 ({prefill}), decode by decode-0 ({decode})" in output
    assert {f"{name}.log" for name in ("prefill-0", "decode-0", "filter", "envoy")} <= {path.name for path in run_dir.iterdir()}

    everything = system.processes()
    below = system.server(system.decode_url).children(recursive=True)
    engine = max(below, key=lambda process: process.memory_info().rss)
    engine.kill()

    assert_ends(system, everything, status=1)
    assert "decode-0 ended" in system.output() or "decode-0 was ended" in system.output()
