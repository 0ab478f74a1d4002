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
def _tanh_parts(x, SCALE: tl.constexpr):
    """Numerator and denominator of tanh(x / SCALE): 1 - e and 1 + e, e = exp(-2 x / SCALE)."""
    # From 9 SCALE on a tanh is 1 in float32; without the bound, e would overflow. NaN stays NaN.
    bounded = tl.maximum(x, -9 * SCALE, propagate_nan=tl.PropagateNan.ALL)
    e = tl.exp2(bounded * (-2.8853900817779268 / SCALE))
    # Near 0, 1 - e loses digits that three terms of its series keep (to 2^-19 at SCALE / 64).
    cube = x * (1.3333333333333333 / (SCALE * SCALE * SCALE))
    near = x * (2.0 / SCALE + x * (cube - 2.0 / (SCALE * SCALE)))
    return tl.where(tl.abs(x) < SCALE / 64, near, 1.0 - e), 1.0 + e


@triton.jit
def activate(gate, up, KIND: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    """Device function. gate, up: float32 of one shape; KIND, A, B as in Activation.constants."""
    if KIND == 0:
        # A tanh(gate / A) sigmoid(gate) * B tanh(up / B) with two divisions: a pass over many rows
        # is bound by instructions, not by memory. With one, a product's large tiles run out of
        # registers.
        top, bottom = _tanh_parts(gate, A)
        bounded = (A * B) * top / (bottom * (1.0 + tl.exp2(gate * -1.4426950408889634)))
        up_top, up_bottom = _tanh_parts(up, B)
        return bounded * (up_top / up_bottom)
    elif KIND == 1:
        return gate * tl.sigmoid(gate) * up
    else:
        # Comparisons, not minimum and maximum: a NaN must stay one.
        g = tl.where(gate > B, B, gate)
        u = tl.where(up > B, B, tl.where(up < -B, -B, up))
        return g * tl.sigmoid(A * g) * (u + 1.0)


@triton.jit(do_not_specialize=["num_rows"])
def _activate_rows_kernel(
    gate_up,
    out,
    num_rows,
    width,
    KIND: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    BLOCK: tl.constexpr,
    ON_DEVICE: tl.constexpr,
):
    """gate_up [rows, 2 * width] -> out [rows, width]; `num_rows` of them, or, ON_DEVICE, as many as
    the scalar at `num_rows` says.

    Example: width 2, swiglu, a row [0, 1, 5, 2] -> [0 * sigmoid(0) * 5, sigmoid(1) * 2].
    """
    if ON_DEVICE:
        rows = tl.load(num_rows)
    else:
        rows = num_rows
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
    gate_up: Tensor, num_rows: Tensor | int, *, activation: Activation = SITU, out: Tensor
) -> Tensor:
    """One pass over rows.

    Args:
        gate_up: bfloat16 [capacity, 2 I], gate first.
        num_rows: at most capacity; int32 scalar or [1] on the device where only that knows it.
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
        gate_up, out, num_rows, width, KIND=kind, A=a, B=b, BLOCK=block,
        ON_DEVICE=isinstance(num_rows, Tensor),
    )  # fmt: skip
    return out
