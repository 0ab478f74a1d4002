"""Combine: weighted fp32 sums of expert rows, one row back per (token, rank), and the final sum.

Legend: T tokens here, R ranks, B the bucket, H hidden, G scale groups, K choices, N expert rows.
The order of additions is the numeric contract's (moe_comm.backends.reference).

Programs 0 .. send_programs - 1 sum and put the rows that belong to other ranks, chunk after chunk
of tokens, and release each chunk: each program its part (DIRECT), or the last to arrive all of it.
The programs after them sum this rank's own rows (which never leave registers), wait for the others'
and add. So reading, transfer and final sum overlap, and putting programs, first in the grid, wait
for nobody.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_comm.kernels.quantize import quantize_groups, scale_to_f32, through_wire
from moe_comm.kernels.signal import (
    arrive,
    is_fatal,
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
    """fp32 [BLOCK]: fma of the row's `count` choices here, k ascending, rounded at each step. They
    lie without gaps (Order of expert_index), and UNROLL loads are in flight. What is past the count
    adds -0, which changes no number."""
    acc = tl.zeros([BLOCK], tl.float32)
    for first in range(0, count, UNROLL):
        for step in tl.static_range(UNROLL):
            at = row * K + first + step
            inside = first + step < count
            position = tl.load(order_ptr + at, mask=inside, other=-1)
            here = position >= 0
            value = tl.load(
                y_ptr + position.to(tl.int64) * H + column, mask=in_row & here, other=-0.0
            ).to(tl.float32)
            if APPLIED:
                acc = acc + value
            else:
                weight = tl.load(order_weights_ptr + at, mask=here, other=1.0)
                acc = tl.fma(value, tl.zeros([BLOCK], tl.float32) + weight, acc)
    return acc


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


@triton.jit(
    do_not_specialize=[
        "rank", "num_rows", "bucket", "channel", "dispatch_channel", "first_chunk", "num_chunks",
        "send_programs", "releases", "timeout_ns",
    ]
)  # fmt: skip
def _combine_kernel(
    y_ptr, order_ptr, order_weights_ptr, order_count_ptr, fold_rank_ptr, fold_count_ptr,
    bias_ptr, out_ptr, alive_ptr, peers_ptr, put_ptr, partials_ptr, partial_scales_ptr, rows_offset,
    scales_offset, flags_offset, flags_ptr, state_ptr, status_ptr, channel,
    dispatch_channel, rank, bucket, num_rows, first_chunk, num_chunks, send_programs,
    releases, timeout_ns,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, R: tl.constexpr, RP: tl.constexpr,
    UNROLL: tl.constexpr, FOLD_UNROLL: tl.constexpr, BLOCK: tl.constexpr, WIRE: tl.constexpr,
    GROUP: tl.constexpr, VALUE_BYTES: tl.constexpr, ROWS_LAYOUT: tl.constexpr,
    APPLIED: tl.constexpr, ROW_ALIGN: tl.constexpr, HAS_BIAS: tl.constexpr,
    CHUNKS: tl.constexpr, NUM_CHANNELS: tl.constexpr, CHANNELS_P: tl.constexpr,
    ANNOUNCE: tl.constexpr, RELEASE_AFTER: tl.constexpr, DIRECT: tl.constexpr, SEND: tl.constexpr,
    RECEIVE: tl.constexpr, WAIT: tl.constexpr, POLL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    # put_ptr: addresses that partial sums go to, peers_ptr's own unless they wait there for copies.
    program = tl.program_id(0)
    blocks: tl.constexpr = (H + BLOCK - 1) // BLOCK
    y_type: tl.constexpr = y_ptr.dtype.element_ty
    chunk_tokens = (bucket + CHUNKS - 1) // CHUNKS
    if SEND:
        if program < send_programs:
            usable = is_usable(status_ptr)
            if ANNOUNCE:
                # That this call was issued; copies tell later what has arrived.
                if program == 0:
                    release(
                        release_target(
                            peers_ptr, alive_ptr, flags_offset, channel, rank, R, RP
                        ),
                        state_ptr, channel, 1, 0, usable, NUM_CHANNELS, RP,
                    )  # fmt: skip
            for chunk in range(first_chunk, first_chunk + num_chunks):
                if RELEASE_AFTER:
                    target = release_target(
                        peers_ptr, alive_ptr, flags_offset, channel + chunk, rank, R, RP
                    )
                begin = tl.minimum(chunk * chunk_tokens, bucket)
                size = tl.minimum(bucket - begin, chunk_tokens)
                for item in range(program, size * (R - 1) * blocks, send_programs):
                    block = item % blocks
                    token = begin + item // (blocks * (R - 1))
                    # Each rank starts with its right neighbour.
                    peer = (rank + 1 + (item // blocks) % (R - 1)) % R
                    row = peer.to(tl.int64) * bucket + token
                    # No row of a masked rank has a choice here, so nothing is put to one.
                    choices = tl.load(order_count_ptr + row)
                    if choices > 0:
                        _put_partial(
                            y_ptr, order_ptr, order_weights_ptr, row, choices, usable, block,
                            y_type, tl.load(put_ptr + peer), rows_offset, scales_offset,
                            rank.to(tl.int64) * bucket + token, H, G, K, BLOCK, WIRE, GROUP,
                            VALUE_BYTES, ROWS_LAYOUT, APPLIED, ROW_ALIGN, UNROLL,
                        )  # fmt: skip
                if RELEASE_AFTER:
                    if DIRECT:
                        release(
                            target, state_ptr, channel + chunk, releases, 0, usable, NUM_CHANNELS,
                            RP,
                        )  # fmt: skip
                    elif arrive(state_ptr, channel + chunk, NUM_CHANNELS) == send_programs - 1:
                        reset_arrivals(state_ptr, channel + chunk, NUM_CHANNELS)
                        release(
                            target, state_ptr, channel + chunk, releases, 0, usable, NUM_CHANNELS,
                            RP,
                        )  # fmt: skip
            if program == 0:
                settle(state_ptr, dispatch_channel, 2, 2, NUM_CHANNELS)
    if RECEIVE:
        if program >= send_programs:
            receiver = program - send_programs
            receivers = tl.num_programs(0) - send_programs
            for chunk in range(first_chunk, first_chunk + num_chunks):
                want = wanted(state_ptr, channel + chunk, releases)
                begin = tl.minimum(chunk * chunk_tokens, bucket)
                size = tl.minimum(tl.maximum(num_rows - begin, 0), chunk_tokens)
                arrived = 1
                if WAIT:
                    # Someone has to wait even where this rank has no tokens: the slot is free only
                    # when every rank has sent.
                    if (receiver == 0) & (size * blocks == 0):
                        arrived = wait(
                            flags_ptr, alive_ptr, state_ptr, status_ptr, channel + chunk, want,
                            rank, timeout_ns, NUM_CHANNELS, CHANNELS_P, R, RP, POLL, INTERPRET,
                        )  # fmt: skip
                else:
                    # An earlier launch has waited.
                    arrived = 1 - is_fatal(status_ptr, POLL)
                waited = 0
                for item in range(receiver, size * blocks, receivers):
                    block = item % blocks
                    token = begin + item // blocks
                    column = block * BLOCK + tl.arange(0, BLOCK)
                    in_row = column < H
                    row = rank.to(tl.int64) * bucket + token
                    if ROWS_LAYOUT:
                        own = tl.load(y_ptr + row * H + column, mask=in_row, other=0.0).to(
                            tl.float32
                        )
                    else:
                        own = ordered_sum(
                            y_ptr, order_ptr, order_weights_ptr, row,
                            tl.load(order_count_ptr + row), column, in_row, H, K, BLOCK, APPLIED,
                            UNROLL,
                        )  # fmt: skip
                    own = _round_to_wire(own, y_type, WIRE, GROUP, BLOCK)
                    if WAIT:
                        if waited == 0:
                            waited = 1
                            arrived = wait(
                                flags_ptr, alive_ptr, state_ptr, status_ptr, channel + chunk, want,
                                rank, timeout_ns, NUM_CHANNELS, CHANNELS_P, R, RP, POLL, INTERPRET,
                            )  # fmt: skip
                    acc = tl.zeros([BLOCK], tl.float32)
                    if HAS_BIAS:
                        acc = tl.load(
                            bias_ptr + token.to(tl.int64) * H + column, mask=in_row, other=0.0
                        )
                    acc = ordered_fold(
                        acc, own, partials_ptr, partial_scales_ptr, fold_rank_ptr,
                        tl.load(fold_count_ptr + token), token, rank, bucket, column, block, H, G,
                        K, R, BLOCK, WIRE, GROUP, FOLD_UNROLL,
                    )  # fmt: skip
                    acc = tl.where(arrived != 0, acc, float("nan"))
                    tl.store(out_ptr + token.to(tl.int64) * H + column, acc.to(y_type), mask=in_row)


@triton.jit
def _put_partial(
    y_ptr, order_ptr, order_weights_ptr, row, choices, usable, block, y_type: tl.constexpr, base,
    rows_offset,
    scales_offset, target, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
    WIRE: tl.constexpr, GROUP: tl.constexpr, VALUE_BYTES: tl.constexpr, ROWS_LAYOUT: tl.constexpr,
    APPLIED: tl.constexpr, ROW_ALIGN: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """The partial sum of received row `row` to row `target` of the memory at `base`."""
    column = block * BLOCK + tl.arange(0, BLOCK)
    in_row = column < H
    if ROWS_LAYOUT:
        partial = tl.load(y_ptr + row * H + column, mask=in_row, other=0.0).to(tl.float32)
    else:
        partial = ordered_sum(
            y_ptr, order_ptr, order_weights_ptr, row, choices, column, in_row, H, K, BLOCK,
            APPLIED, UNROLL,
        )  # fmt: skip
    rounded = partial.to(y_type)
    writes = usable != 0
    at = base + rows_offset + target * (H * VALUE_BYTES)
    if WIRE != 0:
        values, scale = quantize_groups(rounded.to(tl.float32), WIRE == 2, GROUP, BLOCK)
        rows_ptr = tl.multiple_of(at.to(tl.pointer_type(values.dtype)), ROW_ALIGN)
        tl.store(rows_ptr + column, values, mask=in_row & writes)
        group = block * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
        at_g = base + scales_offset + target * (G * scale.dtype.primitive_bitwidth // 8)
        scales_ptr = at_g.to(tl.pointer_type(scale.dtype))
        tl.store(scales_ptr + group, scale, mask=(group < G) & writes)
    else:
        # Rows are aligned, which a loaded address does not show to the compiler.
        rows_ptr = tl.multiple_of(at.to(tl.pointer_type(y_type)), ROW_ALIGN)
        tl.store(rows_ptr + column, rounded, mask=in_row & writes)
