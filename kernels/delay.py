"""A busy kernel that holds a stream up for a time that is read from device memory, so that graphs
can be replayed with other delays: tests of races between ranks. CUDA only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _clock():
    """Cycles of this multiprocessor: one program runs on one, and its tick is fine."""
    return tl.max(
        tl.inline_asm_elementwise(
            "mov.u64 $0, %clock64;", "=l,r", [tl.arange(0, 32)], dtype=tl.int64, is_pure=False,
            pack=1,
        ), 0,
    )  # fmt: skip


@triton.jit(do_not_specialize=["index"])
def _delay_kernel(cycles_ptr, index):
    wanted = tl.load(cycles_ptr + index)
    start = _clock()
    now = start
    while now - start < wanted:
        now = _clock()


def delay(cycles: torch.Tensor, index: int) -> None:
    """Hold the current stream up for cycles[index] clock cycles; cycles is int64, on the GPU."""
    _delay_kernel[(1,)](cycles, index, num_warps=1)
