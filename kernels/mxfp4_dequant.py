"""Device functions: codes of the tile form (mxfp4_tiles.py) to bfloat16, in registers.

An int16 word holds four codes; code j of word c is element 32 j + c of its block of 128, and the 32
elements of one j share a scale. Exact in every mode, for every scale but 255 (NaN, which the loader
refuses): products from 2^128 on are infinite, and 2^-127 is a subnormal bfloat16.

MODE: PORTABLE, plain Triton for any device; NARROW, inline PTX for scales up to 128 (2^1, weights
up to 12); WIDE, inline PTX for every scale. A code's exponent and mantissa, at bits 8 to 6 of a
bfloat16, read as the code's value times 2^-126 (code 1 is a subnormal there as in E2M1). So NARROW
multiplies by 2^(e - 1), whose exponent fits up to e = 128; WIDE by 2^126, then by 2^(e - 127).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PORTABLE, NARROW, WIDE = 0, 1, 2
# The largest scale byte that NARROW takes.
NARROW_LIMIT = 128
_PORTABLE, _NARROW = tl.constexpr(PORTABLE), tl.constexpr(NARROW)

# Two words in $1 -> sign at bits 15 and 31, the rest at 8 to 6 and 24 to 22 of register a. Masks
# take from each half what came from it, so nothing crosses over.
_TAKE = (
    "and.b32 a, $1, 0x81C081C0;",
    "shl.b32 a, $1, 3; and.b32 a, a, 0x81C081C0;",
    "shl.b32 a, $1, 6; and.b32 a, a, 0x81C081C0;",
    """shl.b32 a, $1, 1; and.b32 a, a, 0x80008000;
        shr.u32 b, $1, 5; lop3.b32 a, b, 0x01000100, a, 0xEA;
        shr.u32 b, $1, 4; lop3.b32 a, b, 0x00C000C0, a, 0xEA;""",
)


def _ptx(code: int, scale: str) -> tl.constexpr:
    """Words $1 (two a register) times scale: `scale` turns a into $0. fma with -0 is a product with
    one rounding, and exists from sm_80 on."""
    return tl.constexpr(
        f"""{{
        .reg .b32 a, b, c, z;
        mov.b32 z, 0x80008000;
        {_TAKE[code]}
        {scale}
        }}"""
    )


# $2 and $3: the scales of the two words, each as a pair already. They are of one row, so equal.
_NARROW_SCALE = "fma.rn.bf16x2 $0, a, $2, z;"
_WIDE_SCALE = "mov.b32 c, 0x7E807E80; fma.rn.bf16x2 a, a, c, z; fma.rn.bf16x2 $0, a, $2, z;"
_N0, _N1, _N2, _N3 = (_ptx(code, _NARROW_SCALE) for code in range(4))
_W0, _W1, _W2, _W3 = (_ptx(code, _WIDE_SCALE) for code in range(4))


def _pair_ptx(code: int) -> tl.constexpr:
    """Four scale bytes -> the pair of bfloat16 2^(e - 1) of byte `code`: exponent bits e + 126."""
    return tl.constexpr(
        f"""{{
        .reg .b32 t;
        prmt.b32 t, $1, 0, 0x4{code}4{code};
        mad.lo.u32 $0, t, 128, 0x3F003F00;
        }}"""
    )


_S0, _S1, _S2, _S3 = (_pair_ptx(code) for code in range(4))


@triton.jit
def block_scale(packed, CODE: tl.constexpr, MODE: tl.constexpr):
    """int32 [N], four E8M0 bytes each -> what dequantize_words wants for code CODE: float32
    (PORTABLE) or an int32 pair of bfloat16."""
    if MODE == _PORTABLE:
        e = (packed >> (8 * CODE)) & 0xFF
        return tl.maximum(e << 23, 0x400000).to(tl.float32, bitcast=True)
    elif MODE == _NARROW:
        ASM: tl.constexpr = (
            _S0 if CODE == 0 else (_S1 if CODE == 1 else (_S2 if CODE == 2 else _S3))
        )
        return tl.inline_asm_elementwise(
            ASM, "=r,r", [packed], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        e = (packed >> (8 * CODE)) & 0xFF
        return tl.maximum(e << 7, 0x40) * 0x10001


@triton.jit
def dequantize_words(words, scale, CODE: tl.constexpr, MODE: tl.constexpr):
    """Code CODE of int16 words [N, 32] times block_scale's result [N] -> bfloat16 [N, 32].

    Example: code 0b1011 under scale byte 128 -> -1.5 * 2 = -3.
    """
    if MODE == _PORTABLE:
        w = words.to(tl.int32)
        # Sign at bit 3, as in E2M1.
        if CODE == 0:
            sign, small = w >> 12, (w >> 6) & 7
        elif CODE == 1:
            sign, small = w >> 9, (w >> 3) & 7
        elif CODE == 2:
            sign, small = w >> 6, w & 7
        else:
            sign, small = w >> 11, ((w >> 11) & 4) | ((w >> 10) & 3)
        # Twice the magnitude, as an integer: 0, 1, 2, 3, 4, 6, 8, 12.
        twice = tl.where(small < 2, small, (2 + (small & 1)) << tl.maximum((small >> 1) - 1, 0))
        half = twice.to(tl.float32) * 0.5
        # A product, because Triton's minus is 0 - x, which would lose -0.
        signed = half * tl.where((sign & 8) != 0, -1.0, 1.0)
        return (signed * scale[:, None]).to(tl.bfloat16)
    else:
        N_ASM: tl.constexpr = (
            _N0 if CODE == 0 else (_N1 if CODE == 1 else (_N2 if CODE == 2 else _N3))
        )
        W_ASM: tl.constexpr = (
            _W0 if CODE == 0 else (_W1 if CODE == 1 else (_W2 if CODE == 2 else _W3))
        )
        ASM: tl.constexpr = N_ASM if MODE == _NARROW else W_ASM
        pair = tl.broadcast_to(scale[:, None], words.shape)
        return tl.inline_asm_elementwise(
            ASM, "=r,r,r,r", [words, pair], dtype=tl.bfloat16, is_pure=True, pack=2
        )


@triton.jit
def _dequantize_tiles_kernel(
    words, scales, out, rows, k, width, MODE: tl.constexpr, BLOCK: tl.constexpr
):
    """words int16 [KB, rows, 32], scales int32 [KB, rows] -> out [rows, width]; columns below k.

    Example: a word whose code 1 is 2 (1.0) under scale byte 128 -> 2.0 in column 32 of its block.
    """
    block = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    c = tl.arange(0, 32)
    mask = (n < rows)[:, None]
    word = tl.load(words + (block * rows + n)[:, None] * 32 + c[None, :], mask=mask, other=0)
    packed = tl.load(scales + block * rows + n, mask=n < rows, other=0)
    for code in tl.static_range(4):
        value = dequantize_words(word, block_scale(packed, code, MODE), code, MODE)
        column = block * 128 + code * 32 + c
        target = out + n.to(tl.int64)[:, None] * width + column[None, :]
        tl.store(target, value, mask=mask & (column < k)[None, :])


def dequantize_tiles(words: Tensor, tile_scales: Tensor, *, k: int, mode: int) -> Tensor:
    """One matrix in tile form -> bfloat16 [N, k], bit-equal to mxfp4_format.dequantize.

    Args:
        words: int16 [KB, N, 32], contiguous; tile_scales: uint8 [KB, N, 4], contiguous.
        k: elements of a row.
        mode: PORTABLE, NARROW (scales up to NARROW_LIMIT) or WIDE.
    """
    blocks, rows, _ = words.shape
    out = torch.empty(rows, k, dtype=torch.bfloat16, device=words.device)
    grid = (blocks, triton.cdiv(rows, 64))
    scales = tile_scales.view(torch.int32)
    _dequantize_tiles_kernel[grid](words, scales, out, rows, k, k, MODE=mode, BLOCK=64)
    return out
