"""Combine: weighted fp32 sums of expert rows, one row back per (token, rank), and the final sum.

Legend: T tokens here, R ranks, B the bucket, H hidden, G scale groups, K choices, N expert rows.
The order of additions is the numeric contract's (moe_comm.backends.reference).

The work is cut into items, a column block of a row each: a send item sums a row that belongs to
another rank and puts it there; a receive item sums this rank's own row (which never leaves
registers), waits for the others' and adds. Tokens are cut into chunks, and the receive items of a
chunk come, one by one, between the send items of the chunk after it. So loads of expert rows,
stores to peers and waiting overlap all the way, and no chunk waits for what was put last.

A program takes the items program, program + programs, ... Before an item that waits come, in the
grid of every rank, the items that it waits for; so nothing stands still as long as all programs run
at once or each takes one item alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_comm.kernels.quantize import quantize_groups, scale_to_f32, through_wire
from moe_comm.kernels.signal import (
    arrive,
    is_usable,
    release,
    release_target,
    reset_arrivals,
    settle,
    wait,
    wanted,
)


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
def _load_partial(
    partials_ptr, scales_ptr, source, bucket, token, column, wanted_here, block, H: tl.constexpr,
    G: tl.constexpr, BLOCK: tl.constexpr, WIRE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """fp32 [BLOCK]: what rank `source` sent of a token; -0 where not wanted, which changes no
    number."""
    row = source.to(tl.int64) * bucket + token
    value = tl.load(
        partials_ptr + row * H + column, mask=(column < H) & wanted_here, other=-0.0
    ).to(tl.float32)
    if WIRE != 0:
        group = block * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
        scale = tl.load(scales_ptr + row * G + group, mask=(group < G) & wanted_here, other=0)
        factor = scale_to_f32(scale, WIRE == 2)
        value = (value.reshape(BLOCK // GROUP, GROUP) * factor[:, None]).reshape(BLOCK)
    return value


@triton.jit
def ordered_fold(
    acc, own, partials_ptr, scales_ptr, fold_rank_ptr, count, token, rank, bucket, column,
    block, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
    WIRE: tl.constexpr, GROUP: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """acc plus the partial sums of the token's `count` ranks in fold_rank's order; `own` is this
    rank's, the others' are at partials_ptr + (source * bucket + token) * H."""
    if (R == 2) & (K >= 2):
        # The other rank's row is asked for before it is known whether, and in which place, it is
        # added: one trip to memory less.
        other = _load_partial(
            partials_ptr, scales_ptr, 1 - rank, bucket, token, column, True, block, H, G, BLOCK,
            WIRE, GROUP,
        )  # fmt: skip
        for step in tl.static_range(2):
            source = tl.load(fold_rank_ptr + token * K + step)
            value = tl.where(source == rank, own, other)
            acc = acc + tl.where(step < count, value, -0.0)
    else:
        for first in range(0, count, UNROLL):
            for step in tl.static_range(UNROLL):
                inside = first + step < count
                source = tl.load(fold_rank_ptr + token * K + first + step, mask=inside, other=-1)
                value = _load_partial(
                    partials_ptr, scales_ptr, source, bucket, token, column,
                    (source >= 0) & (source != rank), block, H, G, BLOCK, WIRE, GROUP,
                )  # fmt: skip
                acc = acc + tl.where(source == rank, own, value)
    return acc


@triton.jit
def _round_to_wire(partial, y_type: tl.constexpr, WIRE: tl.constexpr, GROUP: tl.constexpr,
                   BLOCK: tl.constexpr):  # fmt: skip
    """What a receiver would read of this rank's own partial sum."""
    rounded = partial.to(y_type).to(tl.float32)
    if WIRE != 0:
        rounded = through_wire(rounded, WIRE == 2, GROUP, BLOCK)
    return rounded


@triton.jit
def _put_partial(
    partial, writes, block, y_type: tl.constexpr, base, rows_offset, scales_offset, target,
    H: tl.constexpr, G: tl.constexpr, BLOCK: tl.constexpr, WIRE: tl.constexpr, GROUP: tl.constexpr,
    VALUE_BYTES: tl.constexpr, ROW_ALIGN: tl.constexpr,
):  # fmt: skip
    """A partial sum to row `target` of the memory at `base`, where `writes`."""
    column = block * BLOCK + tl.arange(0, BLOCK)
    mask = (column < H) & writes
    rounded = partial.to(y_type)
    at = base + rows_offset + target * (H * VALUE_BYTES)
    if WIRE != 0:
        values, scale = quantize_groups(rounded.to(tl.float32), WIRE == 2, GROUP, BLOCK)
        rows_ptr = tl.multiple_of(at.to(tl.pointer_type(values.dtype)), ROW_ALIGN)
        tl.store(rows_ptr + column, values, mask=mask)
        group = block * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
        at_g = base + scales_offset + target * (G * scale.dtype.primitive_bitwidth // 8)
        scales_ptr = at_g.to(tl.pointer_type(scale.dtype))
        tl.store(scales_ptr + group, scale, mask=(group < G) & writes)
    else:
        # Rows are aligned, which a loaded address does not show to the compiler.
        rows_ptr = tl.multiple_of(at.to(tl.pointer_type(y_type)), ROW_ALIGN)
        tl.store(rows_ptr + column, rounded, mask=mask)


@triton.jit
def locate_item(
    item, units, S: tl.constexpr, CHUNKS: tl.constexpr, SEND: tl.constexpr, RECEIVE: tl.constexpr
):
    """(sends, chunk, place in it) of an item. A chunk has `units` rows' column blocks, and as many
    receive items; S times as many send items.

    Example: 2 chunks of 2 units, S = 1, both halves: send items 0, 1 of chunk 0; send 0 of chunk 1,
    receive 0 of chunk 0, send 1 of 1, receive 1 of 0; receive 0, 1 of chunk 1.
    """
    if SEND and RECEIVE:
        later = item - units * S
        stage = tl.where(later < 0, 0, 1 + later // (units * (S + 1)))
        within = tl.where(later < 0, item, later % (units * (S + 1)))
        mixed = (stage > 0) & (stage < CHUNKS)
        lane = tl.where(mixed, within % (S + 1), 0)
        sends = (stage == 0) | (mixed & (lane < S))
        chunk = tl.where(sends, stage, stage - 1)
        place = tl.where(mixed, within // (S + 1) * tl.where(sends, S, 1) + lane * sends, within)
    else:
        size = units * S if SEND else units
        sends = item >= 0 if SEND else item < 0
        chunk = item // size
        place = item % size
    return sends, chunk, place


@triton.jit(
    do_not_specialize=[
        "rank", "num_rows", "bucket", "channel", "dispatch_channel", "chunk_tokens", "num_items",
        "releases", "timeout_ns",
    ]
)  # fmt: skip
def _combine_kernel(
    y_ptr, bias_ptr, out_ptr, put_ptr, rows_offset, scales_offset, num_rows, chunk_tokens,
    num_items, releases,
    order_ptr, order_weights_ptr, order_count_ptr, fold_rank_ptr, fold_count_ptr, alive_ptr,
    peers_ptr, partials_ptr, partial_scales_ptr, flags_offset, flags_ptr, state_ptr, status_ptr,
    channel, dispatch_channel, rank, bucket, timeout_ns,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, R: tl.constexpr, RP: tl.constexpr,
    UNROLL: tl.constexpr, FOLD_UNROLL: tl.constexpr, BLOCK: tl.constexpr, WIRE: tl.constexpr,
    GROUP: tl.constexpr, VALUE_BYTES: tl.constexpr, ROWS_LAYOUT: tl.constexpr,
    APPLIED: tl.constexpr, ROW_ALIGN: tl.constexpr, HAS_BIAS: tl.constexpr,
    CHUNKS: tl.constexpr, NUM_CHANNELS: tl.constexpr, CHANNELS_P: tl.constexpr,
    RELEASE_AFTER: tl.constexpr, DIRECT: tl.constexpr, SEND: tl.constexpr,
    RECEIVE: tl.constexpr, POLL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    # put_ptr: addresses that partial sums go to, peers_ptr's own unless they wait there to be put.
    blocks: tl.constexpr = (H + BLOCK - 1) // BLOCK
    # A single rank sends nothing, but releases: so it needs no rule of its own.
    S: tl.constexpr = R - 1 if R > 1 else 1
    y_type: tl.constexpr = y_ptr.dtype.element_ty
    units = chunk_tokens * blocks
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        sends, chunk, place = locate_item(item, units, S, CHUNKS, SEND, RECEIVE)
        if SEND:
            if sends:
                usable = is_usable(status_ptr)
                target = release_target(
                    peers_ptr, alive_ptr, flags_offset, channel + chunk, rank, R, RP
                )
                block = place // S % blocks
                token = chunk * chunk_tokens + place // (S * blocks)
                # Each rank starts with its right neighbour.
                peer = (rank + 1 + place % S) % R
                row = peer.to(tl.int64) * bucket + token
                column = block * BLOCK + tl.arange(0, BLOCK)
                # No row of a masked rank has a choice here, so nothing is put to one.
                count = tl.load(order_count_ptr + row, mask=(token < bucket) & (R > 1), other=0)
                if R <= 4:
                    # Most rows have a choice here: what they need is asked for at once.
                    partial = _expert_sum(
                        y_ptr, order_ptr, order_weights_ptr, row, count, column,
                        (column < H) & (count > 0), H, K, BLOCK, ROWS_LAYOUT, APPLIED, UNROLL,
                    )  # fmt: skip
                    _put_partial(
                        partial, (count > 0) & (usable != 0), block, y_type,
                        tl.load(put_ptr + peer), rows_offset, scales_offset,
                        rank.to(tl.int64) * bucket + token, H, G, BLOCK, WIRE, GROUP, VALUE_BYTES,
                        ROW_ALIGN,
                    )  # fmt: skip
                elif count > 0:
                    partial = _expert_sum(
                        y_ptr, order_ptr, order_weights_ptr, row, count, column, column < H, H, K,
                        BLOCK, ROWS_LAYOUT, APPLIED, UNROLL,
                    )  # fmt: skip
                    _put_partial(
                        partial, usable != 0, block, y_type, tl.load(put_ptr + peer), rows_offset,
                        scales_offset, rank.to(tl.int64) * bucket + token, H, G, BLOCK, WIRE,
                        GROUP, VALUE_BYTES, ROW_ALIGN,
                    )  # fmt: skip
                if RELEASE_AFTER:
                    if DIRECT:
                        release(
                            target, state_ptr, channel + chunk, releases, 0, usable, NUM_CHANNELS,
                            RP,
                        )  # fmt: skip
                    elif arrive(state_ptr, channel + chunk, NUM_CHANNELS) == units * S - 1:
                        reset_arrivals(state_ptr, channel + chunk, NUM_CHANNELS)
                        release(
                            target, state_ptr, channel + chunk, releases, 0, usable, NUM_CHANNELS,
                            RP,
                        )  # fmt: skip
                if item == 0:
                    settle(state_ptr, dispatch_channel, 2, 2, NUM_CHANNELS)
        if RECEIVE:
            if sends == 0:
                want = wanted(state_ptr, channel + chunk, releases)
                block = place % blocks
                token = chunk * chunk_tokens + place // blocks
                if token < num_rows:
                    column = block * BLOCK + tl.arange(0, BLOCK)
                    in_row = column < H
                    row = rank.to(tl.int64) * bucket + token
                    own = _expert_sum(
                        y_ptr, order_ptr, order_weights_ptr, row, tl.load(order_count_ptr + row),
                        column, in_row, H, K, BLOCK, ROWS_LAYOUT, APPLIED, UNROLL,
                    )  # fmt: skip
                    own = _round_to_wire(own, y_type, WIRE, GROUP, BLOCK)
                    acc = tl.zeros([BLOCK], tl.float32)
                    if HAS_BIAS:
                        acc = tl.load(
                            bias_ptr + token.to(tl.int64) * H + column, mask=in_row, other=0.0
                        )
                    arrived = wait(
                        flags_ptr, alive_ptr, state_ptr, status_ptr, channel + chunk, want, rank,
                        timeout_ns, NUM_CHANNELS, CHANNELS_P, R, RP, POLL, INTERPRET,
                    )  # fmt: skip
                    acc = ordered_fold(
                        acc, own, partials_ptr, partial_scales_ptr, fold_rank_ptr,
                        tl.load(fold_count_ptr + token), token, rank, bucket, column, block, H, G,
                        K, R, BLOCK, WIRE, GROUP, FOLD_UNROLL,
                    )  # fmt: skip
                    acc = tl.where(arrived != 0, acc, float("nan"))
                    tl.store(out_ptr + token.to(tl.int64) * H + column, acc.to(y_type), mask=in_row)
                elif place == 0:
                    # Someone has to wait even where this rank has no tokens: the slot is free only
                    # when every rank has sent.
                    wait(
                        flags_ptr, alive_ptr, state_ptr, status_ptr, channel + chunk, want, rank,
                        timeout_ns, NUM_CHANNELS, CHANNELS_P, R, RP, POLL, INTERPRET,
                    )  # fmt: skip
