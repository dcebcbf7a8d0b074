"""What a workload asks of an engine, by arithmetic: no queue, no luck. The roofline's step times, taken over the lengths.

These are the bounds that candidates are pruned with and that a bottleneck is named by. They are optimistic where they must be:
shared prefixes are always cached, batches are as full as the limits let them be, nobody waits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from extproc.plan.engines import Engine
from extproc.plan.links import Link
from extproc.plan.workload import AnyWorkload
from workers.traces import BLOCK_TOKENS

_TYPICAL = 199
"""Requests that stand for all; a prime, so that lengths in and out mix."""


class Part(Enum):
    """What can be full."""

    PREFILL = "prefill compute"
    BANDWIDTH = "decode bandwidth"
    """A larger batch would be slower than the ITL SLO."""
    KV = "decode KV memory"
    SEQS = "decode batch limit"
    """``max_num_seqs``."""
    LINK = "link"
    WORKERS = "workers' time"
    """Of workers that do both, as if each step did one of them only; steps that do both can do more."""
    STALLS = "prefills between tokens"
    """Of workers that do both: more than one in a hundred gaps has a prefill in it that is longer than the ITL SLO."""


@dataclass(frozen=True)
class Demand:
    """Prompts, what of each is not cached, and answers, in tokens."""

    typical: tuple[tuple[int, int, int], ...]
    longest_tokens: int
    """Of a prompt with its answer."""

    @cached_property
    def prompt_tokens(self) -> int:
        """Mean, in whole tokens."""
        return round(self._mean(lambda prompt, _, __: prompt))

    @cached_property
    def answer_tokens(self) -> float:
        """Mean."""
        return self._mean(lambda _, __, answer: answer)

    @cached_property
    def uncached_tokens(self) -> float:
        """Mean, of a prompt."""
        return self._mean(lambda _, uncached, __: uncached)

    @cached_property
    def held_tokens(self) -> float:
        """KV of a sequence that is being decoded: the mean over time, in which long answers count more, in whole blocks."""
        weighed = self._mean(lambda prompt, _, answer: (prompt + answer / 2 + BLOCK_TOKENS / 2) * answer)
        return weighed / self.answer_tokens

    def prompt_at(self, share: float) -> tuple[int, int]:
        """The prompt that ``share`` of all do not exceed in what is not cached: its tokens, and those not cached."""
        ordered = sorted((uncached, prompt) for prompt, uncached, _ in self.typical)
        uncached, prompt = ordered[max(0, math.ceil(share * len(ordered)) - 1)]
        return prompt, uncached

    def prefills_s(self, engine: Engine, step_tokens: int) -> float:
        """Seconds of a worker that a prompt takes, mean, where steps are full (short prompts share them)."""

        def seconds(prompt: int, uncached: int, _: int) -> float:
            profile, steps = engine.profile, uncached / step_tokens
            context_tokens = int(uncached * (prompt - uncached / 2))
            flops = profile.step_flops(tokens=uncached, prefill_context_tokens=context_tokens)
            read_bytes = steps * profile.step_bytes(tokens=step_tokens, decode_context_tokens=0)
            return steps * profile.step_overhead_s + max(flops / profile.flops_a_s, read_bytes / profile.memory_bytes_a_s)

        return self._mean(seconds)

    def prefills_steps(self, step_tokens: int) -> float:
        """Steps that a prompt takes, mean; short prompts share them, but come one by one."""
        return self._mean(lambda _, uncached, __: math.ceil(uncached / step_tokens))

    def decode_step_s(self, engine: Engine, batch: float, prefill_tokens: int = 0) -> float:
        """One step with ``batch`` sequences of mean context, and part of a prompt in it."""
        return engine.profile.step_s(
            prefill_tokens=prefill_tokens,
            prefill_context_tokens=int(prefill_tokens * self.prompt_at(0.9)[0] / 2),
            decodes=max(1, int(batch)),
            decode_context_tokens=int(batch * self.held_tokens),
        )

    def batch_within(self, engine: Engine, itl_s: float, at_most: int) -> int:
        """Sequences whose step is not longer than ``itl_s``; 0: not even one's."""
        low, high = 0, at_most + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.decode_step_s(engine, middle) <= itl_s else (low, middle)
        return low

    def decodes_per_s(self, engine: Engine, batch: float) -> float:
        """Answers a second of one worker whose batch is always so large."""
        return batch / (self.decode_step_s(engine, batch) * self.answer_tokens)

    def transfers_s(self, engine: Engine, link: Link) -> float:
        """Seconds of a worker's link that a prompt takes, mean."""
        return link.transfer_s(self.uncached_tokens * moved_bytes(engine), engine.gpus)

    def _mean(self, what: Callable[[int, int, int], float]) -> float:
        return math.fsum(what(*each) for each in self.typical) / len(self.typical)


def rate_within_wait(servers: int, service_s: float, slack_s: float, late: float) -> float:
    """Requests a second at which not more than ``late`` of them wait longer than ``slack_s`` for one of the servers.

    Poisson arrivals. Erlang's C for how many wait at all (A. K. Erlang, 1917), and for how long with half the mean of
    exponential service times, since these are nearly constant: a common approximation, for the order of candidates only.
    """
    low, high = 0.0, servers / service_s
    for _ in range(40):
        rate = (low + high) / 2
        load = rate * service_s
        blocked = 1.0  # Erlang's B, by its recursion
        for number in range(1, servers + 1):
            blocked = load * blocked / (number + load * blocked)
        waiting = blocked / (1 - load / servers * (1 - blocked))
        beyond = waiting * math.exp(-2 * (servers - load) * slack_s / service_s)
        low, high = (rate, high) if beyond <= late else (low, rate)
    return low


def moved_bytes(engine: Engine) -> float:
    """Bytes that a token of a handoff is on the link: each of the receiver's GPUs gets its own copy of what it shares."""
    return engine.profile.kv_bytes_a_token * engine.profile.kv_copies


def prefill_s(engine: Engine, prompt: int, uncached: int, step_tokens: int) -> float:
    """One prompt on an idle worker."""
    done, total_s = prompt - uncached, 0.0
    while done < prompt:
        tokens = min(step_tokens, prompt - done)
        context = tokens * (2 * done + tokens) // 2
        total_s += engine.profile.step_s(
            prefill_tokens=tokens, prefill_context_tokens=context, decodes=0, decode_context_tokens=0
        )
        done += tokens
    return total_s


def demand_of(workload: AnyWorkload) -> Demand:
    """Of a workload; the last token of a prompt is always computed."""
    return Demand(
        tuple(
            (each.input_tokens, max(1, each.input_tokens - workload.shared_tokens(each)), each.output_tokens)
            for each in workload.typical(_TYPICAL)
        ),
        workload.longest_tokens,
    )
