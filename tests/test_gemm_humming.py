"""The grouped expert MLP on humming-kernels: shapes it takes anywhere, results on a GPU."""

from __future__ import annotations

import importlib.util
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moe_comm.kernels.expert_gemm import choose_implementation, grouped_mlp
from moe_comm.kernels.expert_gemm_humming import buffer_specs
from moe_comm.kernels.expert_gemm_weights import ExpertWeights

cases = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("gemm_cases.py"))))
HAVE_HUMMING = importlib.util.find_spec("humming") is not None


def test_buffers_hold_the_checkpoint_bytes():
    specs = buffer_specs(2, 3584, 3072)
    sizes = [torch.empty(shape, dtype=dtype, device="meta").nbytes for shape, dtype in specs]
    assert sum(sizes) == 2 * 17_547_264


def test_shapes_that_humming_does_not_take():
    with pytest.raises(ValueError, match="hidden: expected 64 to divide 96 rows"):
        buffer_specs(1, 96, 64)
    with pytest.raises(ValueError, match="bias: expected False"):
        ExpertWeights.empty(1, 128, 64, layout="humming", bias=True)
    weights = ExpertWeights.empty(1, 128, 64, layout="humming")
    with pytest.raises(ValueError, match="layout: expected rows or tiles"):
        weights.get(0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.skipif(not HAVE_HUMMING, reason="needs humming-kernels (the extra 'gemm')")
class TestGpu:
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
