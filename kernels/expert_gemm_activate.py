"""Gated activations in Triton: the device function that the fused GEMM calls, and one pass over
rows for GEMMs that cannot fuse. Formulas and the torch reference: situ.py.

Shape legend: I intermediate width.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moe_comm.kernels.situ import SITU, Activation


@triton.jit
def _tanh(x):
    # (1 - e^-2|x|) / (1 + e^-2|x|) loses digits near 0, where a short series does not.
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    far = tl.where(x < 0, -far, far)
    square = x * x
    near = x * (1.0 + square * (-0.33333333 + square * (0.13333333 - square * 0.053968254)))
    return tl.where(square < 0.04, near, far)


@triton.jit
def activate(gate, up, KIND: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    """Device function. gate, up: float32 of one shape; KIND, A, B as in Activation.constants."""
    if KIND == 0:
        bounded = A * _tanh(gate / A) * tl.sigmoid(gate)
        return bounded * (B * _tanh(up / B))
    elif KIND == 1:
        return gate * tl.sigmoid(gate) * up
    else:
        # Comparisons, not minimum and maximum: a NaN must stay one.
        g = tl.where(gate > B, B, gate)
        u = tl.where(up > B, B, tl.where(up < -B, -B, up))
        return g * tl.sigmoid(A * g) * (u + 1.0)


@triton.jit
def _activate_rows_kernel(
    gate_up,
    out,
    num_rows,
    width,
    KIND: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """gate_up [rows, 2 * width] -> out [rows, width]; rows from the device scalar `num_rows`.

    Example: width 2, swiglu, a row [0, 1, 5, 2] -> [0 * sigmoid(0) * 5, sigmoid(1) * 2].
    """
    rows = tl.load(num_rows)
    columns = tl.cdiv(width, BLOCK)
    for tile in range(tl.program_id(0), rows * columns, tl.num_programs(0)):
        row = (tile // columns).to(tl.int64)
        offset = (tile % columns) * BLOCK + tl.arange(0, BLOCK)
        mask = offset < width
        source = gate_up + row * 2 * width + offset
        gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(source + width, mask=mask, other=0.0).to(tl.float32)
        value = activate(gate, up, KIND, A, B)
        tl.store(out + row * width + offset, value.to(out.dtype.element_ty), mask=mask)


def activate_rows(
    gate_up: Tensor, num_rows: Tensor, *, activation: Activation = SITU, out: Tensor
) -> Tensor:
    """One pass over rows whose number only the device knows.

    Args:
        gate_up: bfloat16 [capacity, 2 I], gate first.
        num_rows: int32 scalar or [1] on the device, at most capacity.
        out: bfloat16 [capacity, I]; rows from num_rows on are not written.
    """
    capacity, width = gate_up.shape[0], out.shape[1]
    if gate_up.shape != (out.shape[0], 2 * width):
        raise ValueError(
            f"gate_up: expected shape {(out.shape[0], 2 * width)}, got {tuple(gate_up.shape)}"
        )
    kind, a, b = activation.constants
    block = min(1024, triton.next_power_of_2(width))
    programs = min(max(capacity, 1) * triton.cdiv(width, block), 4096)
    _activate_rows_kernel[(programs,)](
        gate_up, out, num_rows, width, KIND=kind, A=a, B=b, BLOCK=block
    )
    return out
