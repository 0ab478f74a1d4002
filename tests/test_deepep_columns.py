"""Which ranks a message goes to, and in what order, against a loop over choices."""

from __future__ import annotations

import pytest
import torch

from moe_comm.backends.deepep_transport import columns_of


def by_loop(rank: list[list[int]], num_ranks: int, num_headers: int) -> list[list[int]]:
    """Each token's ranks by their last choice; then headers that name every rank."""
    width = min(num_ranks, len(rank[0]))
    lines = []
    for choices in rank:
        last = {r: k for k, r in enumerate(choices) if r >= 0}
        order = sorted(last, key=lambda r: last[r])
        lines.append(order + [-1] * (width - len(order)))
    named = [*range(num_ranks), *[-1] * (num_headers * width - num_ranks)]
    return lines + [named[h * width : (h + 1) * width] for h in range(num_headers)]


@pytest.mark.parametrize(
    ("ranks", "choices"), [(1, 1), (2, 16), (3, 6), (8, 16), (16, 16), (20, 4), (64, 16)]
)
def test_columns_are_in_order_of_last_choices(ranks, choices):
    generator = torch.Generator().manual_seed(ranks * 100 + choices)
    rank = torch.randint(-1, ranks, (200, choices), generator=generator, dtype=torch.int32)
    rank[0] = -1
    headers = -(-ranks // min(ranks, choices))
    got = columns_of(rank, ranks, num_headers=headers)
    assert got.dtype == torch.int64
    assert got.is_contiguous()
    assert got.tolist() == by_loop(rank.tolist(), ranks, headers)
