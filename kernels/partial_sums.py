"""The two sums of combine, each a launch of its own, for backends that move rows by other means.

Legend: T tokens here, R ranks, B the bucket, H hidden, K choices, M received rows, N expert rows.
The order of additions is the numeric contract's (moe_comm.backends.reference).
"""

from __future__ import annotations

import torch
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


@triton.jit
def _partials_kernel(
    y_ptr, position_ptr, weights_ptr, out_ptr, H: tl.constexpr, K: tl.constexpr,
    BLOCK: tl.constexpr, APPLIED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_row = column < H
    acc = partial_sum(y_ptr, position_ptr, weights_ptr, row, column, in_row, H, K, BLOCK, APPLIED)
    tl.store(out_ptr + row * H + column, acc.to(out_ptr.dtype.element_ty), mask=in_row)


@triton.jit
def _fold_kernel(
    partials_ptr, choice_rank_ptr, bias_ptr, out_ptr, stride_rank, H: tl.constexpr,
    K: tl.constexpr, KP: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Without a list of ranks in order: each choice asks whether a later one lies on its rank."""
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_row = column < H
    acc = tl.zeros([BLOCK], tl.float32)
    if HAS_BIAS:
        acc = tl.load(bias_ptr + token.to(tl.int64) * H + column, mask=in_row, other=0.0)
    choice = tl.arange(0, KP)
    ranks = tl.load(choice_rank_ptr + token * K + choice, mask=choice < K, other=-1)
    for k in tl.static_range(K):
        source = tl.load(choice_rank_ptr + token * K + k)
        later = tl.max(((ranks == source) & (choice > k)).to(tl.int32), 0)
        last = (source >= 0) & (later == 0)
        at = source.to(tl.int64) * stride_rank + token.to(tl.int64) * H
        value = tl.load(partials_ptr + at + column, mask=in_row & last, other=-0.0)
        acc = acc + value.to(tl.float32)
    tl.store(
        out_ptr + token.to(tl.int64) * H + column, acc.to(out_ptr.dtype.element_ty), mask=in_row
    )


def partial_sums(
    y: torch.Tensor,
    choice_position: torch.Tensor,
    weights: torch.Tensor,
    *,
    weights_applied: bool,
    out: torch.Tensor,
) -> torch.Tensor:
    """The contract's partial(t, r) of each received row.

    Args:
        y: [N, H] bf16, fp16 or fp32 expert rows.
        choice_position: [M, K] int32, expert row of each choice, -1 where not here.
        weights: [M, K] fp32.
        weights_applied: add without weights.
        out: [M, H] in the dtype to round to; rows that nobody reached become zeros.

    Returns: out.
    """
    num_rows, num_topk = choice_position.shape
    hidden = y.shape[1]
    if num_rows:
        block = min(1024, triton.next_power_of_2(hidden))
        _partials_kernel[(num_rows, triton.cdiv(hidden, block))](
            y, choice_position, weights, out, H=hidden, K=num_topk, BLOCK=block,
            APPLIED=weights_applied,
        )  # fmt: skip
    return out


def fold(
    partials: torch.Tensor,
    choice_rank: torch.Tensor,
    *,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> torch.Tensor:
    """The contract's final sum.

    Args:
        partials: [R, B, H], rank r's partial sum of this rank's token t at (r, t), B >= T; any
            float dtype; inner two dimensions contiguous.
        choice_rank: [T, K] int32, rank that serves each choice, -1 where masked.
        bias: fp32 [T, H] added first, or None.
        out: [T, H].

    Returns: out.
    """
    num_tokens, num_topk = choice_rank.shape
    hidden = partials.shape[-1]
    if num_tokens:
        block = min(1024, triton.next_power_of_2(hidden))
        _fold_kernel[(num_tokens, triton.cdiv(hidden, block))](
            partials, choice_rank, bias if bias is not None else out, out, partials.stride(0),
            H=hidden, K=num_topk, KP=triton.next_power_of_2(num_topk), BLOCK=block,
            HAS_BIAS=bias is not None,
        )  # fmt: skip
    return out
