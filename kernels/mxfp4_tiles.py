"""The runtime form of MXFP4 weights that our Triton GEMM reads, and the way back.

Checkpoint form: packed uint8 [N, K / 2] and scales uint8 [N, K / 32].
Tile form: words int16 [KB, N, 32] and scales uint8 [KB, N, 4], KB = ceil(K / 128).

Word c of a row's block holds four codes: nibble j is element 32 j + c of the block. So nibble j of
the 32 words is one scale group, a dot product over it needs 32 neighbouring elements of x, and two
words in one 32-bit register unpack into a pair of bf16 with two shifts and two logical operations.
A block of BLOCK_N rows is one contiguous piece of memory, scales too. K is padded to whole blocks
with zero codes under scale 127 (2^0): finite, and never NaN.

Example: row [0.5, 1, ...] of block 0 has word 0 = 1 | (code 32) << 4 | (code 64) << 8 | ...
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_comm.kernels.mxfp4_format import GROUP, check_pair

TILE_K = 128
NEUTRAL_SCALE = 127
_WORDS, _GROUPS = TILE_K // 4, TILE_K // GROUP


def num_blocks(k: int) -> int:
    """KB: blocks of 128 that hold `k` elements."""
    return -(-k // TILE_K)


def to_tiles(packed: Tensor, scales: Tensor, words: Tensor, tile_scales: Tensor) -> None:
    """Checkpoint form [N, K / 2], [N, K / 32] -> tile form, into `words` int16 [KB, N, 32] and
    `tile_scales` uint8 [KB, N, 4] (both may be strided in their first two dimensions). Temporaries
    take about twice the size of `packed`."""
    check_pair(packed, scales)
    rows, width = packed.shape
    blocks = num_blocks(width * 2)
    _check_tiles(words, tile_scales, blocks, rows)
    missing = blocks * TILE_K // 2 - width
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
    words.copy_(out.view(torch.int16).view(blocks, rows, _WORDS))
    tile_scales.copy_(scales.view(rows, blocks, _GROUPS).transpose(0, 1))


def from_tiles(words: Tensor, tile_scales: Tensor, *, k: int) -> tuple[Tensor, Tensor]:
    """Tile form -> checkpoint form of `k` elements a row: packed [N, k / 2], scales [N, k / 32].
    The exact inverse of `to_tiles`, so a hash of the original bytes can be checked again."""
    blocks, rows, _ = words.shape
    _check_tiles(words, tile_scales, num_blocks(k), rows)
    w = words.contiguous().view(torch.uint8).view(blocks, rows, 16, 2, 2)
    out = torch.empty(rows, blocks, 4, 16, dtype=torch.uint8, device=words.device)
    for half in (0, 1):
        low, high = w[..., 0, half], w[..., 1, half]
        out[:, :, 2 * half] = ((low & 0xF) | (high << 4)).transpose(0, 1)
        out[:, :, 2 * half + 1] = ((low >> 4) | (high & 0xF0)).transpose(0, 1)
    packed = out.view(rows, -1)[:, : k // 2].contiguous()
    scales = tile_scales.transpose(0, 1).reshape(rows, -1)[:, : k // GROUP].contiguous()
    return packed, scales


def _check_tiles(words: Tensor, tile_scales: Tensor, blocks: int, rows: int) -> None:
    for name, tensor, dtype, shape in (
        ("words", words, torch.int16, (blocks, rows, _WORDS)),
        ("tile_scales", tile_scales, torch.uint8, (blocks, rows, _GROUPS)),
    ):
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name}: expected {dtype} {shape}, got {tensor.dtype} {tuple(tensor.shape)}"
            )
