"""The benchmark's oracle against the library's reference, bit for bit."""

from __future__ import annotations

import pytest
import torch

from moe_comm import EPConfig, ExpertPlacement
from moe_comm.backends.reference import RankInput, ReferenceWorld
from moe_comm.launch.experts import apply_expert, expert_factors, expert_step
from moe_comm.launch.oracle import expected_combine, expected_dispatch, expected_rows_layout
from moe_comm.launch.rank_data import RankData

SHAPE = {"num_experts": 20, "num_topk": 6, "hidden": 160, "max_tokens_per_rank": 8}
NODES = (0, 0, 1, 1)


@pytest.mark.parametrize("wire", ["bf16", "fp8", "mxfp8", "none"])
@pytest.mark.parametrize("reduction", ["rank", "node"])
@pytest.mark.parametrize("num_tokens", [(7, 0, 3, 8), (0, 0, 0, 0)])
def test_oracle_equals_reference(wire, reduction, num_tokens):
    redundant = ExpertPlacement.from_load([float(e % 7) for e in range(20)], 4, num_redundant=3)
    config = EPConfig(
        **SHAPE, dispatch_wire=wire, combine_wire=wire, reduction=reduction, placement=redundant
    )
    data = RankData.create_all(config, num_tokens=num_tokens, routing="zipf:1+masked:0.2", seed=5)
    world = ReferenceWorld(config, 4, node_of_rank=NODES)
    arrived = world.dispatch(
        [RankInput(x=d.x, topk_idx=d.topk_idx, topk_weights=d.topk_weights) for d in data]
    )
    factors = expert_factors(20)
    y = [expert_step(arrived[rank], factors[redundant.local_expert_ids(rank)]) for rank in range(4)]
    returned = world.combine(y, [d.handle for d in arrived])
    for rank in range(4):
        want = arrived[rank]
        got = expected_dispatch(config, data, redundant, rank=rank, bucket=8)
        total = int(want.expert_offsets[-1])
        assert torch.equal(got.local_idx, want.topk_idx.long())
        assert torch.equal(got.expert_offsets, want.expert_offsets.long())
        assert torch.equal(got.row_index, want.row_index[:total].long())
        assert torch.equal(got.reached, (want.topk_idx >= 0).any(dim=-1))
        assert torch.equal(
            got.values[got.reached].view(torch.uint8), want.rows[got.reached].view(torch.uint8)
        )
        if want.scales is not None:
            assert torch.equal(got.scales[got.reached], want.scales[got.reached])
        here = got.local_idx >= 0
        assert torch.equal(got.weights[here], want.topk_weights[here])
        out = expected_combine(config, data[rank], redundant, node_of_rank=NODES)
        assert torch.equal(out, returned[rank])


def test_rows_layout_gives_the_same_output():
    config = EPConfig(**SHAPE)
    placement = config.placement_for(4)
    data = RankData.create_all(config, num_tokens=(7, 0, 3, 8), routing="masked:0.2", seed=1)
    world = ReferenceWorld(config, 4)
    arrived = world.dispatch(
        [RankInput(x=d.x, topk_idx=d.topk_idx, topk_weights=d.topk_weights) for d in data]
    )
    rows = [expected_rows_layout(config, data, placement, rank=rank, bucket=8) for rank in range(4)]
    returned = world.combine(rows, [d.handle for d in arrived], layout="rows")
    for rank in range(4):
        want = expected_combine(config, data[rank], placement, node_of_rank=[0] * 4)
        assert torch.equal(returned[rank], want)


def test_every_expert_changes_a_row_differently():
    row = torch.randn(1, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    factors = expert_factors(896)
    out = apply_expert(row.expand(896, -1), factors)
    assert len({tuple(line.tolist()) for line in out}) == 896
