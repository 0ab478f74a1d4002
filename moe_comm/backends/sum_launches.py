"""Launches of combine's two sums (kernels/partial_sums.py), set up once a kind of call.

Shape legend: M received rows, N expert rows, D row width, K choices, G terms of a sum, B rows a
term has room for, T tokens.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from moe_comm.backends.direct_launch import Launch


def _power_of_2(value: int) -> int:
    """The next one, at least 1."""
    return 1 << (value - 1).bit_length() if value > 1 else 1


@functools.cache
def _partials(
    device: torch.device, width: int, num_topk: int, applied: bool, *kinds: torch.dtype
) -> Launch:
    """kinds: dtypes of y and of the sums."""
    from moe_comm.kernels.partial_sums import _partials_kernel

    options = {"H": width, "K": num_topk, "BLOCK": min(1024, _power_of_2(width))}
    return Launch(_partials_kernel, {**options, "APPLIED": applied})


@functools.cache
def _fold(
    device: torch.device,
    width: int,
    num_topk: int,
    num_terms: int,
    stride: int,
    has_bias: bool,
    *kinds: torch.dtype,
) -> Launch:
    """stride: elements from a term to the next. kinds: dtypes of terms and sums."""
    from moe_comm.kernels.partial_sums import _fold_kernel

    block = min(4096, _power_of_2(width))
    options = {
        "H": width, "K": num_topk, "KP": _power_of_2(num_topk), "TERMS": min(num_terms, num_topk),
        "BLOCK": block, "HAS_BIAS": has_bias, "num_warps": 8 if block > 1024 else 4,
    }  # fmt: skip
    return Launch(_fold_kernel, options, stride_rank=stride)


def partial_sums(
    y: Tensor,
    position: Tensor,
    weights: Tensor,
    *,
    weights_applied: bool,
    out: Tensor,
    rows: range | None = None,
) -> None:
    """The contract's partial(t, r) of each received row.

    Args:
        y: [N, D] bf16, fp16 or fp32 expert rows, contiguous.
        position: [M, K] int32, contiguous, expert row of each choice, -1 where not here.
        weights: M * K fp32, contiguous.
        weights_applied: add without weights.
        out: M * D, contiguous, in the dtype to round to; rows that nobody reached become zeros.
        rows: which of the M rows; default all.
    """
    (num_rows, num_topk), width = position.shape, y.shape[1]
    first, num_rows = (0, num_rows) if rows is None else (rows.start, len(rows))
    if num_rows and width:
        launch = _partials(y.device, width, num_topk, weights_applied, y.dtype, out.dtype)
        grid = num_rows, -(-width // min(1024, _power_of_2(width)))
        launch(grid, y, position, weights, out, first)


def fold(terms: Tensor, who: Tensor, *, bias: Tensor | None, out: Tensor) -> None:
    """The contract's final sum.

    Args:
        terms: [G, B, D], rank r's partial sum of token t at (r, t), B >= T; any float dtype; inner
            two dimensions contiguous.
        who: [T, K] int32, contiguous, the term of each choice, -1 where masked.
        bias: fp32 [T, D], contiguous, added first, or None.
        out: [T, D], contiguous.
    """
    (num_tokens, num_topk), width = who.shape, terms.shape[2]
    if num_tokens and width:
        launch = _fold(
            terms.device, width, num_topk, terms.shape[0], terms.stride(0), bias is not None,
            terms.dtype, out.dtype,
        )  # fmt: skip
        grid = num_tokens, -(-width // min(4096, _power_of_2(width)))
        launch(grid, terms, who, out if bias is None else bias, out)
