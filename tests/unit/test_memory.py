"""Freed memory is kept and used again, and what exists at the start is out of the garbage collector's sight."""

from __future__ import annotations

import subprocess
import sys

FAULTS = """
import resource
from extproc import memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(200):
        bytes(1 << 20)  # a body that comes and goes: 256 pages
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

assert memory.keep_freed(), "this C library has no such settings"
faults()
print(faults())
"""

FROZEN = """
import gc
from extproc import memory

class Node: pass

early = Node()
memory.collect_rarely()
assert gc.get_freeze_count() > 1_000
assert not any(each is early for each in gc.get_objects())
late = Node()
late.itself = late
del late
assert gc.collect() >= 1, "what comes later is still collected"
assert gc.get_threshold()[0] == 10_000
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_body_that_comes_and_goes_is_not_got_from_the_system_each_time() -> None:
    assert int(run(FAULTS)) < 2_000, "200 bodies of 256 pages each would be 51,200 faults"


def test_what_exists_at_the_start_is_not_looked_at_again() -> None:
    run(FROZEN)
