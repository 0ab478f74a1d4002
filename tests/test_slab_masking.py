"""Slab: what survivors of a lost rank agree on, in processes of their own (no kernel runs)."""

from __future__ import annotations

import pytest
import torch
from rank_pool import RankContext, run_ranks


def masked(context: RankContext) -> None:
    """Ranks 0 and 2 failed in different calls, one counter on each side of the wrap."""
    from moe_comm import EPConfig
    from moe_comm.backends.slab import SlabCommunicator, region_sizes
    from moe_comm.group import Group
    from moe_comm.kernels.signal import COMBINE, RELEASE
    from moe_comm.symmetric import VirtualSymmetricMemory

    config = EPConfig(num_experts=6, num_topk=2, hidden=8, max_tokens_per_rank=4)
    group = Group()
    memory = VirtualSymmetricMemory.create(3, region_sizes(config, 3), torch.device("cpu"))
    comm = SlabCommunicator(config, group, memory=memory[group.rank])
    if group.rank == 1:
        return
    counters = comm.engine.state[0]
    counters[COMBINE] = 2**31 - 1 if group.rank == 0 else 2**31 - 2
    comm.engine.state[1][COMBINE] = group.rank == 0  # one more on rank 0, beyond the wrap
    counters[RELEASE] = 3 + group.rank
    comm.mask_rank(1)
    assert int(counters[COMBINE]) == -(2**31)
    assert int(counters[RELEASE]) == 5
    assert int(counters[0]) == 0
    with pytest.raises(ValueError, match="rank: expected one of the other live ranks"):
        comm.mask_rank(1)


def test_survivors_go_on_from_the_same_counters() -> None:
    run_ranks(3, masked)
