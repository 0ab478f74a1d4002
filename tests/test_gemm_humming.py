"""The grouped expert MLP on humming-kernels: shapes it takes anywhere, results on a GPU."""

from __future__ import annotations

import importlib.util
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moe_comm.kernels.expert_gemm import choose_implementation, grouped_mlp
from moe_comm.kernels.expert_gemm_humming import buffer_specs
from moe_comm.kernels.expert_gemm_weights import ExpertWeights

cases = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("gemm_cases.py"))))
HAVE_HUMMING = importlib.util.find_spec("humming") is not None
# One product each way on two experts, beside float32 products; says where it fails, and ends.
TINY = """
import faulthandler, sys, time
faulthandler.dump_traceback_later(float(sys.argv[1]), exit=True)
import torch
from moe_comm.kernels import mxfp4_format
from moe_comm.kernels.expert_gemm_humming import grouped_product, LOCK_WORDS, tuning
from moe_comm.kernels.expert_gemm_weights import ExpertWeights

torch.manual_seed(0)
def pair(n, k):
    packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
    return packed, torch.randint(118, 124, (n, k // 32), dtype=torch.uint8, device="cuda")
gate, up, down = pair(512, 512), pair(512, 512), pair(512, 512)
weights = ExpertWeights.empty(2, 512, 512, layout="humming", device="cuda")
began = time.perf_counter()
for slot in (0, 1):
    weights.put(slot, gate=gate, up=up, down=down)
print(f"put: {time.perf_counter() - began:.1f} s; tiles {tuning(2, 1024, 512, 5, 0)}")
x = torch.randn(5, 512, device="cuda").bfloat16()
offsets = torch.tensor([0, 2, 5], dtype=torch.int32, device="cuda")
both = torch.cat([mxfp4_format.dequantize(*part).float() for part in (gate, up)])
wanted = x.float() @ both.T
for locks in (None, torch.zeros(LOCK_WORDS, dtype=torch.int32, device="cuda")):
    began = time.perf_counter()
    out = torch.full((5, 1024), torch.nan, dtype=torch.bfloat16, device="cuda")
    grouped_product(
        x, weights.w13, weights.w13_scale, offsets, expected_rows=5, out=out, locks=locks
    )
    torch.cuda.synchronize()
    error = (out.float() - wanted).abs().max() / wanted.abs().max()
    print(f"locks {locks is not None}: {time.perf_counter() - began:.1f} s, error {error:.2e}")
    assert error < 2**-6, (out[0, :8], wanted[0, :8])
"""


def test_buffers_hold_the_checkpoint_bytes():
    specs = buffer_specs(2, 3584, 3072)
    sizes = [torch.empty(shape, dtype=dtype, device="meta").nbytes for shape, dtype in specs]
    assert sum(sizes) == 2 * 17_547_264


def test_shapes_that_humming_does_not_take():
    with pytest.raises(ValueError, match="hidden: expected 64 to divide 96 rows"):
        buffer_specs(1, 96, 64)
    with pytest.raises(ValueError, match="inter: expected 64 to divide 96 rows"):
        buffer_specs(1, 64, 96)
    with pytest.raises(ValueError, match="bias: expected False"):
        ExpertWeights.empty(1, 128, 64, layout="humming", bias=True)
    weights = ExpertWeights.empty(1, 128, 64, layout="humming")
    with pytest.raises(ValueError, match="layout: expected rows or tiles"):
        weights.get(0)


@pytest.fixture(scope="module")
def humming_works():
    """One tiny case in a process of its own, once and within 100 s: what is wrong with humming
    here is then told whole, and no other test waits for it."""
    root = Path(__file__).parents[1]
    paths = [str(root), *sys.path]
    done = subprocess.run(
        [sys.executable, "-c", TINY, "80"],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)},
    )
    if done.returncode != 0:
        pytest.fail(f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}", pytrace=False)
    return done.stdout


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.skipif(not HAVE_HUMMING, reason="needs humming-kernels (the extra 'gemm')")
@pytest.mark.usefixtures("humming_works")
class TestGpu:
    def test_a_tiny_product(self, humming_works):
        assert humming_works.count("error") == 2

    @pytest.mark.parametrize(
        ("counts", "hidden", "inter", "wire"),
        [
            ([5] * 7 + [0, 1], 3584, 512, "bf16"),
            ([0, 300, 1, 0, 17], 512, 1024, "bf16"),
            ([9, 2], 3584, 512, "fp8"),
            ([9, 2], 512, 512, "mxfp8"),
            ([200, 131], 512, 3072, "bf16"),
        ],
    )
    def test_shapes(self, counts, hidden, inter, wire):
        assert choose_implementation("cuda", hidden=hidden, inter=inter) == "humming"
        case = cases.make_case(counts, hidden, inter, seed=len(counts), wire=wire)
        capacity = case.row_index.shape[0]
        out = torch.full((capacity, hidden), torch.nan, dtype=torch.bfloat16, device="cuda")
        rows, index, offsets = case.to("cuda")
        scales = None if case.scales is None else case.scales.cuda()
        weights = case.weights("humming", "cuda")
        grouped_mlp(rows, index, offsets, weights, scales=scales, out=out)
        cases.check(case, out)
        again = grouped_mlp(rows, index, offsets, weights, scales=scales)
        assert torch.equal(again[: sum(counts)], out[: sum(counts)])

    def test_under_a_graph(self):
        case = cases.make_case([5] * 20, 512, 512, seed=10)
        rows, index, offsets = case.to("cuda")
        weights = case.weights("humming", "cuda")
        first = grouped_mlp(rows, index, offsets, weights)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = grouped_mlp(rows, index, offsets, weights)
        captured.fill_(torch.nan)
        graph.replay()
        assert torch.equal(captured[:100], first[:100])
