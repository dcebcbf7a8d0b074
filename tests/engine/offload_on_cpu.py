"""vLLM's tier in host memory on a machine without a GPU: its own, but for who copies.

vLLM refuses it on a CPU, as its copies are CUDA's (``v1/kv_offload/cpu/spec.py``: get_worker). All else of it needs no GPU:
what is kept and dropped, what is looked up, counted and published. Named in ``kv_connector_extra_config`` (``spec_name``,
``spec_module_path``), it runs in a worker of the CPU build, whose "GPU cache" is host memory as well.
"""

from __future__ import annotations

import torch
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class OnCpu(CPUOffloadingSpec):
    """vLLM's own spec, with a worker that copies by itself."""

    _copier: Copier | None = None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """The worker's side of it."""
        if self._copier is None:
            assert self.blocks_per_chunk == 1
            self._copier = Copier(kv_caches, self.num_chunks)
        return self._copier


class Copier(OffloadingWorker):
    """Copies whole blocks at once; each transfer is done when it was submitted, and reported with the next step."""

    def __init__(self, kv_caches: CanonicalKVCaches, chunks: int) -> None:
        self._cache = [each.tensor for each in kv_caches.tensors]
        self._kept = [torch.zeros((chunks, tensor.shape[1]), dtype=tensor.dtype) for tensor in self._cache]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """From the cache."""
        assert isinstance(dst_spec, BlockIDsLoadStoreSpec)
        self._copy(self._cache, src_spec, self._kept, dst_spec, job_id)
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Into the cache."""
        assert isinstance(src_spec, BlockIDsLoadStoreSpec)
        self._copy(self._kept, src_spec, self._cache, dst_spec, job_id)
        return True

    def get_finished(self) -> list[TransferResult]:
        """Transfers since the last call."""
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Nothing to wait for."""

    def _copy(
        self,
        source: list[torch.Tensor],
        source_ids: BlockIDsLoadStoreSpec,
        target: list[torch.Tensor],
        target_ids: BlockIDsLoadStoreSpec,
        job_id: int,
    ) -> None:
        rows, into = torch.from_numpy(source_ids.block_ids).long(), torch.from_numpy(target_ids.block_ids).long()
        assert len(rows) == len(into)
        size = 0
        for there, here in zip(source, target, strict=True):
            here[into] = there[rows]
            size += len(rows) * here.shape[1]
        self._done.append(TransferResult(job_id, success=True, transfer_size=size, transfer_time=0.0))
