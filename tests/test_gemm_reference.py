"""The grouped expert MLP in torch against float64, its arguments, and the activations."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moe_comm.kernels.expert_gemm import choose_implementation, grouped_mlp
from moe_comm.kernels.expert_gemm_weights import ExpertWeights
from moe_comm.kernels.situ import SITU, Activation, activate_torch

cases = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("gemm_cases.py"))))
check, make_case = cases.check, cases.make_case
ACTIVATIONS = [SITU, Activation(kind="swiglu"), Activation(kind="swiglu_clamped")]


def run(case, layout="rows", **more):
    out = torch.full((case.row_index.shape[0], case.hidden), torch.nan, dtype=torch.bfloat16)
    return grouped_mlp(
        case.rows,
        case.row_index,
        case.expert_offsets,
        case.weights(layout),
        scales=case.scales,
        implementation="torch",
        out=out,
        **more,
    )


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: a.kind)
@pytest.mark.parametrize("wire", ["bf16", "fp8", "mxfp8"])
def test_torch_against_float64(activation, wire):
    case = make_case([3, 0, 1, 17], 160, 96, seed=1, wire=wire, bias=wire == "bf16")
    check(case, run(case, activation=activation), activation=activation)


@pytest.mark.parametrize("wire", ["bf16", "fp8"])
def test_rows_of_ranks_apart(wire):
    case = make_case([5, 4], 160, 64, seed=8, wire=wire)
    bucket = -(-case.rows.shape[0] // 2)
    wide = case.rows.new_zeros(2, bucket + 2, 160)
    wide[0, :bucket], rest = case.rows[:bucket], case.rows[bucket:]
    wide[1, : rest.shape[0]] = rest
    scales = None
    if case.scales is not None:
        scales = torch.zeros(2, bucket, case.scales.shape[1])
        scales[0], rest = case.scales[:bucket], case.scales[bucket:]
        scales[1, : rest.shape[0]] = rest
    y = grouped_mlp(
        wide[:, :bucket], case.row_index, case.expert_offsets, case.weights("rows"), scales=scales
    )
    assert torch.equal(y[:9], run(case)[:9])


def test_tiles_give_the_same_bits_as_rows():
    case = make_case([5, 2], 224, 64, seed=2)
    used = int(case.expert_offsets[-1])
    assert torch.equal(run(case)[:used], run(case, "tiles")[:used])


def test_rows_past_the_end_are_not_written():
    case = make_case([2, 0], 64, 32, seed=3, spare=4)
    assert run(case)[2:].isnan().all()


def test_no_rows_and_no_experts():
    case = make_case([0, 0], 64, 32, spare=0)
    assert run(case).shape == (0, 64)
    nothing = ExpertWeights.empty(0, 64, 32, layout="rows")
    out = grouped_mlp(
        torch.zeros(4, 64, dtype=torch.bfloat16),
        torch.full((3,), -1, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
        nothing,
    )
    assert out.shape == (3, 64)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: a.kind)
def test_activation_values(activation):
    g = torch.tensor([0.0, 1.0, -3.0, 50.0, 8.0], dtype=torch.float64)
    u = torch.tensor([5.0, -2.0, 0.25, 90.0, -30.0], dtype=torch.float64)
    if activation.kind == "situ":
        wanted = [
            4 * torch.tanh(a / 4) * torch.sigmoid(a) * 25 * torch.tanh(b / 25)
            for a, b in zip(g, u, strict=True)
        ]
        assert activate_torch(g, u, activation).abs().max() <= 100
    elif activation.kind == "swiglu":
        wanted = [a * torch.sigmoid(a) * b for a, b in zip(g, u, strict=True)]
    else:
        wanted = [
            min(a, torch.tensor(7.0).double())
            * torch.sigmoid(1.702 * min(a, torch.tensor(7.0).double()))
            * (b.clamp(-7, 7) + 1)
            for a, b in zip(g, u, strict=True)
        ]
    torch.testing.assert_close(
        activate_torch(g, u, activation), torch.stack(wanted), rtol=1e-12, atol=0
    )


def test_bad_arguments_are_named():
    case = make_case([2, 1], 64, 32)
    weights = case.weights("rows")
    good = (case.rows, case.row_index, case.expert_offsets)
    with pytest.raises(ValueError, match="rows: expected"):
        grouped_mlp(case.rows[:, :32], *good[1:], weights)
    with pytest.raises(TypeError, match="rows: expected"):
        grouped_mlp(case.rows.float(), *good[1:], weights)
    with pytest.raises(ValueError, match="expert_offsets: expected 3 entries, got 2"):
        grouped_mlp(*good[:2], case.expert_offsets[:2], weights)
    with pytest.raises(TypeError, match="row_index"):
        grouped_mlp(case.rows, case.row_index.long(), case.expert_offsets, weights)
    with pytest.raises(ValueError, match="layout: expected tiles for triton"):
        grouped_mlp(*good, weights, implementation="triton")
    with pytest.raises(ValueError, match="implementation: expected one of"):
        grouped_mlp(*good, weights, implementation="cutlass")
    with pytest.raises(ValueError, match="out: expected"):
        grouped_mlp(*good, weights, out=torch.empty(1, 64, dtype=torch.bfloat16))
    fp8 = make_case([2, 1], 64, 32, wire="fp8")
    with pytest.raises(ValueError, match="scales: expected"):
        grouped_mlp(fp8.rows, *good[1:], weights, scales=fp8.scales[:, :0])
    with pytest.raises(ValueError, match="slot: expected 0 to 1, got 2"):
        weights.put(2, gate=case.experts[0][0], up=case.experts[0][1], down=case.experts[0][2])
    with pytest.raises(ValueError, match="down: expected"):
        weights.put(0, gate=case.experts[0][0], up=case.experts[0][1], down=case.experts[0][1])
    with pytest.raises(ValueError, match="hidden: expected a positive multiple of 32"):
        ExpertWeights.empty(1, 48, 32, layout="rows")
    with pytest.raises(ValueError, match="kind: expected"):
        Activation(kind="gelu")


def test_the_cpu_uses_torch():
    assert choose_implementation("cpu", hidden=64, inter=32) == "torch"
