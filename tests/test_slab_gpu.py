"""The slab on GPUs: virtual ranks on one, real ranks on two; all bit for bit with the reference."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
from comm_cases import Case, assert_same_bits, check_case
from rank_pool import RankContext, run_ranks
from slab_world import VirtualWorld
from test_c10d_modes import OPTIONS, WIRES, case_of

from moe_comm import EPConfig, ExpertPlacement, PeerTimeoutError, PhaseError
from moe_comm.backends.slab_modes import SlabTuning
from moe_comm.launch.rank_data import RankData

gpu = pytest.mark.gpu
pair = [pytest.mark.gpu, pytest.mark.multi_gpu(2)]
MODES = ["low-latency", "high-throughput"]
# Tables and edits made for four ranks, and float64, which the slab refuses.
FOR_TWO = [
    name
    for name in OPTIONS
    if "counts" not in OPTIONS[name] and "far" not in name and name != "float64"
]


def world(num_ranks: int, mode: str, chunk: int = 1024, **shape: Any) -> VirtualWorld:
    config = EPConfig(**{"num_experts": 896, "num_topk": 16, "hidden": 3584} | shape)
    tuning = SlabTuning(mode=mode, combine_lag=chunk)
    return VirtualWorld(config, num_ranks, torch.device("cuda", 0), tuning)


@gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tokens", [(0, 0), (1, 2), (3, 127), (128, 129), (600, 1)])
def test_virtual_pair(mode, tokens) -> None:
    here = world(2, mode, chunk=128, max_tokens_per_rank=max(*tokens, 1))
    here.round_trip(tokens, torch.Generator().manual_seed(1))


@gpu
@pytest.mark.parametrize("wire", ["fp8", "mxfp8"])
@pytest.mark.parametrize("hidden", [64, 2880, 7168])
def test_virtual_wires(wire, hidden) -> None:
    here = world(
        2, "low-latency", max_tokens_per_rank=8, hidden=hidden, dispatch_wire=wire,
        combine_wire=wire,
    )  # fmt: skip
    here.round_trip((7, 5), torch.Generator().manual_seed(2))


@gpu
@pytest.mark.parametrize("num_ranks", [4, 8, 16, 64])
@pytest.mark.parametrize("mode", MODES)
def test_virtual_ranks(num_ranks, mode) -> None:
    here = world(num_ranks, mode, chunk=4, max_tokens_per_rank=8, hidden=64)
    generator = torch.Generator().manual_seed(num_ranks)
    tokens = torch.randint(9, (num_ranks,), generator=generator).tolist()
    for _ in range(2):
        here.round_trip(tokens, generator)


@gpu
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("wire", ["bf16", "fp8"])
def test_virtual_ranks_at_once(num_ranks, wire) -> None:
    """They wait for each other on the device: for choices, rows, and partial sums of several ranks.
    Few tokens, so that all programs of all ranks run at the same time."""
    here = world(
        num_ranks, "low-latency", chunk=2, max_tokens_per_rank=4, hidden=512, dispatch_wire=wire,
        combine_wire=wire, timeout_s=10.0,
    )  # fmt: skip
    here.at_once = random.Random(num_ranks)
    generator = torch.Generator().manual_seed(6)
    for turn in range(20):
        tokens = torch.randint(5, (num_ranks,), generator=generator).tolist()
        here.round_trip(tokens, generator, bucket=4, slot=turn % 2)


@gpu
@pytest.mark.parametrize(("num_ranks", "tokens"), [(2, (3, 127)), (2, (600, 513)), (8, (40,) * 8)])
def test_virtual_choices_that_are_counted(num_ranks, tokens) -> None:
    config = EPConfig(num_experts=896, num_topk=16, hidden=512, max_tokens_per_rank=max(tokens))
    tuning = SlabTuning(mode="low-latency", ranked_choices=0)
    here = VirtualWorld(config, num_ranks, torch.device("cuda", 0), tuning)
    generator = torch.Generator().manual_seed(5)
    for _ in range(2):
        here.round_trip(tokens, generator)


@gpu
def test_virtual_uneven_placement_with_copies() -> None:
    slots = (tuple(range(10)), (), (3, 3, 1))
    here = world(
        3, "low-latency", num_experts=10, num_topk=4, max_tokens_per_rank=16, hidden=64,
        placement=ExpertPlacement(num_experts=10, slots=slots),
    )  # fmt: skip
    here.round_trip((16, 9, 0), torch.Generator().manual_seed(3))


@gpu
def test_virtual_rows_beyond_2_31_elements() -> None:
    """The second slot's rows lie past 2^31 elements of the block."""
    if torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.skip("needs 40 GiB of free GPU memory")
    here = world(2, "low-latency", max_tokens_per_rank=300_000, hidden=4096, num_topk=1)
    here.round_trip((2, 3), torch.Generator().manual_seed(4), bucket=4, slot=1)


def on_pair(function: Any, *args: Any) -> list[Any]:
    return run_ranks(2, function, *args, device_type="cuda", timeout_s=240.0)


class TestPair:
    pytestmark = pair

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("wire", WIRES)
    def test_wires(self, mode, wire) -> None:
        config = {"dispatch_wire": wire, "combine_wire": wire}
        case = case_of("exact", 2, 1, config=config, routing="zipf:1+masked:0.2")
        on_pair(check_case, as_slab(case, mode))

    @pytest.mark.parametrize("option", FOR_TWO)
    def test_options(self, option) -> None:
        on_pair(check_case, as_slab(case_of("exact", 2, 1, **OPTIONS[option]), "low-latency"))

    @pytest.mark.parametrize("tokens", [(1, 4096), (128, 128)])
    def test_the_real_shape(self, tokens) -> None:
        shape = {
            "num_experts": 896, "num_topk": 16, "hidden": 3584,
            "max_tokens_per_rank": max(tokens),
        }  # fmt: skip
        case = Case(backend="slab", config=shape, num_tokens=(tokens, tokens), routing="zipf:1.1")
        on_pair(check_case, case)

    @pytest.mark.parametrize("mode", MODES)
    def test_replayed_graph(self, mode) -> None:
        on_pair(replayed, mode)

    def test_random_calls(self) -> None:
        on_pair(random_calls, 2000, 1)

    def test_a_stalled_rank(self) -> None:
        on_pair(stalled)

    def test_phases(self) -> None:
        on_pair(out_of_phase)


def as_slab(case: Case, mode: str) -> Case:
    import dataclasses

    config = {**case.config, "max_payload_bytes": 64}
    return dataclasses.replace(case, backend=f"slab:{mode}", config=config)


def replayed(context: RankContext, mode: str) -> None:
    """Three layers in one graph, replayed 1,000 times with routing and T changed in place; every
    hundredth replay is compared with eager calls."""
    config = EPConfig.preset("kimi-k3", hidden=512, max_tokens_per_rank=64)
    with context.communicator(config, f"slab:{mode}") as comm:
        held = RankData.create(
            config, rank=context.rank, num_tokens=[64, 64], seed=0, device=comm.device
        )
        x, idx, weights = held.x.clone(), held.topk_idx.clone(), held.topk_weights.clone()
        count = torch.full((), 64, dtype=torch.int32, device=comm.device)

        def layers() -> torch.Tensor:
            rows = x
            for _ in range(3):
                d = comm.dispatch(rows, idx, weights, num_tokens=count)
                flat = d.rows.flatten(0, 1)[d.row_index.clamp_min(0).long()]
                y = torch.where((d.row_index >= 0).unsqueeze(-1), flat, 0)
                rows = comm.combine(y, d.handle)
            return rows

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            layers()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            static = layers()
        for step in range(1000):
            count.fill_((step * 7 + 13 * context.rank) % 65)
            if step % 100 == 0:
                new = RankData.create(
                    config, rank=context.rank, num_tokens=[64, 64], seed=step, device=comm.device
                )
                x.copy_(new.x)
                idx.copy_(new.topk_idx)
                weights.copy_(new.topk_weights)
            graph.replay()
            if step % 100 == 99:
                torch.cuda.synchronize()
                replay = static.clone()
                assert_same_bits("out", replay.cpu(), layers().cpu())
        comm.check()
        graph.reset()


def random_calls(context: RankContext, pairs: int, seed: int) -> None:
    """Random T a rank and call, 0 included. With one choice a token, weight 1 and identity experts
    the combined row is the row itself, bit for bit: every call is checked on the device."""
    config = EPConfig(num_experts=64, num_topk=1, hidden=256, max_tokens_per_rank=96)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 97, (pairs, 2), generator=generator)
    with context.communicator(config, "slab:low-latency") as comm:
        device = comm.device
        local = torch.Generator(device).manual_seed(seed + context.rank)
        wrong = torch.zeros((), dtype=torch.int64, device=device)
        ones = torch.ones(96, 1, device=device)
        for call in range(pairs):
            mine = int(tokens[call, context.rank])
            x = torch.randn(mine, 256, generator=local, device=device).bfloat16()
            idx = torch.randint(0, 64, (mine, 1), generator=local, device=device)
            d = comm.dispatch(x, idx, ones[:mine])
            rows = d.rows.flatten(0, 1)[d.row_index.clamp_min(0).long()]
            out = torch.full_like(x, torch.nan)
            comm.combine(rows, d.handle, out=out)
            wrong += (out != x).sum()
        comm.check()
        assert int(wrong) == 0


def stalled(context: RankContext) -> None:
    """A rank that does not come: the other names it in time, and both can go on afterwards."""
    config = EPConfig.preset("k3-tiny", max_tokens_per_rank=8, timeout_s=1.0)
    data = RankData.create(
        config, rank=context.rank, num_tokens=[8, 8], device=torch.device("cuda", context.rank)
    )
    given = (data.x, data.topk_idx, data.topk_weights)
    with context.communicator(config, "slab") as comm:
        if context.rank == 0:
            began = time.monotonic()
            d = comm.dispatch(*given)
            with pytest.raises(PeerTimeoutError, match="rank 1") as caught:
                comm.check()
            assert time.monotonic() - began < 6.0
            assert caught.value.phase == "dispatch"
            assert int(d.expert_offsets[-1]) == 0
            again = time.monotonic()
            with pytest.raises(PeerTimeoutError, match="rank 1"):
                comm.combine(data.x.new_zeros(1, 64), d.handle)
            assert time.monotonic() - again < 1.0
        else:
            time.sleep(3.0)
    check_case(context, Case(backend="slab", num_tokens=((16, 3),)))


def out_of_phase(context: RankContext) -> None:
    """One rank dispatches again while the other combines."""
    config = EPConfig.preset("k3-tiny", max_tokens_per_rank=8, timeout_s=8.0)
    data = RankData.create(
        config, rank=context.rank, num_tokens=[8, 8], device=torch.device("cuda", context.rank)
    )
    given = (data.x, data.topk_idx, data.topk_weights)
    with context.communicator(config, "slab") as comm:
        d = comm.dispatch(*given)
        if context.rank == 0:
            comm.dispatch(*given)
        else:
            comm.combine(data.x.new_zeros(d.row_index.shape[0], 64), d.handle)
        with pytest.raises(PhaseError) as caught:
            comm.check()
        assert caught.value.rank == 1 - context.rank
