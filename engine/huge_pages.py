"""Asks the kernel to back large tensors with huge pages: streaming K and V then misses the TLB far less."""

import ctypes
import mmap

from torch import Tensor

_HUGE_PAGE_BYTES = 2 * 2**20


def advise_huge_pages(tensor: Tensor) -> bool:
    """Mark the whole huge pages inside a CPU tensor's memory, before it is first touched.

    Only advice: pages stay unbacked until touched, and where the system knows no huge pages (or this is
    no Linux) nothing happens and False is returned.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None or tensor.device.type != "cpu":
        return False
    start = tensor.data_ptr()
    first = start + -start % _HUGE_PAGE_BYTES
    end = (start + tensor.numel() * tensor.element_size()) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    if end <= first:
        return False
    status: int = ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), advice)
    return status == 0
