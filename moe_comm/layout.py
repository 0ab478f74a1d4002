"""Index computation in pure torch: destinations of tokens, and rows grouped by local expert.

Shape legend: T tokens, K choices a token, E logical experts, R ranks, C copies of an expert,
M received rows (R * bucket), L local experts, N expert rows. All on the tensors' own device, with
no host sync.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Destinations:
    """Where each choice of each token goes.

    Attributes:
        rank: [T, K] int32, the rank that holds the chosen copy; -1 for a masked choice.
        slot: [T, K] int32, the local expert id there; -1 for a masked choice.
        reaches: [T, R] bool, token t has a row on rank r.
        num_invalid: scalar int64 tensor, choices outside [-1, E), which count as masked.
    """

    rank: Tensor
    slot: Tensor
    reaches: Tensor
    num_invalid: Tensor


def destinations(
    topk_idx: Tensor,
    copy_table: Tensor,
    num_copies: Tensor,
    *,
    source_rank: int,
    num_ranks: int,
    num_tokens: int | Tensor,
    alive: Tensor | None = None,
) -> Destinations:
    """Resolve global expert ids into (rank, slot).

    Args:
        topk_idx: [T, K] int, global ids; -1 masks a choice, anything else outside [0, E) counts
            as masked and is tallied.
        copy_table: [E, C, 2] int32 and
        num_copies: [E] int32, of the ExpertPlacement, on topk_idx's device.
        source_rank: the rank whose tokens these are; with the token's position it picks the copy.
        num_ranks: R.
        num_tokens: valid tokens (int or scalar tensor); rows past it are masked.
        alive: [R] bool, ranks that take part; choices on others are masked. None: all.
    """
    num_rows = topk_idx.shape[0]
    num_experts = num_copies.shape[0]
    position = torch.arange(num_rows, device=topk_idx.device)
    ids = topk_idx.to(torch.int64)
    live = (position < num_tokens).unsqueeze(-1)
    invalid = live & ((ids < -1) | (ids >= num_experts))
    valid = live & (ids >= 0) & (ids < num_experts)
    safe = torch.where(valid, ids, 0)
    copies, at = copy_table.shape[1], safe.flatten()
    if copies > 1:
        which = (source_rank + position).repeat_interleave(topk_idx.shape[1])
        at = at * copies + which % num_copies.index_select(0, at)
    # A (rank, slot) at a time, as one number: rows of two would be gathered element by element.
    pairs = copy_table.reshape(-1, 2).view(torch.int64).squeeze(1)
    chosen = pairs.index_select(0, at).view(torch.int32).view(*ids.shape, 2)
    if alive is not None:
        valid &= alive[chosen[..., 0].to(torch.int64)]
    rank = torch.where(valid, chosen[..., 0], -1)
    slot = torch.where(valid, chosen[..., 1], -1)
    reaches = torch.zeros(num_rows, num_ranks + 1, dtype=torch.bool, device=topk_idx.device)
    # Masked choices go to a column of their own, which is cut off.
    reaches.scatter_(1, torch.where(valid, rank, num_ranks).to(torch.int64), True)
    return Destinations(
        rank=rank, slot=slot, reaches=reaches[:, :num_ranks], num_invalid=invalid.sum()
    )


@dataclass(frozen=True, kw_only=True)
class ExpertIndex:
    """Received rows grouped by local expert, in order of (expert, source rank, token, choice).

    Attributes:
        expert_offsets: [L + 1] int32; expert e owns expert rows expert_offsets[e] up to
            expert_offsets[e + 1]. Clamped to the capacity.
        row_index: [capacity] int32; expert row n is a copy of received row row_index[n]; -1 from
            expert_offsets[-1] on.
        choice_position: [M, K] int32; choice k of received row m is expert row
            choice_position[m, k]; -1 where the choice is not here, or was dropped.
        num_dropped: scalar int64 tensor, choices beyond the capacity.
    """

    expert_offsets: Tensor
    row_index: Tensor
    choice_position: Tensor
    num_dropped: Tensor


def expert_index(local_idx: Tensor, *, num_local_experts: int, capacity: int) -> ExpertIndex:
    """Group received rows by local expert (a stable sort of the choices).

    Args:
        local_idx: [M, K] int32 local expert ids, -1 where a choice is not on this rank.
        num_local_experts: L.
        capacity: bound on N; the last expert rows in order beyond it are dropped.
    """
    num_choices = local_idx.shape[1]
    flat = local_idx.reshape(-1).to(torch.int64)
    here = flat >= 0
    keys = torch.where(here, flat, num_local_experts)
    # Narrow keys sort several times faster.
    narrow = keys.to(torch.int16) if num_local_experts < 2**15 else keys
    order = torch.sort(narrow, stable=True).indices
    counts = torch.zeros(num_local_experts + 1, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, keys, torch.ones_like(keys))
    offsets = torch.zeros(num_local_experts + 1, dtype=torch.int64, device=flat.device)
    torch.cumsum(counts[:-1], 0, out=offsets[1:])
    total = offsets[-1]
    clamped = offsets.clamp_max(capacity)

    position = torch.empty_like(flat)
    position[order] = torch.arange(flat.numel(), device=flat.device)
    kept = here & (position < clamped[-1])
    choice_position = torch.where(kept, position, -1).to(torch.int32)

    row_index = torch.full((capacity,), -1, dtype=torch.int32, device=flat.device)
    used = min(capacity, flat.numel())
    head = torch.arange(used, device=flat.device) < clamped[-1]
    row_index[:used] = torch.where(head, order[:used] // num_choices, -1).to(torch.int32)
    return ExpertIndex(
        expert_offsets=clamped.to(torch.int32),
        row_index=row_index,
        choice_position=choice_position.view_as(local_idx),
        num_dropped=(total - clamped[-1]),
    )
