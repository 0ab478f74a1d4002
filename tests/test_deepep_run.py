"""What `run` and `check` make of deepep: a bare name means both modes, sums that are not the
contract's are held against their tolerance, bytes are those of messages. Over doubles, on CPU
ranks."""

from __future__ import annotations

from typing import Any

import deepep_double as double
import pytest
import torch
from rank_pool import RankContext, run_ranks

from moe_comm import EPConfig

SHAPE = {"num_experts": 24, "num_topk": 6, "hidden": 64}
ROW, BACK = {"v1-ht": 192 + 4, "v1-ll": 4096 + 16}, {"v1-ht": 128, "v1-ll": 4096}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """A module path with a V1 double on it."""
    return str(double.write_package(tmp_path_factory.mktemp("v1"), double.V1))


def measured(context: RankContext, folder: str, shift: float) -> dict[str, Any]:
    """A run of deepep with its sums shifted by a part of their tolerance."""
    from moe_comm import Group
    from moe_comm.backends.deepep_base import DeepEPCommunicator
    from moe_comm.launch.bench import Bench, Plan
    from moe_comm.launch.routing import parse_routing
    from moe_comm.launch.worker import Ranks

    del context
    combine = DeepEPCommunicator._combine_at_once

    def shifted(self: Any, call: Any) -> torch.Tensor:
        return combine(self, call) * (1 + shift)

    DeepEPCommunicator._combine_at_once = shifted
    try:
        with double.installed(folder):
            ranks = Ranks(Group(), timeout_s=60.0)
            config = EPConfig(**SHAPE, max_tokens_per_rank=9)
            plan = Plan(
                config=config, backends=["deepep"], num_tokens=[9],
                routings=[parse_routing("uniform", num_experts=24, num_topk=6)],
                iters=2, warmup=1, limit=False,
            )  # fmt: skip
            rows = Bench(plan, ranks, quiet=True).run().rows
    finally:
        DeepEPCommunicator._combine_at_once = combine
    return {
        f"{row.mode} {row.phase}": (row.wrong, row.remote_bytes, row.params["reduction"])
        for row in rows
    }


def all_shifts(context: RankContext, folder: str) -> list[dict[str, Any]]:
    return [measured(context, folder, shift) for shift in (0.0, 2**-8, 0.5)]


def test_both_modes_within_what_they_promise(folder):
    right, near, far = run_ranks(4, all_shifts, folder)[0]
    for found in (right, near, far):
        assert {name.split()[0] for name in found} == {"v1-ht", "v1-ll"}
        for mode in ("v1-ht", "v1-ll"):
            wrong, sent, _ = found[f"{mode} dispatch"]
            assert wrong == 0
            # Nine tokens and a header, to at most three other ranks.
            assert 0 < sent <= 30 * ROW[mode]
            assert sent % ROW[mode] == 0
            assert found[f"{mode} combine"][1] % BACK[mode] == 0
    assert [found["v1-ht combine"][0] > 0 for found in (right, near, far)] == [False, False, True]
    assert right["v1-ht combine"][2] == "rank, within a tolerance"
    # In the contract's order, to the bit: any shift shows.
    assert [found["v1-ll combine"][0] > 0 for found in (right, near, far)] == [False, True, True]
    assert right["v1-ll combine"][2] == "rank"


def adapted(context: RankContext, folder: str) -> dict[str, Any]:
    """The adapted half of the comparison with the library by itself, small."""
    from moe_comm import Group
    from moe_comm.launch import deepep_stock
    from moe_comm.launch.worker import Ranks

    del context
    deepep_stock.TOKENS, deepep_stock.ITERS, deepep_stock.WARMUP = 6, 2, 1
    with double.installed(folder):
        return deepep_stock._adapted(Ranks(Group(), timeout_s=60.0), None)


def test_comparison_with_the_library_by_itself(folder):
    times = run_ranks(2, adapted, folder)[0]
    assert times.pop("wrong_elements") == 0
    assert set(times) == {
        "dispatch_transport_us",
        "combine_transport_us",
        "dispatch_us",
        "partial_sums_us",
        "round_trip_us",
    }
    assert min(times.values()) > 0
