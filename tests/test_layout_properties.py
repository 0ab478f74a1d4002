"""Destinations and expert rows against loops, over random experts, ranks, tokens and masks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_comm import EPConfig, ExpertPlacement
from moe_comm.backends import device_math
from moe_comm.layout import destinations, expert_index

QUICK = settings(max_examples=60, deadline=None)


@st.composite
def routings(draw):
    """(placement, topk_idx [T, K] with masks, duplicates and rubbish, source, num_tokens)."""
    num_experts = draw(st.integers(1, 24))
    num_ranks = draw(st.integers(1, 7))
    redundant = draw(st.integers(0, 5))
    load = draw(st.lists(st.integers(0, 9), min_size=num_experts, max_size=num_experts))
    placement = ExpertPlacement.from_load(load, num_ranks, num_redundant=redundant)
    num_rows = draw(st.integers(0, 9))
    num_topk = draw(st.integers(1, num_experts))
    ids = st.integers(-3, num_experts + 2)
    rows = draw(
        st.lists(
            st.lists(ids, min_size=num_topk, max_size=num_topk),
            min_size=num_rows,
            max_size=num_rows,
        )
    )
    kind = draw(st.sampled_from([torch.int16, torch.int32, torch.int64]))
    topk_idx = torch.tensor(rows, dtype=kind).view(num_rows, num_topk)
    return placement, topk_idx, draw(st.integers(0, num_ranks - 1)), draw(st.integers(0, num_rows))


@QUICK
@given(routings(), st.booleans())
def test_destinations_follow_the_table(case, as_tensor):
    placement, topk_idx, source, num_tokens = case
    to = destinations(
        topk_idx,
        placement.copy_table,
        placement.num_copies,
        source_rank=source,
        num_ranks=placement.num_ranks,
        num_tokens=torch.tensor(num_tokens) if as_tensor else num_tokens,
    )
    invalid = 0
    for token, choices in enumerate(topk_idx.tolist()):
        reached = set()
        for k, expert in enumerate(choices):
            at = (int(to.rank[token, k]), int(to.slot[token, k]))
            if token >= num_tokens or not 0 <= expert < placement.num_experts:
                assert at == (-1, -1)
                invalid += token < num_tokens and expert != -1
                continue
            copies = [
                (rank, slot)
                for rank, held in enumerate(placement.slots)
                for slot, there in enumerate(held)
                if there == expert
            ]
            assert at == copies[(source + token) % len(copies)]
            reached.add(at[0])
        assert set(to.reaches[token].nonzero().flatten().tolist()) == reached
    assert int(to.num_invalid) == invalid


@QUICK
@given(routings(), st.integers(0, 6))
def test_dead_ranks_are_masked(case, dead):
    placement, topk_idx, source, num_tokens = case
    alive = torch.ones(placement.num_ranks, dtype=torch.bool)
    alive[dead % placement.num_ranks] = False
    common = {
        "source_rank": source, "num_ranks": placement.num_ranks, "num_tokens": num_tokens
    }  # fmt: skip
    table, copies = placement.copy_table, placement.num_copies
    all_ranks = destinations(topk_idx, table, copies, **common)
    some = destinations(topk_idx, table, copies, **common, alive=alive)
    gone = all_ranks.rank == dead % placement.num_ranks
    assert torch.equal(some.rank, torch.where(gone, -1, all_ranks.rank))
    assert torch.equal(some.slot, torch.where(gone, -1, all_ranks.slot))
    assert torch.equal(some.reaches, all_ranks.reaches & alive)
    assert torch.equal(some.num_invalid, all_ranks.num_invalid)


@QUICK
@given(
    st.integers(0, 8), st.integers(1, 5), st.integers(1, 6), st.integers(0, 60), st.integers(0, 99)
)
def test_expert_rows_are_grouped_in_order(num_rows, num_topk, num_local, capacity, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, num_local, (num_rows, num_topk), generator=generator).to(torch.int32)
    capacity = min(capacity, num_rows * num_topk)
    # The order, by the obvious loop.
    order = [
        (row, k)
        for expert in range(num_local)
        for row in range(num_rows)
        for k in range(num_topk)
        if ids[row, k] == expert
    ]
    kept = order[:capacity]
    ends = [sum(int(ids[r, k]) <= e for r, k in kept) for e in range(num_local)]
    status = torch.zeros(1, dtype=torch.int32)
    plain = expert_index(ids, num_local_experts=num_local, capacity=capacity)
    fast = device_math.expert_index(
        ids, num_local_experts=num_local, capacity=capacity, status=status
    )
    for offsets, row_index, position in (
        (plain.expert_offsets, plain.row_index, plain.choice_position),
        fast,
    ):
        assert offsets.tolist() == [0, *ends]
        assert row_index.tolist() == [r for r, _ in kept] + [-1] * (capacity - len(kept))
        want = torch.full((num_rows, num_topk), -1, dtype=torch.int32)
        for n, (row, k) in enumerate(kept):
            want[row, k] = n
        assert torch.equal(position, want)
    assert int(plain.num_dropped) == len(order) - len(kept)
    assert int(status) == (2 if len(order) > capacity else 0)


@pytest.mark.parametrize("num_local", [448, 40000])
def test_expert_rows_of_many_experts(num_local):
    """Keys of 16 bits and more than that."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(-1, num_local, (3000, 16), generator=generator).to(torch.int32)
    status = torch.zeros(1, dtype=torch.int32)
    plain = expert_index(ids, num_local_experts=num_local, capacity=48000)
    fast = device_math.expert_index(ids, num_local_experts=num_local, capacity=48000, status=status)
    keys = ids.flatten()[ids.flatten() >= 0]
    sizes = torch.bincount(keys, minlength=num_local)
    assert torch.equal(plain.expert_offsets.diff(), sizes.to(torch.int32))
    rows = plain.row_index[: keys.numel()].long()
    expert = torch.arange(num_local).repeat_interleave(sizes)
    assert bool((ids[rows] == expert.unsqueeze(-1)).any(dim=1).all())
    for a, b in zip((plain.expert_offsets, plain.row_index, plain.choice_position), fast,
                    strict=True):  # fmt: skip
        assert torch.equal(a, b)


def test_capacity_covers_duplicates():
    """A token may name one expert K times, so the worst case a token is K."""
    config = EPConfig(num_experts=8, num_topk=4, hidden=8, max_tokens_per_rank=3)
    assert config.expert_row_capacity(2, 1, 3) == 2 * 3 * 4
    assert config.expert_row_capacity(2, 0, 3) == 0
    assert config.replace(max_expert_rows=5).expert_row_capacity(2, 1, 3) == 5
