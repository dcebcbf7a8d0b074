"""The same requests replayed without processes (``baton replay``), to see whether the fast twin can be trusted."""

from __future__ import annotations

from collections.abc import Sequence

from bench.routing.engines import EngineOptions
from bench.routing.policies import CONTESTANTS
from extproc.replay import Setup, replay
from extproc.replay_command import routing_of
from extproc.replay_router import Routed
from extproc.routing.job import Aims, Mode, Objective
from extproc.routing.settings import Routing
from workers import goodput
from workers.goodput import Summary
from workers.sim.twin import TwinConfig
from workers.traces import BLOCK_TOKENS, Request


def twin_setup(options: EngineOptions) -> Setup:
    """The bench's workers as the replay has them."""
    engine = TwinConfig(block_tokens=BLOCK_TOKENS, num_blocks=options.cache_tokens // BLOCK_TOKENS)
    return Setup(prefill=options.prefill, decode=options.decode, engine=engine)


def twin_summary(name: str, requests: Sequence[Request], setup: Setup) -> Summary | None:
    """One of Baton's policies on these requests; None for a peer, which the replay does not have."""
    if CONTESTANTS[name].kind != "baton":
        return None
    aims = twin_aims(name)
    replayed = replay(requests, Routed(setup, routing_of(Routing(), setup)), setup, lambda _: aims)
    return goodput.summary(replayed.outcomes)


def twin_aims(name: str) -> Aims:
    """The aims of one of Baton's policies, in simulated seconds."""
    if name == "baton":
        return Aims(ttft_slo_s=goodput.TTFT_SLO_S, itl_slo_s=goodput.ITL_SLO_S)
    return Aims(objective=Objective(name), mode=Mode.DISAGGREGATE, held=False)
