"""The index of expert_index in two halves, for few choices a rank: every source ranks its own, and
the receiver, which has to wait for them, only adds up what the sources say. So the work that grows
with the square of the choices is done before and not after the transfer, and on a rank's own
choices instead of all that it receives.

Legend: R ranks, B the bucket, K choices, L local experts, P = the most local experts of a rank
+ 1, or more.
A source's choices, keyed by (destination rank, local slot, choice), are in the order in which each
destination has them. Received, both int32: ranks [R, B, K], how many of the source's keys are
smaller than the choice's, and starts [R, P], how many are smaller than (this rank, e, 0).

Of a choice i of source s for local expert e: the rows before it are those of the experts before e
of all sources, of e of the sources before s, and ranks[i] - starts[s, e] of its own source.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_comm.kernels.choice_route import route
from moe_comm.kernels.expert_index import count_smaller, load_ids, place_in_row, write_order

# Up to this many choices of its own a source ranks them: counting pairs takes their square.
RANKED_CHOICES = 4096
# Received choices, or experts, of a program.
TILE = 256


@triton.jit
def put_ranked(
    program, num_choices, num_tokens, usable, topk_idx_ptr, topk_weights_ptr, copy_table_ptr,
    num_copies_ptr, alive_ptr, peers_ptr, ids_offset, weights_offset, ranks_offset, starts_offset,
    rank, E, K: tl.constexpr, C: tl.constexpr, P: tl.constexpr, R: tl.constexpr,
    QUERY: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One program's QUERY of the num_choices = B * K choices of this rank, or, after the programs
    of all choices, QUERY of the R * P starts: counted, and put to the ranks that they are for.
    Local ids go to every rank, since they tell it whether it was reached; padding tokens put -1, so
    that no receiver reads another call's.

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
    smaller = tl.zeros([QUERY, BLOCK], counts)
    for first in range(0, num_choices, UNROLL * BLOCK):
        # Unrolled, so that all blocks of keys are on their way together.
        for step in tl.static_range(UNROLL):
            j = first + step * BLOCK + tl.arange(0, BLOCK)
            other = (j < num_choices) & (j // K < num_tokens)
            others_rank, others_slot, _theirs = route(
                j, j // K, other, topk_idx_ptr, rank, E, copy_table_ptr, num_copies_ptr, C
            )
            keys = (others_rank * P + others_slot) * num_choices + j
            keys = tl.where(others_rank >= 0, keys, 0x7FFFFFFF).to(counts)
            smaller = count_smaller(smaller, query[:, None], keys[None, :], EXACT)
    ranks = tl.sum(smaller, 1).to(tl.int32)
    if R <= 8:
        for step in tl.static_range(R):
            _put_to_peer(
                step, i, start, of_choices, inside, to_rank, slot, weight, ranks, num_choices,
                usable, alive_ptr, peers_ptr, ids_offset, weights_offset, ranks_offset,
                starts_offset, rank, P, R,
            )  # fmt: skip
    else:
        for step in range(R):
            _put_to_peer(
                step, i, start, of_choices, inside, to_rank, slot, weight, ranks, num_choices,
                usable, alive_ptr, peers_ptr, ids_offset, weights_offset, ranks_offset,
                starts_offset, rank, P, R,
            )  # fmt: skip


@triton.jit
def _put_to_peer(
    step, i, start, of_choices, inside, to_rank, slot, weight, ranks, num_choices, usable,
    alive_ptr, peers_ptr, ids_offset, weights_offset, ranks_offset, starts_offset, rank,
    P: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """What put_ranked puts to the step-th peer. Each rank starts with its right neighbour, so that
    no peer is everyone's first."""
    peer = (rank + 1 + step) % R
    base = tl.load(peers_ptr + peer)
    alive = tl.load(alive_ptr + peer) != 0
    writes = usable != 0
    # A masked rank writes nothing here any more, so its ids are kept at -1 for it.
    ids_base = tl.where(alive, base, tl.load(peers_ptr + rank))
    source = tl.where(alive, rank, peer).to(tl.int64)
    here = to_rank == peer
    ids_ptr = (ids_base + ids_offset).to(tl.pointer_type(tl.int32)) + source * num_choices
    tl.store(ids_ptr + i, tl.where(here, slot, -1), mask=inside & writes)
    own = rank.to(tl.int64) * num_choices
    weights_ptr = (base + weights_offset).to(tl.pointer_type(tl.float32)) + own
    tl.store(weights_ptr + i, weight, mask=inside & here & writes)
    ranks_ptr = (base + ranks_offset).to(tl.pointer_type(tl.int32)) + own
    tl.store(ranks_ptr + i, ranks, mask=inside & here & writes)
    starts_ptr = (base + starts_offset).to(tl.pointer_type(tl.int32)) + rank * P
    at = start - peer * P
    for_peer = (of_choices == 0) & (at >= 0) & (at < P) & alive
    tl.store(starts_ptr + at, ranks, mask=for_peer & writes)


@triton.jit
def index_ranked(
    program, arrived, ids_ptr, weights_ptr, ranks_ptr, starts_ptr, alive_ptr, offsets_ptr,
    row_index_ptr, position_ptr, order_ptr, order_weights_ptr, count_ptr, status_ptr,
    source_choices, capacity, L, K: tl.constexpr, KP: tl.constexpr, P: tl.constexpr,
    R: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program's TILE of the R * source_choices received choices, or, after the programs of all,
    TILE experts' offsets. As expert_index: what did not arrive (`arrived` 0) counts as not here."""
    num_choices = R * source_choices
    choice_programs = (num_choices + TILE - 1) // TILE
    step = tl.arange(0, TILE)
    total = tl.full((), 0, tl.int32)
    if program < choice_programs:
        i = program * TILE + step
        ids = load_ids(ids_ptr, i, num_choices * arrived)
        here = ids >= 0
        source = i // source_choices
        place, in_row = place_in_row(i, ids, ids_ptr, num_choices * arrived, K, KP)
        weight = tl.load(weights_ptr + i, mask=here, other=0.0)
        rank = tl.load(ranks_ptr + i, mask=here, other=0)
        for s in range(R):
            live = tl.load(alive_ptr + s) * arrived
            first = tl.load(starts_ptr + s * P)
            total += (tl.load(starts_ptr + s * P + L) - first) * live
            # Of sources before, this expert's rows come first too.
            until = tl.load(
                starts_ptr + s * P + ids + (s < source).to(tl.int32), mask=here, other=0
            )
            rank += (tl.where(s == source, 0, until) - first) * live
        kept = here & (rank < capacity)
        position = tl.where(kept, rank, -1)
        tl.store(row_index_ptr + rank, i // K, mask=kept)
        tl.store(position_ptr + i, position, mask=i < num_choices)
        tl.store(row_index_ptr + i, -1, mask=(i >= total) & (i < capacity))
        write_order(
            i, ids, position, place, in_row, weight, order_ptr, order_weights_ptr, count_ptr,
            num_choices, K,
        )  # fmt: skip
    else:
        expert = (program - choice_programs) * TILE + step
        offset = tl.zeros([TILE], tl.int32)
        for s in range(R):
            live = tl.load(alive_ptr + s) * arrived
            first = tl.load(starts_ptr + s * P)
            total += (tl.load(starts_ptr + s * P + L) - first) * live
            until = tl.load(starts_ptr + s * P + expert, mask=expert <= L, other=0)
            offset += (until - first) * live
        tl.store(offsets_ptr + expert, tl.minimum(offset, capacity), mask=expert <= L)
        if (program == choice_programs) & (total > capacity):
            tl.atomic_or(status_ptr, 2)


def ranking_programs(num_choices: int, num_ranks: int, starts: int, queries: int) -> int:
    """Programs of put_ranked. starts: P."""
    return -(-num_choices // queries) + -(-(num_ranks * starts) // queries)


def adding_programs(num_received: int, num_local_experts: int) -> int:
    """Programs of index_ranked."""
    return -(-num_received // TILE) + -(-(num_local_experts + 1) // TILE)
