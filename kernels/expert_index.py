"""Rows grouped by local expert on the device; the reference is moe_comm.layout.expert_index.

Legend: M received rows, K choices, N = M * K choices in all, L local experts. `local_idx` [M, K]
holds local expert ids, anything below 0 where a choice is not here. The order is that of a stable
sort by expert: a choice's position is the number of choices of smaller experts, plus those of its
own expert before it.

Two ways. One launch, for few choices: a program an expert scans all ids, so no program waits for
another. Three launches, for many: chunks count, counts are scanned, chunks place.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Above this many choices three launches of every choice beat one launch of every (choice, expert).
ONE_LAUNCH_CHOICES = 16384
CHUNK = 512


@triton.jit
def load_ids(
    ids_ptr, tokens_ptr, alive_ptr, i, num_choices, bucket, K: tl.constexpr, STRIDE: tl.constexpr
):
    """Local ids of choices i; -1 past the end and, with STRIDE > 0, past the tokens of the source
    that row // bucket names: int32 tokens_ptr[source * STRIDE], none where alive_ptr[source] is
    0."""
    inside = i < num_choices
    if STRIDE > 0:
        row = i // K
        source = row // bucket
        valid = tl.load(tokens_ptr + source * STRIDE, mask=inside, other=0)
        valid = valid * tl.load(alive_ptr + source, mask=inside, other=0)
        inside = inside & (row - source * bucket < valid)
    return tl.load(ids_ptr + i, mask=inside, other=-1)


@triton.jit
def index_one_expert(
    expert, programs, ids_ptr, tokens_ptr, alive_ptr, offsets_ptr, row_index_ptr, position_ptr,
    status_ptr, num_choices, num_readable, bucket, capacity, L, K: tl.constexpr,
    BLOCK: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """One of `programs` > L programs: places the choices of `expert` < L (others place none),
    writes its end into offsets and clears its share of what no choice fills. Choices from
    `num_readable` on count as not here.

    Example: ids [[0, 1], [1, -1]], expert 1: two choices, after one of expert 0, so
    offsets[2] = 3, row_index[1] = 0, row_index[2] = 1, position[0, 1] = 1, position[1, 0] = 2.
    """
    before = 0
    mine = 0
    total = 0
    # A program reads ids as rows of 32: a row's matches are the bits of one word, so a choice's
    # place among them is a population count, and only the rows' counts need a scan.
    rows: tl.constexpr = BLOCK // 32
    lane = tl.arange(0, 32)
    offset = tl.arange(0, rows)[:, None] * 32 + lane[None, :]
    for start in range(0, num_choices, BLOCK):
        i = start + offset
        ids = load_ids(ids_ptr, tokens_ptr, alive_ptr, i, num_readable, bucket, K, STRIDE)
        # Three counts of up to 2^14 (ONE_LAUNCH_CHOICES) in one sum.
        counts = ((ids >= 0) & (ids < expert)).to(tl.int64)
        counts += (ids == expert).to(tl.int64) << 16
        counts += (ids >= 0).to(tl.int64) << 32
        packed = tl.sum(tl.sum(counts, 1), 0)
        before += (packed & 0xFFFF).to(tl.int32)
        mine += ((packed >> 16) & 0xFFFF).to(tl.int32)
        total += (packed >> 32).to(tl.int32)
    if expert < L:
        tl.store(offsets_ptr + expert + 1, tl.minimum(before + mine, capacity))
    else:
        tl.store(offsets_ptr, 0)
        if total > capacity:
            tl.atomic_or(status_ptr, 2)
    placed = before
    block = 0
    for start in range(0, num_choices, BLOCK):
        i = start + offset
        ids = load_ids(ids_ptr, tokens_ptr, alive_ptr, i, num_readable, bucket, K, STRIDE)
        here = ids == expert
        if (mine > 0) & (expert < L):
            bits = tl.sum(here.to(tl.int32) << lane[None, :], 1)
            count = popcount(bits)
            row_start = placed + tl.cumsum(count, 0) - count
            at = row_start[:, None] + popcount(bits[:, None] & ((1 << lane) - 1)[None, :])
            kept = here & (at < capacity)
            tl.store(row_index_ptr + at, i // K, mask=kept)
            tl.store(position_ptr + i, tl.where(at < capacity, at, -1), mask=here)
            placed += tl.sum(count, 0)
        if block % programs == expert:
            tl.store(position_ptr + i, -1, mask=(i < num_choices) & (ids < 0))
            tl.store(row_index_ptr + i, -1, mask=(i >= total) & (i < capacity))
        block += 1


@triton.jit
def popcount(bits):
    """Set bits of each int32, by halves, quarters and bytes.

    Example: popcount(0b1011) = 3; popcount(-1) = 32.
    """
    x = bits.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x = x + (x >> 8)
    x = x + (x >> 16)
    return (x & 0x3F).to(tl.int32)


@triton.jit
def _one_launch_kernel(
    ids_ptr, tokens_ptr, alive_ptr, offsets_ptr, row_index_ptr, position_ptr, status_ptr,
    num_choices, bucket, capacity, L, K: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    index_one_expert(
        tl.program_id(0), tl.num_programs(0), ids_ptr, tokens_ptr, alive_ptr, offsets_ptr,
        row_index_ptr, position_ptr, status_ptr, num_choices, num_choices, bucket, capacity, L, K,
        BLOCK, STRIDE,
    )  # fmt: skip


@triton.jit
def _count_kernel(
    ids_ptr, tokens_ptr, alive_ptr, counts_ptr, num_choices, bucket, L, K: tl.constexpr,
    BLOCK: tl.constexpr, BINS: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """counts [chunks, L]: choices of each expert in this program's chunk. One bin more than
    experts takes the choices that are not here."""
    chunk = tl.program_id(0)
    i = chunk * BLOCK + tl.arange(0, BLOCK)
    ids = load_ids(ids_ptr, tokens_ptr, alive_ptr, i, num_choices, bucket, K, STRIDE)
    bins = tl.histogram(tl.where(ids >= 0, ids, BINS - 1), BINS)
    experts = tl.arange(0, BINS)
    tl.store(counts_ptr + chunk.to(tl.int64) * L + experts, bins, mask=experts < L)


@triton.jit
def _scan_kernel(
    counts_ptr, starts_ptr, offsets_ptr, status_ptr, num_chunks, capacity, L,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """starts [chunks, L]: expert rows before each (chunk, expert); offsets [L + 1]. Each program
    scans EXPERTS experts, after summing those of all smaller ones."""
    first = tl.program_id(0) * EXPERTS
    before = 0
    column = tl.arange(0, EXPERTS)
    row = tl.arange(0, ROWS)
    for left in range(0, first, EXPERTS):
        for top in range(0, num_chunks, ROWS):
            at = (top + row)[:, None].to(tl.int64) * L + (left + column)[None, :]
            tile = tl.load(counts_ptr + at, mask=(top + row < num_chunks)[:, None], other=0)
            before += tl.sum(tl.sum(tile, 1), 0)
    experts = first + column
    sums = tl.zeros([EXPERTS], tl.int32)
    for top in range(0, num_chunks, ROWS):
        at = (top + row)[:, None].to(tl.int64) * L + experts[None, :]
        inside = (top + row < num_chunks)[:, None] & (experts < L)[None, :]
        sums += tl.sum(tl.load(counts_ptr + at, mask=inside, other=0), 0)
    ends = before + tl.cumsum(sums, 0)
    tl.store(offsets_ptr + 1 + experts, tl.minimum(ends, capacity), mask=experts < L)
    if first == 0:
        tl.store(offsets_ptr, 0)
    if (first + EXPERTS >= L) & (tl.max(ends, 0) > capacity):
        tl.atomic_or(status_ptr, 2)
    running = ends - sums
    for top in range(0, num_chunks, ROWS):
        at = (top + row)[:, None].to(tl.int64) * L + experts[None, :]
        inside = (top + row < num_chunks)[:, None] & (experts < L)[None, :]
        tile = tl.load(counts_ptr + at, mask=inside, other=0)
        tl.store(starts_ptr + at, running[None, :] + tl.cumsum(tile, 0) - tile, mask=inside)
        running += tl.sum(tile, 0)


@triton.jit
def _place_kernel(
    ids_ptr, tokens_ptr, alive_ptr, starts_ptr, offsets_ptr, row_index_ptr, position_ptr,
    num_choices, bucket, capacity, L, K: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """Each program places its chunk's choices, and clears its share of row_index's tail."""
    chunk = tl.program_id(0)
    i = chunk * BLOCK + tl.arange(0, BLOCK)
    ids = load_ids(ids_ptr, tokens_ptr, alive_ptr, i, num_choices, bucket, K, STRIDE)
    here = ids >= 0
    order = tl.arange(0, BLOCK)
    same = (ids[:, None] == ids[None, :]) & (order[None, :] < order[:, None])
    earlier = tl.sum(same.to(tl.int32), 1)
    start = tl.load(starts_ptr + chunk.to(tl.int64) * L + ids, mask=here, other=0)
    at = start + earlier
    kept = here & (at < capacity)
    tl.store(row_index_ptr + at, i // K, mask=kept)
    tl.store(position_ptr + i, tl.where(kept, at, -1), mask=i < num_choices)
    total = tl.load(offsets_ptr + L)
    tl.store(row_index_ptr + i, -1, mask=(i >= total) & (i < capacity))


def expert_index(
    local_idx: torch.Tensor,
    *,
    num_local_experts: int,
    capacity: int,
    status: torch.Tensor,
    sources: tuple[torch.Tensor, torch.Tensor, int] | None = None,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    one_launch: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Group received rows by local expert, as moe_comm.layout.expert_index, with no host sync.

    Args:
        local_idx: [M, K] int32 contiguous.
        num_local_experts: L. capacity: length of row_index, at most M * K.
        status: int32 [>= 1]; bit 2 is set where choices were dropped beyond the capacity.
        sources: (tokens int32 [R], alive int32 [R], bucket): row m is token m % bucket of source
            m // bucket, and ids past a live source's tokens are not read. None: all are valid.
        out: (expert_offsets [L + 1], row_index [capacity], choice_position [M, K]), int32.
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
    if num_choices == 0 or experts == 0:
        offsets.zero_()
        row_index.fill_(-1)
        position.fill_(-1)
    elif one_launch if one_launch is not None else num_choices <= ONE_LAUNCH_CHOICES:
        block = min(4096, max(32, triton.next_power_of_2(num_choices)))
        _one_launch_kernel[(experts + 1,)](
            local_idx, tokens, alive, offsets, row_index, position, status, num_choices, bucket,
            capacity, experts, K=num_topk, BLOCK=block, STRIDE=stride,
        )  # fmt: skip
    else:
        chunks = triton.cdiv(num_choices, CHUNK)
        counts = torch.empty(chunks, experts, dtype=torch.int32, device=device)
        starts = torch.empty_like(counts)
        _count_kernel[(chunks,)](
            local_idx, tokens, alive, counts, num_choices, bucket, experts, K=num_topk, BLOCK=CHUNK,
            BINS=triton.next_power_of_2(experts + 1), STRIDE=stride,
        )  # fmt: skip
        _scan_kernel[(triton.cdiv(experts, 16),)](
            counts, starts, offsets, status, chunks, capacity, experts, EXPERTS=16, ROWS=128
        )
        _place_kernel[(chunks,)](
            local_idx, tokens, alive, starts, offsets, row_index, position, num_choices, bucket,
            capacity, experts, K=num_topk, BLOCK=CHUNK, STRIDE=stride,
        )  # fmt: skip
    return out
