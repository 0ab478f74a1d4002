"""NVSHMEM's heap as ranks agree on it: which block is taken, and what is said where there is no
NVSHMEM. Two processes over gloo; blocks are plain CPU tensors here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_pool import RankContext, run_ranks

from moe_comm import BackendUnavailableError, Group
from moe_comm.symmetric_nvshmem import NvshmemSymmetricMemory, _Heap, missing


class Plain:
    """Allocates as a library would, and counts."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def allocate(self, group: Group, num_bytes: int) -> torch.Tensor:
        self.sizes.append(num_bytes)
        return torch.zeros(num_bytes, dtype=torch.uint8)


def take_and_give_back(context: RankContext) -> list[Any]:
    library, group = Plain(), Group()
    heap = _Heap(library)  # type: ignore[arg-type]
    taken = [heap.take(group, size)[0] for size in (1000, 500, 2000)]
    # One rank is still busy with block 0: then nobody may have it, though it fits best.
    for index in (1, 2) if context.rank else (0, 1, 2):
        heap.give_back(index)
    again, block = heap.take(group, 900)
    heap.give_back(0)
    third, _ = heap.take(group, 900)
    fourth, _ = heap.take(group, 5000)
    return [taken, again, block.numel(), third, fourth, library.sizes]


def test_all_ranks_take_the_same_block() -> None:
    for told in run_ranks(2, take_and_give_back):
        assert told == [[0, 1, 2], 2, 2000, 0, 3, [1000, 500, 2000, 5000]]


def refused(context: RankContext) -> str:
    with pytest.raises(BackendUnavailableError) as caught:
        NvshmemSymmetricMemory(Group(), {"a": 8}, puts=True)
    return str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch for CUDA may have NVSHMEM")
def test_the_reason_is_the_same_everywhere() -> None:
    assert "built without NVSHMEM" in missing()
    told = run_ranks(2, refused)
    assert told == [f"NVSHMEM: {missing()} (rank 0)"] * 2
