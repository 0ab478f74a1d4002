"""The index of expert_index inside a dispatch's one launch, for many choices: it is computed while
rows travel. What sources say of their choices tells of itself, as in moe_comm.kernels.ranked_index,
so no fence has to wait for rows that were stored before.

Legend: R ranks, B the bucket, K choices, L local experts. A chunk is so many of the R * B received
rows that their choices, K padded to a power of two KP, are TILE cells; N chunks in all.
Received, int64 words: choices [R, B, K, 2]; the high half of a word is the number of the call (the
count that it brings its slot's DISPATCH channel to). Low halves: a choice's local expert, -1 where
it is not here; then its weight's bits, where it is here.

Three kinds of programs, in this order in the grid; each waits for other ranks, or for programs
before it, so that it need not run beside any that come later:

1. counting programs, which take chunks in turn: how many choices each expert has there;
2. scanning programs have experts each: the expert's choices in all chunks before. The last of them
   writes the offsets;
3. placing programs, which take chunks in turn: before a choice's row come those of the experts
   before, and of its own expert those of the chunks before, and of the chunk itself.

While they wait they keep other work off their multiprocessors, that of another communicator too,
which may be what another rank waits for: so they are few (WORKERS).

What they tell each other are words too, in memory of the slot's own (`words`, int64, `num_words`):
counts [N, L] (in the upper 16 bits of the low half how many of the chunk's choices are for experts
before, in the lower 16 how many for this one), places [N, L] (the expert's choices in the chunks
before, less the former), totals [L].

What is read while others write it has an element a thread at least: see moe_comm.kernels.signal.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_comm.kernels.choice_route import route_tokens
from moe_comm.kernels.expert_index import count_smaller
from moe_comm.kernels.placed_rows import write_placed
from moe_comm.kernels.signal import high_half, is_fatal, lose_patience, low_half, tagged

# Programs that count, and that place, at most.
WORKERS = 128
# Experts of a program that scans, and chunks that it takes at a time.
SCANNED = 8
SCANNED_CHUNKS = 256
# Keys that a choice is compared with at a time.
KEYS = 32
_WORKERS, _SCANNED, _KEYS = tl.constexpr(WORKERS), tl.constexpr(SCANNED), tl.constexpr(KEYS)


@triton.jit
def put_choices(
    token, inside, num_tokens, usable, call, topk_idx_ptr, topk_weights_ptr, copy_table_ptr,
    num_copies_ptr, alive_ptr, peers_ptr, choices_offset, rank, bucket, E, K: tl.constexpr,
    KP: tl.constexpr, C: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Choices of tokens `token` [TOKENS, 1], where `inside`, to every live rank. Of every token and
    to every rank, which waits until it is told: padding tokens put -1."""
    choice = tl.arange(0, KP)[None, :]
    real = inside & (token < num_tokens)
    to_rank, slot, _ = route_tokens(
        token, real, topk_idx_ptr, rank, E, copy_table_ptr, num_copies_ptr, K, KP, C
    )
    at = token * K + choice
    weight = tl.load(topk_weights_ptr + at, mask=(choice < K) & real, other=0.0)
    bits = weight.to(tl.int32, bitcast=True)
    for step in tl.range(0, R, loop_unroll_factor=R if R <= 8 else 1):
        # Each rank starts with its right neighbour, so that no peer is everyone's first.
        peer = (rank + 1 + step) % R
        base = tl.load(peers_ptr + peer)
        live = (usable != 0) & (tl.load(alive_ptr + peer) != 0)
        writes = (choice < K) & inside & live
        here = to_rank == peer
        told_ptr = (base + choices_offset).to(tl.pointer_type(tl.int64))
        told_ptr += (rank.to(tl.int64) * bucket * K + at) * 2
        tl.store(told_ptr, tagged(call, tl.where(here, slot, -1)), mask=writes)
        tl.store(told_ptr + 1, tagged(call, bits), mask=writes & here)


@triton.jit
def _cells(
    chunk, cell, num_rows, bucket, alive_ptr, K: tl.constexpr, KP: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Of cells of a chunk: row, choice (row * K + column), whether there is one, its source, and
    whether that tells of it."""
    row = chunk * (TILE // KP) + cell // KP
    column = cell % KP
    inside = (row < num_rows) & (column < K)
    source = row // bucket
    awaited = inside & (tl.load(alive_ptr + source, mask=inside, other=0) != 0)
    return row, row * K + column, inside, source, awaited


@triton.jit
def _read_choices(call, i, source, awaited, choices_ptr, R: tl.constexpr):
    """Of choices i, where `awaited`: (local expert, -1 where not here; weight; the first source
    that has not told all of them, R where none is). As far as told: final where nobody is late."""
    told_ptr = choices_ptr + 2 * i.to(tl.int64)
    told = tl.load(told_ptr, mask=awaited, other=0, volatile=True)
    more = tl.load(told_ptr + 1, mask=awaited, other=0, volatile=True)
    said = high_half(told) == call
    slot = tl.where(awaited & said, low_half(told), -1)
    late = awaited & ((said == 0) | ((slot >= 0) & (high_half(more) != call)))
    weight = low_half(more).to(tl.float32, bitcast=True)
    return slot, weight, tl.min(tl.where(late, source, R), 0)


@triton.jit
def _await_choices(
    call, i, source, awaited, choices_ptr, flags_ptr, status_ptr, channel, rank, timeout_ns,
    R: tl.constexpr, NUM_CHANNELS: tl.constexpr, CHANNELS_P: tl.constexpr, POLL: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """Wait until the sources have told of choices i, at most timeout_ns. Returns what _read_choices
    does, and whether the wait was in vain."""
    slot, weight, late = _read_choices(call, i, source, awaited, choices_ptr, R)
    lost = tl.full((), 0, tl.int32)
    if late < R:
        lost = is_fatal(status_ptr, POLL)
        spins = 0
        began = tl.full((), 0, tl.int64)
        while (late < R) & (lost == 0):
            _slot, _weight, late = _read_choices(call, i, source, awaited, choices_ptr, R)
            spins += 1
            if late < R:
                lost, began = lose_patience(
                    spins, began, flags_ptr, status_ptr, channel, call, late, rank, timeout_ns,
                    NUM_CHANNELS, CHANNELS_P, R, POLL, INTERPRET,
                )  # fmt: skip
        slot, weight, late = _read_choices(call, i, source, awaited, choices_ptr, R)
    return slot, weight, lost


@triton.jit
def _read_words(call, words_ptr, mask):
    """Low halves of words, where `mask`, else 0; and 1 where one of them is not this call's."""
    words = tl.load(words_ptr, mask=mask, other=0, volatile=True)
    return low_half(words), tl.max((mask & (high_half(words) != call)).to(tl.int32))


@triton.jit
def _await_words(call, words_ptr, mask, status_ptr, POLL: tl.constexpr, INTERPRET: tl.constexpr):
    """Wait for words of programs before this one: those wait for bounded time and note a failure.
    Returns the words' low halves, and 1 where there has been one."""
    lost = tl.full((), 0, tl.int32)
    spins = 0
    words, missing = _read_words(call, words_ptr, mask)
    while (missing > 0) & (lost == 0):
        words, missing = _read_words(call, words_ptr, mask)
        spins += 1
        if (missing > 0) & ((spins % 256 == 0) | INTERPRET):
            lost += is_fatal(status_ptr, POLL)
    return words, lost


@triton.jit
def index_chunks(
    program, call, choices_ptr, words_ptr, alive_ptr, ids_ptr, weights_ptr, offsets_ptr,
    row_index_ptr, position_ptr, order_ptr, order_weights_ptr, count_ptr, flags_ptr, status_ptr,
    channel, rank, timeout_ns, bucket, capacity, L, K: tl.constexpr, KP: tl.constexpr,
    R: tl.constexpr, TILE: tl.constexpr, BINS: tl.constexpr, CHUNKS: tl.constexpr,
    EXACT: tl.constexpr, NUM_CHANNELS: tl.constexpr, CHANNELS_P: tl.constexpr, POLL: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """One of indexing_programs(): writes its share of what expert_index does, and of the received
    ids [R, B, K] (-1 where not here) and weights. After a failure nothing counts as here."""
    rows: tl.constexpr = TILE // KP
    num_chunks = (R * bucket + rows - 1) // rows
    workers = tl.minimum(num_chunks, _WORKERS)
    scanners = (L + _SCANNED - 1) // _SCANNED
    places_ptr = words_ptr + num_chunks.to(tl.int64) * L
    totals_ptr = places_ptr + num_chunks.to(tl.int64) * L
    if program < workers:
        for chunk in range(program, num_chunks, workers):
            _count_chunk(
                chunk, call, choices_ptr, words_ptr, alive_ptr, flags_ptr, status_ptr, channel,
                rank, timeout_ns, bucket, L, K, KP, R, TILE, BINS, NUM_CHANNELS, CHANNELS_P, POLL,
                INTERPRET,
            )  # fmt: skip
    elif program < workers + scanners:
        _scan_chunks(
            program - workers, num_chunks, call, words_ptr, places_ptr, totals_ptr, status_ptr, L,
            CHUNKS, POLL, INTERPRET,
        )  # fmt: skip
    elif program == workers + scanners:
        _write_offsets(
            call, totals_ptr, offsets_ptr, status_ptr, capacity, L, BINS, POLL, INTERPRET
        )
    else:
        for chunk in range(program - (workers + scanners + 1), num_chunks, workers):
            _place_chunk(
                chunk, call, choices_ptr, places_ptr, totals_ptr, alive_ptr, ids_ptr, weights_ptr,
                row_index_ptr, position_ptr, order_ptr, order_weights_ptr, count_ptr, flags_ptr,
                status_ptr, channel, rank, timeout_ns, bucket, capacity, L, K, KP, R, TILE, BINS,
                EXACT, NUM_CHANNELS, CHANNELS_P, POLL, INTERPRET,
            )  # fmt: skip


@triton.jit
def _count_chunk(
    chunk, call, choices_ptr, counts_ptr, alive_ptr, flags_ptr, status_ptr, channel, rank,
    timeout_ns, bucket, L, K: tl.constexpr, KP: tl.constexpr, R: tl.constexpr, TILE: tl.constexpr,
    BINS: tl.constexpr, NUM_CHANNELS: tl.constexpr, CHANNELS_P: tl.constexpr, POLL: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """Counts of a chunk.

    Example: choices for experts [2, 0, -1, 2], L = 3: counts 1, 0, 2, and before them 0, 1, 1.
    """
    _row, i, _inside, source, awaited = _cells(
        chunk, tl.arange(0, TILE), R * bucket, bucket, alive_ptr, K, KP, TILE
    )
    slot, _weight, lost = _await_choices(
        call, i, source, awaited, choices_ptr, flags_ptr, status_ptr, channel, rank, timeout_ns, R,
        NUM_CHANNELS, CHANNELS_P, POLL, INTERPRET,
    )  # fmt: skip
    counts = tl.histogram(slot, BINS, mask=slot >= 0)
    before = tl.cumsum(counts, 0) - counts
    expert = tl.arange(0, BINS)
    # The interpreter's loops count in ints.
    words_ptr = counts_ptr + (tl.full((), 0, tl.int64) + chunk) * L + expert
    tl.store(words_ptr, tagged(call, before * 65536 + counts), mask=(expert < L) & (lost == 0))


@triton.jit
def _scan_chunks(
    program, num_chunks, call, counts_ptr, places_ptr, totals_ptr, status_ptr, L,
    CHUNKS: tl.constexpr, POLL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Places and totals of this program's experts.

    Example: an expert with counts 2, 0, 1 in three chunks, of which 5, 4, 6 come before it in its
    chunk: places -5, -2, -4; total 3.
    """
    lost = tl.full((), 0, tl.int32)
    expert = program * _SCANNED + tl.arange(0, _SCANNED)
    running = tl.zeros([_SCANNED], tl.int32)
    for first in range(0, num_chunks, CHUNKS):
        chunk = first + tl.arange(0, CHUNKS)
        inside = (chunk < num_chunks)[:, None] & (expert < L)[None, :]
        at = chunk.to(tl.int64)[:, None] * L + expert[None, :]
        words, failed = _await_words(call, counts_ptr + at, inside, status_ptr, POLL, INTERPRET)
        lost += failed
        counts = words & 0xFFFF
        place = running[None, :] + tl.cumsum(counts, 0) - counts - (words >> 16)
        tl.store(places_ptr + at, tagged(call, place), mask=inside & (lost == 0))
        running += tl.sum(counts, 0)
    tl.store(totals_ptr + expert, tagged(call, running), mask=(expert < L) & (lost == 0))


@triton.jit
def _read_offsets(
    call, totals_ptr, status_ptr, L, BINS: tl.constexpr, POLL: tl.constexpr, INTERPRET: tl.constexpr
):
    """[BINS]: the choices of all experts before each; all choices; 1 after a failure."""
    expert = tl.arange(0, BINS)
    totals, lost = _await_words(call, totals_ptr + expert, expert < L, status_ptr, POLL, INTERPRET)
    return tl.cumsum(totals, 0) - totals, tl.sum(totals, 0), lost


@triton.jit
def _write_offsets(
    call, totals_ptr, offsets_ptr, status_ptr, capacity, L, BINS: tl.constexpr, POLL: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """offsets [L + 1]."""
    offsets, total, lost = _read_offsets(call, totals_ptr, status_ptr, L, BINS, POLL, INTERPRET)
    expert = tl.arange(0, BINS)
    offsets = tl.where(lost == 0, tl.minimum(offsets, capacity), 0)
    tl.store(offsets_ptr + expert, offsets, mask=expert <= L)
    if (lost == 0) & (total > capacity):
        tl.atomic_or(status_ptr, 2)


@triton.jit
def _place_chunk(
    chunk, call, choices_ptr, places_ptr, totals_ptr, alive_ptr, ids_ptr, weights_ptr,
    row_index_ptr, position_ptr, order_ptr, order_weights_ptr, count_ptr, flags_ptr, status_ptr,
    channel, rank, timeout_ns, bucket, capacity, L, K: tl.constexpr, KP: tl.constexpr,
    R: tl.constexpr, TILE: tl.constexpr, BINS: tl.constexpr, EXACT: tl.constexpr,
    NUM_CHANNELS: tl.constexpr, CHANNELS_P: tl.constexpr, POLL: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """Everything of a chunk's rows."""
    ROWS: tl.constexpr = TILE // KP
    kind: tl.constexpr = tl.int32 if EXACT else tl.float32
    num_rows = R * bucket
    cell = tl.arange(0, TILE)
    row, i, inside, source, awaited = _cells(chunk, cell, num_rows, bucket, alive_ptr, K, KP, TILE)
    slot, weight, lost = _await_choices(
        call, i, source, awaited, choices_ptr, flags_ptr, status_ptr, channel, rank, timeout_ns, R,
        NUM_CHANNELS, CHANNELS_P, POLL, INTERPRET,
    )  # fmt: skip
    # Choices of the chunk that are for experts before, or for the same and come before.
    key = slot * TILE + cell
    keys = tl.where(slot >= 0, key, 0x7FFFFFFF).to(kind)
    key = key.to(kind)
    # Queries along the threads of a warp, so that their counts are added up in registers.
    smaller = tl.zeros([_KEYS, TILE], kind)
    for first in range(0, TILE, _KEYS):
        some = tl.gather(keys, first + tl.arange(0, _KEYS), 0)
        smaller = count_smaller(smaller, key[None, :], some[:, None], EXACT)
    place = tl.sum(smaller, 0).to(tl.int32)
    expert = tl.maximum(slot, 0)
    places_ptr += (tl.full((), 0, tl.int64) + chunk) * L + expert
    before, failed = _await_words(call, places_ptr, slot >= 0, status_ptr, POLL, INTERPRET)
    offsets, total, all_failed = _read_offsets(
        call, totals_ptr, status_ptr, L, BINS, POLL, INTERPRET
    )
    lost += failed + all_failed
    place += before + tl.gather(offsets, expert, 0)
    write_placed(
        chunk * ROWS, row, i, inside, slot, place, weight, total, lost, capacity, num_rows, ids_ptr,
        weights_ptr, row_index_ptr, position_ptr, order_ptr, order_weights_ptr, count_ptr, K, KP,
        ROWS,
    )  # fmt: skip


def chunks_of(num_rows: int, padded_topk: int, tile: int) -> int:
    """N. num_rows: R * B; padded_topk: KP; tile: TILE."""
    return -(-num_rows // (tile // padded_topk))


def indexing_programs(num_chunks: int, num_local_experts: int) -> int:
    """Programs of index_chunks."""
    return 2 * min(num_chunks, WORKERS) + -(-num_local_experts // SCANNED) + 1


def num_words(num_chunks: int, num_local_experts: int) -> int:
    """Entries of `words`."""
    return (2 * num_chunks + 1) * num_local_experts
