"""The two sums of combine, each a launch of its own, for backends that move rows by other means.

Legend: H width of a row, K choices. The order of additions is the numeric contract's
(moe_comm.backends.reference). Launches: moe_comm.backends.sum_launches.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def partial_sum(
    y_ptr, position_ptr, weights_ptr, row, column, in_row, H: tl.constexpr, K: tl.constexpr,
    BLOCK: tl.constexpr, APPLIED: tl.constexpr,
):  # fmt: skip
    """fp32 [BLOCK]: fma of the row's choices on this rank, k ascending, rounded at each step.

    Choices are unrolled and loads masked, so that all of them are in flight together.

    Example: positions [4, -1, 2], weights [0.5, ., 2]: fma(y[2], 2, fma(y[4], 0.5, 0)).
    """
    acc = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(K):
        position = tl.load(position_ptr + row * K + k)
        here = position >= 0
        value = tl.load(
            y_ptr + position.to(tl.int64) * H + column, mask=in_row & here, other=0.0
        ).to(tl.float32)
        if APPLIED:
            added = acc + value
        else:
            weight = tl.load(weights_ptr + row * K + k)
            added = tl.fma(value, tl.zeros([BLOCK], tl.float32) + weight, acc)
        acc = tl.where(here, added, acc)
    return acc


@triton.jit(do_not_specialize=["first"])
def _partials_kernel(
    y_ptr, position_ptr, weights_ptr, out_ptr, first, H: tl.constexpr, K: tl.constexpr,
    BLOCK: tl.constexpr, APPLIED: tl.constexpr,
):  # fmt: skip
    """The partial sum of a row, from `first` on; zeros where no choice is here."""
    row = first + tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_row = column < H
    acc = partial_sum(y_ptr, position_ptr, weights_ptr, row, column, in_row, H, K, BLOCK, APPLIED)
    tl.store(out_ptr + row * H + column, acc.to(out_ptr.dtype.element_ty), mask=in_row)


@triton.jit
def _fold_kernel(
    partials_ptr, choice_rank_ptr, bias_ptr, out_ptr, stride_rank, H: tl.constexpr,
    K: tl.constexpr, KP: tl.constexpr, TERMS: tl.constexpr, BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """One token's sum: of each rank once, where its last choice stands. All terms, TERMS at most,
    are asked for before the first is added.

    Example: choices on ranks [1, 0, 1, -1] add rank 0's term, then rank 1's.
    """
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_row = column < H
    choice = tl.arange(0, KP)
    ranks = tl.load(choice_rank_ptr + token * K + choice, mask=choice < K, other=-1)
    later = (ranks[:, None] == ranks[None, :]) & (choice[None, :] > choice[:, None])
    last = (ranks >= 0) & (tl.max(later.to(tl.int32), 1) == 0)
    place = tl.cumsum(last.to(tl.int32), 0) - 1
    acc = tl.zeros([BLOCK], tl.float32)
    if HAS_BIAS:
        acc = tl.load(bias_ptr + token.to(tl.int64) * H + column, mask=in_row, other=0.0)
    for step in tl.static_range(TERMS):
        source = tl.max(tl.where(last & (place == step), ranks, -1), 0)
        at = source.to(tl.int64) * stride_rank + token.to(tl.int64) * H
        # -0 changes no number.
        value = tl.load(partials_ptr + at + column, mask=in_row & (source >= 0), other=-0.0)
        acc = acc + value.to(tl.float32)
    tl.store(
        out_ptr + token.to(tl.int64) * H + column, acc.to(out_ptr.dtype.element_ty), mask=in_row
    )
