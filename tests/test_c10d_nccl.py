"""c10d over NCCL on two GPUs: the CPU's cases bit for bit, CUDA graphs, gradients, headers."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from comm_cases import Case, assert_same_bits, check_case
from rank_pool import RankContext, run_ranks
from test_c10d_gathered import CALLS, FULL
from test_c10d_modes import OPTIONS, WIRES, case_of
from test_ops_autograd import check_numerically, compare_compiled

from moe_comm import EPConfig, PhaseError
from moe_comm.backends import c10d_exact
from moe_comm.launch.rank_data import RankData

pytestmark = [pytest.mark.gpu, pytest.mark.multi_gpu(2)]

MODES = ["exact", "dense", "hierarchical"]
# Options whose tables or edits are not made for four ranks.
FOR_TWO = [name for name in OPTIONS if "counts" not in OPTIONS[name] and "far" not in name]


def on_gpus(function: Any, *args: Any) -> list[Any]:
    """function on two ranks, each with a GPU."""
    return run_ranks(2, function, *args, device_type="cuda", timeout_s=180.0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("wire", WIRES)
def test_wires(mode, wire):
    config = {"dispatch_wire": wire, "combine_wire": wire}
    on_gpus(check_case, case_of(mode, 2, 1, config=config, routing="zipf:1+masked:0.2"))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("option", FOR_TWO)
def test_options(mode, option):
    on_gpus(check_case, case_of(mode, 2, 1, **OPTIONS[option]))


def packed_records(context: RankContext, cases: list[Case]) -> None:
    """Mode exact with records that are too large to be gathered."""
    limit = c10d_exact._GATHERED_BYTES
    c10d_exact._GATHERED_BYTES = 0
    try:
        for case in cases:
            check_case(context, case)
    finally:
        c10d_exact._GATHERED_BYTES = limit


def test_options_with_packed_records():
    on_gpus(packed_records, [case_of("exact", 2, 1, **OPTIONS[option]) for option in FOR_TWO])


@pytest.mark.parametrize("mode", MODES[:2])
@pytest.mark.parametrize("more", [{}, {"split": True}, {"payloads": True}, {"bucket": 16}])
def test_full_dispatches(mode, more):
    """Exact sends the whole bucket without waiting for counts, where the last ones were full, and
    repeats calls that are like the one before."""
    case = case_of(mode, 2, 1, config=FULL, num_tokens=CALLS, routing="uniform", **more)
    on_gpus(check_case, case)


@pytest.mark.parametrize("mode", MODES[:2])
def test_the_real_shape(mode):
    shape = {
        "num_experts": 896, "num_topk": 16, "hidden": 3584, "max_tokens_per_rank": 128
    }  # fmt: skip
    tokens = ((128, 77), *((128, 128),) * 4)
    case = Case(backend=f"c10d:{mode}", config=shape, num_tokens=tokens, routing="zipf:1.1")
    on_gpus(check_case, case)


def captured(context: RankContext, wire: str) -> None:
    """A graph of dispatch, experts and combine, replayed on new tokens, equals the eager calls."""
    config = EPConfig.preset(
        "kimi-k3", hidden=512, max_tokens_per_rank=64, dispatch_wire=wire, combine_wire=wire
    )
    with context.communicator(config, "c10d:dense") as comm:
        held = RankData.create(
            config, rank=context.rank, num_tokens=[64, 64], seed=0, device=comm.device
        )
        x, idx, weights = held.x.clone(), held.topk_idx.clone(), held.topk_weights.clone()
        count = torch.full((), 64, dtype=torch.int32, device=comm.device)

        def layer() -> torch.Tensor:
            d = comm.dispatch(x, idx, weights, num_tokens=count)
            rows = d.dequantized_rows().flatten(0, 1)[d.row_index.clamp_min(0).long()]
            y = torch.where((d.row_index >= 0).unsqueeze(-1), rows, 0) * 2
            return comm.combine(y.to(torch.bfloat16), d.handle)

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                layer()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            static = layer()
        for seed, tokens in ((1, 64), (2, 3), (3, 0), (4, 50)):
            new = RankData.create(
                config, rank=context.rank, num_tokens=[64, 64], seed=seed, device=comm.device
            )
            x.copy_(new.x)
            idx.copy_(new.topk_idx)
            weights.copy_(new.topk_weights)
            count.fill_(max(0, tokens - context.rank))
            static.fill_(torch.nan)
            graph.replay()
            torch.cuda.synchronize()
            replayed = static.clone()
            assert_same_bits("out", replayed.cpu(), layer().cpu())
            assert not replayed[int(count) :].any()
        comm.check()
        graph.reset()


@pytest.mark.parametrize("wire", ["bf16", "fp8"])
def test_dense_in_a_cuda_graph(wire):
    on_gpus(captured, wire)


@pytest.mark.parametrize("mode", MODES)
def test_gradcheck(mode):
    on_gpus(check_numerically, mode, "expert")


def test_compiled_equals_eager():
    on_gpus(compare_compiled, "dense", "methods", "bfloat16")


def debug_phases(context: RankContext) -> None:
    """Headers are exchanged where MOE_COMM_DEBUG asks for them."""
    os.environ["MOE_COMM_DEBUG"] = "1"
    try:
        config = EPConfig.preset("k3-tiny", max_tokens_per_rank=8)
        with context.communicator(config, "c10d:dense") as comm:
            data = RankData.create(config, rank=context.rank, num_tokens=[8, 8], device=comm.device)
            given = (data.x, data.topk_idx, data.topk_weights)
            d = comm.dispatch(*given)
            y = torch.zeros(int(d.expert_offsets[-1]), 64, dtype=torch.bfloat16, device=comm.device)
            with pytest.raises(PhaseError):
                comm.combine(y, d.handle) if context.rank == 0 else comm.dispatch(*given)
    finally:
        del os.environ["MOE_COMM_DEBUG"]


def test_phases_under_debug():
    on_gpus(debug_phases)
