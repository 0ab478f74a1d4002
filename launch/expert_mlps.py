"""Expert MLPs on rows that are in expert order already: what baselines and benchmarks call.

Shape legend: M expert rows, H hidden, I intermediate width, L local experts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moe_comm.kernels.expert_gemm import grouped_mlp
from moe_comm.kernels.expert_gemm_weights import ExpertWeights
from moe_comm.kernels.situ import SITU, activate_torch

# (rows [M, H] bf16 grouped by expert, int32 offsets [L + 1]) -> rows [M, H] bf16.
Mlp = Callable[[Tensor, Tensor], Tensor]


def mxfp4_mlp(weights: ExpertWeights, *, experts_by: str, expected_rows: int) -> Mlp:
    """The same MXFP4 experts on rows that are in expert order already."""

    def call(rows: Tensor, offsets: Tensor) -> Tensor:
        out = torch.empty_like(rows)
        if experts_by == "humming":
            # Its gather would only copy.
            from moe_comm.kernels.expert_gemm_humming import mlp_in_order

            return mlp_in_order(
                rows, offsets, weights, activation=SITU, expected_rows=expected_rows, out=out
            )
        index = torch.arange(rows.shape[0], dtype=torch.int32, device=rows.device)
        return grouped_mlp(
            rows,
            index,
            offsets,
            weights,
            implementation=experts_by,
            expected_rows=expected_rows,
            out=out,
        )

    return call


def bf16_mlp(w13: Tensor, w2: Tensor) -> Mlp:
    """bf16 weights [L, 2 I, H] and [L, H, I] through torch's grouped product."""
    inter = w2.shape[2]

    def call(rows: Tensor, offsets: Tensor) -> Tensor:
        ends = offsets[1:].contiguous()
        gate_up = torch._grouped_mm(rows, w13.transpose(1, 2), offs=ends)
        if rows.device.type != "cuda":
            hidden = activate_torch(gate_up[:, :inter], gate_up[:, inter:])
        else:
            from moe_comm.kernels.expert_gemm_activate import activate_rows

            hidden = torch.empty(rows.shape[0], inter, dtype=torch.bfloat16, device=rows.device)
            activate_rows(gate_up, offsets[-1:], out=hidden)
        return torch._grouped_mm(hidden, w2.transpose(1, 2), offs=ends)

    return call
