"""Quantizers of the wire formats on the device; their reference is moe_comm.wire.

Legend: M rows, H hidden, G = ceil(H / group) scale groups of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

FP8_GROUP = 128
MXFP8_GROUP = 32


@triton.jit
def quantize_groups(x, MX: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """x: fp32 [BLOCK], zero past the row's end -> float8e4nv [BLOCK] and one scale a group:
    fp32 [BLOCK // GROUP], or with MX an E8M0 exponent as uint8.

    Maxima are taken on the bits, so a NaN or an infinity in a group is seen on every device.

    Example (MX, GROUP 32): a group with largest magnitude 3.0 has exponent byte 127 + 1 - 8 = 120;
    its values are multiplied by 2^7.
    """
    grouped = x.reshape(BLOCK // GROUP, GROUP)
    bits = tl.max(grouped.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    finite = bits < 0x7F800000
    if MX:
        exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
        exponent = tl.maximum(exponent, 0)
        factor = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        scale = tl.where(finite, exponent, 255).to(tl.uint8)
    else:
        # 2^-100 in bits: (127 - 100) << 23.
        amax = tl.maximum(bits, 27 << 23).to(tl.float32, bitcast=True)
        limit = tl.full([BLOCK // GROUP], 448.0, tl.float32)
        factor = tl.div_rn(limit, amax)
        scale = tl.where(finite, tl.div_rn(amax, limit), float("nan"))
    scaled = tl.where(finite[:, None], grouped * factor[:, None], 0.0)
    return scaled.to(tl.float8e4nv).reshape(BLOCK), scale


@triton.jit
def through_wire(x, MX: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """fp32 [BLOCK] -> what a receiver reads of it: value * scale in fp32."""
    values, scale = quantize_groups(x, MX, GROUP, BLOCK)
    factor = scale_to_f32(scale, MX)
    wide = values.to(tl.float32).reshape(BLOCK // GROUP, GROUP) * factor[:, None]
    return wide.reshape(BLOCK)


@triton.jit
def scale_to_f32(scale, MX: tl.constexpr):
    """A scale as fp32; E8M0 byte 255 is NaN and byte 0 the subnormal 2^-127."""
    if MX:
        wide = scale.to(tl.int32)
        bits = tl.where(wide == 0, 1 << 22, wide << 23)
        value = tl.where(wide == 255, float("nan"), bits.to(tl.float32, bitcast=True))
    else:
        value = scale
    return value


@triton.jit
def _quantize_kernel(
    x_ptr, values_ptr, scales_ptr, stride_x, H: tl.constexpr, G: tl.constexpr, MX: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    columns = start + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride_x + columns, mask=columns < H, other=0.0).to(tl.float32)
    values, scale = quantize_groups(x, MX, GROUP, BLOCK)
    tl.store(values_ptr + row * H + columns, values, mask=columns < H)
    groups = start // GROUP + tl.arange(0, BLOCK // GROUP)
    tl.store(scales_ptr + row * G + groups, scale, mask=groups < G)


def quantize(x: torch.Tensor, *, mx: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows onto a wire, as moe_comm.wire.quantize_fp8 or quantize_mxfp8 to the bit.

    Args:
        x: [M, H] bf16, rows contiguous.
        mx: mxfp8 (uint8 E8M0 scale a 32) instead of fp8 (fp32 scale a 128).

    Returns: float8_e4m3fn [M, H] and scales [M, G].
    """
    num_rows, hidden = x.shape
    group = MXFP8_GROUP if mx else FP8_GROUP
    num_groups = -(-hidden // group)
    values = torch.empty(num_rows, hidden, dtype=torch.float8_e4m3fn, device=x.device)
    scale_dtype = torch.uint8 if mx else torch.float32
    scales = torch.empty(num_rows, num_groups, dtype=scale_dtype, device=x.device)
    if x.numel():
        block = min(1024, triton.next_power_of_2(max(hidden, group)))
        grid = (num_rows, triton.cdiv(hidden, block))
        _quantize_kernel[grid](
            x, values, scales, x.stride(0), H=hidden, G=num_groups, MX=mx, GROUP=group, BLOCK=block
        )
    return values, scales
