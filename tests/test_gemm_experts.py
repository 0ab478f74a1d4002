"""Experts over what dispatch brought: rank by rank on the reference, against one rank with all."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moe_comm.backends.reference import RankInput, ReferenceWorld
from moe_comm.config import EPConfig
from moe_comm.model.layers.experts import GroupedExperts, run_experts

cases = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("gemm_cases.py"))))
HIDDEN, INTER, EXPERTS, TOPK = 64, 32, 6, 3


def dispatch(ranks, wire):
    generator = torch.Generator().manual_seed(21)
    config = EPConfig(
        num_experts=EXPERTS,
        num_topk=TOPK,
        hidden=HIDDEN,
        max_tokens_per_rank=8,
        dispatch_wire=wire,
    )
    x = torch.randn(8, HIDDEN, generator=generator).bfloat16()
    idx = torch.rand(8, EXPERTS, generator=generator).topk(TOPK).indices
    idx[2, 1] = -1
    weights = torch.rand(8, TOPK, generator=generator)
    share = 8 // ranks
    inputs = [
        RankInput(
            x=x[r * share : (r + 1) * share],
            topk_idx=idx[r * share : (r + 1) * share],
            topk_weights=weights[r * share : (r + 1) * share],
        )
        for r in range(ranks)
    ]
    world = ReferenceWorld(config, ranks)
    return world.dispatch(inputs, bucket=share), idx


@pytest.mark.parametrize("wire", ["bf16", "fp8", "mxfp8"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_experts_of_every_rank(ranks, wire):
    arrived, idx = dispatch(ranks, wire)
    made = cases.make_case([1] * EXPERTS, HIDDEN, INTER, seed=22)
    share = EXPERTS // ranks
    for rank, here in enumerate(arrived):
        case = cases.Case(
            rows=here.rows.flatten(0, 1),
            scales=None if here.scales is None else here.scales.flatten(0, 1),
            row_index=here.row_index,
            expert_offsets=here.expert_offsets,
            experts=made.experts[rank * share : (rank + 1) * share],
            biases=None,
            hidden=HIDDEN,
            inter=INTER,
        )
        weights = case.weights("rows")
        y = GroupedExperts(weights=weights)(here)
        assert y.shape == (here.row_index.shape[0], HIDDEN)
        cases.check(case, y)
        # Each expert got exactly the tokens that chose it.
        for local in range(share):
            wanted = int((idx == rank * share + local).sum())
            assert int(here.num_tokens_per_expert[local]) == wanted


def test_weights_of_another_placement_are_refused():
    arrived, _ = dispatch(2, "bf16")
    weights = cases.make_case([1], HIDDEN, INTER).weights("rows")
    with pytest.raises(ValueError, match="weights: expected 3 experts as dispatched, got 1"):
        run_experts(arrived[0], weights)
