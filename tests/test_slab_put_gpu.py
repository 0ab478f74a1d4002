"""The slab over puts on GPUs: virtual ranks on one, NVSHMEM's device-side puts between two; all bit
for bit with the reference."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from comm_cases import Case, check_case
from rank_pool import RankContext, RankPool
from slab_world import VirtualWorld
from test_c10d_modes import OPTIONS, WIRES, case_of
from test_slab_gpu import FOR_TWO, MODES, as_slab, out_of_phase, random_calls, replayed, stalled

from moe_comm import BackendUnavailableError, EPConfig
from moe_comm.backends.slab_modes import SlabTuning

gpu = pytest.mark.gpu
FORCED = {"MOE_COMM_SLAB_FORCE_PUT": "1"}


@gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("num_ranks", "tokens"), [(2, (129, 1)), (2, (0, 300)), (8, (9,) * 8)])
def test_virtual_ranks(mode, num_ranks, tokens) -> None:
    config = EPConfig(
        num_experts=896, num_topk=16, hidden=3584, max_tokens_per_rank=max(tokens),
        combine_wire="fp8",
    )  # fmt: skip
    tuning = SlabTuning(mode=mode, combine_lag=128)
    here = VirtualWorld(config, num_ranks, torch.device("cuda", 0), tuning, puts=True)
    # Few choices: many rows go alone.
    for masked in (0.1, 0.9):
        here.round_trip(tokens, torch.Generator().manual_seed(1), masked=masked)


@pytest.fixture(scope="module")
def pair() -> Iterator[RankPool]:
    """Two ranks that put, and keep NVSHMEM for all tests: it is initialized once a process."""
    with RankPool(2, "cuda", variables=FORCED) as ranks:
        yield ranks


def run(ranks: RankPool, function: Any, *args: Any) -> list[Any]:
    return ranks.run(function, *args, timeout_s=200.0)


@gpu
@pytest.mark.multi_gpu(2)
class TestPair:
    def test_it_says_that_it_puts(self, pair) -> None:
        for told in run(pair, answers):
            assert "put" in told["capabilities"]
            assert told["mode"] == "low-latency+put"
            # A communicator that was closed left its block to the next one.
            assert told["blocks"] == 2

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("wire", WIRES)
    def test_wires(self, pair, mode, wire) -> None:
        config = {"dispatch_wire": wire, "combine_wire": wire}
        case = case_of("exact", 2, 1, config=config, routing="zipf:1+masked:0.2")
        run(pair, check_case, as_slab(case, mode))

    @pytest.mark.parametrize("option", FOR_TWO)
    def test_options(self, pair, option) -> None:
        run(pair, check_case, as_slab(case_of("exact", 2, 1, **OPTIONS[option]), "low-latency"))

    @pytest.mark.parametrize("tokens", [(1, 4096), (128, 128)])
    def test_the_real_shape(self, pair, tokens) -> None:
        shape = {
            "num_experts": 896, "num_topk": 16, "hidden": 3584,
            "max_tokens_per_rank": max(tokens),
        }  # fmt: skip
        case = Case(backend="slab", config=shape, num_tokens=(tokens, tokens), routing="zipf:1.1")
        run(pair, check_case, case)

    @pytest.mark.parametrize("mode", MODES)
    def test_replayed_graph(self, pair, mode) -> None:
        run(pair, replayed, mode)

    def test_random_calls(self, pair) -> None:
        run(pair, random_calls, 1000, 1)

    def test_a_stalled_rank(self, pair) -> None:
        run(pair, stalled)

    def test_phases(self, pair) -> None:
        run(pair, out_of_phase)


@gpu
@pytest.mark.multi_gpu(2)
def test_after_a_communicator_that_stores() -> None:
    """Torch's symmetric memory keeps its first backend, so the heap is nvshmem4py's, or the reason
    names both."""
    with RankPool(2, "cuda") as ranks:
        told = run(ranks, store_then_put)
    assert told[0] == told[1]
    if told[0]:
        assert "symmetric memory" in told[0]
        assert "nvshmem4py" in told[0]
        pytest.skip(told[0])


def answers(context: RankContext) -> dict[str, Any]:
    from moe_comm import symmetric_nvshmem

    config = EPConfig.preset("k3-tiny", max_tokens_per_rank=8)
    with context.communicator(config, "slab") as first:
        told = {"capabilities": first.capabilities, "mode": first.mode_for(8)}
        with context.communicator(config, "slab"):
            pass
    with context.communicator(config, "slab"):
        told["blocks"] = len(symmetric_nvshmem._heaps[0]._blocks)
    return told


def store_then_put(context: RankContext) -> str:
    case = as_slab(case_of("exact", 2, 1), "low-latency")
    check_case(context, case)
    os.environ.update(FORCED)
    try:
        check_case(context, case)
    except BackendUnavailableError as error:
        return str(error)
    return ""
