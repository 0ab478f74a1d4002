"""Routing for collectives on the device: where choices lie, which tokens go to which rank, and the
records that travel beside rows. One launch a step, no host sync.

Legend: T tokens here, R ranks, B the bucket, K choices, E experts, C copies of an expert, N
records. A record is `record_bytes` bytes: int32 ids [K] at `ids_at`, fp32 weights [K] at
`weights_at`, and an int32 at `token_at` (the token's number). A header is W int32: phase, call, T,
rows, bucket, bytes of a row and of a record.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["source", "num_tokens", "num_choices"])
def _locate_kernel(
    ids_ptr, rank_ptr, slot_ptr, kept_ptr, table_ptr, copies_ptr, alive_ptr, count_ptr, status_ptr,
    source, num_tokens, num_choices, E, K: tl.constexpr, C: tl.constexpr, COUNT: tl.constexpr,
    ALIVE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """rank, slot (int32) and id (int64) of each choice; -1 where it is masked.

    Example: source 1, token 2, an expert with copies (0, 5) and (3, 1): (1 + 2) % 2 = 1, so the
    choice lies on rank 3, slot 1.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < num_choices
    token = i // K
    limit = num_tokens
    if COUNT:
        limit = tl.load(count_ptr).to(tl.int32)
    expert = tl.load(ids_ptr + i, mask=inside, other=-1).to(tl.int64)
    live = inside & (token < limit)
    known = (expert >= 0) & (expert < E)
    wrong = live & (expert != -1) & (known == 0)
    if tl.max(wrong.to(tl.int32), 0) > 0:
        tl.atomic_or(status_ptr, 1)
    valid = live & known
    safe = tl.where(valid, expert, 0)
    entry = safe * C
    if C > 1:
        entry += (source + token) % tl.load(copies_ptr + safe)
    rank = tl.load(table_ptr + entry * 2)
    slot = tl.load(table_ptr + entry * 2 + 1)
    if ALIVE:
        valid = valid & (tl.load(alive_ptr + rank) != 0)
    tl.store(rank_ptr + i, tl.where(valid, rank, -1), mask=inside)
    tl.store(slot_ptr + i, tl.where(valid, slot, -1), mask=inside)
    tl.store(kept_ptr + i, tl.where(valid, expert, -1), mask=inside)


@triton.jit(do_not_specialize=["me", "num_tokens", "num_rows", "phase", "call", "bucket"])
def _plan_kernel(
    rank_ptr, position_ptr, header_ptr, me, num_tokens, num_rows, phase, call, bucket, row_bytes,
    record_bytes, W: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BLOCK: tl.constexpr,
    SHARE: tl.constexpr,
):  # fmt: skip
    """Program d: position [d, t] of token t among those sent to rank d, -1 where it is not; and the
    header for d. Where leaving tokens out would save less than one row in SHARE, all go.

    Example: choices on ranks [[0, 1], [1, 1], [0, 0]], d = 1: positions [0, 1, -1], two rows.
    """
    d = tl.program_id(0)
    choice = tl.arange(0, KP)
    total = 0
    for start in range(0, num_rows, BLOCK):
        t = start + tl.arange(0, BLOCK)
        at = t[:, None].to(tl.int64) * K + choice[None, :]
        there = (t < num_rows)[:, None] & (choice < K)[None, :]
        rank = tl.load(rank_ptr + at, mask=there, other=-1)
        hit = tl.max((rank == d).to(tl.int32), 1)
        position = total + tl.cumsum(hit, 0) - 1
        position = tl.where((hit > 0) & (d != me), position, -1)
        tl.store(position_ptr + d.to(tl.int64) * num_rows + t, position, mask=t < num_rows)
        total += tl.sum(hit, 0)
    whole = (total > 0) & (total * SHARE >= num_tokens * (SHARE - 1)) & (d != me)
    if whole:
        total = num_tokens
        for start in range(0, num_rows, BLOCK):
            t = start + tl.arange(0, BLOCK)
            position = tl.where(t < num_tokens, t, -1)
            tl.store(position_ptr + d.to(tl.int64) * num_rows + t, position, mask=t < num_rows)
    header = header_ptr + d * W
    tl.store(header, phase)
    tl.store(header + 1, call)
    tl.store(header + 2, num_tokens)
    tl.store(header + 3, tl.where(d == me, 0, total))
    tl.store(header + 4, bucket)
    tl.store(header + 5, row_bytes)
    tl.store(header + 6, record_bytes)


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def _pack_kernel(
    rank_ptr, slot_ptr, weights_ptr, position_ptr, header_ptr, records_ptr, rows_ptr, packed_ptr,
    num_tokens, num_rows, row_words, record_bytes, ids_at, weights_at, token_at, W: tl.constexpr,
    K: tl.constexpr, KP: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (t, d): the record of token t for rank d, and its row where not all rows go there."""
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1)
    position = tl.load(position_ptr + d.to(tl.int64) * num_rows + t)
    if position >= 0:
        peer = tl.arange(0, RP)
        counts = tl.load(header_ptr + peer * W + 3, mask=peer < R, other=0)
        before = tl.sum(tl.where(peer < d, counts, 0), 0).to(tl.int64)
        record = records_ptr + (before + position) * record_bytes
        choice = tl.arange(0, KP)
        inside = choice < K
        rank = tl.load(rank_ptr + t * K + choice, mask=inside, other=-1)
        slot = tl.load(slot_ptr + t * K + choice, mask=inside, other=-1)
        weight = tl.load(weights_ptr + t * K + choice, mask=inside, other=0.0)
        ids_ptr = (record + ids_at).to(tl.pointer_type(tl.int32))
        tl.store(ids_ptr + choice, tl.where(rank == d, slot, -1), mask=inside)
        to_weights = (record + weights_at).to(tl.pointer_type(tl.float32))
        tl.store(to_weights + choice, weight, mask=inside)
        tl.store((record + token_at).to(tl.pointer_type(tl.int32)), t.to(tl.int32))
        mine = tl.sum(tl.where(peer == d, counts, 0), 0)
        if mine != num_tokens:
            chosen = (peer < d) & (counts != num_tokens)
            first = tl.sum(tl.where(chosen, counts, 0), 0).to(tl.int64)
            target = packed_ptr + (first + position) * row_words
            for start in range(0, row_words, BLOCK):
                word = start + tl.arange(0, BLOCK)
                value = tl.load(rows_ptr + t * row_words + word, mask=word < row_words)
                tl.store(target + word, value, mask=word < row_words)


@triton.jit(do_not_specialize=["num_records", "me", "num_tokens", "bucket"])
def _unpack_kernel(
    records_ptr, theirs_ptr, rank_ptr, slot_ptr, weights_ptr, local_ptr, received_ptr, places_ptr,
    tokens_ptr, num_records, me, num_tokens, bucket, record_bytes, ids_at, weights_at, token_at,
    W: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, R: tl.constexpr, RP: tl.constexpr,
):  # fmt: skip
    """Program i < N: record i to its place (source * B + token); the programs after them: this
    rank's own tokens. The first also writes T of every rank."""
    i = tl.program_id(0)
    choice = tl.arange(0, KP)
    inside = choice < K
    peer = tl.arange(0, RP)
    if i == 0:
        tokens = tl.load(theirs_ptr + peer * W + 2, mask=peer < R, other=0)
        tl.store(tokens_ptr + peer, tl.where(peer == me, num_tokens, tokens), mask=peer < R)
    if i < num_records:
        counts = tl.load(theirs_ptr + peer * W + 3, mask=(peer < R) & (peer != me), other=0)
        source = tl.sum((tl.cumsum(counts, 0) <= i).to(tl.int32), 0)
        record = records_ptr + i.to(tl.int64) * record_bytes
        token = tl.load((record + token_at).to(tl.pointer_type(tl.int32)))
        place = source.to(tl.int64) * bucket + token
        ids_ptr = (record + ids_at).to(tl.pointer_type(tl.int32))
        local = tl.load(ids_ptr + choice, mask=inside, other=-1)
        from_weights = (record + weights_at).to(tl.pointer_type(tl.float32))
        weight = tl.load(from_weights + choice, mask=inside, other=0.0)
        tl.store(places_ptr + i, place)
        tl.store(local_ptr + place * K + choice, local, mask=inside)
        tl.store(received_ptr + place * K + choice, weight, mask=inside)
    elif i - num_records < num_tokens:
        t = (i - num_records).to(tl.int64)
        place = me * tl.cast(bucket, tl.int64) + t
        rank = tl.load(rank_ptr + t * K + choice, mask=inside, other=-1)
        slot = tl.load(slot_ptr + t * K + choice, mask=inside, other=-1)
        weight = tl.load(weights_ptr + t * K + choice, mask=inside, other=0.0)
        tl.store(local_ptr + place * K + choice, tl.where(rank == me, slot, -1), mask=inside)
        tl.store(received_ptr + place * K + choice, weight, mask=inside)


def locate(
    topk_idx: torch.Tensor,
    copy_table: torch.Tensor,
    num_copies: torch.Tensor,
    *,
    source: int,
    num_tokens: int | torch.Tensor,
    alive: torch.Tensor | None,
    status: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As moe_comm.layout.destinations.

    Args:
        topk_idx: [T, K] int. copy_table: [E, C, 2] int32. num_copies: [E] int32.
        source: this rank.
        num_tokens: int, or an int tensor of one element in [0, T].
        alive: [R] bool, or None for all.
        status: int32 [>= 1]; bit 1 is set where an id is neither -1 nor an expert.

    Returns: rank [T, K] int32, slot [T, K] int32, id [T, K] int64; -1 where masked.
    """
    ids = topk_idx.contiguous()
    rank = torch.empty(ids.shape, dtype=torch.int32, device=ids.device)
    slot, kept = torch.empty_like(rank), torch.empty_like(rank, dtype=torch.int64)
    if ids.numel():
        block = 1024
        counted = isinstance(num_tokens, torch.Tensor)
        _locate_kernel[(triton.cdiv(ids.numel(), block),)](
            ids, rank, slot, kept, copy_table, num_copies, rank if alive is None else alive,
            num_tokens if counted else rank, status, source, 0 if counted else num_tokens,
            ids.numel(), num_copies.shape[0], K=ids.shape[1], C=copy_table.shape[1],
            COUNT=counted, ALIVE=alive is not None, BLOCK=block,
        )  # fmt: skip
    return rank, slot, kept


def plan(
    rank: torch.Tensor,
    *,
    num_ranks: int,
    me: int,
    num_tokens: int,
    phase: int,
    call: int,
    bucket: int,
    row_bytes: int,
    record_bytes: int,
    share: int,
    width: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tokens go to which rank.

    Args:
        rank: [T, K] int32, of locate().
        share: see the kernel. width: W. The others go into the headers.

    Returns: positions int32 [R, T], -1 where a token does not go; headers int32 [R, W].
    """
    num_rows, num_topk = rank.shape
    positions = torch.empty(num_ranks, num_rows, dtype=torch.int32, device=rank.device)
    headers = torch.empty(num_ranks, width, dtype=torch.int32, device=rank.device)
    _plan_kernel[(num_ranks,)](
        rank, positions, headers, me, num_tokens, num_rows, phase, call, bucket, row_bytes,
        record_bytes, W=width, K=num_topk, KP=triton.next_power_of_2(num_topk), BLOCK=256,
        SHARE=share, num_warps=8,
    )  # fmt: skip
    return positions, headers


def pack(
    rank: torch.Tensor,
    slot: torch.Tensor,
    weights: torch.Tensor,
    positions: torch.Tensor,
    headers: torch.Tensor,
    rows: torch.Tensor,
    *,
    num_tokens: int,
    records: torch.Tensor,
    packed: torch.Tensor,
    at: tuple[int, ...],
) -> None:
    """Fill `records` uint8 [N, record_bytes], by rank, and `packed` with the rows of the ranks that
    do not get all.

    Args:
        rank, slot: of locate(). weights: [T, K] fp32. positions, headers: of plan().
        rows: uint8 [T, row_bytes], row_bytes a multiple of 4.
        at: bytes at which ids, weights and token begin in a record.
    """
    num_ranks, num_rows = positions.shape
    num_topk = rank.shape[1]
    if records.shape[0]:
        _pack_kernel[(num_rows, num_ranks)](
            rank, slot, weights, positions, headers, records, rows.view(torch.int32),
            packed.view(torch.int32), num_tokens, num_rows, rows.shape[1] // 4,
            records.shape[1], *at, W=headers.shape[1], K=num_topk,
            KP=triton.next_power_of_2(num_topk), R=num_ranks,
            RP=triton.next_power_of_2(num_ranks), BLOCK=1024,
        )  # fmt: skip


def unpack(
    records: torch.Tensor,
    headers: torch.Tensor,
    rank: torch.Tensor,
    slot: torch.Tensor,
    weights: torch.Tensor,
    *,
    me: int,
    num_tokens: int,
    local_idx: torch.Tensor,
    received: torch.Tensor,
    at: tuple[int, ...],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read what came, and this rank's own tokens, into local_idx and received [R, B, K]; entries
    that no record names are left alone.

    Args:
        records: uint8 [N, record_bytes], by source. headers: int32 [R, W], from each rank.
        rank, slot, weights: this rank's, as for pack().

    Returns: places int64 [N], r * B + t of each record; tokens int32 [R], T of each rank.
    """
    num_ranks, bucket, num_topk = local_idx.shape
    places = torch.empty(records.shape[0], dtype=torch.int64, device=records.device)
    tokens = torch.empty(num_ranks, dtype=torch.int32, device=records.device)
    _unpack_kernel[(max(records.shape[0] + num_tokens, 1),)](
        records, headers, rank, slot, weights, local_idx, received, places, tokens,
        records.shape[0], me, num_tokens, bucket, records.shape[1], *at, W=headers.shape[1],
        K=num_topk, KP=triton.next_power_of_2(num_topk), R=num_ranks,
        RP=triton.next_power_of_2(num_ranks), num_warps=1,
    )  # fmt: skip
    return places, tokens
