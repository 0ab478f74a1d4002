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
    TAIL: tl.constexpr,
    ONLY_TAILS: tl.constexpr,
):
    """plan[0] = number of row blocks; from plan[1] each block's expert, from plan[1 + max_blocks]
    its first expert row. One program an expert. An expert's rows beyond its whole blocks, where
    there are at most TAIL of them, have no block, or with ONLY_TAILS are the only block.

    Example: offsets [0, 5, 5, 40], BLOCK_M 16 -> 4 blocks: experts 0, 2, 2, 2, rows 0, 5, 21, 37;
    with TAIL 4 the last one is left out, and is the only one with ONLY_TAILS.
    """
    me = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    inside = expert < num_experts
    start = tl.load(expert_offsets + expert, mask=inside, other=0)
    end = tl.minimum(tl.load(expert_offsets + expert + 1, mask=inside, other=0), capacity)
    rows = tl.where(inside, tl.maximum(end - start, 0), 0)
    rest = rows % BLOCK_M
    if ONLY_TAILS:
        blocks = ((rest > 0) & (rest <= TAIL)).to(tl.int32)
        start += rows - rest
    else:
        blocks = rows // BLOCK_M + (rest > TAIL).to(tl.int32)
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


def make_plan(
    expert_offsets: Tensor, capacity: int, *, block_m: int, tail: int = 0, only_tails: bool = False
) -> Tensor:
    """int32 [1 + 2 * max_blocks] on the device: see _plan_kernel. tail: at most so many rows of an
    expert beyond its whole blocks are left to another plan, the one of `only_tails`."""
    experts = expert_offsets.shape[0] - 1
    max_blocks = experts + (0 if only_tails else capacity // block_m)
    plan = torch.empty(1 + 2 * max_blocks, dtype=torch.int32, device=expert_offsets.device)
    _plan_kernel[(experts,)](
        expert_offsets,
        plan,
        experts,
        capacity,
        max_blocks,
        EXPERTS=triton.next_power_of_2(experts),
        BLOCK_M=block_m,
        TAIL=tail,
        ONLY_TAILS=only_tails,
    )
    return plan
