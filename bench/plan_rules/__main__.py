"""``make plan-rules``: the rules of thumb about P:D ratios, each as a question to `baton plan ratio`.

Writes bench/plan_rules/results.json and docs/plan-rules.svg, and prints the tables of docs/plan-ratio.md. With names of cases:
only those are run again, the others stay as they are in the file.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from pathlib import Path

import msgspec

from bench.plan_rules.cases import CASES, Case
from bench.plan_rules.report import Results, Row, chunked_table, draw, row_of, splits_table
from extproc.plan.errors import PlanError
from extproc.plan.ratio import Effort, study
from extproc.plan.runs import Runner, runner

RESULTS = Path(__file__).with_name("results.json")
PICTURE = Path(__file__).parents[2] / "docs" / "plan-rules.svg"


def run(case: Case, effort: Effort, runs: Runner) -> Row:
    """One case. Raises PlanError where no arrangement can do."""
    return row_of(case, study(case.question, kinds=case.kinds, effort=effort, runner=runs))


def load() -> Results | None:
    """What an earlier run found."""
    return msgspec.json.decode(RESULTS.read_bytes(), type=Results) if RESULTS.is_file() else None


def save(rows: dict[str, Row]) -> Results:
    """In the order of the cases."""
    results = Results(
        made_by="python -m bench.plan_rules",
        machine=f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}",
        rows=[rows[case.name] for case in CASES if case.name in rows],
    )
    RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    return results


def main(names: list[str]) -> int:
    """Run the cases, print the tables."""
    unknown = sorted(set(names) - {case.name for case in CASES})
    if unknown:
        print(f"plan_rules: no case {', '.join(unknown)}; there are {', '.join(case.name for case in CASES)}", file=sys.stderr)  # noqa: T201
        return 2
    before = load() if names else None
    rows = {row.name: row for row in before.rows} if before is not None else {}
    with runner(int(os.environ.get("PROCESSES", "0")) or len(os.sched_getaffinity(0))) as runs:
        for case in CASES:
            if names and case.name not in names:
                continue
            began_s = time.monotonic()
            try:
                rows[case.name] = run(case, case.effort, runs)
            except PlanError as error:
                print(f"plan_rules: {case.name}: {error}", file=sys.stderr)  # noqa: T201
                return 1
            print(f"{case.name}: {time.monotonic() - began_s:.0f} s", file=sys.stderr, flush=True)  # noqa: T201
            save(rows)
    results = save(rows)
    print(f"{splits_table(CASES, results)}\n{chunked_table(CASES, results)}")  # noqa: T201
    draw(CASES, results, PICTURE)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
