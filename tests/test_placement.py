"""ExpertPlacement: tables of any shape, balance by load, and what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_comm import ExpertPlacement

QUICK = settings(max_examples=80, deadline=None)


def check_tables(placement: ExpertPlacement) -> None:
    """copy_table and num_copies say what the slots say."""
    for expert in range(placement.num_experts):
        copies = [
            [rank, slot]
            for rank, held in enumerate(placement.slots)
            for slot, there in enumerate(held)
            if there == expert
        ]
        count = int(placement.num_copies[expert])
        assert count == len(copies) >= 1
        assert placement.copy_table[expert, :count].tolist() == copies
        assert bool((placement.copy_table[expert, count:] == -1).all())
    assert placement.max_local_experts == max(len(held) for held in placement.slots)


@QUICK
@given(st.integers(1, 50), st.integers(1, 12))
def test_contiguous_is_even(num_experts, num_ranks):
    placement = ExpertPlacement.contiguous(num_experts, num_ranks)
    counts = [placement.num_local_experts(rank) for rank in range(num_ranks)]
    assert max(counts) - min(counts) <= 1
    assert counts == sorted(counts, reverse=True)
    assert [e for rank in range(num_ranks) for e in placement.local_expert_ids(rank)] == list(
        range(num_experts)
    )
    check_tables(placement)


@QUICK
@given(
    st.lists(st.floats(0, 1e6, allow_nan=False), min_size=1, max_size=40),
    st.integers(1, 9),
    st.integers(0, 12),
)
def test_from_load_is_even_and_repeatable(load, num_ranks, num_redundant):
    placement = ExpertPlacement.from_load(load, num_ranks, num_redundant=num_redundant)
    counts = [placement.num_local_experts(rank) for rank in range(num_ranks)]
    assert sum(counts) == len(load) + num_redundant
    assert max(counts) - min(counts) <= 1
    assert placement == ExpertPlacement.from_load(
        torch.tensor(load, dtype=torch.float64), num_ranks, num_redundant=num_redundant
    )
    check_tables(placement)


def test_from_load_copies_the_hottest():
    load = [1.0] * 7 + [100.0]
    placement = ExpertPlacement.from_load(load, 4, num_redundant=4)
    assert placement.num_copies.tolist() == [1] * 7 + [5]
    # Five copies on four ranks of three slots: every rank has one before any has two.
    assert all(7 in held for held in placement.slots)


def test_from_load_levels_skew():
    """The greedy packing is never worse than contiguous on a skewed load."""
    load = (torch.arange(64, dtype=torch.float64) + 1).pow(-1.2)
    balanced = ExpertPlacement.from_load(load, 8)
    heaviest = max(float(load[list(held)].sum()) for held in balanced.slots)
    contiguous = ExpertPlacement.contiguous(64, 8)
    assert heaviest < 0.5 * max(float(load[list(held)].sum()) for held in contiguous.slots)
    # One expert alone is heavier than a fair share: no table of whole experts does better.
    assert heaviest == pytest.approx(float(load[0]), rel=0.25)


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: ExpertPlacement(num_experts=2, slots=()), "at least one rank"),
        (lambda: ExpertPlacement(num_experts=2, slots=((0, 2),)), r"ids in \[0, 2\), got 2"),
        (lambda: ExpertPlacement(num_experts=3, slots=((0,), (2,))), r"got none for \[1\]"),
        (lambda: ExpertPlacement.contiguous(4, 0), "num_ranks: expected at least 1"),
        (lambda: ExpertPlacement.from_counts([2, -1]), "no negative count"),
        (lambda: ExpertPlacement.from_load([1.0, -1.0], 2), "non-negative"),
        (lambda: ExpertPlacement.from_load([1.0, float("nan")], 2), "non-negative"),
        (
            lambda: ExpertPlacement.from_load([1.0], 1, num_redundant=-1),
            "expected at least 1 and 0",
        ),
    ],
)
def test_bad_tables(build, text):
    with pytest.raises(ValueError, match=text):
        build()


def test_empty_ranks_are_fine():
    placement = ExpertPlacement.from_counts([0, 3, 0])
    assert placement.num_ranks == 3
    assert placement.local_expert_ids(0) == []
    check_tables(placement)
