"""The fused multiply-add of the numeric contract, against exact rational arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from moe_comm.backends import device_math
from moe_comm.numerics import FusedMultiplyAdd, fma_f32, fma_f32_fast
from moe_comm.wire import WIRES, quantize


def nearest_f32(value: Fraction) -> float:
    """The fp32 nearest to an exact value, ties to even, by comparing neighbours."""
    if value == 0:
        return 0.0
    with np.errstate(over="ignore"):
        guess = np.float32(float(value))
    if not np.isfinite(guess):
        # Half a unit above the largest number is where infinity begins.
        limit = Fraction(2) ** 128 - Fraction(2) ** 103
        if abs(value) >= limit:
            return math.copysign(math.inf, value)
        return float(np.copysign(np.finfo(np.float32).max, np.float32(1 if value > 0 else -1)))
    near = [
        np.nextafter(guess, np.float32(-np.inf)),
        guess,
        np.nextafter(guess, np.float32(np.inf)),
    ]
    near = [candidate for candidate in near if np.isfinite(candidate)]
    gap = {float(c): abs(Fraction(float(c)) - value) for c in near}
    least = min(gap.values())
    best = [c for c in gap if gap[c] == least]
    even = [c for c in best if np.float32(c).view(np.int32) % 2 == 0]
    return even[0] if len(best) > 1 else best[0]


def cases(kind: str, count: int = 400) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """weight fp32, value bf16, acc fp32, [count, 4] of one kind."""
    generator = torch.Generator().manual_seed(7)
    shape = (count, 4)
    weight = torch.randn(count, generator=generator)
    value = torch.randn(shape, generator=generator)
    acc = torch.randn(shape, generator=generator)
    if kind == "ties":
        # acc = 1 and a product of 2^-24 and a little: the sum is half way, or just beside it.
        acc = torch.ones(shape)
        value = torch.full(shape, 2.0**-12)
        weight = 2.0**-12 * (1 + torch.randint(-2, 3, (count,), generator=generator) * 2.0**-23)
        acc[::3] *= -1
    elif kind == "subnormal":
        scale = 2.0 ** torch.randint(-140, -120, shape, generator=generator).float()
        acc, value = acc * scale, value * 2.0**-80
        weight = weight * 2.0**-50
    elif kind == "huge":
        acc, value, weight = acc * 2.0**126, value * 2.0**100, weight * 2.0**27
    elif kind == "zero":
        acc[::2], value[::3] = 0.0, 0.0
    elif kind == "cancel":
        acc = -(weight.unsqueeze(-1) * value.bfloat16().float())
    return weight, value.bfloat16(), acc


@pytest.mark.parametrize("kind", ["plain", "ties", "subnormal", "huge", "zero", "cancel"])
def test_every_form_rounds_once(kind):
    weight, value, acc = cases(kind)
    want = torch.tensor(
        [
            [
                nearest_f32(Fraction(w) * Fraction(v) + Fraction(a))
                for v, a in zip(values, accs, strict=True)
            ]
            for w, values, accs in zip(
                weight.tolist(), value.float().tolist(), acc.tolist(), strict=True
            )
        ]
    )
    assert torch.equal(fma_f32(weight.unsqueeze(-1), value, acc), want)
    assert torch.equal(fma_f32_fast(weight.unsqueeze(-1), value, acc), want)
    in_place = acc.clone()
    FusedMultiplyAdd(500, 4)(weight, value, in_place)
    assert torch.equal(in_place, want)


def test_the_case_that_double_rounding_gets_wrong():
    weight = torch.tensor([5237765 * 2.0**-30])
    value, acc = torch.tensor([[205 * 2.0**-24]]).bfloat16(), torch.ones(1, 1)
    twice = (weight.double() * value.double() + acc.double()).float()
    assert twice.item() == 1.0
    assert fma_f32(weight, value, acc).item() == 1 + 2.0**-23
    assert fma_f32_fast(weight, value, acc).item() == 1 + 2.0**-23
    FusedMultiplyAdd(1, 1)(weight, value, acc)
    assert acc.item() == 1 + 2.0**-23


def test_infinities_and_nan_pass_through():
    value = torch.tensor([[math.inf, -math.inf, math.nan, 1.0]]).bfloat16()
    acc = torch.tensor([[1.0, math.inf, 0.0, math.nan]])
    weight = torch.tensor([2.0])
    want = torch.tensor([[math.inf, math.nan, math.nan, math.nan]])
    for got in (fma_f32(weight, value, acc), fma_f32_fast(weight, value, acc)):
        assert torch.equal(got.isnan(), want.isnan())
        assert got[0, 0] == math.inf
    FusedMultiplyAdd(1, 4)(weight, value, acc)
    assert torch.equal(acc.isnan(), want.isnan())
    assert acc[0, 0] == math.inf


def routed(seed: int, dtype: torch.dtype, width: int = 40) -> tuple[torch.Tensor, ...]:
    """y [N, D], weights and positions [M, K] of a random routing; some rows have no choice."""
    generator = torch.Generator().manual_seed(seed)
    here = torch.rand(33, 5, generator=generator) < 0.6
    here[::7] = False
    total = int(here.sum())
    position = torch.full((33, 5), -1, dtype=torch.int32)
    position[here] = torch.randperm(total, generator=generator).to(torch.int32)
    y = torch.randn(total, width, generator=generator).to(dtype)
    return y, torch.rand(33, 5, generator=generator), position


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("applied", [False, True])
def test_partial_sums_equal_the_loop(dtype, applied, monkeypatch):
    # Blocks of eight rows: the last one is short.
    monkeypatch.setattr(device_math, "_BLOCK_BYTES", 1)
    y, weights, position = routed(3, dtype)
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    want = torch.zeros(33, y.shape[1], dtype=kind)
    for row in range(33):
        for k in range(5):
            if position[row, k] >= 0:
                value = y[int(position[row, k])]
                if applied:
                    want[row] += value.to(kind)
                elif kind == torch.float64:
                    want[row] += weights[row, k].double() * value
                else:
                    want[row] = fma_f32(weights[row, k], value, want[row])
    out = torch.full((33, y.shape[1]), torch.nan, dtype=dtype)
    device_math.partial_sums(
        y, weights, position, weights_applied=applied, fill_empty=False, out=out
    )
    live = (position >= 0).any(dim=1)
    assert torch.equal(out[live], want.to(dtype)[live])
    assert bool(out[~live].isnan().all())
    device_math.partial_sums(
        y, weights, position, weights_applied=applied, fill_empty=True, out=out
    )
    assert torch.equal(out, want.to(dtype))
    everywhere = device_math._partial_sums_everywhere(y, weights, position, applied)
    assert torch.equal(everywhere, want.to(dtype))


@pytest.mark.parametrize("form", ["bf16", "fp8", "mxfp8"])
@pytest.mark.parametrize("num_terms", [1, 2, 5])
def test_fold_equals_the_loop(form, num_terms, monkeypatch):
    monkeypatch.setattr(device_math, "_BLOCK_BYTES", 1)
    generator = torch.Generator().manual_seed(num_terms)
    wire = WIRES[form]
    rows = torch.randn(num_terms, 21, 40, generator=generator).bfloat16()
    terms, scales = quantize(rows, wire)
    who = torch.randint(-1, num_terms, (19, 4), generator=generator).to(torch.int32)
    biases = [torch.randn(19, 40, generator=generator).bfloat16() for _ in range(2)]
    from moe_comm.wire import dequantize

    read = dequantize(terms, scales, wire)
    want = biases[0].float() + biases[1].float()
    for token in range(19):
        for k in range(4):
            term = int(who[token, k])
            if term >= 0 and term not in who[token, k + 1 :].tolist():
                want[token] = want[token] + read[term, token].float()
    for fold in (device_math._fold_cpu, device_math._fold_everywhere):
        out = torch.full((19, 40), torch.nan, dtype=torch.bfloat16)
        fold(terms, scales, wire, who, biases, out)
        assert torch.equal(out, want.bfloat16())
