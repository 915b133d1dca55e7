"""Memory for a model's weights on the CPU: few large mappings on huge pages.

A decode step reads every weight once, in order, so with 4 KB pages it misses the TLB on every page, and the
processor's own prefetchers stop at each page's end. The allocator gives a tensor huge pages only where it
covers whole ones by itself, which most layers of a small model do not.
"""

from __future__ import annotations

import contextlib
import math
import mmap

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2 << 20  # of x86-64, and of AArch64 with 4 KB pages
# A mapping takes address space at once and memory only where it is written, a huge page at a time.
_MAPPING_BYTES = 64 << 20
_ALIGNMENT = 64  # a cache line


class WeightArena:
    """Hands out tensors that lie one after another in huge pages.

    Memory goes back to the system when the last tensor of a mapping goes, so this is for tensors that live
    together. Where the system has no transparent huge pages the tensors lie in ordinary ones.
    """

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised contiguous tensor."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes == 0:
            return torch.empty(shape, dtype=dtype)
        taken = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        if taken > _MAPPING_BYTES:
            memory = _map(taken)  # of its own; the one in use keeps its rest
        else:
            if taken > self._free.numel():
                self._free = _map(_MAPPING_BYTES)
            memory, self._free = self._free[:taken], self._free[taken:]
        return memory[:nbytes].view(dtype).view(shape)


def _map(nbytes: int) -> Tensor:
    """``[nbytes]`` uint8 of zeros that starts with a huge page."""
    mapping = mmap.mmap(-1, nbytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    start = -memory.data_ptr() % HUGE_PAGE_BYTES
    return memory[start : start + nbytes]
