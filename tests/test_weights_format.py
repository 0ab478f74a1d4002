"""MXFP4 codes and scales: hand-made cases, round trips, torchao as the oracle, gpt-oss's layout."""

from __future__ import annotations

import math
import random

import pytest
import torch

from moe_comm.kernels import mxfp4_tiles
from moe_comm.model.weights import mxfp4


def bits(tensor):
    return tensor.view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32)


def same_values(a, b):
    """Equal bits, with every NaN standing for every other."""
    nan = torch.isnan(a)
    assert torch.equal(nan, torch.isnan(b))
    assert torch.equal(bits(a)[~nan], bits(b)[~nan])


def dequantize_loop(packed, scales):
    """One element at a time, from the format's definition, in Python floats."""
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    rows, width = packed.shape
    out = torch.empty(rows, width * 2, dtype=torch.float64)
    for row in range(rows):
        for k in range(width * 2):
            code = (int(packed[row, k // 2]) >> (4 * (k % 2))) & 0xF
            exponent = int(scales[row, k // 32])
            factor = math.nan if exponent == 255 else 2.0 ** (exponent - 127)
            out[row, k] = math.copysign(values[code & 7], -1 if code & 8 else 1) * factor
    return out


def test_low_nibble_is_the_even_element():
    codes = torch.tensor([[1, 7] + [0] * 30], dtype=torch.uint8)
    packed = mxfp4.pack_codes(codes)
    assert packed[0, 0] == 1 | (7 << 4)
    scale = torch.tensor([[128]], dtype=torch.uint8)
    assert mxfp4.dequantize(packed, scale)[0, :3].tolist() == [1.0, 12.0, 0.0]
    assert torch.equal(mxfp4.unpack_codes(packed), codes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_code_under_every_scale(dtype):
    packed = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 16)
    got = mxfp4.dequantize(packed, scales, dtype=dtype)
    wanted = dequantize_loop(packed, scales)
    largest = float(torch.finfo(dtype).max)
    over = wanted.abs() > largest
    # Only exponents at the very top overflow; everything else, subnormals included, is exact.
    assert set(scales.repeat_interleave(32, 1)[over].tolist()) == {253, 254}
    wanted[over] = torch.copysign(torch.tensor(math.inf, dtype=torch.float64), wanted[over])
    same_values(got, wanted.to(dtype))
    assert torch.equal(got[~over & ~wanted.isnan()].double(), wanted[~over & ~wanted.isnan()])


def test_quantize_rounds_ties_to_even_and_saturates():
    values = [0, 0.25, 0.5, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 7.0, 7.9] + [0] * 20
    packed, scales = mxfp4.quantize(torch.tensor([values]))
    assert scales.tolist() == [[127]]
    back = mxfp4.dequantize(packed, scales, dtype=torch.float32)[0, :12].tolist()
    assert back == [0, 0, 0.5, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, 6.0, 6.0]


def test_quantize_of_dequantized_is_the_identity():
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 16, (64, 96), dtype=torch.uint8, generator=generator)
    # A code of 4 or more in each block, else a lower exponent would do as well.
    codes[:, ::32] = 4 + (codes[:, ::32] & 11)
    packed = mxfp4.pack_codes(codes)
    scales = torch.randint(4, 250, (64, 3), dtype=torch.uint8, generator=generator)
    again = mxfp4.quantize(mxfp4.dequantize(packed, scales, dtype=torch.float32))
    assert torch.equal(again[0], packed)
    assert torch.equal(again[1], scales)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_equal_torchao(dtype):
    oracle = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    seed = random.randrange(2**31)
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-148, 128, (256, 8), generator=generator).double()
    noise = torch.randn(256, 8, 32, generator=generator).double()
    x = (noise * torch.exp2(exponents)[..., None]).flatten(1).to(dtype)
    grid = torch.tensor([0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, 7, 1, 2, 3, 4, 0.5, 1.5])
    ties = torch.cat((grid, -grid)).repeat(8)
    x[0], x[1], x[2] = ties.to(dtype), (ties * 2.0**-126).to(dtype), (ties * 2.0**124).to(dtype)
    x[3, 5], x[4, 40], x[5, 70], x[6], x[7] = math.nan, math.inf, -math.inf, 0.0, -0.0
    packed, scales = mxfp4.quantize(x)
    wanted_scales, wanted = oracle.to_mx(x, torch.float4_e2m1fn_x2, 32)
    wanted_scales, wanted = wanted_scales.view(torch.uint8), wanted.view(torch.uint8)
    assert torch.equal(scales, wanted_scales), f"seed {seed}"
    assert torch.equal(packed, wanted), f"seed {seed}"
    # Any bytes at all, not only those that a quantizer makes.
    packed = torch.randint(0, 256, (256, 64), dtype=torch.uint8, generator=generator)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 4)
    theirs = oracle.to_dtype(
        packed, scales.view(torch.float8_e8m0fnu), torch.float4_e2m1fn_x2, 32, dtype
    )
    same_values(mxfp4.dequantize(packed, scales, dtype=dtype), theirs)


def test_gpt_oss_rows_are_interleaved():
    generator = torch.Generator().manual_seed(5)
    gate, gate_scales = (
        torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        for shape in ((6, 32), (6, 2))
    )
    up, up_scales = gate.flip(0), gate_scales.flip(0)
    blocks = torch.empty(12, 2, 16, dtype=torch.uint8)
    blocks[0::2], blocks[1::2] = gate.view(6, 2, 16), up.view(6, 2, 16)
    scales = torch.empty(12, 2, dtype=torch.uint8)
    scales[0::2], scales[1::2] = gate_scales, up_scales
    got = mxfp4.split_gpt_oss(blocks, scales)
    for have, want in zip(got, (gate, gate_scales, up, up_scales), strict=True):
        assert torch.equal(have, want)


def word_code(word, j):
    """Code j of a word, by the table in mxfp4_tiles."""
    places = ((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (14, 13, 11, 10))[j]
    return sum(((word >> place) & 1) << (3 - i) for i, place in enumerate(places))


@pytest.mark.parametrize(("rows", "k"), [(3, 128), (5, 32), (64, 160), (2, 384)])
def test_tiles_are_a_permutation_of_codes(rows, k):
    generator = torch.Generator().manual_seed(k)
    packed = torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 255, (rows, k // 32), dtype=torch.uint8, generator=generator)
    blocks = mxfp4_tiles.num_blocks(k)
    words = torch.full((blocks, rows, 32), -1, dtype=torch.int16)
    tile_scales = torch.full((blocks, rows, 4), 255, dtype=torch.uint8)
    mxfp4_tiles.to_tiles(packed, scales, words, tile_scales)
    codes = mxfp4.unpack_codes(packed)
    for row in range(rows):
        for element in range(blocks * 128):
            block, nibble, c = element // 128, element % 128 // 32, element % 32
            code = word_code(int(words[block, row, c]) & 0xFFFF, nibble)
            inside = element < k
            assert code == (int(codes[row, element]) if inside else 0)
            scale = int(tile_scales[block, row, nibble])
            assert scale == (int(scales[row, element // 32]) if inside else 127)
    back = mxfp4_tiles.from_tiles(words, tile_scales, k=k)
    assert torch.equal(back[0], packed)
    assert torch.equal(back[1], scales)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: mxfp4.quantize(torch.zeros(2, 33)), ValueError, "divisible by 32"),
        (lambda: mxfp4.quantize(torch.zeros(32, dtype=torch.int32)), TypeError, "x: expected"),
        (lambda: mxfp4.pack_codes(torch.zeros(3, dtype=torch.uint8)), ValueError, "even"),
        (
            lambda: mxfp4.dequantize(
                torch.zeros(4, 16, dtype=torch.uint8), torch.zeros(4, 2, dtype=torch.uint8)
            ),
            ValueError,
            r"scales: expected shape \(4, 1\)",
        ),
    ],
)
def test_bad_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
