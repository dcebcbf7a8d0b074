"""What the parts say about themselves in Prometheus' text format, and waiting for them to say something."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Callable

from prometheus_client.parser import text_string_to_metric_families


class Samples(dict[tuple[str, frozenset[tuple[str, str]]], float]):
    """The samples of one scrape."""

    def total(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels; 0 where there is none, as for a counter that never moved."""
        wanted = set(labels.items())
        return sum(value for (sample, having), value in self.items() if sample == name and wanted <= having)


def scrape(url: str, path: str = "/metrics") -> Samples:
    with urllib.request.urlopen(f"{url}{path}", timeout=60) as reply:
        text = reply.read().decode()
    return Samples(
        ((sample.name, frozenset(sample.labels.items())), sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    )


def kv_usage(url: str) -> float:
    """The share of a worker's KV blocks that are in use, those that wait for a decode worker included."""
    usage = [value for (name, _), value in scrape(url).items() if name == "vllm:kv_cache_usage_perc"]
    assert len(usage) == 1
    return usage[0]


def running(url: str) -> float:
    """Requests that a worker's engine has, waiting ones included."""
    samples = scrape(url)
    return samples.total("vllm:num_requests_running") + samples.total("vllm:num_requests_waiting")


def until(condition: Callable[[], bool], timeout_s: float = 30.0, *, every_s: float = 0.02) -> float:
    """Wait for ``condition``; returns how many seconds that took. Raises AssertionError after ``timeout_s``."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < timeout_s, f"not within {timeout_s:g} s"
        time.sleep(every_s)
    return time.monotonic() - start
