"""The quantizers against scalar arithmetic, short groups, and values that are not numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from moe_comm import WIRES, EPConfig, dequantize, quantize
from moe_comm.backends import device_math
from moe_comm.wire import e8m0_to_f32

F32 = np.float32


def e4m3(value: float) -> float:
    """Nearest float8_e4m3fn, by search over all of them; ties to even."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).float()
    finite = [(abs(float(c) - value), i & 1, float(c)) for i, c in enumerate(codes) if c.isfinite()]
    return min(finite)[2]


def rows(hidden: int, seed: int = 0) -> torch.Tensor:
    """bf16 rows whose groups differ in size by many powers of two."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(6, hidden, generator=generator)
    x *= 2.0 ** torch.randint(-30, 30, (6, hidden), generator=generator)
    x[1] = 0.0
    x[2] *= 2.0**-126
    return x.bfloat16()


@pytest.mark.parametrize("hidden", [128, 176, 1])
def test_fp8_by_hand(hidden):
    x = rows(hidden)
    values, scales = quantize(x, WIRES["fp8"])
    assert scales is not None
    assert values.dtype == torch.float8_e4m3fn
    assert tuple(scales.shape) == (6, math.ceil(hidden / 128))
    for row in range(6):
        for group in range(scales.shape[1]):
            part = x[row, 128 * group : 128 * (group + 1)].float()
            amax = max(F32(part.abs().max().item()), F32(2.0**-100))
            assert F32(scales[row, group].item()) == amax / F32(448)
            factor = F32(448) / amax
            got = values[row, 128 * group : 128 * (group + 1)].float()
            want = [e4m3(float(F32(v) * factor)) for v in part.tolist()]
            assert got.tolist() == want


@pytest.mark.parametrize("hidden", [32, 50, 1])
def test_mxfp8_by_hand(hidden):
    x = rows(hidden, seed=1)
    values, scales = quantize(x, WIRES["mxfp8"])
    assert scales is not None
    assert scales.dtype == torch.uint8
    for row in range(6):
        for group in range(scales.shape[1]):
            part = x[row, 32 * group : 32 * (group + 1)].float()
            amax = part.abs().max().item()
            exponent = math.ceil(math.log2(amax / 448)) if amax else -127
            exponent = min(max(exponent, -127), 127)
            assert int(scales[row, group]) == exponent + 127
            got = values[row, 32 * group : 32 * (group + 1)].float()
            want = [e4m3(math.ldexp(v, -exponent)) for v in part.tolist()]
            assert got.tolist() == want
            assert got.abs().max() <= 448


@pytest.mark.parametrize("name", ["fp8", "mxfp8"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_group_with_a_bad_value_is_nan_alone(name, bad):
    wire = WIRES[name]
    x = rows(300, seed=2)
    x[3, 170] = bad
    values, scales = quantize(x, wire)
    read = dequantize(values, scales, wire)
    group = 170 // wire.group
    inside = slice(wire.group * group, wire.group * (group + 1))
    assert bool(read[3, inside].isnan().all())
    read[3, inside] = 0.0
    assert bool(read.isfinite().all())


def test_e8m0_bytes():
    wide = e8m0_to_f32(torch.tensor([0, 1, 127, 254, 255], dtype=torch.uint8))
    assert wide[:4].tolist() == [2.0**-127, 2.0**-126, 1.0, 2.0**127]
    assert math.isnan(wide[4])


@pytest.mark.parametrize("name", ["fp8", "mxfp8"])
@pytest.mark.parametrize("hidden", [176, 3584])
def test_error_is_bounded(name, hidden):
    """A value comes back within 2^-4 of itself, or the group's smallest step."""
    wire = WIRES[name]
    x = torch.randn(16, hidden, generator=torch.Generator().manual_seed(3)).bfloat16()
    values, scales = quantize(x, wire)
    read = dequantize(values, scales, wire)
    error = (read - x.float()).abs()
    assert bool((error <= x.float().abs() * 2.0**-4 + x.float().abs().max() / 448 * 2.0**-9).all())


@pytest.mark.parametrize("name", list(WIRES))
def test_blocks_on_the_cpu_change_nothing(name, monkeypatch):
    monkeypatch.setattr(device_math, "_BLOCK_BYTES", 1)
    x = rows(176).view(2, 3, 176)
    values, scales = device_math.quantize(x, WIRES[name])
    want, factors = quantize(x, WIRES[name])
    assert torch.equal(values.view(torch.uint8), want.view(torch.uint8))
    assert (scales is None) == (factors is None)
    if scales is not None and factors is not None:
        assert torch.equal(scales, factors)


def test_bytes_of_a_row():
    assert WIRES["bf16"].row_bytes(3584) == 7168
    assert WIRES["fp8"].row_bytes(3584) == 3584 + 28 * 4
    assert WIRES["mxfp8"].row_bytes(3584) == 3584 + 112
    assert WIRES["none"].row_bytes(10, torch.float64) == 80
    assert WIRES["mxfp8"].num_groups(2880) == 90
    config = EPConfig.preset("kimi-k3", max_tokens_per_rank=4, dispatch_wire="fp8", num_slots=1)
    sizes = config.buffer_bytes(2)
    assert sizes["dispatch_rows"] + sizes["dispatch_scales"] == 2 * 4 * WIRES["fp8"].row_bytes(3584)
    assert sizes["total"] == sum(size for name, size in sizes.items() if name != "total")
