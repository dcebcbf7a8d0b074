"""vLLM's own tier in host memory behind the GPU cache of a prefill worker: its OffloadingConnector, behind NIXL.

Pure. Facts are vLLM 0.32's: ``kv_connector/v1/offloading`` (scheduler.py, events.py), ``v1/kv_offload/cpu`` (spec.py,
manager.py, shared_offload_region.py) and ``multi_connector.py``.
"""

from __future__ import annotations

from workers.spec import WorkerSpec

GIB = 1 << 30

CONNECTOR = "OffloadingConnector"

_LEAST_GIB, _MOST_GIB = 1 / 1024, 1 << 20
"""Of any worker: beyond them is a slip."""


def connector(spec: WorkerSpec) -> dict[str, object]:
    """The child of a prefill worker's MultiConnector. Raises ValueError, with the field, for what vLLM would fail on.

    It keeps what a prompt computes, in blocks of the GPU cache, and drops those used least recently. ``kv_both``: it stores and
    loads, whatever the worker's own role.
    """
    extra: dict[str, object] = {"cpu_bytes_to_use": engine_bytes(spec)}
    if spec.kv_events_port is not None:
        # Without it an event has the block's hash and nothing else, which is of use only while the GPU holds the block too.
        extra["self_describing_kv_events"] = True
    return {"kv_connector": CONNECTOR, "kv_role": "kv_both", "kv_connector_extra_config": extra}


def engine_bytes(spec: WorkerSpec) -> int:
    """Bytes for each engine of the worker. Raises ValueError, with the field.

    vLLM counts them over all tensor- and pipeline-parallel ranks of an engine, and every data-parallel rank is an engine of its
    own with so many (``cpu/spec.py``: ``num_copies``).
    """
    _check(spec)
    assert spec.host_cache_gib is not None
    return int(spec.host_cache_gib * GIB) // len(spec.ranks)


def _check(spec: WorkerSpec) -> None:
    gib = spec.host_cache_gib
    if gib is None or not _LEAST_GIB <= gib <= _MOST_GIB:
        raise ValueError(f"host_cache_gib: {gib} is not a positive number of GiB that a machine can have")
    if spec.role != "prefill":
        raise ValueError(
            "host_cache_gib: for prefill workers. A decode worker takes its prompts over NIXL, and would copy each of them to "
            "host memory once more"
        )
    if spec.device == "cpu":
        raise ValueError(
            "host_cache_gib: vLLM's tier in host memory works on GPUs only (v1/kv_offload/cpu/spec.py); on a CPU all of the KV "
            "cache is in host memory, and kv_cache_gib is its size"
        )
    if spec.prefix_caching is False:
        raise ValueError("host_cache_gib: goes with prefix_caching, and that is off")
    if spec.cache_server is not None:
        raise ValueError(
            "host_cache_gib and cache_server: one of them. vLLM loads a prompt from the first place that has its beginning, so "
            "one block in host memory would hide all that the cache server has of it; and the server keeps blocks in memory "
            "itself (baton cache-server --dram-gb)"
        )
