"""What tokens cost. Only those of requests that were served within both limits are paid for; the GPUs are, whatever they do."""

from __future__ import annotations

import math

from extproc.plan.errors import PlanError


def usd_per_million_tokens(*, gpus: int, usd_a_gpu_hour: float, good_tokens_per_s: float) -> float:
    """US dollars per million output tokens of good requests; infinite where there are none.

    ``gpus``: all of them, idle ones too. Hosts, network and staff are in the price of a GPU-hour, or not counted.
    Raises PlanError.
    """
    if usd_a_gpu_hour < 0 or not math.isfinite(usd_a_gpu_hour):
        raise PlanError(f"price of a GPU-hour: 0 or more US dollars, not {usd_a_gpu_hour:g}")
    if good_tokens_per_s <= 0:
        return math.inf
    return gpus * usd_a_gpu_hour / 3600 / good_tokens_per_s * 1e6
