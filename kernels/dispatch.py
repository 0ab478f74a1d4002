"""Dispatch over symmetric memory: put ids, weights and rows, release, wait, index.

Legend: T tokens here, R ranks, B the bucket, H hidden, G scale groups, K choices, C copies of an
expert, L local experts. Receive memory of one slot, at `*_offset` bytes from each rank's base
(`peers_ptr`, int64 [R]): rows [R, B, H], scales [R, B, G], ids int32 [R, B, K], weights fp32
[R, B, K], payload bytes [R, B, P]; entry (source, token) is written by that source alone.

Three kinds of programs, in this order in the grid, so that those that put, and wait for nobody,
always get to run:

1. `id_programs` put ids and weights, and release the slot's DISPATCH channel. Where this launch
   indexes, they put words that need no release to be read: of few choices, ranked before (RANKED,
   moe_comm.kernels.ranked_index), of many as they are (CHUNKED, moe_comm.kernels.chunked_index);
   the release, which then tells the number of tokens alone, goes ahead of them and waits for no
   store.
2. `row_programs` put rows, scales and payloads, and release ROWS. So the index, which needs ids
   alone, is computed while rows are still on their way.
3. Waiting programs index, or later launches do. The last one waits for all sources' releases: of
   ids, then of rows.

Each program releases what it put (DIRECT), or the last of its kind to arrive releases it all. What
only combine needs the first kind writes after its release, since nobody waits for it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_comm.kernels.choice_route import route_tokens
from moe_comm.kernels.chunked_index import index_chunks, put_choices
from moe_comm.kernels.put_rows import put_row
from moe_comm.kernels.ranked_index import index_ranked, put_ranked
from moe_comm.kernels.signal import (
    arrive,
    is_usable,
    low_half,
    release,
    release_target,
    reset_arrivals,
    settle,
    wait,
    wanted,
)

# Tokens of a step of a program that puts ids.
ID_TOKENS = 16


@triton.jit
def _put_ids(
    token, inside, num_tokens, usable, topk_idx_ptr, topk_weights_ptr, copy_table_ptr,
    num_copies_ptr, alive_ptr, peers_ptr, ids_offset, weights_offset, rank, bucket, E,
    K: tl.constexpr, KP: tl.constexpr, C: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Local ids and weights of tokens `token` [TOKENS, 1], where `inside`, to every rank. Ids of
    every token, since they tell a rank whether it was reached; padding tokens put -1, so that no
    receiver reads another call's."""
    choice = tl.arange(0, KP)[None, :]
    real = inside & (token < num_tokens)
    to_rank, slot, _ = route_tokens(
        token, real, topk_idx_ptr, rank, E, copy_table_ptr, num_copies_ptr, K, KP, C
    )
    weight = tl.load(topk_weights_ptr + token * K + choice, mask=(choice < K) & real, other=0.0)
    writes = (choice < K) & inside & (usable != 0)
    if R <= 8:
        for step in tl.static_range(R):
            _put_ids_to_peer(
                step, token, choice, to_rank, slot, weight, writes, alive_ptr, peers_ptr,
                ids_offset, weights_offset, rank, bucket, K, R,
            )  # fmt: skip
    else:
        for step in range(R):
            _put_ids_to_peer(
                step, token, choice, to_rank, slot, weight, writes, alive_ptr, peers_ptr,
                ids_offset, weights_offset, rank, bucket, K, R,
            )  # fmt: skip


@triton.jit
def _put_ids_to_peer(
    step, token, choice, to_rank, slot, weight, writes, alive_ptr, peers_ptr, ids_offset,
    weights_offset, rank, bucket, K: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """What _put_ids puts to the step-th peer. Each rank starts with its right neighbour, so that no
    peer is everyone's first."""
    peer = (rank + 1 + step) % R
    base = tl.load(peers_ptr + peer)
    # A masked rank writes nothing here any more, so its ids are kept at -1 for it.
    alive = tl.load(alive_ptr + peer) != 0
    source = tl.where(alive, rank, peer).to(tl.int64)
    ids_base = tl.where(alive, base, tl.load(peers_ptr + rank))
    at = (source * bucket + token) * K + choice
    ids_ptr = (ids_base + ids_offset).to(tl.pointer_type(tl.int32))
    here = to_rank == peer
    tl.store(ids_ptr + at, tl.where(here, slot, -1), mask=writes)
    weights_ptr = (base + weights_offset).to(tl.pointer_type(tl.float32))
    at = (rank.to(tl.int64) * bucket + token) * K + choice
    tl.store(weights_ptr + at, weight, mask=writes & here)


@triton.jit
def _note_tokens(
    token, inside, num_tokens, topk_idx_ptr, copy_table_ptr, num_copies_ptr, choice_rank_ptr,
    fold_rank_ptr, fold_count_ptr, status_ptr, rank, E, K: tl.constexpr, KP: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """What this rank's combine reads of tokens [TOKENS, 1]: the rank of each choice, and a token's
    ranks in order of their last choice: the order in which combine adds.

    Example: to_rank [1, 0, 1, -1]: fold_rank [0, 1], fold_count 2.
    """
    choice = tl.arange(0, KP)
    real = inside & (token < num_tokens)
    to_rank, _, invalid = route_tokens(
        token, real, topk_idx_ptr, rank, E, copy_table_ptr, num_copies_ptr, K, KP, C
    )
    at = token * K + choice[None, :]
    tl.store(choice_rank_ptr + at, to_rank, mask=inside & (choice < K)[None, :])
    again = (to_rank[:, :, None] == to_rank[:, None, :]) & (
        choice[None, None, :] > choice[None, :, None]
    )
    last = (to_rank >= 0) & (tl.max(again.to(tl.int32), 2) == 0)
    place = tl.cumsum(last.to(tl.int32), 1) - 1
    tl.store(fold_rank_ptr + token * K + place, to_rank, mask=inside & last)
    count = tl.sum(last.to(tl.int32), 1)[:, None]
    tl.store(fold_count_ptr + token, count, mask=inside)
    if tl.max(tl.max(invalid.to(tl.int32), 1), 0) > 0:
        tl.atomic_or(status_ptr, 1)


@triton.jit(
    do_not_specialize=[
        "num_tokens_host", "num_rows", "id_programs", "row_programs",
        "releases", "row_releases", "channel", "rows_channel", "combine_channel", "rank", "bucket",
        "capacity", "E", "L", "timeout_ns",
    ]
)  # fmt: skip
def _dispatch_kernel(
    x_ptr, scales_ptr, topk_idx_ptr, topk_weights_ptr, payload_ptr, num_tokens_ptr, num_tokens_host,
    num_rows, stride_x, id_programs, row_programs, releases, row_releases,
    copy_table_ptr, num_copies_ptr, alive_ptr, peers_ptr,
    rows_offset, scales_offset, ids_offset, weights_offset, choices_offset, starts_offset,
    payload_offset, flags_offset, ids_ptr, weights_ptr, choices_ptr, starts_ptr, flags_ptr,
    choice_rank_ptr, fold_rank_ptr, fold_count_ptr, tokens_out_ptr, readable_ptr, offsets_ptr,
    row_index_ptr, position_ptr, order_ptr, order_weights_ptr, order_count_ptr, words_ptr,
    state_ptr, status_ptr, channel, rows_channel, combine_channel, rank, bucket, capacity, E, L,
    timeout_ns,
    H: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr,
    KP: tl.constexpr, C: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, BLOCK: tl.constexpr,
    TOKENS: tl.constexpr, WIRE: tl.constexpr, VALUE_BYTES: tl.constexpr, PAYLOAD: tl.constexpr,
    PAYLOAD_P: tl.constexpr, ROWS_COPIED: tl.constexpr, ROW_ALIGN: tl.constexpr,
    NUM_CHANNELS: tl.constexpr, CHANNELS_P: tl.constexpr, T_ON_DEVICE: tl.constexpr,
    RELEASE_IDS: tl.constexpr, RELEASE_ROWS: tl.constexpr, WAIT_ROWS: tl.constexpr,
    DIRECT: tl.constexpr, SEND: tl.constexpr, RECEIVE: tl.constexpr,
    RANKED: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr, QUERY: tl.constexpr,
    KEYS: tl.constexpr, KEYS_UNROLL: tl.constexpr, EXACT: tl.constexpr, CHUNKED: tl.constexpr,
    BINS: tl.constexpr, CHUNKS: tl.constexpr, POLL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if SEND:
        if program < id_programs + row_programs:
            usable = is_usable(status_ptr)
            if T_ON_DEVICE:
                num_tokens = tl.load(num_tokens_ptr).to(tl.int32)
                num_tokens = tl.minimum(tl.maximum(num_tokens, 0), num_rows)
            else:
                num_tokens = num_tokens_host
            if program < id_programs:
                target = release_target(peers_ptr, alive_ptr, flags_offset, channel, rank, R, RP)
                # Nobody else writes this rank's own word, and nobody changes its token half before
                # the release that does so below.
                told = low_half(tl.load(flags_ptr + channel * R + rank, volatile=True))
                step = tl.arange(0, TOKENS)[:, None]
                if RANKED or CHUNKED:
                    # What is put tells of itself; this tells how many tokens there are.
                    if program == 0:
                        release(
                            target, state_ptr, channel, releases, num_tokens - told, usable,
                            NUM_CHANNELS, RP, ORDERED=False,
                        )  # fmt: skip
                call = wanted(state_ptr, channel, releases)
                if RANKED:
                    put_ranked(
                        program, call, bucket * K, num_tokens,
                        usable, topk_idx_ptr, topk_weights_ptr, copy_table_ptr, num_copies_ptr,
                        alive_ptr, peers_ptr, choices_offset, starts_offset, rank, E, K, C, P, R,
                        QUERY, KEYS, KEYS_UNROLL, EXACT,
                    )  # fmt: skip
                elif CHUNKED:
                    for first in range(program * TOKENS, bucket, id_programs * TOKENS):
                        put_choices(
                            first + step, first + step < bucket, num_tokens, usable, call,
                            topk_idx_ptr, topk_weights_ptr, copy_table_ptr, num_copies_ptr,
                            alive_ptr, peers_ptr, choices_offset, rank, bucket, E, K, KP, C, R,
                        )  # fmt: skip
                else:
                    for first in range(program * TOKENS, bucket, id_programs * TOKENS):
                        _put_ids(
                            first + step, first + step < bucket, num_tokens, usable,
                            topk_idx_ptr, topk_weights_ptr, copy_table_ptr, num_copies_ptr,
                            alive_ptr, peers_ptr, ids_offset, weights_offset, rank, bucket, E, K,
                            KP, C, R,
                        )  # fmt: skip
                if RELEASE_IDS and not (RANKED or CHUNKED):
                    if DIRECT:
                        release(
                            target, state_ptr, channel, releases,
                            tl.where(program == 0, num_tokens - told, 0), usable, NUM_CHANNELS, RP,
                        )  # fmt: skip
                    elif arrive(state_ptr, channel, NUM_CHANNELS) == id_programs - 1:
                        reset_arrivals(state_ptr, channel, NUM_CHANNELS)
                        release(
                            target, state_ptr, channel, releases, num_tokens - told, usable,
                            NUM_CHANNELS, RP,
                        )  # fmt: skip
                for first in range(program * TOKENS, bucket, id_programs * TOKENS):
                    _note_tokens(
                        first + step, first + step < bucket, num_tokens, topk_idx_ptr,
                        copy_table_ptr, num_copies_ptr, choice_rank_ptr, fold_rank_ptr,
                        fold_count_ptr, status_ptr, rank, E, K, KP, C,
                    )  # fmt: skip
                if program == 0:
                    settle(state_ptr, combine_channel, 1, 1, NUM_CHANNELS)
            else:
                target = release_target(
                    peers_ptr, alive_ptr, flags_offset, rows_channel, rank, R, RP
                )
                if ROWS_COPIED:
                    # Copies bring the others rows, and then the word that is written here.
                    target = tl.where(tl.arange(0, RP) == rank, target, 0)
                blocks: tl.constexpr = (H + BLOCK - 1) // BLOCK
                for item in range(program - id_programs, bucket * blocks, row_programs):
                    # The interpreter's loops count in ints.
                    token = tl.full((), 0, tl.int32) + item // blocks
                    put_row(
                        token, item % blocks, num_tokens, usable, x_ptr, scales_ptr, topk_idx_ptr,
                        payload_ptr, copy_table_ptr, num_copies_ptr, peers_ptr, rows_offset,
                        scales_offset, payload_offset, rank, bucket, E, stride_x, H, G, GP, GROUP,
                        K, KP, C, R, BLOCK, WIRE, VALUE_BYTES, PAYLOAD, PAYLOAD_P, ROWS_COPIED,
                        ROW_ALIGN,
                    )  # fmt: skip
                if RELEASE_ROWS:
                    if DIRECT:
                        release(
                            target, state_ptr, rows_channel, row_releases, 0, usable, NUM_CHANNELS,
                            RP,
                        )  # fmt: skip
                    elif arrive(state_ptr, rows_channel, NUM_CHANNELS) == row_programs - 1:
                        reset_arrivals(state_ptr, rows_channel, NUM_CHANNELS)
                        release(
                            target, state_ptr, rows_channel, row_releases, 0, usable, NUM_CHANNELS,
                            RP,
                        )  # fmt: skip
    if RECEIVE:
        senders = id_programs + row_programs
        if not SEND:
            senders = 0
        if program >= senders:
            want = wanted(state_ptr, channel, releases)
            # The last one waits for releases, the others index.
            if program == tl.num_programs(0) - 1:
                arrived = wait(
                    flags_ptr, alive_ptr, state_ptr, status_ptr, channel, want, rank, timeout_ns,
                    NUM_CHANNELS, CHANNELS_P, R, RP, POLL, INTERPRET,
                )  # fmt: skip
                _write_tokens(flags_ptr + channel * R, alive_ptr, tokens_out_ptr, arrived, R, RP)
                if not (RANKED or CHUNKED):
                    # Later launches index; what did not arrive they must not read.
                    tl.store(readable_ptr, R * bucket * K * arrived)
                if WAIT_ROWS:
                    wait(
                        flags_ptr, alive_ptr, state_ptr, status_ptr, rows_channel,
                        wanted(state_ptr, rows_channel, row_releases), rank, timeout_ns,
                        NUM_CHANNELS, CHANNELS_P, R, RP, POLL, INTERPRET,
                    )  # fmt: skip
            elif RANKED:
                index_ranked(
                    program - senders, want, choices_ptr, starts_ptr, alive_ptr, ids_ptr,
                    weights_ptr, offsets_ptr, row_index_ptr, position_ptr, order_ptr,
                    order_weights_ptr, order_count_ptr, flags_ptr, status_ptr, channel, rank,
                    timeout_ns, bucket, capacity, L, K, KP, P, R, TILE, NUM_CHANNELS, CHANNELS_P,
                    POLL, INTERPRET,
                )  # fmt: skip
            elif CHUNKED:
                index_chunks(
                    program - senders, want, choices_ptr, words_ptr, alive_ptr, ids_ptr,
                    weights_ptr, offsets_ptr, row_index_ptr, position_ptr, order_ptr,
                    order_weights_ptr, order_count_ptr, flags_ptr, status_ptr, channel, rank,
                    timeout_ns, bucket, capacity, L, K, KP, R, TILE, BINS, CHUNKS, EXACT,
                    NUM_CHANNELS, CHANNELS_P, POLL, INTERPRET,
                )  # fmt: skip


@triton.jit
def _write_tokens(words_ptr, alive_ptr, tokens_out_ptr, arrived, R: tl.constexpr, RP: tl.constexpr):
    """tokens_out int32 [R]: each live source's tokens, 0 where the wait failed."""
    ranks = tl.arange(0, RP)
    word = tl.load(words_ptr + ranks, mask=ranks < R, other=0)
    alive = tl.load(alive_ptr + ranks, mask=ranks < R, other=0)
    tl.store(tokens_out_ptr + ranks, low_half(word) * alive * arrived, mask=ranks < R)
