"""RMSNorm, l2norm, SiTU and the dense MLP. All compute in `wide` (fp32, or float64 for the
batch-invariant mode; see Numerics.wide) and round once.

Formulas: kimi_k3's modeling code; SiTU: situ(g) = beta * tanh(g / beta) * sigmoid(g),
out = situ(g) * lb * tanh(up / lb).
"""

from __future__ import annotations

import dataclasses

import torch

from moe_comm.model.layers.linear import Numerics, linear
from moe_comm.model.parallel import Parallel, row_parallel


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, wide: torch.dtype = torch.float32
) -> torch.Tensor:
    """x [..., D] over its last axis times weight [D]; x's dtype."""
    if x.is_cuda:
        from moe_comm.kernels import rms_norm as kernel

        return kernel.rms_norm(x.contiguous(), weight, eps)
    value = x.to(wide)
    scale = torch.rsqrt(value.square().mean(dim=-1, keepdim=True) + eps)
    return (value * scale * weight.to(wide)).to(x.dtype)


def gated_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    gate: torch.Tensor,
    eps: float,
    wide: torch.dtype = torch.float32,
) -> torch.Tensor:
    """rms_norm(x) * sigmoid(gate), x and gate [N, H, V], weight [V] for every head; x's dtype,
    rounded once."""
    if x.is_cuda:
        from moe_comm.kernels import rms_norm as kernel

        return kernel.gated_rms_norm(x.contiguous(), weight, gate.contiguous(), eps)
    normed = rms_norm(x.to(wide), weight, eps, wide)
    return (normed * torch.sigmoid(gate.to(wide))).to(x.dtype)


def l2_norm(x: torch.Tensor, eps: float = 1e-6, wide: torch.dtype = torch.float32) -> torch.Tensor:
    """x [..., D] divided by sqrt(sum of squares + eps); in `wide`."""
    value = x.to(wide)
    return value * torch.rsqrt(value.square().sum(dim=-1, keepdim=True) + eps)


def situ_and_mul(
    gate: torch.Tensor,
    up: torch.Tensor,
    *,
    beta: float,
    linear_beta: float,
    wide: torch.dtype = torch.float32,
) -> torch.Tensor:
    """SiTU-GLU of gate and up, equal shapes; gate's dtype. Bounded by beta * linear_beta."""
    value = gate.to(wide)
    bounded = beta * torch.tanh(value / beta) * torch.sigmoid(value)
    return (bounded * (linear_beta * torch.tanh(up.to(wide) / linear_beta))).to(gate.dtype)


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
        both = linear(x, self.gate_up, self.numerics)
        if both.is_cuda and both.dtype == torch.bfloat16:
            return _situ_on_gpu(both, beta=self.beta, linear_beta=self.linear_beta)
        gate, up = both.chunk(2, dim=-1)
        return situ_and_mul(
            gate.contiguous(),
            up.contiguous(),
            beta=self.beta,
            linear_beta=self.linear_beta,
            wide=self.numerics.wide,
        )

    def forward(self, x: torch.Tensor, parallel: Parallel) -> torch.Tensor:
        """x [T, hidden] to [T, hidden], summed over the tensor-parallel group."""
        return row_parallel(self.hidden(x), self.down, self.numerics, parallel)


def _situ_on_gpu(gate_up: torch.Tensor, *, beta: float, linear_beta: float) -> torch.Tensor:
    """situ_and_mul of [T, 2 I] in one pass."""
    from moe_comm.kernels.expert_gemm_activate import activate_rows
    from moe_comm.kernels.situ import Activation

    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    if not rows:
        return out
    activation = Activation(kind="situ", beta=beta, linear_beta=linear_beta)
    return activate_rows(gate_up, rows, activation=activation, out=out)
