"""Gated activations between an expert's two products: SiTU, SwiGLU, gpt-oss's clamped SwiGLU.

All compute in float32 and round once.
- situ: beta tanh(g / beta) sigmoid(g) * linear_beta tanh(u / linear_beta); Kimi K3 has beta 4 and
  linear_beta 25, so a result never exceeds 100.
- swiglu: g sigmoid(g) * u.
- swiglu_clamped (gpt-oss): g' = min(g, limit), u' = clamp(u, -limit, limit),
  g' sigmoid(alpha g') * (u' + 1).

The kernels are in expert_gemm_activate.py, so that the torch path needs no Triton.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

KINDS = ("situ", "swiglu", "swiglu_clamped")


@dataclass(frozen=True, kw_only=True)
class Activation:
    """One gated activation. `beta`, `linear_beta` belong to situ; `alpha`, `limit` to
    swiglu_clamped."""

    kind: str = "situ"
    beta: float = 4.0
    linear_beta: float = 25.0
    alpha: float = 1.702
    limit: float = 7.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {self.kind!r}")
        for name in ("beta", "linear_beta", "limit"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: expected above 0, got {getattr(self, name)}")

    @property
    def constants(self) -> tuple[int, float, float]:
        """What the kernels take: the kind's number and its two constants."""
        pair = (self.beta, self.linear_beta) if self.kind == "situ" else (self.alpha, self.limit)
        return (KINDS.index(self.kind), *pair)


SITU = Activation()


def activate_torch(gate: Tensor, up: Tensor, activation: Activation = SITU) -> Tensor:
    """The reference. gate, up: [..., I] of any float dtype -> [..., I] in gate's dtype; computed in
    float32, or float64 where given."""
    wide = torch.promote_types(gate.dtype, torch.float32)
    g, u = gate.to(wide), up.to(wide)
    if activation.kind == "situ":
        beta, linear = activation.beta, activation.linear_beta
        value = beta * torch.tanh(g / beta) * torch.sigmoid(g) * (linear * torch.tanh(u / linear))
    elif activation.kind == "swiglu":
        value = g * torch.sigmoid(g) * u
    else:
        g = g.clamp(max=activation.limit)
        u = u.clamp(-activation.limit, activation.limit)
        value = g * torch.sigmoid(activation.alpha * g) * (u + 1)
    return value.to(gate.dtype)
