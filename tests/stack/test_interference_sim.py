"""The interference bench as a whole, with simulated engines, real Envoy and the real filter: small, and stopped half-way."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from bench.interference import results
from bench.interference.numbers import gaps_of, row
from workers.sim.timing import Profile

# Half a minute; more where the machine has other work.
pytestmark = pytest.mark.timeout(240)

_SMALL = ("--engine", "sim", "--rounds", "1", "--streams", "2", "--stream-tokens", "40", "--quiet", "1", "--every", "1.5")
_SECONDS = 180.0
_PROMPT_TOKENS = 8_000
_FASTER = 2.0
"""A colocated engine that stands for two."""


def prefill_s() -> float:
    """The least that a colocated engine needs for a long prompt, by the simulated hardware."""
    context = _PROMPT_TOKENS * _PROMPT_TOKENS // 2
    step_s = Profile().step_s(prefill_tokens=_PROMPT_TOKENS, prefill_context_tokens=context, decodes=0, decode_context_tokens=0)
    return step_s / _FASTER


def test_long_prompts_stall_the_streams_of_one_engine_and_are_handed_over_by_baton(tmp_path: Path) -> None:
    numbers, drawn, tables = tmp_path / "numbers.json", tmp_path / "picture.svg", tmp_path / "tables.md"
    argv = [sys.executable, "-m", "bench.interference", *_SMALL, "--window", "4", "--prompt-tokens", str(_PROMPT_TOKENS)]
    argv += ["--json", str(numbers), "--out", str(drawn), "--markdown", str(tables)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=_SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = results.read(numbers)
    by_name = {each.arrangement: each for each in found.rounds}
    assert set(by_name) == {"colocated", "chunked", "apart"}
    assert not found.failures and all(not row(name, [each], 1).faults for name, each in by_name.items())
    for each in by_name.values():
        assert len(each.prompts) == 2 and all(prompt.first_s is not None for prompt in each.prompts)
        assert [prompt.due_s for prompt in each.prompts] == [prompt.due_s for prompt in found.rounds[0].prompts]
    assert max(gaps_of([by_name["colocated"]], loaded=True)) >= 0.9 * prefill_s(), "a stream waited for a whole prefill"
    assert [row(name, [each], 1).handed_over for name, each in by_name.items()] == [0, 0, 2]
    assert all(answer.handed_over for answer in by_name["apart"].streams if answer.first_s is not None)
    assert "| prefill/decode, Baton |" in tables.read_text() and "<svg" in drawn.read_text()[:300]


def test_one_that_is_told_to_end_leaves_nothing_behind_not_even_what_stood_still(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "bench.interference", *_SMALL, "--window", "60", "--logs", str(tmp_path / "logs")]
    bench = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        said = lines_until(bench, "round 1")  # one arrangement runs, the others stand still
        below = psutil.Process(bench.pid).children(recursive=True)
        assert psutil.STATUS_STOPPED in [status(process) for process in below], said
        bench.send_signal(signal.SIGTERM)
        rest, _ = bench.communicate(timeout=_SECONDS)
    finally:
        bench.kill()  # its guards then end all that is left
        bench.communicate()
    assert bench.returncode == 130, rest
    assert "interrupted" in rest
    deadline_s = time.monotonic() + 5.0
    while time.monotonic() < deadline_s and any(process.is_running() for process in below):
        time.sleep(0.05)
    assert [process for process in below if process.is_running()] == []


def lines_until(bench: subprocess.Popen[str], start: str) -> list[str]:
    """What it says up to a line that begins so."""
    assert bench.stdout is not None
    said = []
    for line in bench.stdout:
        said.append(line)
        if line.startswith(start):
            break
    return said


def status(process: psutil.Process) -> str:
    """What it does; a process can have ended since it was listed."""
    try:
        return process.status()
    except psutil.NoSuchProcess:
        return "gone"


def test_an_engine_that_does_not_start_is_shown_with_the_end_of_its_log(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "bench.interference", *_SMALL, "--window", "5", "--prompt-tokens", "900000"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=_SECONDS, check=False)
    assert done.returncode == 1
    assert "blocks of 16 tokens cannot hold one request" in done.stdout and "the end of" in done.stdout
