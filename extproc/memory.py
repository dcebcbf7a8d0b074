"""How the process manages its memory: set once, when everything has been imported and built.

* The C library gives large pieces of memory back to the system at once, and gets them anew for the next request: a body of
  128 KB costs more in page faults than in all that is done with it. So what is freed is kept, up to a bound.
* What exists at the start lives as long as the process, so the garbage collector need not look at it again and again. Requests
  leave few cycles behind: a young collection after some thousand new objects is enough, and full ones are rare.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from typing import Final

KEPT_BYTES: Final = 64 << 20
"""Freed memory at the end of the heap that is not given back."""
MAPPED_FROM_BYTES: Final = 4 << 20
"""Pieces of this size and more are still got from the system, and given back, one by one."""
_GROWS_BY_BYTES: Final = 4 << 20

_YOUNG_OBJECTS: Final = 10_000
_MIDDLE_ROUNDS: Final = 20
_OLD_ROUNDS: Final = 20

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h of glibc; mallopt(3)


def keep_freed() -> bool:
    """Let the C library keep what is freed; whether it can be told so (glibc)."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    settings = ((_M_MMAP_THRESHOLD, MAPPED_FROM_BYTES), (_M_TRIM_THRESHOLD, KEPT_BYTES), (_M_TOP_PAD, _GROWS_BY_BYTES))
    # musl has the function for its name only, and answers 0.
    taken = [mallopt(name, value) == 1 for name, value in settings]
    return all(taken)


def collect_rarely() -> None:
    """What exists now is never looked at again by the garbage collector, and what comes later less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, _MIDDLE_ROUNDS, _OLD_ROUNDS)
