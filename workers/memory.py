"""Do weights and KV cache fit? Arithmetic on what a profile says; vLLM measures it at its start. GB are 10^9 bytes."""

from __future__ import annotations

from dataclasses import dataclass

from workers.host_cache import GIB
from workers.profile import Hardware, ModelFacts, Profile
from workers.spec import WorkerSpec

_DEFAULT_UTILIZATION = 0.92
"""vLLM's own --gpu-memory-utilization."""
_DTYPE_BYTES = {"auto": 2.0, "bfloat16": 2.0, "float16": 2.0, "float32": 4.0, "nvfp4": 0.5625}
"""Names that begin with fp8 are one byte."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """One GPU of a worker, and what all its GPUs hold together."""

    gpus: int
    usable_gb: float
    """Of a GPU, what vLLM may take."""
    weights_gb: float
    """On each GPU."""
    overhead_gb: float
    kv_gb: float
    """Left for the KV cache on each GPU; negative: it does not fit."""
    kv_bytes_per_token: int
    """On each GPU."""
    kv_tokens: int
    """That the worker's cache holds, over all data-parallel ranks here."""
    host_gb: float = 0.0
    """Host memory behind the GPU cache, for all GPUs of the worker together."""
    host_tokens: int = 0
    """That it holds, the same way."""

    def line(self, name: str, gpu_gb: float) -> str:
        """One line for a profile's comment, or a terminal."""
        return (
            f"{name}: {self.gpus} x {gpu_gb:g} GB; of each {self.usable_gb:.1f} usable - {self.weights_gb:.1f} weights - "
            f"{self.overhead_gb:.1f} other = {self.kv_gb:.1f} GB of KV cache; {self.kv_tokens:,} tokens in all"
            + (f"; {self.host_gb:.1f} GB of host memory behind it: {self.host_tokens:,} tokens" if self.host_gb else "")
        )


def memory(spec: WorkerSpec, facts: ModelFacts, hardware: Hardware) -> Memory:
    """What a worker needs and has."""
    tp = spec.tensor_parallel_size
    # Expert parallelism spreads the routed experts over the whole group, wherever its ranks run.
    experts_over = tp * spec.data_parallel_size if spec.expert_parallel else tp
    weights_gb = (facts.weights_gb - facts.experts_gb) / tp + facts.experts_gb / experts_over
    share = _DEFAULT_UTILIZATION if spec.gpu_memory_utilization is None else spec.gpu_memory_utilization
    usable_gb = hardware.memory_gb * share
    kv_gb = usable_gb - weights_gb - facts.overhead_gb
    each = kv_bytes_per_token(facts, spec.kv_cache_dtype or "auto", tp)
    # vLLM keeps what each rank has, heads that several have included; a latent vector, the same on all, is kept once.
    in_host = each if facts.mla else each * tp
    host_bytes = (spec.host_cache_gib or 0.0) * GIB
    return Memory(
        gpus=spec.gpus,
        usable_gb=usable_gb,
        weights_gb=weights_gb,
        overhead_gb=facts.overhead_gb,
        kv_gb=kv_gb,
        kv_bytes_per_token=each,
        kv_tokens=max(0, int(kv_gb * 1e9 / each)) * len(spec.ranks),
        host_gb=host_bytes / 1e9,
        host_tokens=int(host_bytes / in_host),
    )


def kv_bytes_per_token(facts: ModelFacts, kv_dtype: str, tensor_parallel_size: int = 1) -> int:
    """Bytes of KV cache that a token has on each GPU. A head is never cut: with more GPUs than heads it is there twice."""
    size = 1.0 if kv_dtype.startswith("fp8") else _DTYPE_BYTES.get(kv_dtype, 2.0)
    if facts.mla:
        return int(facts.layers * facts.head_dim * size)
    heads = max(1, facts.kv_heads // tensor_parallel_size)
    return int(facts.layers * 2 * heads * facts.head_dim * size)


def memory_of(profile: Profile, spec: WorkerSpec) -> Memory | None:
    """The same for a profile that says enough; None for one that does not, or for a CPU."""
    if profile.facts is None or profile.hardware is None or spec.device == "cpu":
        return None
    return memory(spec, profile.facts, profile.hardware)
