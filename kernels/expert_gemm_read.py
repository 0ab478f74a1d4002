"""Reads memory and keeps nothing: what a kernel that only reads gets from the device."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _read_kernel(source, out, size, BLOCK: tl.constexpr, UNROLL: tl.constexpr):
    """out[program] = XOR of this program's int32 words.

    Example: one program, words [1, 2, 4] -> 7.
    """
    folded = tl.zeros((BLOCK,), dtype=tl.int32)
    step = tl.num_programs(0).to(tl.int64) * BLOCK * UNROLL
    first = tl.program_id(0).to(tl.int64) * BLOCK * UNROLL
    for start in range(first, size, step):
        for part in tl.static_range(UNROLL):
            index = start + part * BLOCK + tl.arange(0, BLOCK)
            folded ^= tl.load(source + index, mask=index < size, other=0)
    tl.store(out + tl.program_id(0), tl.xor_sum(folded))


def read_memory(source: Tensor, *, out: Tensor) -> Tensor:
    """Read all of `source` (int32, contiguous). out: int32 [programs]; their XOR is the words'."""
    _read_kernel[(out.shape[0],)](source, out, source.numel(), BLOCK=2048, UNROLL=4, num_warps=8)
    return out
