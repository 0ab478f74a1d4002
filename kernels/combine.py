"""Combine: weighted fp32 sums of expert rows, one row back per (token, rank), and the final sum.

Legend: T tokens here, R ranks, B the bucket, H hidden, G scale groups, K choices, N expert rows.
The order of additions is the numeric contract's (moe_comm.backends.reference).

A partial sum is its own flag (moe_comm.kernels.returned_rows).

The work is cut into items, a column block of a row each: a send item sums a row that belongs to
another rank and puts it there; a receive item sums this rank's own row (which never leaves
registers), waits for the others' and adds. A receive item comes `lag` items of its kind after the
send items of the same token. So loads of expert rows, stores to peers and waiting overlap all the
way, and what is waited for was put long ago.

A program takes the items program, program + programs, ... Before an item that waits come, in the
grid of every rank, the items that it waits for; so nothing stands still as long as all programs run
at once or each takes one item alone.

The channel COMBINE tells that a rank is in the call, and so has read what was dispatched to it: a
rank that is done may dispatch into the slot again when all have told so.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_comm.kernels.quantize import through_wire
from moe_comm.kernels.returned_rows import fold_returned, put_partial
from moe_comm.kernels.signal import is_usable, release, release_target, settle, wait, wanted


@triton.jit
def ordered_sum(
    y_ptr, order_ptr, order_weights_ptr, row, count, column, in_row, H: tl.constexpr,
    K: tl.constexpr, BLOCK: tl.constexpr, APPLIED: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """fp32 [BLOCK]: fma of the row's `count` choices on this rank, in order of k without gaps
    (Order of expert_index), rounded at each step.

    Example: order [4, 2], weights [0.5, 2]: fma(y[2], 2, fma(y[4], 0.5, 0)).
    """
    acc = _add_choices(
        tl.zeros([BLOCK], tl.float32), 0, y_ptr, order_ptr, order_weights_ptr, row, count, column,
        in_row, H, K, BLOCK, APPLIED, UNROLL,
    )  # fmt: skip
    if UNROLL < K:
        for first in range(UNROLL, count, UNROLL):
            acc = _add_choices(
                acc, first, y_ptr, order_ptr, order_weights_ptr, row, count, column, in_row, H, K,
                BLOCK, APPLIED, UNROLL,
            )  # fmt: skip
    return acc


@triton.jit
def _add_choices(
    acc, first, y_ptr, order_ptr, order_weights_ptr, row, count, column, in_row, H: tl.constexpr,
    K: tl.constexpr, BLOCK: tl.constexpr, APPLIED: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """acc plus UNROLL choices from `first` on, their loads in flight together. Positions are asked
    for before the count is known; past it, and past the row, -0 is added, which changes no
    number."""
    for step in tl.static_range(UNROLL):
        n = first + step
        at = row * K + n
        position = tl.load(order_ptr + at, mask=n < K, other=-1)
        here = (n < count) & (position >= 0)
        value = tl.load(
            y_ptr + position.to(tl.int64) * H + column, mask=in_row & here, other=-0.0
        ).to(tl.float32)
        if APPLIED:
            acc = acc + value
        else:
            weight = tl.where(here, tl.load(order_weights_ptr + at, mask=n < K, other=1.0), 1.0)
            acc = tl.fma(value, tl.zeros([BLOCK], tl.float32) + weight, acc)
    return acc


@triton.jit
def _expert_sum(
    y_ptr, order_ptr, order_weights_ptr, row, count, column, in_row, H: tl.constexpr,
    K: tl.constexpr, BLOCK: tl.constexpr, ROWS_LAYOUT: tl.constexpr, APPLIED: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """fp32 [BLOCK]: this rank's partial sum of received row `row`; given as it is in layout
    "rows"."""
    if ROWS_LAYOUT:
        total = tl.load(y_ptr + row * H + column, mask=in_row, other=0.0).to(tl.float32)
    else:
        total = ordered_sum(
            y_ptr, order_ptr, order_weights_ptr, row, count, column, in_row, H, K, BLOCK, APPLIED,
            UNROLL,
        )  # fmt: skip
    return total


@triton.jit
def _round_to_wire(partial, y_type: tl.constexpr, WIRE: tl.constexpr, GROUP: tl.constexpr,
                   BLOCK: tl.constexpr):  # fmt: skip
    """What a receiver would read of this rank's own partial sum."""
    rounded = partial.to(y_type).to(tl.float32)
    if WIRE != 0:
        rounded = through_wire(rounded, WIRE == 2, GROUP, BLOCK)
    return rounded


@triton.jit
def locate_item(item, adds, lag, S: tl.constexpr, SEND: tl.constexpr, RECEIVE: tl.constexpr):
    """(sends, place): whether an item sends, and its place among its kind. There are `adds` receive
    items and S times as many send items; lag <= adds.

    Example: adds = 3, lag = 2, S = 1, both halves: send 0, send 1; send 2, receive 0; receive 1,
    receive 2.
    """
    if SEND and RECEIVE:
        later = tl.maximum(item - lag * S, 0)
        mixed = (adds - lag) * (S + 1)
        lane = later % (S + 1)
        turn = later // (S + 1)
        ahead = item < lag * S
        last = later >= mixed
        sends = ahead | ((lane < S) & (last == 0))
        place = tl.where(
            ahead, item,
            tl.where(last, adds - lag + later - mixed,
                     tl.where(lane < S, (lag + turn) * S + lane, turn)),
        )  # fmt: skip
    else:
        sends = item >= 0 if SEND else item < 0
        place = item
    return sends, place


@triton.jit(
    do_not_specialize=[
        "rank", "num_rows", "bucket", "channel", "dispatch_channel", "lag", "num_items",
        "timeout_ns",
    ]
)  # fmt: skip
def _combine_kernel(
    y_ptr, bias_ptr, out_ptr, put_ptr, rows_offset, scales_offset, num_rows, lag, num_items,
    order_ptr, order_weights_ptr, order_count_ptr, fold_rank_ptr, fold_count_ptr, alive_ptr,
    peers_ptr, partials_ptr, partial_scales_ptr, flags_offset, flags_ptr, state_ptr, status_ptr,
    channel, dispatch_channel, rank, bucket, timeout_ns,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, R: tl.constexpr, RP: tl.constexpr,
    UNROLL: tl.constexpr, FOLD_UNROLL: tl.constexpr, BLOCK: tl.constexpr, WIRE: tl.constexpr,
    GROUP: tl.constexpr, VALUE_BYTES: tl.constexpr, ROWS_LAYOUT: tl.constexpr,
    APPLIED: tl.constexpr, ROW_ALIGN: tl.constexpr, HAS_BIAS: tl.constexpr,
    NUM_CHANNELS: tl.constexpr, CHANNELS_P: tl.constexpr, RELEASE: tl.constexpr,
    SEND: tl.constexpr, RECEIVE: tl.constexpr, POLL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """put_ptr: addresses that partial sums go to, peers_ptr's own unless they wait there to be put.
    partials_ptr, partial_scales_ptr: bits. lag, num_items: items. Of the programs, the first tells
    of the call where SEND, and the last waits for all ranks to tell where RECEIVE."""
    program = tl.program_id(0)
    blocks: tl.constexpr = (H + BLOCK - 1) // BLOCK
    S: tl.constexpr = R - 1
    # Of more than two ranks as many as a token has choices: most rows have a choice on each.
    AHEAD: tl.constexpr = (R > 2) and (R <= K)
    y_type: tl.constexpr = y_ptr.dtype.element_ty
    first = 0
    workers = tl.num_programs(0)
    if SEND:
        first = 1
        workers -= 1
        if program == 0:
            if RELEASE:
                release(
                    release_target(peers_ptr, alive_ptr, flags_offset, channel, rank, R, RP),
                    state_ptr, channel, 1, 0, is_usable(status_ptr), NUM_CHANNELS, RP,
                )  # fmt: skip
            settle(state_ptr, dispatch_channel, 2, 2, NUM_CHANNELS)
    if RECEIVE:
        workers -= 1
        if program == tl.num_programs(0) - 1:
            wait(
                flags_ptr, alive_ptr, state_ptr, status_ptr, channel, wanted(state_ptr, channel, 1),
                rank, timeout_ns, NUM_CHANNELS, CHANNELS_P, R, RP, POLL, INTERPRET,
            )  # fmt: skip
    if (program >= first) & (program < first + workers):
        for item in range(program - first, num_items, workers):
            sends, place = locate_item(item, bucket * blocks, lag, S, SEND, RECEIVE)
            if SEND and R > 1:
                if sends:
                    usable = is_usable(status_ptr)
                    block = place // S % blocks
                    token = place // (S * blocks)
                    # Each rank starts with its right neighbour.
                    peer = (rank + 1 + place % S) % R
                    row = peer.to(tl.int64) * bucket + token
                    target = rank.to(tl.int64) * bucket + token
                    column = block * BLOCK + tl.arange(0, BLOCK)
                    base = tl.load(put_ptr + peer)
                    # No row of a masked rank has a choice here, so nothing is put to one.
                    count = tl.load(order_count_ptr + row)
                    if AHEAD or R <= 4:
                        # Most rows have a choice here: what they need is asked for at once.
                        read = count > 0
                        if AHEAD:
                            # With it what else decides whether the sum is put, which the compiler
                            # would look up behind the sum.
                            read = read & (usable != 0) & (base != 0)
                        partial = _expert_sum(
                            y_ptr, order_ptr, order_weights_ptr, row, count, column,
                            (column < H) & read, H, K, BLOCK, ROWS_LAYOUT, APPLIED, UNROLL,
                        )  # fmt: skip
                        put_partial(
                            partial, read & (usable != 0), block, y_type, base, rows_offset,
                            scales_offset, target, H, G, BLOCK, WIRE, GROUP, VALUE_BYTES, ROW_ALIGN,
                        )  # fmt: skip
                    elif count > 0:
                        partial = _expert_sum(
                            y_ptr, order_ptr, order_weights_ptr, row, count, column, column < H, H,
                            K, BLOCK, ROWS_LAYOUT, APPLIED, UNROLL,
                        )  # fmt: skip
                        put_partial(
                            partial, usable != 0, block, y_type, base, rows_offset, scales_offset,
                            target, H, G, BLOCK, WIRE, GROUP, VALUE_BYTES, ROW_ALIGN,
                        )  # fmt: skip
            if RECEIVE:
                token = place // blocks
                if (sends == 0) & (token < num_rows):
                    block = place % blocks
                    column = block * BLOCK + tl.arange(0, BLOCK)
                    in_row = column < H
                    row = rank.to(tl.int64) * bucket + token
                    own = _expert_sum(
                        y_ptr, order_ptr, order_weights_ptr, row, tl.load(order_count_ptr + row),
                        column, in_row, H, K, BLOCK, ROWS_LAYOUT, APPLIED, UNROLL,
                    )  # fmt: skip
                    own = _round_to_wire(own, y_type, WIRE, GROUP, BLOCK)
                    acc = tl.zeros([BLOCK], tl.float32)
                    at = token.to(tl.int64) * H + column
                    if HAS_BIAS:
                        acc = tl.load(bias_ptr + at, mask=in_row, other=0.0)
                    acc, lost = fold_returned(
                        acc, own, partials_ptr, partial_scales_ptr, fold_rank_ptr,
                        tl.load(fold_count_ptr + token), token, rank, bucket, column, block,
                        flags_ptr, state_ptr, status_ptr, channel, timeout_ns, y_type, H, G, K, R,
                        BLOCK, WIRE, GROUP, FOLD_UNROLL, NUM_CHANNELS, CHANNELS_P, POLL, INTERPRET,
                    )  # fmt: skip
                    acc = tl.where(lost == 0, acc, float("nan"))
                    tl.store(out_ptr + at, acc.to(y_type), mask=in_row)
