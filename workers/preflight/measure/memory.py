"""The buffers that are read and written: host memory, or GPU memory where there is a CUDA torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

_STEP = 2_654_435_761
"""Any odd number: the pattern then repeats only after 2^32 words."""


def pattern(size_bytes: int, seed: int) -> NDArray[np.uint32]:
    """What a buffer of this size holds, word by word."""
    return np.arange(size_bytes // 4, dtype=np.uint32) * np.uint32(_STEP & 0xFFFFFFFF) + np.uint32(seed)


class Buffer(Protocol):
    """Memory that NIXL can register."""

    memory: str
    """dram or cuda."""
    address: int
    size_bytes: int
    device_id: int

    def fill(self, words: NDArray[np.uint32]) -> None:
        """Write all of it."""

    def words(self) -> NDArray[np.uint32]:
        """A copy of it in host memory."""


class HostBuffer:
    """Host memory."""

    memory = "dram"
    device_id = 0

    def __init__(self, size_bytes: int) -> None:
        """Every page is touched at once: none is new while the time runs."""
        self._words = np.zeros(size_bytes // 4, dtype=np.uint32)
        self._words.fill(1)
        self.address = int(self._words.ctypes.data)
        self.size_bytes = size_bytes

    def fill(self, words: NDArray[np.uint32]) -> None:
        """See Buffer."""
        self._words[:] = words

    def words(self) -> NDArray[np.uint32]:
        """See Buffer."""
        return self._words.copy()


class CudaBuffer:
    """Memory of the first visible GPU, through torch."""

    memory = "cuda"

    def __init__(self, size_bytes: int) -> None:
        """Raises RuntimeError without a CUDA torch."""
        import torch

        self._torch: Any = torch
        self._words: Any = torch.ones(size_bytes // 4, dtype=torch.int32, device="cuda:0")
        torch.cuda.synchronize()
        self.address = int(self._words.data_ptr())
        self.size_bytes = size_bytes
        self.device_id = 0

    def fill(self, words: NDArray[np.uint32]) -> None:
        """See Buffer."""
        self._words.copy_(self._torch.from_numpy(words.view(np.int32)))
        self._torch.cuda.synchronize()

    def words(self) -> NDArray[np.uint32]:
        """See Buffer."""
        self._torch.cuda.synchronize()
        copy: NDArray[np.int32] = self._words.cpu().numpy()
        return copy.view(np.uint32)


def resolve(memory: str, say: Callable[[str], None]) -> str:
    """``auto`` -> cuda where there is a torch that sees a GPU, else dram."""
    if memory != "auto":
        return memory
    try:
        import torch

        if torch.cuda.is_available():
            return "cuda"
    except ImportError:
        pass
    say("no CUDA torch here: host memory is measured instead of GPU memory")
    return "dram"


def buffer(memory: str, size_bytes: int) -> Buffer:
    """``memory``: dram or cuda."""
    return CudaBuffer(size_bytes) if memory == "cuda" else HostBuffer(size_bytes)
