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
SCANNED = 16


class Order(NamedTuple):
    """Choices of each row in order of k. position int32 [M, K]: expert row of the row's n-th
    choice here, -1 where it was dropped; weights fp32 [M, K] of the same; count int32 [M]: choices
    here. received_weights fp32 [M, K] is where weights are read."""

    position: torch.Tensor
    weights: torch.Tensor
    count: torch.Tensor
    received_weights: torch.Tensor


@triton.jit
def is_real_row(row, tokens_ptr, alive_ptr, inside, bucket, STRIDE: tl.constexpr):
    """Whether received rows lie within their source's tokens: int32 tokens_ptr[source * STRIDE],
    none where alive_ptr[source] is 0. With STRIDE 0 all rows inside are real."""
    if STRIDE > 0:
        source = row // bucket
        valid = tl.load(tokens_ptr + source * STRIDE, mask=inside, other=0)
        valid = valid * tl.load(alive_ptr + source, mask=inside, other=0)
        inside = inside & (row - source * bucket < valid)
    return inside


@triton.jit
def load_ids(
    ids_ptr, tokens_ptr, alive_ptr, i, num_choices, bucket, K: tl.constexpr, STRIDE: tl.constexpr
):
    """Local ids of choices i; -1 past the end and on rows that are not real."""
    inside = is_real_row(i // K, tokens_ptr, alive_ptr, i < num_choices, bucket, STRIDE)
    return tl.load(ids_ptr + i, mask=inside, other=-1)


@triton.jit
def write_order(
    i, ids, position, ids_ptr, tokens_ptr, alive_ptr, order_ptr, order_weights_ptr, count_ptr,
    weights_ptr, num_choices, num_readable, bucket, K: tl.constexpr, KP: tl.constexpr,
    STRIDE: tl.constexpr,
):  # fmt: skip
    """Choices i, whose local ids and positions are given, into their rows' order.

    Example: a row with ids [2, -1, 0] and positions [7, -1, 1]: order [7, 1], count 2.
    """
    row = i // K
    k = i - row * K
    column = tl.arange(0, KP)
    real = is_real_row(row, tokens_ptr, alive_ptr, i < num_readable, bucket, STRIDE)
    inside = real[:, None] & (column < K)[None, :]
    row_ids = tl.load(ids_ptr + (row * K)[:, None] + column[None, :], mask=inside, other=-1)
    present = (row_ids >= 0).to(tl.int32)
    place = tl.sum(tl.where(column[None, :] < k[:, None], present, 0), 1)
    here = ids >= 0
    tl.store(order_ptr + row * K + place, position, mask=here)
    weight = tl.load(weights_ptr + i, mask=here, other=0.0)
    tl.store(order_weights_ptr + row * K + place, weight, mask=here)
    # One choice of each row writes the count: the last one here, or the first of a row with none.
    total = tl.sum(present, 1)
    writes = (here & (place == total - 1)) | ((total == 0) & (k == 0) & (i < num_choices))
    tl.store(count_ptr + row, total, mask=writes)


@triton.jit
def rank_by_counting(
    program, ids_ptr, tokens_ptr, alive_ptr, offsets_ptr, row_index_ptr, position_ptr, order_ptr,
    order_weights_ptr, count_ptr, weights_ptr, status_ptr, num_choices, num_readable, bucket,
    capacity, L, K: tl.constexpr, KP: tl.constexpr, QUERY: tl.constexpr, BLOCK: tl.constexpr,
    STRIDE: tl.constexpr, ORDER: tl.constexpr,
):  # fmt: skip
    """One program's QUERY choices, or, after the programs of all choices, its QUERY experts: how
    many keys (expert << 16 | choice) are smaller. For a choice that is its position, for an expert
    (as key expert << 16) its offset. Choices from `num_readable` on count as not here.

    Example: ids [[0, 1], [1, -1]]: keys 0x00000, 0x10001, 0x10002. Choice 2 has two smaller:
    position[1, 0] = 2, row_index[2] = 1. Expert 1 has one: offsets[1] = 1.
    """
    choice_programs = (num_choices + QUERY - 1) // QUERY
    query = tl.arange(0, QUERY)
    of_choices = program < choice_programs
    i = program * QUERY + query
    expert = i - choice_programs * QUERY
    readable = tl.where(of_choices, num_readable, 0)
    ids = load_ids(ids_ptr, tokens_ptr, alive_ptr, i, readable, bucket, K, STRIDE)
    key = tl.where(of_choices, (ids << 16) + i, expert << 16)
    smaller = tl.zeros([QUERY, BLOCK], tl.int32)
    present = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_choices, BLOCK):
        j = start + tl.arange(0, BLOCK)
        others = load_ids(ids_ptr, tokens_ptr, alive_ptr, j, num_readable, bucket, K, STRIDE)
        keys = tl.where(others >= 0, (others << 16) + j, 0x7FFFFFFF)
        smaller += (keys[None, :] < key[:, None]).to(tl.int32)
        present += (others >= 0).to(tl.int32)
    rank = tl.sum(smaller, 1)
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
                i, ids, position, ids_ptr, tokens_ptr, alive_ptr, order_ptr, order_weights_ptr,
                count_ptr, weights_ptr, num_choices, num_readable, bucket, K, KP, STRIDE,
            )  # fmt: skip
    else:
        tl.store(offsets_ptr + expert, tl.minimum(rank, capacity), mask=expert <= L)
        if (program == choice_programs) & (total > capacity):
            tl.atomic_or(status_ptr, 2)


@triton.jit(do_not_specialize=["num_choices", "bucket", "capacity", "L"])
def _one_launch_kernel(
    ids_ptr, tokens_ptr, alive_ptr, offsets_ptr, row_index_ptr, position_ptr, order_ptr,
    order_weights_ptr, count_ptr, weights_ptr, status_ptr, num_choices, bucket, capacity, L,
    K: tl.constexpr, KP: tl.constexpr, QUERY: tl.constexpr, BLOCK: tl.constexpr,
    STRIDE: tl.constexpr, ORDER: tl.constexpr,
):  # fmt: skip
    rank_by_counting(
        tl.program_id(0), ids_ptr, tokens_ptr, alive_ptr, offsets_ptr, row_index_ptr, position_ptr,
        order_ptr, order_weights_ptr, count_ptr, weights_ptr, status_ptr, num_choices, num_choices,
        bucket, capacity, L, K, KP, QUERY, BLOCK, STRIDE, ORDER,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_choices", "bucket", "L"])
def _count_kernel(
    ids_ptr, tokens_ptr, alive_ptr, counts_ptr, totals_ptr, num_choices, bucket, L,
    K: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """counts [chunks, L]: choices of each expert in this program's chunk; added to totals [L],
    which were 0. The last bin takes the choices that are not here."""
    chunk = tl.program_id(0)
    i = chunk * BLOCK + tl.arange(0, BLOCK)
    ids = load_ids(ids_ptr, tokens_ptr, alive_ptr, i, num_choices, bucket, K, STRIDE)
    bins = tl.histogram(tl.where(ids >= 0, ids, BINS - 1), BINS)
    experts = tl.arange(0, BINS)
    tl.store(counts_ptr + chunk.to(tl.int64) * L + experts, bins, mask=experts < L)
    tl.atomic_add(totals_ptr + experts, bins, mask=(experts < L) & (bins > 0), sem="relaxed")


@triton.jit(do_not_specialize=["num_chunks", "capacity", "L"])
def _scan_kernel(
    counts_ptr, totals_ptr, offsets_ptr, status_ptr, num_chunks, capacity, L,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """offsets [L + 1], and counts [chunks, L] turned into the expert rows before each
    (chunk, expert). Each program has EXPERTS experts."""
    first = tl.program_id(0) * EXPERTS
    every = tl.arange(0, BINS)
    totals = tl.load(totals_ptr + every, mask=every < L, other=0)
    experts = first + tl.arange(0, EXPERTS)
    mine = tl.load(totals_ptr + experts, mask=experts < L, other=0)
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


@triton.jit(do_not_specialize=["num_choices", "bucket", "capacity", "L"])
def _place_kernel(
    ids_ptr, tokens_ptr, alive_ptr, starts_ptr, offsets_ptr, row_index_ptr, position_ptr,
    order_ptr, order_weights_ptr, count_ptr, weights_ptr, num_choices, bucket, capacity, L,
    K: tl.constexpr, KP: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr,
    ORDER: tl.constexpr,
):  # fmt: skip
    """Each program places its chunk's choices, and clears its share of row_index's tail."""
    chunk = tl.program_id(0)
    order = tl.arange(0, BLOCK)
    i = chunk * BLOCK + order
    ids = load_ids(ids_ptr, tokens_ptr, alive_ptr, i, num_choices, bucket, K, STRIDE)
    here = ids >= 0
    earlier = tl.zeros([BLOCK], tl.int32)
    for first in range(0, BLOCK, 32):
        j = first + tl.arange(0, 32)
        others = load_ids(
            ids_ptr, tokens_ptr, alive_ptr, chunk * BLOCK + j, num_choices, bucket, K, STRIDE
        )
        same = (ids[:, None] == others[None, :]) & (j[None, :] < order[:, None])
        earlier += tl.sum(same.to(tl.int32), 1)
    start = tl.load(starts_ptr + chunk.to(tl.int64) * L + ids, mask=here, other=0)
    at = start + earlier
    kept = here & (at < capacity)
    position = tl.where(kept, at, -1)
    tl.store(row_index_ptr + at, i // K, mask=kept)
    tl.store(position_ptr + i, position, mask=i < num_choices)
    total = tl.load(offsets_ptr + L)
    tl.store(row_index_ptr + i, -1, mask=(i >= total) & (i < capacity))
    if ORDER:
        write_order(
            i, ids, position, ids_ptr, tokens_ptr, alive_ptr, order_ptr, order_weights_ptr,
            count_ptr, weights_ptr, num_choices, num_choices, bucket, K, KP, STRIDE,
        )  # fmt: skip


def expert_index(
    local_idx: torch.Tensor,
    *,
    num_local_experts: int,
    capacity: int,
    status: torch.Tensor,
    sources: tuple[torch.Tensor, torch.Tensor, int] | None = None,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    order: Order | None = None,
    one_launch: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Group received rows by local expert, as moe_comm.layout.expert_index, with no host sync.

    Args:
        local_idx: [M, K] int32 contiguous, local ids below 2^15.
        num_local_experts: L. capacity: length of row_index, at most M * K.
        status: int32 [>= 1]; bit 2 is set where choices were dropped beyond the capacity.
        sources: (tokens int32 [R], alive int32 [R], bucket): row m is token m % bucket of source
            m // bucket, and ids past a live source's tokens are not read. None: all are valid.
        out: (expert_offsets [L + 1], row_index [capacity], choice_position [M, K]), int32.
        order: filled where given.
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
    tokens, alive, bucket = sources if sources is not None else (local_idx, local_idx, 1)
    stride = 0 if sources is None else 1
    ordered = order if order is not None else Order(position, position, position, position)
    topk_p = triton.next_power_of_2(num_topk)
    if num_choices == 0 or experts == 0:
        offsets.zero_()
        row_index.fill_(-1)
        position.fill_(-1)
        if order is not None:
            order.count.zero_()
    elif one_launch if one_launch is not None else num_choices <= ONE_LAUNCH_CHOICES:
        grid = (one_launch_programs(num_choices, experts),)
        _one_launch_kernel[grid](
            local_idx, tokens, alive, offsets, row_index, position, *ordered, status, num_choices,
            bucket, capacity, experts, K=num_topk, KP=topk_p, QUERY=QUERIES,
            BLOCK=one_launch_block(num_choices), STRIDE=stride, ORDER=order is not None,
            num_warps=8,
        )  # fmt: skip
    else:
        chunks = triton.cdiv(num_choices, CHUNK)
        counts = torch.empty(chunks, experts, dtype=torch.int32, device=device)
        totals = torch.zeros(experts, dtype=torch.int32, device=device)
        bins = triton.next_power_of_2(experts + 1)
        _count_kernel[(chunks,)](
            local_idx, tokens, alive, counts, totals, num_choices, bucket, experts, K=num_topk,
            BLOCK=CHUNK, BINS=bins, STRIDE=stride,
        )  # fmt: skip
        _scan_kernel[(triton.cdiv(experts, SCANNED),)](
            counts, totals, offsets, status, chunks, capacity, experts, EXPERTS=SCANNED,
            ROWS=min(256, triton.next_power_of_2(chunks)), BINS=bins,
        )  # fmt: skip
        _place_kernel[(chunks,)](
            local_idx, tokens, alive, counts, offsets, row_index, position, *ordered, num_choices,
            bucket, capacity, experts, K=num_topk, KP=topk_p, BLOCK=CHUNK, STRIDE=stride,
            ORDER=order is not None,
        )  # fmt: skip
    return out


def one_launch_programs(num_choices: int, num_local_experts: int) -> int:
    """Programs of rank_by_counting: for all choices, then for all experts and the end."""
    return triton.cdiv(num_choices, QUERIES) + triton.cdiv(num_local_experts + 1, QUERIES)


def one_launch_block(num_choices: int) -> int:
    """Keys compared at a time."""
    return min(256, max(32, triton.next_power_of_2(num_choices)))
