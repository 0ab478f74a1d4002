"""Wire formats: what a row looks like while it travels, and the reference quantizers.

Shape legend: H hidden, G scale groups of a row = ceil(H / group).

| wire | values | scales | group |
|---|---|---|---|
| bf16 | bfloat16 | none | - |
| fp8 | float8_e4m3fn | float32 | 128 |
| mxfp8 | float8_e4m3fn | uint8, an E8M0 exponent: 2^(byte - 127), 255 is NaN | 32 |
| none | the input's own dtype | none | - |

fp8: scale = amax / 448, value = round(x * (448 / amax)), amax taken as at least 2^-100.
mxfp8 (OCP Microscaling Formats v1.0, section 6.3, with the exponent rounded up so that no element
saturates): scale = 2^ceil(log2(amax / 448)), value = round(x / scale). Roundings are to nearest,
ties to even. A group that holds a NaN or an infinity has a NaN scale and zero values. A short last
group (H not divisible by the group) has its own scale.

Both formulas use only operations that round alike on every device (maximum, one division, one
multiplication, one conversion), so kernels are compared with these functions bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

E4M3_MAX = 448.0
_SMALLEST_AMAX = 2.0**-100


@dataclass(frozen=True, kw_only=True)
class Wire:
    """One format. `value_dtype` is None for "none", which keeps the input's dtype."""

    name: str
    value_dtype: torch.dtype | None
    scale_dtype: torch.dtype | None
    group: int

    def num_groups(self, hidden: int) -> int:
        """Scales of one row; 0 for a wire without scales."""
        return -(-hidden // self.group) if self.group else 0

    def row_bytes(self, hidden: int, dtype: torch.dtype = torch.bfloat16) -> int:
        """Bytes of one row's values and scales; `dtype` counts for wire "none" alone."""
        values = hidden * (self.value_dtype or dtype).itemsize
        scale = self.scale_dtype.itemsize if self.scale_dtype else 0
        return values + self.num_groups(hidden) * scale


WIRES: dict[str, Wire] = {
    wire.name: wire
    for wire in (
        Wire(name="bf16", value_dtype=torch.bfloat16, scale_dtype=None, group=0),
        Wire(name="fp8", value_dtype=torch.float8_e4m3fn, scale_dtype=torch.float32, group=128),
        Wire(name="mxfp8", value_dtype=torch.float8_e4m3fn, scale_dtype=torch.uint8, group=32),
        Wire(name="none", value_dtype=None, scale_dtype=None, group=0),
    )
}


def quantize(x: Tensor, wire: Wire) -> tuple[Tensor, Tensor | None]:
    """Put rows on a wire.

    Args:
        x: [..., H]; bfloat16 for fp8 and mxfp8, bfloat16 for bf16, any dtype for none.
        wire: the format.

    Returns:
        values [..., H] and scales [..., G] (None for a wire without scales).
    """
    if wire.name == "fp8":
        return quantize_fp8(x, group=wire.group)
    if wire.name == "mxfp8":
        return quantize_mxfp8(x, group=wire.group)
    return x, None


def dequantize(values: Tensor, scales: Tensor | None, wire: Wire) -> Tensor:
    """Read rows off a wire: [..., H], fp32 for fp8 and mxfp8 (value * scale, rounded once), the
    values themselves for bf16 and none."""
    if scales is None:
        return values
    hidden = values.shape[-1]
    factor = scales if wire.name == "fp8" else e8m0_to_f32(scales)
    wide = factor.repeat_interleave(wire.group, dim=-1)[..., :hidden]
    return values.float() * wide


def quantize_fp8(x: Tensor, *, group: int = 128) -> tuple[Tensor, Tensor]:
    """x [..., H] -> float8_e4m3fn [..., H] and fp32 scales [..., ceil(H / group)]."""
    grouped, hidden = _grouped(x, group)
    amax, finite = _group_amax(grouped)
    amax = amax.clamp_min(_SMALLEST_AMAX)
    limit = torch.full_like(amax, E4M3_MAX)
    scale = torch.where(finite, amax / limit, torch.nan)
    factor = (limit / amax).unsqueeze(-1)
    scaled = torch.where(finite.unsqueeze(-1), grouped * factor, 0.0)
    return _to_e4m3(scaled, hidden), scale


def quantize_mxfp8(x: Tensor, *, group: int = 32) -> tuple[Tensor, Tensor]:
    """x [..., H] -> float8_e4m3fn [..., H] and E8M0 exponents, uint8 [..., ceil(H / group)]."""
    grouped, hidden = _grouped(x, group)
    amax, finite = _group_amax(grouped)
    bits = amax.view(torch.int32)
    # 448 = 1.75 * 2^8, so ceil(log2(amax / 448)) is the exponent of amax less 8, plus one where
    # its mantissa is above 1.75.
    exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(torch.int32)
    exponent = exponent.clamp_min(0)
    inverse = ((254 - exponent) << 23).view(torch.float32).unsqueeze(-1)
    scaled = torch.where(finite.unsqueeze(-1), grouped * inverse, 0.0)
    scales = torch.where(finite, exponent, 255).to(torch.uint8)
    return _to_e4m3(scaled, hidden), scales


def e8m0_to_f32(scales: Tensor) -> Tensor:
    """uint8 E8M0 exponents -> fp32 2^(byte - 127); 255 is NaN, 0 the subnormal 2^-127."""
    wide = scales.to(torch.int32)
    value = (wide << 23).view(torch.float32)
    value = torch.where(wide == 0, 2.0**-127, value)
    return torch.where(wide == 255, torch.nan, value)


def _grouped(x: Tensor, group: int) -> tuple[Tensor, int]:
    """fp32 [..., G, group]; the short last group is filled with zeros, which no amax sees."""
    hidden = x.shape[-1]
    missing = -hidden % group
    wide = torch.nn.functional.pad(x.float(), (0, missing))
    return wide.unflatten(-1, (-1, group)), hidden


def _group_amax(grouped: Tensor) -> tuple[Tensor, Tensor]:
    """[..., G] largest magnitude, and where it is finite. Taken on the bits, whose order is that
    of the magnitudes with infinity and NaN on top: devices differ on NaN in a float maximum."""
    bits = (grouped.view(torch.int32) & 0x7FFFFFFF).amax(dim=-1)
    return bits.view(torch.float32), bits < 0x7F800000


def _to_e4m3(scaled: Tensor, hidden: int) -> Tensor:
    return scaled.flatten(-2)[..., :hidden].to(torch.float8_e4m3fn)
