"""The runtime form of MXFP4 weights that our Triton GEMM reads, and the way back.

Checkpoint form: packed uint8 [N, K / 2] and scales uint8 [N, K / 32].
Tile form: words int16 [KB, N, 32] and scales uint8 [KB, N, 4], KB = ceil(K / 128).

Word c of a row's block holds four codes: code j is element 32 j + c of the block. So code j of the
32 words is one scale group, and a dot product over it needs 32 neighbouring elements of x. A block
of BLOCK_N rows is one contiguous piece of memory, scales too. K is padded to whole blocks with zero
codes under scale 127 (2^0): finite, and never NaN.

Bits of a word, from 15 down, as sign s, exponent e, mantissa m of the four codes:
  s0 s3 e3 s1 . e3' m3 . s2 e0 e0' m0 . e1 e1' m1 . e2 e2' m2     (e is the upper exponent bit)
Codes 0, 1, 2 are then one shift (by 0, 3, 6) and one mask away from the bfloat16 bits that
mxfp4_dequant.py wants, sign at 15 and the rest at 8 to 6; only code 3 is in pieces.

Example: a word whose codes are all 1 (0.5: only the mantissa bit) is 1 << 6 | 1 << 3 | 1 | 1 << 10.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_comm.kernels.mxfp4_format import GROUP, check_pair

TILE_K = 128
NEUTRAL_SCALE = 127
_WORDS, _GROUPS = TILE_K // 4, TILE_K // GROUP
# Packed bytes that are repacked at once: small ones stay in a CPU's cache, large ones keep the
# launches few.
_PIECE_BYTES = {"cpu": 512 << 10, "other": 4 << 20}


# (left shift, mask of what arrives) from nibbles in order (code j at bits 4 j to 4 j + 3) to the
# word's own order.
_SPREAD = (
    (12, 0x8000),  # s0
    (6, 0x01C0),  # e0 e0' m0
    (5, 0x1000),  # s1
    (-1, 0x0038),  # e1 e1' m1
    (-2, 0x0200),  # s2
    (-8, 0x0007),  # e2 e2' m2
    (-1, 0x6000),  # s3 e3
    (-2, 0x0C00),  # e3' m3
)


def num_blocks(k: int) -> int:
    """KB: blocks of 128 that hold `k` elements."""
    return -(-k // TILE_K)


def to_tiles(packed: Tensor, scales: Tensor, words: Tensor, tile_scales: Tensor) -> None:
    """Checkpoint form [N, K / 2], [N, K / 32] -> tile form, into `words` int16 [KB, N, 32] and
    `tile_scales` uint8 [KB, N, 4] (both may be strided in their first two dimensions). Works in
    pieces of rows, so that temporaries stay below 4 pieces: 2 MiB on a CPU, 16 MiB elsewhere."""
    check_pair(packed, scales)
    rows, width = packed.shape
    blocks = num_blocks(width * 2)
    _check_tiles(words, tile_scales, blocks, rows)
    piece = _PIECE_BYTES["cpu" if packed.device.type == "cpu" else "other"]
    step = max(1, piece // (blocks * TILE_K // 2))
    for start in range(0, rows, step):
        part = slice(start, start + step)
        _rows_to_tiles(packed[part], scales[part], words[:, part], tile_scales[:, part])


def _rows_to_tiles(packed: Tensor, scales: Tensor, words: Tensor, tile_scales: Tensor) -> None:
    blocks, rows, _ = words.shape
    missing = blocks * TILE_K // 2 - packed.shape[1]
    if missing:
        packed = torch.nn.functional.pad(packed, (0, missing))
        scales = torch.nn.functional.pad(scales, (0, missing * 2 // GROUP), value=NEUTRAL_SCALE)
    p = packed.view(rows, blocks, 4, 16)
    out = torch.empty(blocks, rows, 16, 2, 2, dtype=torch.uint8, device=packed.device)
    for half in (0, 1):
        even, odd = p[:, :, 2 * half], p[:, :, 2 * half + 1]
        # Byte `half` of the words of even elements, then of odd ones.
        out[..., 0, half] = ((even & 0xF) | (odd << 4)).transpose(0, 1)
        out[..., 1, half] = ((even >> 4) | (odd & 0xF0)).transpose(0, 1)
    words.copy_(_move_bits(out.view(torch.int16).view(blocks, rows, _WORDS), _SPREAD))
    tile_scales.copy_(scales.view(rows, blocks, _GROUPS).transpose(0, 1))


def from_tiles(words: Tensor, tile_scales: Tensor, *, k: int) -> tuple[Tensor, Tensor]:
    """Tile form -> checkpoint form of `k` elements a row: packed [N, k / 2], scales [N, k / 32].
    The exact inverse of `to_tiles`, so a hash of the original bytes can be checked again."""
    blocks, rows, _ = words.shape
    _check_tiles(words, tile_scales, num_blocks(k), rows)
    nibbles = _move_bits(words, [(-shift, _shifted(mask, shift)) for shift, mask in _SPREAD])
    w = nibbles.view(torch.uint8).view(blocks, rows, 16, 2, 2)
    out = torch.empty(rows, blocks, 4, 16, dtype=torch.uint8, device=words.device)
    for half in (0, 1):
        low, high = w[..., 0, half], w[..., 1, half]
        out[:, :, 2 * half] = ((low & 0xF) | (high << 4)).transpose(0, 1)
        out[:, :, 2 * half + 1] = ((low >> 4) | (high & 0xF0)).transpose(0, 1)
    packed = out.view(rows, -1)[:, : k // 2].contiguous()
    scales = tile_scales.transpose(0, 1).reshape(rows, -1)[:, : k // GROUP].contiguous()
    return packed, scales


def _shifted(mask: int, left: int) -> int:
    """Where the bits of `mask` came from before a shift by `left`."""
    return mask >> left if left >= 0 else mask << -left


def _move_bits(words: Tensor, moves: Sequence[tuple[int, int]]) -> Tensor:
    """OR of (words << shift) & mask over `moves`, in int16; a negative shift is to the right, and
    what its sign extension brings in is masked away."""
    out = torch.zeros_like(words, memory_format=torch.contiguous_format)
    for left, mask in moves:
        moved = words << left if left >= 0 else words >> -left
        out |= moved.bitwise_and_(mask - 0x10000 if mask >= 0x8000 else mask)
        del moved
    return out


def _check_tiles(words: Tensor, tile_scales: Tensor, blocks: int, rows: int) -> None:
    for name, tensor, dtype, shape in (
        ("words", words, torch.int16, (blocks, rows, _WORDS)),
        ("tile_scales", tile_scales, torch.uint8, (blocks, rows, _GROUPS)),
    ):
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name}: expected {dtype} {shape}, got {tensor.dtype} {tuple(tensor.shape)}"
            )
