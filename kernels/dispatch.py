"""Dispatch over symmetric memory: put rows, ids and weights, release, wait, index.

Legend: T tokens here, R ranks, B the bucket, H hidden, G scale groups, K choices, C copies of an
expert, L local experts. Receive memory of one slot, at `*_offset` bytes from each rank's base
(`peers_ptr`, int64 [R]): rows [R, B, H], scales [R, B, G], ids int32 [R, B, K], weights fp32
[R, B, K], payload bytes [R, B, P]; entry (source, token) is written by that source alone.

Programs 0 .. send_programs - 1 put; the last of them to arrive releases. The programs after them
wait for all sources and index. Putting programs wait for nobody (but for a released slot), and
come first in the grid, so they always get to run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_comm.kernels.expert_index import rank_by_counting
from moe_comm.kernels.quantize import quantize_groups
from moe_comm.kernels.signal import (
    arrive,
    is_usable,
    release,
    release_target,
    reset_arrivals,
    settle,
    tokens_of,
    wait,
    wanted,
)

# Constants of the kernels: WIRE is 0 to copy elements, 1 to quantize bf16 to fp8 on the way, 2 to
# mxfp8; ROWS_TO is 0 where copies take the rows, 1 for this rank's own memory alone, 2 for all.


@triton.jit
def locate(ids, valid, token, rank, copy_table_ptr, num_copies_ptr, C: tl.constexpr):
    """Rank and local slot of choices `ids` (int32 [KP]) of one token; -1 where not `valid`, or
    where the table says -1 because the rank is masked. The copy is (rank + token) % num_copies, as
    ExpertPlacement says."""
    safe = tl.where(valid, ids, 0)
    if C == 1:
        entry = safe
    else:
        copies = tl.load(num_copies_ptr + safe)
        entry = safe * C + (rank + token) % copies
    to_rank = tl.load(copy_table_ptr + entry * 2, mask=valid, other=-1)
    slot = tl.load(copy_table_ptr + entry * 2 + 1, mask=valid, other=-1)
    return to_rank, slot


@triton.jit
def _put_token(
    token, block, num_tokens, usable, x_ptr, scales_ptr, topk_idx_ptr, topk_weights_ptr,
    payload_ptr, copy_table_ptr, num_copies_ptr, alive_ptr, peers_ptr, rows_offset, scales_offset,
    ids_offset, weights_offset, payload_offset, choice_rank_ptr, fold_rank_ptr, fold_count_ptr,
    status_ptr, rank, bucket, E, stride_x,
    H: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr,
    KP: tl.constexpr, C: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, WIRE: tl.constexpr,
    VALUE_BYTES: tl.constexpr, PAYLOAD: tl.constexpr, PAYLOAD_P: tl.constexpr,
    ROWS_TO: tl.constexpr, ROW_ALIGN: tl.constexpr,
):  # fmt: skip
    """One column block of one token to every rank it reaches; block 0 also puts ids (to every
    rank, since they tell it whether it was reached), weights, given scales and payload. Padding
    tokens put ids of -1, so that no receiver reads another call's."""
    choice = tl.arange(0, KP)
    real = token < num_tokens
    inside = (choice < K) & real
    # Told from masked ones before they are narrowed: 2^32 + 1 is not expert 1.
    wide_ids = tl.load(topk_idx_ptr + token * K + choice, mask=inside, other=-1)
    ids = wide_ids.to(tl.int32)
    weight = tl.load(topk_weights_ptr + token * K + choice, mask=inside, other=0.0)
    column = block * BLOCK + tl.arange(0, BLOCK)
    in_row = (column < H) & real
    values = 0
    scale = 0
    if ROWS_TO != 0:
        x = tl.load(x_ptr + token.to(tl.int64) * stride_x + column, mask=in_row, other=0)
        if WIRE != 0:
            values, scale = quantize_groups(x.to(tl.float32), WIRE == 2, GROUP, BLOCK)
        else:
            values = x
    in_range = (wide_ids >= 0) & (wide_ids < E)
    to_rank, slot = locate(ids, in_range & inside, token, rank, copy_table_ptr, num_copies_ptr, C)
    if R <= 8:
        for step in tl.static_range(R):
            _put_to_peer(
                step, token, block, usable, values, scale, to_rank, slot, weight, column, in_row,
                scales_ptr, payload_ptr, alive_ptr, peers_ptr, rows_offset, scales_offset,
                ids_offset, weights_offset, payload_offset, rank, bucket, H, G, GP, GROUP, K, KP,
                R, BLOCK, WIRE, VALUE_BYTES, PAYLOAD, PAYLOAD_P, ROWS_TO, ROW_ALIGN,
            )  # fmt: skip
    else:
        for step in range(R):
            _put_to_peer(
                step, token, block, usable, values, scale, to_rank, slot, weight, column, in_row,
                scales_ptr, payload_ptr, alive_ptr, peers_ptr, rows_offset, scales_offset,
                ids_offset, weights_offset, payload_offset, rank, bucket, H, G, GP, GROUP, K, KP,
                R, BLOCK, WIRE, VALUE_BYTES, PAYLOAD, PAYLOAD_P, ROWS_TO, ROW_ALIGN,
            )  # fmt: skip
    if block == 0:
        tl.store(choice_rank_ptr + token * K + choice, to_rank, mask=choice < K)
        _write_fold_order(to_rank, token, fold_rank_ptr, fold_count_ptr, K, KP)
        if tl.max((inside & ~in_range & (wide_ids != -1)).to(tl.int32), 0) > 0:
            tl.atomic_or(status_ptr, 1)


@triton.jit
def _put_to_peer(
    step, token, block, usable, values, scale, to_rank, slot, weight, column, in_row, scales_ptr,
    payload_ptr, alive_ptr, peers_ptr, rows_offset, scales_offset, ids_offset, weights_offset,
    payload_offset, rank, bucket,
    H: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr,
    KP: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, WIRE: tl.constexpr,
    VALUE_BYTES: tl.constexpr, PAYLOAD: tl.constexpr, PAYLOAD_P: tl.constexpr,
    ROWS_TO: tl.constexpr, ROW_ALIGN: tl.constexpr,
):  # fmt: skip
    """What _put_token puts to the step-th peer. Each rank starts with its right neighbour, so that
    no peer is everyone's first. Stores are masked, not branched around: their addresses load
    together."""
    peer = (rank + 1 + step) % R
    base = tl.load(peers_ptr + peer)
    here = to_rank == peer
    reached = (tl.max(here.to(tl.int32), 0) > 0) & (usable != 0)
    row = rank.to(tl.int64) * bucket + token
    if ROWS_TO != 0:
        send_row = reached
        if ROWS_TO == 1:
            send_row = (peer == rank) & (usable != 0)
            if WIRE == 0:
                # Quantized rows are copied on from here, so even those not reaching this rank are
                # put; others only where they arrive.
                send_row = send_row & reached
        rows_ptr = (base + rows_offset + row * (H * VALUE_BYTES)).to(tl.pointer_type(values.dtype))
        # Rows are aligned, which an address that was loaded does not show: without the hint they
        # would be stored two bytes at a time.
        rows_ptr = tl.multiple_of(rows_ptr, ROW_ALIGN)
        tl.store(rows_ptr + column, values, mask=in_row & send_row)
        if WIRE != 0:
            group = block * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
            scale_bytes: tl.constexpr = scale.dtype.primitive_bitwidth // 8
            scales_at = (base + scales_offset + row * (G * scale_bytes)).to(
                tl.pointer_type(scale.dtype)
            )
            tl.store(scales_at + group, scale, mask=(group < G) & send_row)
    if block == 0:
        # A masked rank writes nothing here any more, so its ids are kept at -1 for it.
        alive = tl.load(alive_ptr + peer) != 0
        own_base = tl.load(peers_ptr + rank)
        ids_row = tl.where(alive, row, peer.to(tl.int64) * bucket + token)
        ids_at = tl.where(alive, base, own_base) + ids_offset + ids_row * (K * 4)
        choice = tl.arange(0, KP)
        writes = (choice < K) & (usable != 0)
        tl.store(
            ids_at.to(tl.pointer_type(tl.int32)) + choice, tl.where(here, slot, -1), mask=writes
        )
        weights_at = (base + weights_offset + row * (K * 4)).to(tl.pointer_type(tl.float32))
        tl.store(weights_at + choice, weight, mask=writes & reached)
        if GP > 0:
            if reached:
                _put_bytes(
                    scales_ptr + token.to(tl.int64) * G, base + scales_offset + row * G, G, GP
                )
        if PAYLOAD > 0:
            if reached:
                _put_bytes(
                    payload_ptr + token.to(tl.int64) * PAYLOAD,
                    base + payload_offset + row * PAYLOAD, PAYLOAD, PAYLOAD_P,
                )  # fmt: skip


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
        "num_tokens_host", "token_begin", "token_end", "num_rows", "channel", "combine_channel",
        "release_channel", "rank", "bucket", "capacity", "E", "L", "send_programs", "timeout_ns",
    ]
)  # fmt: skip
def _dispatch_kernel(
    x_ptr, scales_ptr, topk_idx_ptr, topk_weights_ptr, payload_ptr, num_tokens_ptr, num_tokens_host,
    token_begin, token_end, num_rows, copy_table_ptr, num_copies_ptr, alive_ptr, peers_ptr,
    rows_offset, scales_offset, ids_offset, weights_offset, payload_offset, flags_offset,
    ids_ptr, weights_ptr, flags_ptr, choice_rank_ptr, fold_rank_ptr, fold_count_ptr,
    tokens_out_ptr, readable_ptr,
    offsets_ptr, row_index_ptr, position_ptr, order_ptr, order_weights_ptr, order_count_ptr,
    state_ptr, status_ptr, channel, combine_channel, release_channel, rank, bucket, capacity, E, L,
    stride_x, send_programs, timeout_ns,
    H: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr,
    KP: tl.constexpr, C: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, BLOCK: tl.constexpr,
    WIRE: tl.constexpr, VALUE_BYTES: tl.constexpr, PAYLOAD: tl.constexpr, PAYLOAD_P: tl.constexpr,
    ROWS_TO: tl.constexpr, ROW_ALIGN: tl.constexpr, NUM_CHANNELS: tl.constexpr,
    CHANNELS_P: tl.constexpr, T_ON_DEVICE: tl.constexpr, RELEASE_AFTER: tl.constexpr,
    CHUNKS: tl.constexpr, SEND: tl.constexpr, RECEIVE: tl.constexpr, INDEX: tl.constexpr,
    QUERY: tl.constexpr, INDEX_BLOCK: tl.constexpr, POLL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if SEND:
        if program < send_programs:
            usable = is_usable(status_ptr)
            released = tl.load(state_ptr + release_channel)
            consumed = tl.load(state_ptr + 2 * NUM_CHANNELS + release_channel)
            count = wanted(state_ptr, channel)
            target = release_target(peers_ptr, alive_ptr, flags_offset, channel, rank, R, RP)
            if T_ON_DEVICE:
                num_tokens = tl.load(num_tokens_ptr).to(tl.int32)
                num_tokens = tl.minimum(tl.maximum(num_tokens, 0), num_rows)
            else:
                num_tokens = num_tokens_host
            if released != consumed:
                # The slot was released without a combine: its readers said so on this channel.
                usable = usable & wait(
                    flags_ptr, alive_ptr, state_ptr, status_ptr, release_channel, released, rank,
                    timeout_ns, NUM_CHANNELS, CHANNELS_P, R, RP, POLL, INTERPRET,
                )  # fmt: skip
            if program == 0:
                settle(state_ptr, combine_channel, CHUNKS, CHUNKS, NUM_CHANNELS)
            blocks: tl.constexpr = (H + BLOCK - 1) // BLOCK if ROWS_TO != 0 else 1
            for item in range(program, (token_end - token_begin) * blocks, send_programs):
                _put_token(
                    token_begin + item // blocks, item % blocks, num_tokens, usable, x_ptr,
                    scales_ptr, topk_idx_ptr, topk_weights_ptr, payload_ptr, copy_table_ptr,
                    num_copies_ptr, alive_ptr, peers_ptr, rows_offset, scales_offset, ids_offset,
                    weights_offset, payload_offset, choice_rank_ptr, fold_rank_ptr, fold_count_ptr,
                    status_ptr, rank, bucket, E, stride_x, H, G, GP, GROUP, K, KP, C, R, BLOCK,
                    WIRE, VALUE_BYTES, PAYLOAD, PAYLOAD_P, ROWS_TO, ROW_ALIGN,
                )  # fmt: skip
            if arrive(state_ptr, channel, NUM_CHANNELS) == send_programs - 1:
                reset_arrivals(state_ptr, channel, NUM_CHANNELS)
                tl.store(state_ptr + 2 * NUM_CHANNELS + release_channel, released)
                if RELEASE_AFTER:
                    release(target, state_ptr, channel, count, num_tokens, usable, NUM_CHANNELS, RP)
    if RECEIVE:
        if program >= send_programs:
            arrived = wait(
                flags_ptr, alive_ptr, state_ptr, status_ptr, channel, wanted(state_ptr, channel),
                rank, timeout_ns, NUM_CHANNELS, CHANNELS_P, R, RP, POLL, INTERPRET,
            )  # fmt: skip
            receiver = program - send_programs
            if receiver == 0:
                _write_tokens(flags_ptr + channel * R, alive_ptr, tokens_out_ptr, arrived, R, RP)
            num_choices = R * bucket * K
            if INDEX:
                rank_by_counting(
                    receiver, ids_ptr, offsets_ptr, row_index_ptr, position_ptr, order_ptr,
                    order_weights_ptr, order_count_ptr, weights_ptr, status_ptr, num_choices,
                    num_choices * arrived, capacity, L, K, KP, QUERY, INDEX_BLOCK, True,
                )  # fmt: skip
            elif receiver == 0:
                # Later launches index; what did not arrive they must not read.
                tl.store(readable_ptr, num_choices * arrived)


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
):  # fmt: skip
    """One program that releases a channel. With FREES_SLOT it is the slot's RELEASE channel: the
    slot's dispatch is settled, and so is this release, which the slot's next dispatch waits for."""
    release(
        release_target(peers_ptr, alive_ptr, flags_offset, channel, rank, R, RP), state_ptr,
        channel, wanted(state_ptr, channel), tl.full((), 0, tl.int32), is_usable(status_ptr),
        NUM_CHANNELS, RP,
    )  # fmt: skip
    if FREES_SLOT:
        settle(state_ptr, channel, 1, 1, NUM_CHANNELS)
        settle(state_ptr, dispatch_channel, 2, 2, NUM_CHANNELS)


@triton.jit(do_not_specialize=["channel", "rank", "timeout_ns"])
def _wait_kernel(
    alive_ptr, state_ptr, status_ptr, flags_ptr, channel, rank, timeout_ns, R: tl.constexpr,
    RP: tl.constexpr, NUM_CHANNELS: tl.constexpr, CHANNELS_P: tl.constexpr, POLL: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """One program that waits for a channel."""
    wait(
        flags_ptr, alive_ptr, state_ptr, status_ptr, channel, wanted(state_ptr, channel), rank,
        timeout_ns, NUM_CHANNELS, CHANNELS_P, R, RP, POLL, INTERPRET,
    )  # fmt: skip
