"""RMSNorm of rows, and KDA's output norm: RMSNorm a head times a sigmoid gate.

fp32 inside, rounded once. Legend: N rows, D width, H heads, V head width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    weight_ptr,
    gate_ptr,
    out_ptr,
    eps,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    GATED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    inside = col < D
    x = tl.load(x_ptr + row * D + col, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + col, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / D + eps)
    out = x * scale * weight
    if GATED:
        gate = tl.load(gate_ptr + row * D + col, mask=inside, other=0.0).to(tl.float32)
        out *= tl.sigmoid(gate)
    tl.store(out_ptr + row * D + col, out.to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., D] over its last axis times weight [D], in x's dtype. x contiguous.

    Example: x = [3, 4], weight = [1, 2], eps = 0: the mean square is 12.5, so the result is
    [3, 8] / sqrt(12.5) = [0.8485, 2.2627].
    """
    return _launch(x, weight, None, eps)


def gated_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, eps: float
) -> torch.Tensor:
    """rms_norm(x) * sigmoid(gate), x and gate [N, H, V], weight [V] for all heads; rounded once."""
    if gate.shape != x.shape or not gate.is_contiguous():
        raise ValueError(f"gate: expected contiguous {tuple(x.shape)}, got {tuple(gate.shape)}")
    return _launch(x, weight, gate, eps)


def _launch(
    x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor | None, eps: float
) -> torch.Tensor:
    if not x.is_contiguous():
        raise ValueError("x: expected a contiguous tensor")
    width = x.shape[-1]
    if weight.shape != (width,):
        raise ValueError(f"weight: expected [{width}], got {tuple(weight.shape)}")
    out = torch.empty_like(x)
    rows = x.numel() // width if width else 0
    if rows:
        block = triton.next_power_of_2(width)
        _rms_norm_kernel[(rows,)](
            x,
            weight,
            x if gate is None else gate,
            out,
            eps,
            D=width,
            BLOCK=block,
            GATED=gate is not None,
            num_warps=min(8, max(1, block // 256)),
        )
    return out
