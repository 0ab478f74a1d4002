"""Routed experts whose rows do not depend on how many rows an expert has.

For the batch-invariant mode: grouped products pick their kernels by row counts, so a row may come
out with other bits when another request's row joins its expert.
"""

from __future__ import annotations

import dataclasses
import itertools

import torch

from moe_comm.handle import Dispatched
from moe_comm.kernels.expert_gemm import dequantize_rows
from moe_comm.kernels.expert_gemm_weights import ExpertWeights
from moe_comm.kernels.mxfp4_format import dequantize
from moe_comm.model.layers.linear import Numerics, linear
from moe_comm.model.layers.norm import situ_and_mul


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class InvariantExperts:
    """One layer's experts on this rank: weights in layout "rows" or "tiles"."""

    weights: ExpertWeights
    beta: float
    linear_beta: float
    numerics: Numerics

    def __call__(self, arrived: Dispatched) -> torch.Tensor:
        """Rows [n, L] bf16, grouped by local expert. Synchronizes for the offsets."""
        offsets = [int(n) for n in arrived.expert_offsets.cpu()]
        index = arrived.row_index[: offsets[-1]].long()
        scales = None if arrived.scales is None else arrived.scales.flatten(0, 1)[index]
        rows = dequantize_rows(arrived.rows.flatten(0, 1)[index], scales).bfloat16()
        out = torch.empty_like(rows)
        for expert, (start, end) in enumerate(itertools.pairwise(offsets)):
            if start < end:
                out[start:end] = self._one(rows[start:end], expert)
        return out

    def _one(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        gate, up, down = (dequantize(*pair) for pair in self.weights.get(expert))
        hidden = situ_and_mul(
            linear(x, gate, self.numerics),
            linear(x, up, self.numerics),
            beta=self.beta,
            linear_beta=self.linear_beta,
            wide=self.numerics.wide,
        )
        return linear(hidden, down, self.numerics)
