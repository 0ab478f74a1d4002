"""The model's Triton kernels against float64 formulas: interpreted on the CPU (in fp32: indices,
masks, state), and on a GPU in bf16."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

oracle = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("model_oracle.py"))))
F32, BF16 = torch.float32, torch.bfloat16


def randn(*shape, seed, dtype=F32, device="cpu"):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def near(got, wanted, *, dtype):
    """Within two roundings of the dtype, and a little for sums."""
    tolerance = {F32: 1e-5, BF16: 2**-7}[dtype]
    torch.testing.assert_close(got.cpu().double(), wanted, rtol=tolerance, atol=tolerance / 4)


def check_rms_norm(device, dtype):
    from moe_comm.kernels.rms_norm import gated_rms_norm, rms_norm

    example = rms_norm(
        torch.tensor([[3.0, 4.0]], device=device), torch.tensor([1.0, 2.0], device=device), 0.0
    )
    near(example, torch.tensor([[0.8485, 2.2627]], dtype=torch.float64), dtype=BF16)
    for width in (32, 72, 1024):
        x = randn(5, 3, width, seed=1, dtype=dtype, device=device)
        weight = randn(width, seed=2, dtype=dtype, device=device)
        gate = randn(5, 3, width, seed=3, dtype=dtype, device=device)
        wanted = oracle.rms(x.cpu().double(), weight.cpu().double(), 1e-5)
        near(rms_norm(x, weight, 1e-5), wanted, dtype=dtype)
        gated = wanted * torch.sigmoid(gate.cpu().double())
        near(gated_rms_norm(x, weight, gate, 1e-5), gated, dtype=dtype)
    assert rms_norm(x[:0], weight, 1e-5).shape == (0, 3, width)


def check_attn_res(device, dtype):
    from moe_comm.kernels.attn_res_norm import attn_res_norm

    num, width = 6, 72
    bank = randn(4, num, width, seed=4, dtype=dtype, device=device)
    bank[3] = float("nan")
    site_norm, proj = randn(width, seed=5), randn(1, width, seed=6)
    norm = randn(width, seed=7, dtype=dtype, device=device)
    running = randn(num, width, seed=8, dtype=dtype, device=device)
    update = randn(num, width, seed=9, dtype=dtype, device=device)
    for rows in (0, 1, 3):
        for has in ((True, True), (True, False), (False, True)):
            parts = [t if yes else None for t, yes in zip((running, update), has, strict=True)]
            out, total = attn_res_norm(
                bank,
                rows,
                *parts,
                (site_norm * proj[0]).to(device),
                norm,
                site_eps=1e-5,
                norm_eps=1e-6,
            )
            new = sum(t for t in parts if t is not None)
            assert torch.equal(total, new)
            stack = [*(b.cpu().double() for b in bank[:rows]), new.cpu().double()]
            mixed = oracle.aggregate(stack, site_norm.double(), proj.double(), 1e-5)
            near(out, oracle.rms(mixed, norm.cpu().double(), 1e-6), dtype=dtype)


def check_short_conv(device, dtype):
    """Sequences in chunks of every kind, among others, against the whole convolution."""
    from moe_comm.kernels.short_conv import short_conv

    channels = 40
    weight = randn(channels, 4, seed=10)
    inputs = {n: randn(9, channels, seed=11 + i, dtype=dtype) for i, n in enumerate("abc")}
    slots = {"a": 3, "b": 1, "c": 2}
    state = torch.full((5, channels, 3), float("nan"), dtype=dtype)
    state[1:4] = 0
    state = state.to(device)
    steps = [
        [("b", 2), ("a", 1)],
        [("a", 1), ("c", 1), ("b", 1)],
        [("a", 2), ("c", 8), ("b", 5)],
        [("b", 1), ("a", 5)],
    ]
    got, at = {n: [] for n in inputs}, dict.fromkeys(inputs, 0)
    for step in steps:
        lengths = [length for _, length in step]
        cu = torch.tensor([0, *lengths]).cumsum(0)
        seqs = torch.repeat_interleave(torch.arange(len(step)), torch.tensor(lengths))
        x = torch.cat([inputs[n][at[n] : at[n] + length] for n, length in step])
        out = short_conv(
            x.to(device),
            weight.to(device),
            state,
            torch.tensor([slots[n] for n, _ in step], device=device),
            cu.to(device),
            seqs.to(device),
            all_single=all(length == 1 for length in lengths),
        )
        for (n, length), piece in zip(step, out.split(lengths), strict=True):
            got[n].append(piece)
            at[n] += length
    for n, x in inputs.items():
        wanted = oracle.conv_silu(x.double(), weight.double().unsqueeze(1))
        near(torch.cat(got[n]), wanted, dtype=dtype)
        assert torch.equal(state[slots[n]].cpu(), x[-3:].T)
    assert state[[0, 4]].isnan().all(), "another slot was touched"


def check_router(device, dtype):
    from moe_comm.kernels.router_topk import router_topk

    del dtype
    ids, weights = router_topk(
        torch.zeros(1, 4, device=device),
        torch.tensor([0.0, 0.1, 0.0, 0.1], device=device),
        top_k=2,
    )
    assert ids.tolist() == [[1, 3]]
    assert weights.tolist() == [[0.5, 0.5]]
    logits, bias = randn(7, 896, seed=20) * 2, randn(896, seed=21) * 0.3
    logits[5] = 0.0
    logits[6, 10] = float("nan")
    ids, weights = router_topk(logits.to(device), bias.to(device), top_k=16)
    for t in range(5):
        order, wanted = oracle.choose(logits[t].double(), bias.double(), 16)
        assert ids[t].tolist() == order
        near(weights[t], wanted, dtype=F32)
    plain, _ = router_topk(logits[5:6].to(device), torch.zeros(896, device=device), top_k=16)
    assert plain[0].tolist() == list(range(16))
    assert 10 not in ids[6].tolist()
    assert len(set(ids[6].tolist())) == 16


CHECKS = [check_rms_norm, check_attn_res, check_short_conv, check_router]


def interpreted():
    """All checks, in a process of its own: TRITON_INTERPRET is read when triton is imported."""
    for check in CHECKS:
        check("cpu", F32)
        print(check.__name__)


def test_interpreted():
    code = f"import runpy; runpy.run_path({str(Path(__file__))!r})['interpreted']()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout.split() == [check.__name__ for check in CHECKS], done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("check", CHECKS)
def test_on_gpu(check):
    check("cuda", BF16)
