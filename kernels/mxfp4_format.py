"""MXFP4 in plain torch: E2M1 codes, two a byte, with one E8M0 scale for 32 consecutive elements.

Format: OCP Microscaling Formats (MX) v1.0. A code is sign, two exponent bits, one mantissa bit;
codes 0 to 7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6 and bit 3 is the sign. The low nibble of a byte is the
even element. A scale byte e stands for 2^(e - 127): 0 is 2^-127, 254 is 2^127, 255 is NaN and
makes the whole block NaN; there is no scale of zero.

Shape legend: K elements along the reduction, K % 32 == 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32
NAN_SCALE = 255
# By code; the negatives follow the positives.
E2M1_VALUES = (
    0.0,
    0.5,
    1.0,
    1.5,
    2.0,
    3.0,
    4.0,
    6.0,
    -0.0,
    -0.5,
    -1.0,
    -1.5,
    -2.0,
    -3.0,
    -4.0,
    -6.0,
)
# Midpoints between the magnitudes of codes n and n + 1.
_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def pack_codes(codes: Tensor) -> Tensor:
    """uint8 codes [..., K] (0 to 15) -> packed uint8 [..., K / 2]; element 2i in the low nibble."""
    _check_dtype("codes", codes, torch.uint8)
    if codes.shape[-1] % 2:
        raise ValueError(f"codes: expected an even last dimension, got {tuple(codes.shape)}")
    pairs = codes.unflatten(-1, (-1, 2))
    packed: Tensor = pairs[..., 0] | (pairs[..., 1] << 4)
    return packed


def unpack_codes(packed: Tensor) -> Tensor:
    """Packed uint8 [..., K / 2] -> codes uint8 [..., K]."""
    _check_dtype("packed", packed, torch.uint8)
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def decode_scales(scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """uint8 E8M0 -> 2^(e - 127) in `dtype` (float32 or bfloat16, exact in both); 255 is NaN."""
    _check_dtype("scales", scales, torch.uint8)
    wide = scales.to(torch.int32)
    value = (wide << 23).view(torch.float32)
    # 2^-127 is below the smallest normal number, so its bits are a mantissa, not an exponent.
    value = torch.where(wide == 0, torch.full_like(value, 2.0**-127), value)
    value = torch.where(wide == NAN_SCALE, torch.full_like(value, torch.nan), value)
    return value.to(dtype)


def dequantize(packed: Tensor, scales: Tensor, *, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """MXFP4 -> values.

    Args:
        packed: uint8 [..., K / 2].
        scales: uint8 [..., K / 32].
        dtype: of the result; float32 or bfloat16.

    Returns:
        [..., K]. Exact, except that products from 2^128 on are infinite (e = 254 with codes of 2
        and above, and so on) and that a NaN scale makes its block NaN.
    """
    check_pair(packed, scales)
    # Two values a byte from one table: a byte indexes the pair (low nibble, high nibble).
    value = torch.tensor(E2M1_VALUES, dtype=dtype, device=packed.device)
    byte = torch.arange(256, device=packed.device)
    table = torch.stack((value[byte & 0xF], value[byte >> 4]), dim=-1)
    out = table.index_select(0, packed.reshape(-1).to(torch.int32))
    out = out.view(*scales.shape, GROUP)
    out.mul_(decode_scales(scales, dtype).unsqueeze(-1))
    return out.flatten(-2)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Values -> MXFP4: shared exponent floor(log2(amax)) - 2, elements rounded to nearest, ties to
    even, saturating at 6 (OCP MX v1.0, section 6.3).

    Args:
        x: float32 or bfloat16 [..., K].

    Returns:
        packed uint8 [..., K / 2] and scales uint8 [..., K / 32].

    Agrees with torchao bit for bit, which settles what section 6.3 leaves open: a block with a NaN
    has scale 255; one with an infinity has exponent 253 (infinities become 6); a block whose amax
    is below 2^-124 has scale byte 0, and its elements are divided by 2^-126, the smallest normal
    number, so they come back at half their value.
    """
    if x.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"x: expected float32 or bfloat16, got {x.dtype}")
    if x.shape[-1] % GROUP:
        raise ValueError(f"x: expected a last dimension divisible by {GROUP}, got {tuple(x.shape)}")
    grouped = x.float().unflatten(-1, (-1, GROUP))
    # On the bits, magnitudes are ordered with infinity and NaN on top.
    top = (grouped.contiguous().view(torch.int32) & 0x7FFFFFFF).amax(dim=-1)
    exponent = ((top >> 23) - 2).clamp_min(0)
    scales = torch.where(top > 0x7F800000, NAN_SCALE, exponent).to(torch.uint8)
    divisor = (scales.to(torch.int32) << 23).view(torch.float32).clamp_min(2.0**-126)
    scaled = grouped / divisor.unsqueeze(-1)
    return pack_codes(_encode(scaled).flatten(-2)), scales


def has_nan_scale(scales: Tensor) -> bool:
    """Whether any scale is 255. Synchronizes where `scales` is on a device."""
    return bool((scales == NAN_SCALE).any())


def split_gpt_oss(blocks: Tensor, scales: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """gpt-oss's `gate_up_proj_blocks` and `_scales` of one expert (or several) -> gate and up.

    Args:
        blocks: uint8 [..., 2 I, K / 32, 16]; row 2i is gate's row i, row 2i + 1 up's.
        scales: uint8 [..., 2 I, K / 32].

    Returns:
        gate packed [..., I, K / 2], gate scales [..., I, K / 32], up packed, up scales: views of
        the input where torch can make them.
    """
    packed = join_blocks(blocks, scales)
    if packed.shape[-2] % 2:
        raise ValueError(f"blocks: expected an even number of rows, got {tuple(blocks.shape)}")
    return packed[..., 0::2, :], scales[..., 0::2, :], packed[..., 1::2, :], scales[..., 1::2, :]


def join_blocks(blocks: Tensor, scales: Tensor) -> Tensor:
    """gpt-oss's blocks uint8 [..., N, K / 32, 16] -> packed uint8 [..., N, K / 2]."""
    if blocks.shape[-1] != GROUP // 2:
        raise ValueError(
            f"blocks: expected a last dimension of {GROUP // 2}, got {tuple(blocks.shape)}"
        )
    packed = blocks.flatten(-2)
    check_pair(packed, scales)
    return packed


def check_pair(packed: Tensor, scales: Tensor) -> None:
    """TypeError or ValueError unless packed uint8 [..., K / 2] goes with scales [..., K / 32]."""
    _check_dtype("packed", packed, torch.uint8)
    _check_dtype("scales", scales, torch.uint8)
    wanted = (*packed.shape[:-1], packed.shape[-1] * 2 // GROUP)
    if packed.shape[-1] * 2 % GROUP or tuple(scales.shape) != wanted:
        raise ValueError(
            f"scales: expected shape {wanted} for packed {tuple(packed.shape)}, "
            f"got {tuple(scales.shape)}"
        )


def _encode(scaled: Tensor) -> Tensor:
    """fp32 -> codes. A NaN becomes 3: its block is NaN by its scale, the code is the oracle's."""
    magnitude = scaled.abs()
    code = torch.zeros_like(scaled, dtype=torch.uint8)
    for index, bound in enumerate(_BOUNDS):
        # A tie goes to the even code: up from an odd one, down from an even one.
        over = magnitude >= bound if index % 2 else magnitude > bound
        code += over.to(torch.uint8)
    code = torch.where(magnitude.isnan(), 3, code)
    return code | (torch.signbit(scaled).to(torch.uint8) << 3)


def _check_dtype(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype:
        raise TypeError(f"{name}: expected {dtype}, got {tensor.dtype}")
