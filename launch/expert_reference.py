"""One expert's MLP in float32, and how far an implementation in bfloat16 may stray from it."""

from __future__ import annotations

from torch import Tensor

from moe_comm.kernels import mxfp4_format
from moe_comm.kernels.situ import activate_torch

# Half a unit in the last place of a bfloat16, relative, at most.
ROUNDING = 2.0**-8


def reference_mlp(
    x: Tensor, gate: tuple[Tensor, Tensor], up: tuple[Tensor, Tensor], down: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """One expert on rows.

    Args:
        x: [n, H] float32.
        gate, up, down: the matrices as packed codes and scales.

    Returns:
        y [n, H] float32, and the tolerance of each element: six roundings of bfloat16 of gate, up
        and the activation (root of squares over the reduction) and one of y.
    """
    w1, w3, w2 = (mxfp4_format.dequantize(*pair).float() for pair in (gate, up, down))
    g, u = x @ w1.T, x @ w3.T
    hidden = activate_torch(g, u)
    # A relative rounding of gate and of up moves the result by its slopes there.
    shift_g = activate_torch(g * (1 + ROUNDING), u) - hidden
    shift_u = activate_torch(g, u * (1 + ROUNDING)) - hidden
    error = (hidden * ROUNDING).square() + shift_g.square() + shift_u.square()
    y = hidden @ w2.T
    return y, 6 * (error @ w2.square().T).sqrt() + 2 * ROUNDING * y.abs() + 1e-6
