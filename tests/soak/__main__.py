"""``python -m tests.soak --minutes 10 --rate 200``: Envoy and the filter under steady load, and whether anything grows.

With faults, clients that leave, hundreds of tenants, and a worker that comes and goes. Exit status 1 if memory or the number of
series grows, or anything is left at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys

from tests.soak.run import Look, run

_HEAD = ("    time", "   sent", "filter MB", "Envoy MB", "series", "ledger", "queue", "lag p99", "lost lines", " outcomes")


def main() -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--rate", type=float, default=200.0, help="requests a second (default: 200)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--transport", choices=("grpc", "lean"), help="of the filter (default: its own)")
    parser.add_argument("--every", type=float, default=30.0, help="seconds between lines (default: 30)")
    parser.add_argument(
        "--growth", type=float, help="MB a minute that the filter may grow (default: 1; any in under 5 minutes)"
    )
    arguments = parser.parse_args()
    limit = arguments.growth if arguments.growth is not None else 1.0 if arguments.minutes >= 5 else math.inf
    print(f"{arguments.minutes:g} minutes at {arguments.rate:g} requests a second; seed {arguments.seed}", flush=True)
    print(" ".join(_HEAD), flush=True)
    result = asyncio.run(
        run(
            minutes=arguments.minutes,
            rate=arguments.rate,
            seed=arguments.seed,
            transport=arguments.transport,
            growth_limit_mb_per_min=limit,
            show=_show,
            every_s=arguments.every,
        )
    )
    judged = f"limit {limit:g}" if limit < math.inf else "not judged: too short a time to fill caches"
    print(
        f"growth of the filter in the last 60 % of the time: {result.growth_mb_per_min:+.2f} MB a minute ({judged}),"
        f" {result.growth_bytes_per_request:+.0f} bytes a request"
    )
    for problem in result.problems:
        print(f"PROBLEM {problem}")
    print("nothing grows, nothing is left" if not result.problems else f"{len(result.problems)} problems")
    return 1 if result.problems else 0


def _show(look: Look) -> None:
    outcomes = ", ".join(f"{name} {count}" for name, count in look.outcomes.most_common())
    cells = (
        f"{look.at_s / 60:6.1f} m",
        f"{look.sent:7d}",
        f"{look.filter_mb:9.1f}",
        f"{look.envoy_mb:8.1f}",
        f"{look.series:6d}",
        f"{look.ledger:6.0f}",
        f"{look.queue:5.0f}",
        f"{look.lag_p99_ms:4.0f} ms",
        f"{look.lost_lines:10.0f}",
        f" {outcomes}",
    )
    print(" ".join(cells), flush=True)


if __name__ == "__main__":
    sys.exit(main())
