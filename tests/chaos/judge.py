"""Whether what came of a request, and what the engines complain about, may be so."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from extproc.errors import CODES
from tests.cases import answers
from tests.chaos.plan import Request
from tests.chaos.world import LEASE_S, SETTINGS, World

# The codes of Envoy's own replies (extproc/envoy_config.py).
_ENVOYS = {"timeout": (504, 408), "filter_unavailable": (503,), "upstream_unavailable": (502, 503)}

_AFTER_S = 2.5
"""So long after the end of a fault its effects may show: retries, deadlines, health checks."""

_RACE_S = 0.15
"""A prefill that is called off is done already (vllm#29906), and its reply lost on the way: nobody can know of its blocks."""

_DECODE_FAULTS = ("hang", "reset", "crash", "restart", "exit", "refuse", "slow", "status")
_HANDOFF = re.compile(r"handoff (\S+) of engine")


@dataclass
class Outcome:
    """What came of one request."""

    request: Request
    began_s: float
    ended_s: float
    status: int | None = None
    content_type: str = ""
    body: bytes = b""
    decode: str = ""
    """The decode worker, ``ip:port``."""
    left: bool = False
    """The client went away by itself."""
    broken: str | None = None
    """How the connection ended, if not as it should."""
    hung: bool = False


class ProblemError(Exception):
    """This must not be."""


def verdict(outcome: Outcome, world: World) -> str:
    """What came of it, in a word. Raises ProblemError."""
    request = outcome.request
    if outcome.hung:
        raise ProblemError("hung")
    if outcome.status == 200 and request.status == 200:
        return _served(outcome, world)
    if outcome.left:
        return "left"
    if outcome.status is None:
        raise ProblemError(f"no answer at all: {outcome.broken}")
    if outcome.status == 200:
        raise ProblemError(f"200 for what must be a {request.status}: {outcome.body[:300]!r}")
    if outcome.broken is not None:
        raise ProblemError(f"an error answer was cut: {outcome.broken}")
    code, message = _error(outcome)
    if outcome.status == request.status and (request.code is None or code == request.code):
        return f"refused: {code}"
    if code == "internal_error":
        raise ProblemError(f"a fault of Baton's own: {message}")
    if not world.troubled(outcome.began_s - _AFTER_S, outcome.ended_s):
        raise ProblemError(f"{outcome.status} {code} with nothing wrong: {message}")
    if outcome.status < 500 and message != "Injected fault" and code != "too_many_requests":
        raise ProblemError(f"{outcome.status} {code} for a request that is right: {message}")
    return f"failed: {code}"


def _served(outcome: Outcome, world: World) -> str:
    request = outcome.request
    if outcome.broken is not None or outcome.left:
        got = answers.read(request.path, outcome.content_type, outcome.body) if request.stream else answers.Answer()
        if request.texts is not None and not all(request.texts[i].startswith(text) for i, text in got.texts.items()):
            raise ProblemError(f"WRONG TEXT in a part of a stream: {got.texts} is no start of {request.texts}")
        if outcome.left:
            return "left"
        if not world.troubled(outcome.began_s - _AFTER_S, outcome.ended_s):
            raise ProblemError(f"cut with nothing wrong: {outcome.broken}")
        return "cut, and seen to be"
    got = answers.read(request.path, outcome.content_type, outcome.body)
    if got.error is not None:
        if not world.troubled(outcome.began_s - _AFTER_S, outcome.ended_s):
            raise ProblemError(f"an error in the stream with nothing wrong: {got.error}")
        if request.texts is not None and not all(request.texts[i].startswith(text) for i, text in got.texts.items()):
            raise ProblemError(f"WRONG TEXT before an error: {got.texts} is no start of {request.texts}")
        return "error in the stream"
    if not got.complete:
        raise ProblemError(f"a broken answer ended as if it were whole: {outcome.body[-300:]!r}")
    if request.texts is not None and (texts := tuple(got.texts.get(i, "") for i in range(len(request.texts)))) != request.texts:
        raise ProblemError(f"WRONG TEXT: {texts} and not {request.texts}")
    return "right"


def _error(outcome: Outcome) -> tuple[str, str]:
    """Code and message of an error answer. Raises ProblemError if it is none of the documented kinds."""
    try:
        value: Any = json.loads(outcome.body)
        error = value["error"]
        message, code = error["message"], error.get("code")
    except (ValueError, KeyError, TypeError):
        raise ProblemError(f"{outcome.status} in no shape that is documented: {outcome.body[:300]!r}") from None
    anthropic = value.get("type") == "error"
    if not isinstance(code, str):  # an engine's own
        if (code is None and not anthropic) or (code is not None and code != outcome.status):
            raise ProblemError(f"{outcome.status} with the code {code}: {outcome.body[:300]!r}")
        return f"engine's {outcome.status}", message
    known = _ENVOYS.get(code) or ((CODES[code].status,) if code in CODES else ())
    if outcome.status not in known:
        raise ProblemError(f"{outcome.status} {code} is not documented: {outcome.body[:300]!r}")
    if anthropic != (outcome.request.path == "/v1/messages") and code not in _ENVOYS:
        raise ProblemError(f"{code} in the other API's shape: {outcome.body[:300]!r}")
    return code, message


def complaints(world: World) -> tuple[list[str], dict[str, int]]:
    """What engines complain about and nothing excuses, and what was excused, by reason."""
    problems: list[str] = []
    excused: dict[str, int] = {}
    ids = {sim.name: sim.engine_ids for sim in world.sims}
    arrivals: dict[str, list[Any]] = {}
    for sim in world.sims:
        for handoff, came in sim.arrivals.items():
            arrivals.setdefault(handoff, []).extend(came)
    for handoff, all_came in arrivals.items():
        if len(dispatched := [arrival for arrival in all_came if not arrival.release]) > 1:
            problems.append(f"one handoff came to decode workers {len(dispatched)} times: {handoff}, {dispatched}")
    for sim in world.sims:
        for report in sim.reports:
            for kind, count in report["environment"]["counts"].items():
                excused[kind] = excused.get(kind, 0) + count
            for violation in report["violations"]:
                reason = _excuse(world, sim.name, violation, set().union(*ids.values()), arrivals)
                if reason is None:
                    handoff = (_HANDOFF.search(violation["detail"]) or [None, violation["request_id"]])[1]
                    came = [
                        f"{a.at_s:.2f} {a.worker} {'release' if a.release else 'decode'} {a.end}"
                        for a in arrivals.get(handoff, ())
                    ]
                    what = f"{sim.name}: {violation['kind']} {violation['request_id']} {violation['detail']}"
                    wrong = world.wrong(violation["at_s"] - LEASE_S - 1.0, violation["at_s"])
                    problems.append(
                        f"at {violation['at_s']:.2f}, {what}; came to {came}; {_whose(world, handoff)}; wrong then: {wrong}"
                    )
                else:
                    excused[reason] = excused.get(reason, 0) + 1
    return problems, excused


def _whose(world: World, handoff: str) -> str:
    """What became of the request that a handoff was made for."""
    for sim in world.sims:
        if pinning := sim.pinnings.get(handoff):
            outcome = world.outcomes.get(pinning.prompt)
            if outcome is None:
                return f"pinned at {pinning.at_s:.2f}"
            what = f"{outcome.request.kind}: {outcome.status}, left {outcome.left}, {outcome.broken}"
            return f"pinned at {pinning.at_s:.2f} for {what}, {outcome.began_s:.2f}-{outcome.ended_s:.2f}"
    return "whose is not known"


def _excuse(world: World, sim: str, violation: dict[str, Any], ids: set[str], arrivals: dict[str, list[Any]]) -> str | None:
    kind, at_s = violation["kind"], violation["at_s"]
    if kind == "unknown_engine":
        # A new process does not know the names of the one before.
        return "engine_gone" if any(engine_id in violation["detail"] for engine_id in ids) else None
    if kind == "use_after_expiry":
        dead = world.troubled(at_s - 2 * LEASE_S, at_s, kinds=("side_channel_dead",))
        return "expired: heartbeats could not come" if dead else None
    if kind != "leaked_blocks":
        return None
    from_s = at_s - LEASE_S - 0.5
    if world.troubled(from_s, at_s, where=sim, kinds=("side_channel_dead",)):
        return "leaked: nobody could reach the side channel"
    came = arrivals.get(violation["request_id"], [])
    for arrival in came:
        if arrival.end == "cut" and world.troubled(from_s, at_s, where=arrival.worker, kinds=_DECODE_FAULTS):
            return "leaked: the decode worker failed with it"
    pinning = next((p for s in world.sims if (p := s.pinnings.get(violation["request_id"]))), None)
    outcome = world.outcomes.get(pinning.prompt) if pinning is not None else None
    stops = [trouble for trouble in world.troubles if trouble.kind == "filter stands still"]
    # Where the client left, its blocks may be given back after a delay: it stood still when that was over.
    due_s = 0.2 if outcome is None or not outcome.left else 0.2 + SETTINGS["handoff"]["release_delay_s"]
    if pinning is not None and any(stop.from_s < pinning.at_s + due_s and stop.to_s > at_s - 0.4 for stop in stops):
        return "leaked: the filter stood still as long as the lease"
    if pinning is None or outcome is None or came:
        return None
    # A filter that stands still sees it when it goes on.
    seen_s = max([outcome.ended_s, *(stop.to_s for stop in stops if stop.to_s <= pinning.at_s)])
    if outcome.left and 0.0 < pinning.at_s - seen_s < _RACE_S:
        return "leaked: the client left as its prefill ended"
    if outcome.broken or outcome.status not in (None, 200):
        restarted = world.troubled(pinning.at_s, at_s, kinds=("filter restarted",))
        return "leaked: the filter was ended with the request" if restarted else None
    return None
