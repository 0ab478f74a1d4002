"""Matrix products of the model, in a fast form and in a form whose bits do not depend on the batch.

A row of `x @ w.T` may come out with other bits when other rows are computed with it: the library
picks another kernel for another shape. `Numerics(batch_invariant=True)` computes tiles of a fixed
number of rows, padded with zeros, in float64, and rounds once. Equal shapes take equal paths, so a
row's bits depend on that row alone; float64 also hides the order of partial sums over
tensor-parallel ranks, which would otherwise show in the last bit.

Shapes: T rows, K inputs, N outputs.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

import torch
import torch.nn.functional as F

KdaForm = Literal["auto", "torch", "recurrent", "chunked"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numerics:
    """How results are computed where the formulas leave a choice.

    - `batch_invariant`: a request's results are the same bits whatever else is in the batch. Slow;
      for telling a state fault from rounding.
    - `row_tile`: rows of one tile in that mode.
    - `kda`: "recurrent" (token by token), "chunked" (the 64-token form, also for one token), or
      "auto": recurrent for one token, else chunked; on a GPU with fla-core's kernels. "torch": the
      same without them. The two forms round differently. With `batch_invariant`, "auto" and "torch"
      mean "chunked".
    """

    batch_invariant: bool = False
    row_tile: int = 16
    kda: KdaForm = "auto"

    def __post_init__(self) -> None:
        if self.row_tile < 1:
            raise ValueError(f"row_tile: expected at least 1, got {self.row_tile}")
        if self.kda not in get_args(KdaForm):
            expected = ", ".join(get_args(KdaForm))
            raise ValueError(f"kda: expected one of {expected}, got {self.kda!r}")

    @property
    def wide(self) -> torch.dtype:
        """dtype inside norms, gates and activations. float64 when batch invariant: an fp32 exp or
        tanh may differ in its last bit by where in a vector its element falls, and float64 keeps
        that out of the rounded result."""
        return torch.float64 if self.batch_invariant else torch.float32


def tiled_matmul(x: torch.Tensor, weight: torch.Tensor, *, row_tile: int) -> torch.Tensor:
    """x [T, K] times weight [N, K] transposed, as float64 [T, N], in tiles of `row_tile` rows."""
    num_rows = x.shape[0]
    wide = weight.double().t().contiguous()
    out = x.new_empty(num_rows, weight.shape[0], dtype=torch.float64)
    tile = x.new_zeros(row_tile, x.shape[1], dtype=torch.float64)
    for start in range(0, num_rows, row_tile):
        rows = min(row_tile, num_rows - start)
        tile[:rows] = x[start : start + rows]
        tile[rows:] = 0
        out[start : start + rows] = (tile @ wide)[:rows]
    return out


def linear(x: torch.Tensor, weight: torch.Tensor, numerics: Numerics) -> torch.Tensor:
    """x [T, K] times weight [N, K] transposed, in x's dtype: [T, N]."""
    if numerics.batch_invariant:
        return tiled_matmul(x, weight, row_tile=numerics.row_tile).to(x.dtype)
    return F.linear(x, weight)


def linear_fp32(x: torch.Tensor, weight: torch.Tensor, numerics: Numerics) -> torch.Tensor:
    """The same with fp32 products and sums, fp32 out: for the router and the logits."""
    if numerics.batch_invariant:
        return tiled_matmul(x, weight, row_tile=numerics.row_tile).float()
    if x.is_cuda and x.shape[0] and x.dtype == weight.dtype == torch.bfloat16:
        # bf16 products are exact in fp32 and sums are kept in fp32, so this is the fp32 product.
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return F.linear(x.float(), weight.float())
