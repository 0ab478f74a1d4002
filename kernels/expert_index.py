"""Rows grouped by local expert on the device; the reference is moe_comm.layout.expert_index.

Legend: M received rows, K choices, N = M * K choices in all, L local experts. `local_idx` [M, K]
holds local expert ids, anything below 0 where a choice is not here. The order is that of a stable
sort by expert.

Two ways. One launch, for few choices: a choice's position is the number of smaller keys
(expert, choice) among all, counted pair by pair, so no program waits for another. Three launches,
for many: chunks count, counts are scanned, chunks place.

Both can also write, for each row, its choices here in order of k without gaps (`Order`): what
combine reads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

# Up to this many choices, counting pairs in one launch beats three launches.
ONE_LAUNCH_CHOICES = 8192
QUERIES = 32
CHUNK = 256
SCANNED = 8
# Copies of the experts' totals, which chunks add to in turn: additions to one word queue up.
TOTALS = 16
_TOTALS = tl.constexpr(TOTALS)


class Order(NamedTuple):
    """Choices of each row in order of k. position int32 [M, K]: expert row of the row's n-th
    choice here, -1 where it was dropped; weights fp32 [M, K] of the same; counts int32 [M]: choices
    here. Read: received_weights fp32 [M, K], and readable int32 [1], how many of all choices may
    be read; the others count as not here."""

    position: torch.Tensor
    weights: torch.Tensor
    counts: torch.Tensor
    received_weights: torch.Tensor
    readable: torch.Tensor


@triton.jit
def load_ids(ids_ptr, i, num_readable):
    """Local ids of choices i; -1 from num_readable on."""
    return tl.load(ids_ptr + i, mask=i < num_readable, other=-1)


@triton.jit
def place_in_row(i, ids, ids_ptr, num_readable, K: tl.constexpr, KP: tl.constexpr):
    """Of choices i, whose local ids are given: the place in their row's order, and the choices of
    that row here.

    Example: i = 5, in a row with ids [2, -1, 0] that begins at 3: place 1, two here.
    """
    row = i // K
    k = i - row * K
    column = tl.arange(0, KP)
    inside = (i < num_readable)[:, None] & (column < K)[None, :]
    row_ids = tl.load(ids_ptr + (row * K)[:, None] + column[None, :], mask=inside, other=-1)
    present = (row_ids >= 0).to(tl.int32)
    place = tl.sum(tl.where(column[None, :] < k[:, None], present, 0), 1)
    return place, tl.sum(present, 1)


@triton.jit
def write_order(
    i, ids, position, place, total, weight, order_ptr, order_weights_ptr, count_ptr, num_choices,
    K: tl.constexpr,
):  # fmt: skip
    """Choices i, whose local ids, positions, places and weights are given, into their rows' order.

    Example: a row with ids [2, -1, 0] and positions [7, -1, 1]: order [7, 1], count 2.
    """
    row = i // K
    here = ids >= 0
    tl.store(order_ptr + row * K + place, position, mask=here)
    tl.store(order_weights_ptr + row * K + place, weight, mask=here)
    # One choice of each row writes the count: the last one here, or the first of a row with none.
    first = (i == row * K) & (i < num_choices)
    writes = (here & (place == total - 1)) | ((total == 0) & first)
    tl.store(count_ptr + row, total, mask=writes)


@triton.jit
def count_smaller(counted, query, keys, EXACT: tl.constexpr):
    """counted plus 1 where a key is smaller than the query.

    Keys are whole numbers: as fp32, query - key saturated to [0, 1] is the comparison, in two
    instructions of the fast units. EXACT takes int32 instead, where keys do not fit or the
    interpreter refuses assembly.
    """
    if EXACT:
        counted += (keys < query).to(tl.int32)
    else:
        counted = tl.inline_asm_elementwise(
            "{ .reg .f32 d; sub.sat.f32 d, $2, $3; add.f32 $0, $1, d; }",
            "=f,f,f,f", [counted, query, keys], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    return counted


@triton.jit
def rank_by_counting(
    program, ids_ptr, offsets_ptr, row_index_ptr, position_ptr, order_ptr, order_weights_ptr,
    count_ptr, weights_ptr, status_ptr, num_choices, num_readable, capacity, L, K: tl.constexpr,
    KP: tl.constexpr, QUERY: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr,
    ORDER: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One program's QUERY choices, or, after the programs of all choices, its QUERY experts: how
    many keys (expert * num_choices + choice) are smaller. For a choice that is its position, for an
    expert (as key expert * num_choices) its offset. Choices from `num_readable` on count as not
    here.

    Example: ids [[0, 1], [1, -1]]: keys 0, 5, 6. Choice 2 has two smaller: position[1, 0] = 2,
    row_index[2] = 1. Expert 1 has one: offsets[1] = 1.
    """
    choice_programs = (num_choices + QUERY - 1) // QUERY
    query = tl.arange(0, QUERY)
    of_choices = program < choice_programs
    i = program * QUERY + query
    expert = i - choice_programs * QUERY
    readable = tl.where(of_choices, num_readable, 0)
    ids = load_ids(ids_ptr, i, readable)
    key = tl.where(of_choices, ids * num_choices + i, expert * num_choices)
    counts: tl.constexpr = tl.int32 if EXACT else tl.float32
    key = key.to(counts)
    if ORDER:
        # Asked for before the long loop, so that they are there after it.
        place, in_row = place_in_row(i, ids, ids_ptr, readable, K, KP)
        weight = tl.load(weights_ptr + i, mask=i < readable, other=0.0)
    # Queries along the threads of a warp, so that their counts are added up in registers.
    smaller = tl.zeros([BLOCK, QUERY], counts)
    present = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_choices, UNROLL * BLOCK):
        # All blocks of keys are asked for before the first is compared: threads exchange keys for
        # that, and no load would pass the barrier.
        keys = ()
        for step in tl.static_range(UNROLL):
            j = start + step * BLOCK + tl.arange(0, BLOCK)
            others = load_ids(ids_ptr, j, num_readable)
            others_key = tl.where(others >= 0, others * num_choices + j, 0x7FFFFFFF).to(counts)
            keys = keys + (others_key,)  # type: ignore[assignment]
            present += (others >= 0).to(tl.int32)
        for step in tl.static_range(UNROLL):
            smaller = count_smaller(smaller, key[None, :], keys[step][:, None], EXACT)
    rank = tl.sum(smaller, 0).to(tl.int32)
    total = tl.sum(present, 0)
    if of_choices:
        here = ids >= 0
        kept = here & (rank < capacity)
        position = tl.where(kept, rank, -1)
        tl.store(row_index_ptr + rank, i // K, mask=kept)
        tl.store(position_ptr + i, position, mask=i < num_choices)
        tl.store(row_index_ptr + i, -1, mask=(i >= total) & (i < capacity))
        if ORDER:
            write_order(
                i, ids, position, place, in_row, weight, order_ptr, order_weights_ptr, count_ptr,
                num_choices, K,
            )  # fmt: skip
    else:
        tl.store(offsets_ptr + expert, tl.minimum(rank, capacity), mask=expert <= L)
        if (program == choice_programs) & (total > capacity):
            tl.atomic_or(status_ptr, 2)


@triton.jit(do_not_specialize=["num_choices", "capacity", "L"])
def _one_launch_kernel(
    ids_ptr, readable_ptr, offsets_ptr, row_index_ptr, position_ptr, order_ptr, order_weights_ptr,
    count_ptr, weights_ptr, status_ptr, num_choices, capacity, L, K: tl.constexpr, KP: tl.constexpr,
    QUERY: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr, ORDER: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    num_readable = num_choices
    if ORDER:
        num_readable = tl.load(readable_ptr)
    rank_by_counting(
        tl.program_id(0), ids_ptr, offsets_ptr, row_index_ptr, position_ptr, order_ptr,
        order_weights_ptr, count_ptr, weights_ptr, status_ptr, num_choices, num_readable, capacity,
        L, K, KP, QUERY, BLOCK, UNROLL, ORDER, EXACT,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_choices", "L"])
def _count_kernel(
    ids_ptr, readable_ptr, counts_ptr, totals_ptr, num_choices, L, BLOCK: tl.constexpr,
    BINS: tl.constexpr, ORDER: tl.constexpr,
):  # fmt: skip
    """counts [chunks, L]: choices of each expert in this program's chunk; added to one of the
    totals [TOTALS, L], which were 0."""
    chunk = tl.program_id(0)
    num_readable = num_choices
    if ORDER:
        num_readable = tl.load(readable_ptr)
    ids = load_ids(ids_ptr, chunk * BLOCK + tl.arange(0, BLOCK), num_readable)
    bins = tl.histogram(ids, BINS, mask=ids >= 0)
    experts = tl.arange(0, BINS)
    tl.store(counts_ptr + chunk.to(tl.int64) * L + experts, bins, mask=experts < L)
    totals_ptr += chunk % _TOTALS * L
    tl.atomic_add(totals_ptr + experts, bins, mask=(experts < L) & (bins > 0), sem="relaxed")


@triton.jit
def _add_totals(totals_ptr, experts, L):
    """Choices of experts in all chunks, 0 from L on."""
    total = tl.zeros_like(experts)
    for copy in tl.static_range(_TOTALS):
        total += tl.load(totals_ptr + copy * L + experts, mask=experts < L, other=0)
    return total


@triton.jit(do_not_specialize=["num_chunks", "capacity", "L"])
def _scan_kernel(
    counts_ptr, totals_ptr, offsets_ptr, status_ptr, num_chunks, capacity, L,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """offsets [L + 1], and counts [chunks, L] turned into the expert rows before each
    (chunk, expert). Each program has EXPERTS experts."""
    first = tl.program_id(0) * EXPERTS
    every = tl.arange(0, BINS)
    totals = _add_totals(totals_ptr, every, L)
    experts = first + tl.arange(0, EXPERTS)
    mine = _add_totals(totals_ptr, experts, L)
    ends = tl.sum(tl.where(every < first, totals, 0), 0) + tl.cumsum(mine, 0)
    tl.store(offsets_ptr + 1 + experts, tl.minimum(ends, capacity), mask=experts < L)
    if first == 0:
        tl.store(offsets_ptr, 0)
        if tl.sum(totals, 0) > capacity:
            tl.atomic_or(status_ptr, 2)
    running = ends - mine
    row = tl.arange(0, ROWS)
    for top in range(0, num_chunks, ROWS):
        at = (top + row)[:, None].to(tl.int64) * L + experts[None, :]
        inside = (top + row < num_chunks)[:, None] & (experts < L)[None, :]
        tile = tl.load(counts_ptr + at, mask=inside, other=0)
        tl.store(counts_ptr + at, running[None, :] + tl.cumsum(tile, 0) - tile, mask=inside)
        running += tl.sum(tile, 0)


@triton.jit(do_not_specialize=["num_choices", "capacity", "L"])
def _place_kernel(
    ids_ptr, readable_ptr, starts_ptr, totals_ptr, offsets_ptr, row_index_ptr, position_ptr,
    order_ptr, order_weights_ptr, count_ptr, weights_ptr, num_choices, capacity, L, K: tl.constexpr,
    KP: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr, ORDER: tl.constexpr,
):  # fmt: skip
    """Each program places its chunk's choices and clears its share of row_index's tail; the first
    clears totals for the next call."""
    chunk = tl.program_id(0)
    order = tl.arange(0, BLOCK)
    i = chunk * BLOCK + order
    num_readable = num_choices
    if ORDER:
        num_readable = tl.load(readable_ptr)
    ids = load_ids(ids_ptr, i, num_readable)
    here = ids >= 0
    # Added up once, after the loop: a sum across threads each time takes longer than all else here.
    same = tl.zeros([BLOCK, 32], tl.int32)
    for first in range(0, BLOCK, 32):
        j = first + tl.arange(0, 32)
        others = load_ids(ids_ptr, chunk * BLOCK + j, num_readable)
        same += ((ids[:, None] == others[None, :]) & (j[None, :] < order[:, None])).to(tl.int32)
    earlier = tl.sum(same, 1)
    start = tl.load(starts_ptr + chunk.to(tl.int64) * L + ids, mask=here, other=0)
    at = start + earlier
    kept = here & (at < capacity)
    position = tl.where(kept, at, -1)
    tl.store(row_index_ptr + at, i // K, mask=kept)
    tl.store(position_ptr + i, position, mask=i < num_choices)
    total = tl.load(offsets_ptr + L)
    tl.store(row_index_ptr + i, -1, mask=(i >= total) & (i < capacity))
    if chunk == 0:
        every = tl.arange(0, BINS)
        for copy in tl.static_range(_TOTALS):
            tl.store(totals_ptr + copy * L + every, tl.zeros([BINS], tl.int32), mask=every < L)
    if ORDER:
        place, in_row = place_in_row(i, ids, ids_ptr, num_readable, K, KP)
        weight = tl.load(weights_ptr + i, mask=here, other=0.0)
        write_order(
            i, ids, position, place, in_row, weight, order_ptr, order_weights_ptr, count_ptr,
            num_choices, K,
        )  # fmt: skip


def expert_index(
    local_idx: torch.Tensor,
    *,
    num_local_experts: int,
    capacity: int,
    status: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    order: Order | None = None,
    workspace: torch.Tensor | None = None,
    one_launch: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Group received rows by local expert, as moe_comm.layout.expert_index, with no host sync.

    Args:
        local_idx: [M, K] int32 contiguous, local ids below 2^15.
        num_local_experts: L. capacity: length of row_index, at most M * K.
        status: int32 [>= 1]; bit 2 is set where choices were dropped beyond the capacity.
        out: (expert_offsets [L + 1], row_index [capacity], choice_position [M, K]), int32.
        order: filled where given.
        workspace: int32, at least workspace_size() and 0 on its first TOTALS * L entries, which it
            is again afterwards. None: allocated.
        one_launch: which way; None: by the number of choices.

    Returns: out.
    """
    num_rows, num_topk = local_idx.shape
    num_choices, device, experts = num_rows * num_topk, local_idx.device, num_local_experts
    if out is None:
        out = (
            torch.empty(experts + 1, dtype=torch.int32, device=device),
            torch.empty(capacity, dtype=torch.int32, device=device),
            torch.empty(num_rows, num_topk, dtype=torch.int32, device=device),
        )
    offsets, row_index, position = out
    ordered = order if order is not None else Order(*[position] * 5)
    topk_p = triton.next_power_of_2(num_topk)
    interpreted = not hasattr(_place_kernel, "params")
    if num_choices == 0 or experts == 0:
        offsets.zero_()
        row_index.fill_(-1)
        position.fill_(-1)
        if order is not None:
            order.counts.zero_()
    elif one_launch if one_launch is not None else num_choices <= ONE_LAUNCH_CHOICES:
        grid = (one_launch_programs(num_choices, experts),)
        _one_launch_kernel[grid](
            local_idx, ordered.readable, offsets, row_index, position, *ordered[:4], status,
            num_choices, capacity, experts, K=num_topk, KP=topk_p, QUERY=QUERIES,
            ORDER=order is not None, num_warps=8,
            **one_launch_form(num_choices, experts, interpreted=interpreted),
        )  # fmt: skip
    else:
        chunks = triton.cdiv(num_choices, CHUNK)
        if workspace is None:
            size = workspace_size(num_choices, experts)
            workspace = torch.empty(size, dtype=torch.int32, device=device)
            split_workspace(workspace, experts)[0].zero_()
        totals, counts = split_workspace(workspace, experts)
        bins = triton.next_power_of_2(experts + 1)
        _count_kernel[(chunks,)](
            local_idx, ordered.readable, counts, totals, num_choices, experts, BLOCK=CHUNK,
            BINS=bins, ORDER=order is not None,
        )  # fmt: skip
        _scan_kernel[(triton.cdiv(experts, SCANNED),)](
            counts, totals, offsets, status, chunks, capacity, experts, EXPERTS=SCANNED,
            ROWS=min(256, triton.next_power_of_2(chunks)), BINS=bins, num_warps=8,
        )  # fmt: skip
        _place_kernel[(chunks,)](
            local_idx, ordered.readable, counts, totals, offsets, row_index, position,
            *ordered[:4], num_choices, capacity, experts, K=num_topk, KP=topk_p, BLOCK=CHUNK,
            BINS=bins, ORDER=order is not None, num_warps=8,
        )  # fmt: skip
    return out


def workspace_size(num_choices: int, num_local_experts: int) -> int:
    """int32 entries that the three launches need: totals [TOTALS, L] and counts [chunks, L]."""
    return num_local_experts * (TOTALS + -(-num_choices // CHUNK))


def split_workspace(
    workspace: torch.Tensor, num_local_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """totals, which are 0 between calls, and counts."""
    return workspace[: TOTALS * num_local_experts], workspace[TOTALS * num_local_experts :]


def one_launch_programs(num_choices: int, num_local_experts: int, queries: int = QUERIES) -> int:
    """Programs of rank_by_counting: for all choices, then for all experts and the end."""
    return -(-num_choices // queries) + -(-(num_local_experts + 1) // queries)


def one_launch_form(
    num_choices: int, num_local_experts: int, *, interpreted: bool
) -> dict[str, int | bool]:
    """Constants of rank_by_counting: keys compared at a time, and in flight together, and whether
    keys need more than fp32's 24 bits."""
    block = min(256, max(32, triton.next_power_of_2(num_choices)))
    return {
        "BLOCK": block,
        "UNROLL": min(16, triton.next_power_of_2(max(1, triton.cdiv(num_choices, block)))),
        "EXACT": interpreted or (num_local_experts + 1) * num_choices >= 1 << 24,
    }
