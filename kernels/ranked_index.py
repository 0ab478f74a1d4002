"""The index of expert_index in two halves, for few choices a rank: every source ranks its own, and
the receiver, which has to wait for them, only adds up what the sources say. So the work that grows
with the square of the choices is done before and not after the transfer, and on a rank's own
choices instead of all that it receives.

Legend: R ranks, B the bucket, K choices, L local experts, P = the most local experts of a rank
+ 1, or more.
A source's choices, keyed by (destination rank, local slot, choice), are in the order in which each
destination has them. Received, int64 words: choices [R, B, K, 2] and starts [R, P]. The high half
of every word is the number of the call (the count that it brings its slot's DISPATCH channel to),
so a word tells by itself that it has arrived: no fence stands between what is put and what tells of
it. Low halves: of a choice, slot * SPAN + how many of the source's keys are smaller, -1 where it is
not here; then its weight's bits, where it is here. Of a start, how many keys are smaller than (this
rank, e, 0).

Of a choice i of source s for local expert e: the rows before it are those of the experts before e
of all sources, of e of the sources before s, and its own rank - starts[s, e] of its own source.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_comm.kernels.choice_route import route
from moe_comm.kernels.expert_index import count_smaller
from moe_comm.kernels.placed_rows import write_placed
from moe_comm.kernels.signal import high_half, is_fatal, lose_patience, low_half, tagged

# Up to this many choices of its own a source ranks them: counting pairs takes their square.
RANKED_CHOICES = 4096
# What a slot is multiplied by beside a rank; slots, which have 15 bits, fit.
SPAN = tl.constexpr(RANKED_CHOICES)
# Received choices, or experts, of a program: at least as many as it has threads.
TILE = 256


@triton.jit
def put_ranked(
    program, call, num_choices, num_tokens, usable, topk_idx_ptr, topk_weights_ptr, copy_table_ptr,
    num_copies_ptr, alive_ptr, peers_ptr, choices_offset, starts_offset, rank, E, K: tl.constexpr,
    C: tl.constexpr, P: tl.constexpr, R: tl.constexpr, QUERY: tl.constexpr, BLOCK: tl.constexpr,
    UNROLL: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One program's QUERY of the num_choices = B * K choices of this rank, or, after the programs
    of all choices, QUERY of the R * P starts: counted, and put to the ranks that they are for.
    Every rank is told of every choice, padding tokens' too: it waits until it is.

    Example: R = 2, P = 3, choices for (rank, slot) [(1, 0), (0, 1), (1, 0)]: sort keys 3, 1, 3, so
    ranks 1, 0, 2. Rank 1 gets starts 1, 3, 3: none of its rows is for slot 1.
    """
    choice_programs = (num_choices + QUERY - 1) // QUERY
    of_choices = program < choice_programs
    i = program * QUERY + tl.arange(0, QUERY)
    inside = of_choices & (i < num_choices)
    real = inside & (i // K < num_tokens)
    to_rank, slot, _mine = route(
        i, i // K, real, topk_idx_ptr, rank, E, copy_table_ptr, num_copies_ptr, C
    )
    weight = tl.load(topk_weights_ptr + i, mask=real, other=0.0)
    start = i - choice_programs * QUERY
    counts: tl.constexpr = tl.int32 if EXACT else tl.float32
    query = tl.where(of_choices, (to_rank * P + slot) * num_choices + i, start * num_choices)
    query = query.to(counts)
    # Queries along the threads of a warp, so that their counts are added up in registers.
    smaller = tl.zeros([BLOCK, QUERY], counts)
    for first in range(0, num_choices, UNROLL * BLOCK):
        # All blocks of keys are asked for before the first is compared: threads exchange keys for
        # that, and no load would pass the barrier.
        keys = ()
        for step in tl.static_range(UNROLL):
            j = first + step * BLOCK + tl.arange(0, BLOCK)
            other = (j < num_choices) & (j // K < num_tokens)
            others_rank, others_slot, _theirs = route(
                j, j // K, other, topk_idx_ptr, rank, E, copy_table_ptr, num_copies_ptr, C
            )
            key = (others_rank * P + others_slot) * num_choices + j
            key = tl.where(others_rank >= 0, key, 0x7FFFFFFF).to(counts)
            keys = keys + (key,)  # type: ignore[assignment]
        for step in tl.static_range(UNROLL):
            smaller = count_smaller(smaller, query[None, :], keys[step][:, None], EXACT)
    ranks = tl.sum(smaller, 0).to(tl.int32)
    if R <= 8:
        for step in tl.static_range(R):
            _put_to_peer(
                step, call, i, start, of_choices, inside, to_rank, slot, weight, ranks,
                num_choices, usable, alive_ptr, peers_ptr, choices_offset, starts_offset, rank, P,
                R,
            )  # fmt: skip
    else:
        for step in range(R):
            _put_to_peer(
                step, call, i, start, of_choices, inside, to_rank, slot, weight, ranks,
                num_choices, usable, alive_ptr, peers_ptr, choices_offset, starts_offset, rank, P,
                R,
            )  # fmt: skip


@triton.jit
def _put_to_peer(
    step, call, i, start, of_choices, inside, to_rank, slot, weight, ranks, num_choices, usable,
    alive_ptr, peers_ptr, choices_offset, starts_offset, rank, P: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """What put_ranked puts to the step-th peer. Each rank starts with its right neighbour, so that
    no peer is everyone's first."""
    peer = (rank + 1 + step) % R
    base = tl.load(peers_ptr + peer)
    writes = (usable != 0) & (tl.load(alive_ptr + peer) != 0)
    here = to_rank == peer
    told_ptr = (base + choices_offset).to(tl.pointer_type(tl.int64))
    told_ptr += (rank.to(tl.int64) * num_choices + i) * 2
    told = tagged(call, tl.where(here, slot * SPAN + ranks, -1))
    tl.store(told_ptr, told, mask=inside & writes)
    bits = weight.to(tl.int32, bitcast=True)
    tl.store(told_ptr + 1, tagged(call, bits), mask=inside & here & writes)
    starts_ptr = (base + starts_offset).to(tl.pointer_type(tl.int64)) + rank * P
    at = start - peer * P
    for_peer = (of_choices == 0) & (at >= 0) & (at < P)
    tl.store(starts_ptr + at, tagged(call, ranks), mask=for_peer & writes)


@triton.jit
def _read_choices(call, i, source, awaited, choices_ptr, R: tl.constexpr):
    """Of choices i of sources `source`, where `awaited`: (local slot, -1 where not here; keys of
    its source before it; weight; the first source that is late, R where none is). As far as said:
    final where nobody is late."""
    told = tl.load(choices_ptr + 2 * i, mask=awaited, other=0, volatile=True)
    more = tl.load(choices_ptr + 2 * i + 1, mask=awaited, other=0, volatile=True)
    low = low_half(told)
    said = high_half(told) == call
    here = awaited & said & (low >= 0)
    late = tl.where(awaited & ((said == 0) | (here & (high_half(more) != call))), source, R)
    weight = low_half(more).to(tl.float32, bitcast=True)
    return tl.where(here, low // SPAN, -1), low % SPAN, weight, tl.min(late, 0)


@triton.jit
def _read_starts(
    call, slots, sources, inside, starts_ptr, alive_ptr, L, P: tl.constexpr, R: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Of local experts `slots` [TILE], where `inside`: rows before those that source `sources`
    [TILE] has for them, less keys of that source that are smaller; rows of all; the first source
    that is late, R where none is."""
    before = tl.zeros([TILE], tl.int32)
    total = tl.zeros([TILE], tl.int32)
    late = tl.full((), R, tl.int32)
    # Up to eight sources at once, as a dimension and not as code of their own: the compiler takes
    # five times as long over that.
    SOURCES: tl.constexpr = 1 if R == 1 else 2 if R == 2 else 4 if R <= 4 else 8
    for first_source in range(0, R, SOURCES):
        # Along the second dimension, which Triton gives to a thread as a whole where it sees no
        # reason for another.
        s = first_source + tl.arange(0, SOURCES)[None, :]
        live = tl.load(alive_ptr + s, mask=s < R, other=0)
        # Every thread reads the words that it uses itself: others may see them sooner or later.
        awaited = (live != 0) & (tl.zeros([TILE], tl.int32) == 0)[:, None]
        words_ptr = starts_ptr + s * P + tl.zeros([TILE], tl.int32)[:, None]
        first = tl.load(words_ptr, mask=awaited, other=0, volatile=True)
        end = tl.load(words_ptr + L, mask=awaited, other=0, volatile=True)
        # Of the sources before, rows for the slot itself come before too.
        of_slot = awaited & inside[:, None]
        at = tl.where(inside, slots, 0)[:, None] + (s < sources[:, None]).to(tl.int32)
        until = tl.load(words_ptr + at, mask=of_slot, other=0, volatile=True)
        said = (high_half(first) == call) & (high_half(end) == call)
        said = said & ((high_half(until) == call) | (of_slot == 0))
        own = tl.where(of_slot & (s != sources[:, None]), low_half(until), 0)
        before += tl.sum(tl.where(awaited, own - low_half(first), 0), 1)
        total += tl.sum(tl.where(awaited, low_half(end) - low_half(first), 0), 1)
        behind = tl.where(said | (awaited == 0), R, s)
        late = tl.minimum(late, tl.min(tl.min(behind, 1), 0))
    return before, total, late


@triton.jit
def _read_places(
    call, i, source, awaited, choices_ptr, starts_ptr, alive_ptr, L, P: tl.constexpr,
    R: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Of choices i of sources `source`, where `awaited`: (local slot, -1 where not here; its row;
    weight; rows of all; the first source that is late, R where none is). Final where nobody is."""
    slot, place, weight, late = _read_choices(call, i, source, awaited, choices_ptr, R)
    before, rows, behind = _read_starts(
        call, slot, source, slot >= 0, starts_ptr, alive_ptr, L, P, R, TILE
    )
    return slot, place + before, weight, rows, tl.minimum(late, behind)


@triton.jit
def index_ranked(
    program, call, choices_ptr, starts_ptr, alive_ptr, ids_ptr, weights_ptr, offsets_ptr,
    row_index_ptr, position_ptr, order_ptr, order_weights_ptr, count_ptr, flags_ptr, status_ptr,
    channel, rank, timeout_ns, bucket, capacity, L, K: tl.constexpr, KP: tl.constexpr,
    P: tl.constexpr, R: tl.constexpr, TILE: tl.constexpr, NUM_CHANNELS: tl.constexpr,
    CHANNELS_P: tl.constexpr, POLL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """One program's rows of the R * B received ones, or, after the programs of all, TILE experts'
    offsets: waits until the sources have said what it needs, at most timeout_ns, and writes what
    expert_index does, and the received ids [R, B, K] (-1 where not here) and weights. Of what has
    not arrived after a failure nothing counts as here."""
    ROWS: tl.constexpr = TILE // KP if TILE > KP else 1
    num_rows = R * bucket
    row_programs = (num_rows + ROWS - 1) // ROWS
    lost = tl.full((), 0, tl.int32)
    spins = 0
    began = tl.full((), 0, tl.int64)
    if program < row_programs:
        cell = tl.arange(0, ROWS * KP)
        row = program * ROWS + cell // KP
        column = cell % KP
        inside = (row < num_rows) & (column < K)
        i = row * K + column
        source = row // bucket
        awaited = inside & (tl.load(alive_ptr + source, mask=inside, other=0) != 0)
        slot, place, weight, rows, late = _read_places(
            call, i, source, awaited, choices_ptr, starts_ptr, alive_ptr, L, P, R, TILE
        )
        if late < R:
            lost += is_fatal(status_ptr, POLL)
        while (late < R) & (lost == 0):
            slot, place, weight, rows, late = _read_places(
                call, i, source, awaited, choices_ptr, starts_ptr, alive_ptr, L, P, R, TILE
            )
            spins += 1
            if late < R:
                lost, began = lose_patience(
                    spins, began, flags_ptr, status_ptr, channel, call, late, rank, timeout_ns,
                    NUM_CHANNELS, CHANNELS_P, R, POLL, INTERPRET,
                )  # fmt: skip
        write_placed(
            program * ROWS, row, i, inside, slot, place, weight, tl.max(rows, 0), lost, capacity,
            num_rows, ids_ptr, weights_ptr, row_index_ptr, position_ptr, order_ptr,
            order_weights_ptr, count_ptr, K, KP, ROWS,
        )  # fmt: skip
    else:
        expert = (program - row_programs) * TILE + tl.arange(0, TILE)
        # Before the first source's: before all.
        nobody = tl.zeros_like(expert) - 1
        offset, all_rows, late = _read_starts(
            call, expert, nobody, expert <= L, starts_ptr, alive_ptr, L, P, R, TILE
        )
        if late < R:
            lost += is_fatal(status_ptr, POLL)
        while (late < R) & (lost == 0):
            offset, all_rows, late = _read_starts(
                call, expert, nobody, expert <= L, starts_ptr, alive_ptr, L, P, R, TILE
            )
            spins += 1
            if late < R:
                lost, began = lose_patience(
                    spins, began, flags_ptr, status_ptr, channel, call, late, rank, timeout_ns,
                    NUM_CHANNELS, CHANNELS_P, R, POLL, INTERPRET,
                )  # fmt: skip
        total = tl.max(all_rows, 0)
        offset = tl.where(lost == 0, offset, 0)
        total = tl.where(lost == 0, total, 0)
        tl.store(offsets_ptr + expert, tl.minimum(offset, capacity), mask=expert <= L)
        if (program == row_programs) & (total > capacity):
            tl.atomic_or(status_ptr, 2)


def ranking_programs(num_choices: int, num_ranks: int, starts: int, queries: int) -> int:
    """Programs of put_ranked. starts: P."""
    return -(-num_choices // queries) + -(-(num_ranks * starts) // queries)


def adding_programs(num_rows: int, padded_topk: int, num_local_experts: int, tile: int) -> int:
    """Programs of index_ranked. num_rows: R * B; padded_topk: KP; tile: TILE."""
    rows = max(1, tile // padded_topk)
    return -(-num_rows // rows) + -(-(num_local_experts + 1) // tile)
