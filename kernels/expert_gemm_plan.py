"""Which expert and which rows each tile of a grouped product has, worked out on the device.

Shape legend: L local experts, C capacity of expert rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _plan_kernel(
    expert_offsets,
    plan,
    num_experts,
    capacity,
    max_blocks,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """plan[0] = number of row blocks; from plan[1] each block's expert, from plan[1 + max_blocks]
    its first expert row. One program an expert.

    Example: offsets [0, 5, 5, 40], BLOCK_M 16 -> 4 blocks: experts 0, 2, 2, 2, rows 0, 5, 21, 37.
    """
    me = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    inside = expert < num_experts
    start = tl.load(expert_offsets + expert, mask=inside, other=0)
    end = tl.minimum(tl.load(expert_offsets + expert + 1, mask=inside, other=0), capacity)
    blocks = tl.where(inside, tl.maximum(end - start + BLOCK_M - 1, 0) // BLOCK_M, 0)
    before = tl.sum(tl.where(expert < me, blocks, 0))
    mine = tl.sum(tl.where(expert == me, blocks, 0))
    first = tl.sum(tl.where(expert == me, start, 0))
    if me == 0:
        tl.store(plan, tl.sum(blocks))
    for offset in range(0, mine, 64):
        index = offset + tl.arange(0, 64)
        mask = index < mine
        tl.store(plan + 1 + before + index, me + tl.zeros_like(index), mask=mask)
        tl.store(plan + 1 + max_blocks + before + index, first + index * BLOCK_M, mask=mask)


def make_plan(expert_offsets: Tensor, capacity: int, *, block_m: int) -> Tensor:
    """int32 [1 + 2 * max_blocks] on the device: see _plan_kernel."""
    experts = expert_offsets.shape[0] - 1
    max_blocks = experts + capacity // block_m
    plan = torch.empty(1 + 2 * max_blocks, dtype=torch.int32, device=expert_offsets.device)
    _plan_kernel[(experts,)](
        expert_offsets,
        plan,
        experts,
        capacity,
        max_blocks,
        EXPERTS=triton.next_power_of_2(experts),
        BLOCK_M=block_m,
    )
    return plan
