"""Is this node fit for the worker that is to run here? Facts are gathered, then judged; nothing is changed.

report = run(Ask(role="decode", device="gpu", side_channel_host="10.0.0.7", side_channel_port=5600))
if report.worst is Severity.ERROR: ...
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from workers.preflight.ask import Ask, Model
from workers.preflight.checks import judge
from workers.preflight.findings import Finding, Identity, Measurement, Outcome, Report, Severity
from workers.preflight.gather import gather
from workers.preflight.identity import identity_of
from workers.preflight.runner import Runner, SystemRunner

__all__ = ["Ask", "Finding", "Identity", "Measurement", "Model", "Outcome", "Report", "Severity", "run"]


def run(
    ask: Ask,
    *,
    root: Path = Path("/"),
    env: Mapping[str, str] | None = None,
    runner: Runner | None = None,
    measure: Callable[[Identity], Outcome] | None = None,
) -> Report:
    """Look at this node and say what is wrong with it for the worker asked about. Takes a few seconds.

    ``env`` is the environment that the worker will have; None: this process's. ``measure`` is told what this node is and
    measures the way to the peer (:mod:`workers.preflight.measure`). What cannot be seen is left out or said in a finding.
    """
    facts = gather(ask, root=root, env=os.environ if env is None else env, runner=runner or SystemRunner())
    return judge(facts, ask, measure(identity_of(facts, ask)) if measure is not None else None)
