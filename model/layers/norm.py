"""RMSNorm, l2norm, SiTU and the dense MLP. All compute in fp32 and round once.

Formulas: kimi_k3's modeling code; SiTU: situ(g) = beta * tanh(g / beta) * sigmoid(g),
out = situ(g) * lb * tanh(up / lb).
"""

from __future__ import annotations

import dataclasses

import torch

from moe_comm.model.layers.linear import Numerics, linear
from moe_comm.model.parallel import Parallel, row_parallel


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., D] over its last axis times weight [D]; x's dtype."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


def l2_norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """x [..., D] divided by sqrt(sum of squares + eps); fp32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().sum(dim=-1, keepdim=True) + eps)


def situ_and_mul(
    gate: torch.Tensor, up: torch.Tensor, *, beta: float, linear_beta: float
) -> torch.Tensor:
    """SiTU-GLU of gate and up, equal shapes; gate's dtype. Bounded by beta * linear_beta."""
    wide = gate.float()
    bounded = beta * torch.tanh(wide / beta) * torch.sigmoid(wide)
    return (bounded * (linear_beta * torch.tanh(up.float() / linear_beta))).to(gate.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mlp:
    """down(SiTU(gate(x), up(x))). Weights: gate_up [2 I, hidden] (gate rows first), down
    [hidden, I]; I is this rank's share when the MLP is tensor parallel."""

    gate_up: torch.Tensor
    down: torch.Tensor
    beta: float
    linear_beta: float
    numerics: Numerics

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] to the activated intermediate [T, I]."""
        gate, up = linear(x, self.gate_up, self.numerics).chunk(2, dim=-1)
        return situ_and_mul(
            gate.contiguous(), up.contiguous(), beta=self.beta, linear_beta=self.linear_beta
        )

    def forward(self, x: torch.Tensor, parallel: Parallel) -> torch.Tensor:
        """x [T, hidden] to [T, hidden], summed over the tensor-parallel group."""
        return row_parallel(self.hidden(x), self.down, self.numerics, parallel)
