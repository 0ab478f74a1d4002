"""Dispatch over symmetric memory: put rows, ids and weights, release, wait, index.

Legend: T tokens here, R ranks, B the bucket, H hidden, G scale groups, K choices, C copies of an
expert, L local experts. Receive memory of one slot, at `*_offset` bytes from each rank's base
(`peers_ptr`, int64 [R]): rows [R, B, H], scales [R, B, G], ids int32 [R, B, K], weights fp32
[R, B, K], payload bytes [R, B, P]; entry (source, token) is written by that source alone.

One launch puts: programs wait for nobody (but for a released slot), and the last to arrive
releases. A second one waits and indexes; it may be launched at once or later.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_comm.kernels.expert_index import rank_by_counting
from moe_comm.kernels.quantize import quantize_groups
from moe_comm.kernels.signal import (
    arrive,
    is_fatal,
    release,
    reset_arrivals,
    settle,
    tokens_of,
    wait,
    wanted,
)

# Wire of the rows as the kernel sees it: copy elements, or quantize bf16 on the way.
COPY, FP8, MXFP8 = 0, 1, 2
# Where rows go: to nobody (copies take them), to this rank's own memory, to all.
ROWS_NONE, ROWS_SELF, ROWS_ALL = 0, 1, 2


@triton.jit
def locate(ids, valid, token, rank, copy_table_ptr, num_copies_ptr, alive_ptr, C: tl.constexpr):
    """Rank and local slot of choices `ids` (int32 [KP]) of one token; -1 where not `valid` or the
    rank is masked. The copy is (rank + token) % num_copies, as ExpertPlacement says."""
    safe = tl.where(valid, ids, 0)
    if C == 1:
        entry = safe
    else:
        copies = tl.load(num_copies_ptr + safe)
        entry = safe * C + (rank + token) % copies
    where_rank = tl.load(copy_table_ptr + entry * 2)
    where_slot = tl.load(copy_table_ptr + entry * 2 + 1)
    live = valid & (tl.load(alive_ptr + where_rank) != 0)
    return tl.where(live, where_rank, -1), tl.where(live, where_slot, -1)


@triton.jit
def _put_token(
    token, block, num_tokens, x_ptr, scales_ptr, topk_idx_ptr, topk_weights_ptr, payload_ptr,
    copy_table_ptr, num_copies_ptr, alive_ptr, peers_ptr, rows_offset, scales_offset, ids_offset,
    weights_offset, payload_offset, choice_rank_ptr, fold_rank_ptr, fold_count_ptr,
    status_ptr, rank, bucket, E, stride_x,
    H: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr,
    KP: tl.constexpr, C: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, WIRE: tl.constexpr,
    VALUE_BYTES: tl.constexpr, PAYLOAD: tl.constexpr, PAYLOAD_P: tl.constexpr,
    ROWS_TO: tl.constexpr, ROW_ALIGN: tl.constexpr,
):  # fmt: skip
    """One column block of one token to every rank it reaches; block 0 also puts ids, weights,
    given scales and payload, to every rank (ids tell a rank that it was not reached)."""
    choice = tl.arange(0, KP)
    inside = choice < K
    ids = tl.load(topk_idx_ptr + token * K + choice, mask=inside, other=-1).to(tl.int32)
    in_range = (ids >= 0) & (ids < E)
    real = token < num_tokens
    to_rank, slot = locate(
        ids, in_range & real, token, rank, copy_table_ptr, num_copies_ptr, alive_ptr, C
    )
    if real:
        column = block * BLOCK + tl.arange(0, BLOCK)
        in_row = column < H
        row = rank.to(tl.int64) * bucket + token
        scale = 0
        if ROWS_TO != 0:
            x = tl.load(x_ptr + token.to(tl.int64) * stride_x + column, mask=in_row, other=0)
            if WIRE != 0:
                values, scale = quantize_groups(x.to(tl.float32), WIRE == 2, GROUP, BLOCK)
            else:
                values = x
        weight = tl.load(topk_weights_ptr + token * K + choice, mask=inside, other=0.0)
        for step in range(R):
            # Each rank starts with its right neighbour, so that no peer is everyone's first.
            peer = (rank + 1 + step) % R
            here = to_rank == peer
            reached = tl.max(here.to(tl.int32), 0) > 0
            base = tl.load(peers_ptr + peer)
            send_row = reached
            if ROWS_TO == 1:
                send_row = peer == rank
                if WIRE == 0:
                    # Quantized rows are copied on from here, so even those not reaching this rank
                    # are put; others only where they arrive.
                    send_row = send_row & reached
            if ROWS_TO != 0:
                if send_row:
                    rows_ptr = (base + rows_offset + row * (H * VALUE_BYTES)).to(
                        tl.pointer_type(values.dtype)
                    )
                    # Rows are aligned, which an address that was loaded does not show: without
                    # the hint they would be stored two bytes at a time.
                    rows_ptr = tl.multiple_of(rows_ptr, ROW_ALIGN)
                    tl.store(rows_ptr + column, values, mask=in_row)
                    if WIRE != 0:
                        group = block * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
                        scales = (
                            base + scales_offset + row * (G * scale.dtype.primitive_bitwidth // 8)
                        )
                        tl.store(
                            scales.to(tl.pointer_type(scale.dtype)) + group, scale, mask=group < G
                        )
            if block == 0:
                if tl.load(alive_ptr + peer) != 0:
                    ids_at = (base + ids_offset + row * (K * 4)).to(tl.pointer_type(tl.int32))
                    tl.store(ids_at + choice, tl.where(here, slot, -1), mask=inside)
                    if reached:
                        weights_at = base + weights_offset + row * (K * 4)
                        tl.store(
                            weights_at.to(tl.pointer_type(tl.float32)) + choice, weight, mask=inside
                        )
                        if GP > 0:
                            _put_bytes(
                                scales_ptr + token.to(tl.int64) * G,
                                base + scales_offset + row * G,
                                G,
                                GP,
                            )
                        if PAYLOAD > 0:
                            _put_bytes(
                                payload_ptr + token.to(tl.int64) * PAYLOAD,
                                base + payload_offset + row * PAYLOAD,
                                PAYLOAD,
                                PAYLOAD_P,
                            )
    if block == 0:
        tl.store(choice_rank_ptr + token * K + choice, to_rank, mask=inside)
        _write_fold_order(to_rank, token, fold_rank_ptr, fold_count_ptr, K, KP)
        if tl.max((real & inside & ~in_range & (ids != -1)).to(tl.int32), 0) > 0:
            tl.atomic_or(status_ptr, 1)


@triton.jit
def _write_fold_order(
    to_rank, token, fold_rank_ptr, fold_count_ptr, K: tl.constexpr, KP: tl.constexpr
):
    """The token's ranks in order of their last choice: the order in which combine adds.

    Example: to_rank [1, 0, 1, -1]: fold_rank [0, 1], fold_count 2.
    """
    choice = tl.arange(0, KP)
    again = (to_rank[:, None] == to_rank[None, :]) & (choice[None, :] > choice[:, None])
    last = (to_rank >= 0) & (tl.max(again.to(tl.int32), 1) == 0)
    place = tl.cumsum(last.to(tl.int32), 0) - 1
    tl.store(fold_rank_ptr + token * K + place, to_rank, mask=last)
    tl.store(fold_count_ptr + token, tl.sum(last.to(tl.int32), 0))


@triton.jit
def _put_bytes(source_ptr, target, COUNT: tl.constexpr, COUNT_P: tl.constexpr):
    """COUNT bytes to an address."""
    i = tl.arange(0, COUNT_P)
    byte = tl.load(source_ptr + i, mask=i < COUNT)
    tl.store(target.to(tl.pointer_type(tl.uint8)) + i, byte, mask=i < COUNT)


@triton.jit(
    do_not_specialize=[
        "num_tokens_host", "token_begin", "num_rows", "channel", "combine_channel",
        "release_channel", "rank", "bucket", "E", "send_programs", "timeout_ns",
    ]
)  # fmt: skip
def _put_kernel(
    x_ptr, scales_ptr, topk_idx_ptr, topk_weights_ptr, payload_ptr, num_tokens_ptr, num_tokens_host,
    token_begin, num_rows, copy_table_ptr, num_copies_ptr, alive_ptr, peers_ptr, rows_offset,
    scales_offset, ids_offset, weights_offset, payload_offset, flags_offset, flags_ptr,
    choice_rank_ptr, fold_rank_ptr, fold_count_ptr, state_ptr, status_ptr, channel,
    combine_channel, release_channel, rank, bucket, E, stride_x, send_programs, timeout_ns,
    H: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr,
    KP: tl.constexpr, C: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, BLOCK: tl.constexpr,
    WIRE: tl.constexpr, VALUE_BYTES: tl.constexpr, PAYLOAD: tl.constexpr, PAYLOAD_P: tl.constexpr,
    ROWS_TO: tl.constexpr, ROW_ALIGN: tl.constexpr, NUM_CHANNELS: tl.constexpr,
    CHANNELS_P: tl.constexpr, T_ON_DEVICE: tl.constexpr, RELEASE_AFTER: tl.constexpr,
    CHUNKS: tl.constexpr, POLL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Every program puts its share of (token, column block); the last to arrive releases."""
    program = tl.program_id(0)
    if T_ON_DEVICE:
        num_tokens = tl.load(num_tokens_ptr).to(tl.int32)
        num_tokens = tl.minimum(tl.maximum(num_tokens, 0), num_rows)
    else:
        num_tokens = num_tokens_host
    # A slot that was released without a combine: its readers said so on this channel.
    released = tl.load(state_ptr + release_channel)
    usable = is_fatal(status_ptr, POLL) == 0
    if released != tl.load(state_ptr + 2 * NUM_CHANNELS + release_channel):
        usable = usable & (
            wait(
                flags_ptr, alive_ptr, state_ptr, status_ptr, release_channel, released, rank,
                timeout_ns, NUM_CHANNELS, CHANNELS_P, R, RP, POLL, INTERPRET,
            ) != 0
        )  # fmt: skip
    if program == 0:
        settle(state_ptr, combine_channel, CHUNKS, CHUNKS, NUM_CHANNELS)
    blocks: tl.constexpr = (H + BLOCK - 1) // BLOCK if ROWS_TO != 0 else 1
    if usable:
        for item in range(program, (num_rows - token_begin) * blocks, send_programs):
            _put_token(
                token_begin + item // blocks, item % blocks, num_tokens, x_ptr, scales_ptr,
                topk_idx_ptr, topk_weights_ptr, payload_ptr, copy_table_ptr, num_copies_ptr,
                alive_ptr, peers_ptr, rows_offset, scales_offset, ids_offset, weights_offset,
                payload_offset, choice_rank_ptr, fold_rank_ptr, fold_count_ptr, status_ptr, rank,
                bucket, E, stride_x, H, G, GP, GROUP, K, KP, C, R, BLOCK, WIRE, VALUE_BYTES,
                PAYLOAD, PAYLOAD_P, ROWS_TO, ROW_ALIGN,
            )  # fmt: skip
    if arrive(state_ptr, channel, NUM_CHANNELS) == send_programs - 1:
        reset_arrivals(state_ptr, channel, NUM_CHANNELS)
        tl.store(state_ptr + 2 * NUM_CHANNELS + release_channel, released)
        if RELEASE_AFTER & usable:
            release(
                peers_ptr, alive_ptr, state_ptr, flags_offset, channel, num_tokens, rank,
                NUM_CHANNELS, R, RP,
            )  # fmt: skip


@triton.jit(do_not_specialize=["channel", "rank", "bucket", "capacity", "L", "timeout_ns"])
def _receive_kernel(
    ids_ptr, weights_ptr, alive_ptr, flags_ptr, tokens_out_ptr, offsets_ptr, row_index_ptr,
    position_ptr, order_ptr, order_weights_ptr, count_ptr, state_ptr, status_ptr, channel, rank,
    bucket, capacity, L, timeout_ns,
    K: tl.constexpr, KP: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, QUERY: tl.constexpr,
    BLOCK: tl.constexpr, INDEX: tl.constexpr, NUM_CHANNELS: tl.constexpr,
    CHANNELS_P: tl.constexpr, POLL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Every program waits for all sources; then, with INDEX, places its share of the choices."""
    program = tl.program_id(0)
    arrived = wait(
        flags_ptr, alive_ptr, state_ptr, status_ptr, channel, wanted(state_ptr, channel), rank,
        timeout_ns, NUM_CHANNELS, CHANNELS_P, R, RP, POLL, INTERPRET,
    )  # fmt: skip
    words = flags_ptr + channel * R
    if program == 0:
        _write_tokens(words, alive_ptr, tokens_out_ptr, arrived, R, RP)
    if INDEX:
        num_choices = R * bucket * K
        # The low half of each word is the source's token count: every second int32.
        rank_by_counting(
            program, ids_ptr, words.to(tl.pointer_type(tl.int32)), alive_ptr, offsets_ptr,
            row_index_ptr, position_ptr, order_ptr, order_weights_ptr, count_ptr, weights_ptr,
            status_ptr, num_choices, num_choices * arrived, bucket, capacity, L, K, KP, QUERY,
            BLOCK, 2, True,
        )  # fmt: skip


@triton.jit
def _write_tokens(words_ptr, alive_ptr, tokens_out_ptr, arrived, R: tl.constexpr, RP: tl.constexpr):
    """tokens_out int32 [R]: each live source's tokens, 0 where the wait failed."""
    ranks = tl.arange(0, RP)
    word = tl.load(words_ptr + ranks, mask=ranks < R, other=0)
    alive = tl.load(alive_ptr + ranks, mask=ranks < R, other=0)
    tl.store(tokens_out_ptr + ranks, tokens_of(word) * alive * arrived, mask=ranks < R)


@triton.jit(do_not_specialize=["channel", "dispatch_channel", "rank"])
def _release_kernel(
    peers_ptr, alive_ptr, state_ptr, status_ptr, flags_offset, channel, dispatch_channel, rank,
    R: tl.constexpr, RP: tl.constexpr, NUM_CHANNELS: tl.constexpr, FREES_SLOT: tl.constexpr,
    POLL: tl.constexpr,
):  # fmt: skip
    """One program that releases a channel. With FREES_SLOT it is the slot's RELEASE channel: the
    slot's dispatch is settled, and so is this release, which the slot's next dispatch waits for."""
    if is_fatal(status_ptr, POLL) == 0:
        release(
            peers_ptr, alive_ptr, state_ptr, flags_offset, channel, tl.full((), 0, tl.int32), rank,
            NUM_CHANNELS, R, RP,
        )  # fmt: skip
        if FREES_SLOT:
            settle(state_ptr, channel, 1, 1, NUM_CHANNELS)
            settle(state_ptr, dispatch_channel, 2, 2, NUM_CHANNELS)
