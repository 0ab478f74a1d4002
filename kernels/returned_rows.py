"""Partial sums in symmetric memory that are their own flags: put by one rank, awaited, read and
wiped by another.

Legend: R ranks, B the bucket, H hidden, G scale groups, K choices. Memory of one slot: values
[R * B, H] and scales [R * B, G], row (source, token) written by that source alone.

The memory holds all ones before (EMPTY), which no value put there has (_without_empty), and its
reader writes all ones again when it has them. So a row counts as arrived, element by element, once
it can be read: no fence stands between the stores and what tells of them, and nobody waits for rows
of others. Between calls all of it is empty.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_comm.kernels.quantize import quantize_groups, scale_to_f32
from moe_comm.kernels.signal import is_due, is_fatal, lose_patience, wanted

# Bits of memory without a partial sum.
EMPTY = tl.constexpr(-1)


@triton.jit
def _without_empty(value):
    """The value's bits, and the other NaN in place of EMPTY: of floating-point types all ones are
    one of the NaNs. Of a scale byte they are its only one, but its values are NaN then as well."""
    if value.dtype.primitive_bitwidth == 8:
        bits = value.to(tl.int8, bitcast=True)
        bits = tl.where(bits == EMPTY, 0x7F, bits).to(tl.int8)
    elif value.dtype.primitive_bitwidth == 16:
        bits = value.to(tl.int16, bitcast=True)
        bits = tl.where(bits == EMPTY, 0x7FFF, bits).to(tl.int16)
    else:
        bits = value.to(tl.int32, bitcast=True)
        bits = tl.where(bits == EMPTY, 0x7FFFFFFF, bits).to(tl.int32)
    return bits


@triton.jit
def put_partial(
    partial, writes, block, y_type: tl.constexpr, base, rows_offset, scales_offset, target,
    H: tl.constexpr, G: tl.constexpr, BLOCK: tl.constexpr, WIRE: tl.constexpr, GROUP: tl.constexpr,
    VALUE_BYTES: tl.constexpr, ROW_ALIGN: tl.constexpr,
):  # fmt: skip
    """A partial sum to row `target` of the memory at `base`, where `writes`."""
    column = block * BLOCK + tl.arange(0, BLOCK)
    rounded = partial.to(y_type)
    if WIRE != 0:
        values, scale = quantize_groups(rounded.to(tl.float32), WIRE == 2, GROUP, BLOCK)
        bits = _without_empty(values)
        scales = _without_empty(scale)
        group = block * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
        at = base + scales_offset + target * (G * scales.dtype.primitive_bitwidth // 8)
        scales_ptr = at.to(tl.pointer_type(scales.dtype))
        tl.store(scales_ptr + group, scales, mask=(group < G) & writes)
    else:
        bits = _without_empty(rounded)
    at = base + rows_offset + target * (H * VALUE_BYTES)
    # Rows are aligned, which a loaded address does not show to the compiler.
    rows_ptr = tl.multiple_of(at.to(tl.pointer_type(bits.dtype)), ROW_ALIGN)
    tl.store(rows_ptr + column, bits, mask=(column < H) & writes)


@triton.jit
def _read_partial(
    partials_ptr, scales_ptr, source, bucket, token, column, block, H: tl.constexpr,
    G: tl.constexpr, BLOCK: tl.constexpr, WIRE: tl.constexpr, GROUP: tl.constexpr,
    POLL: tl.constexpr,
):  # fmt: skip
    """Bits [BLOCK] of what rank `source` sent of a token; and of its scales, again and again
    [POLL], so that every thread has its own and all are judged. 0 where it is -1. Past every cache
    of this multiprocessor."""
    row = source.to(tl.int64) * bucket + token
    awaited = source >= 0
    mask = (column < H) & awaited
    values = tl.load(partials_ptr + row * H + column, mask=mask, other=0, volatile=True)
    scales = values
    if WIRE != 0:
        group = block * (BLOCK // GROUP) + tl.arange(0, POLL) % (BLOCK // GROUP)
        mask = (group < G) & awaited
        scales = tl.load(scales_ptr + row * G + group, mask=mask, other=0, volatile=True)
    return values, scales


@triton.jit
def _read_partials(
    sources, partials_ptr, scales_ptr, bucket, token, column, block, H: tl.constexpr,
    G: tl.constexpr, BLOCK: tl.constexpr, WIRE: tl.constexpr, GROUP: tl.constexpr,
    COUNT: tl.constexpr, POLL: tl.constexpr,
):  # fmt: skip
    """_read_partial of COUNT sources, a tuple, -1 for none; and whether some of them is not here
    yet. All are asked for before the first is looked at: what a program's threads have to agree on
    keeps later reads back."""
    values = ()
    scales = ()
    for step in tl.static_range(COUNT):
        some, more = _read_partial(
            partials_ptr, scales_ptr, sources[step], bucket, token, column, block, H, G, BLOCK,
            WIRE, GROUP, POLL,
        )  # fmt: skip
        values = values + (some,)  # type: ignore[assignment]
        scales = scales + (more,)  # type: ignore[assignment]
    values_late = values[0] == EMPTY  # type: ignore[misc]
    scales_late = scales[0] == EMPTY  # type: ignore[misc]
    for step in tl.static_range(1, COUNT):
        values_late = values_late | (values[step] == EMPTY)
        scales_late = scales_late | (scales[step] == EMPTY)
    missing = tl.max(values_late.to(tl.int32), 0)
    if WIRE != 0:
        missing = tl.maximum(missing, tl.max(scales_late.to(tl.int32), 0))
    return values, scales, missing


@triton.jit
def _first_late(sources, values, scales, WIRE: tl.constexpr, R: tl.constexpr, COUNT: tl.constexpr):
    """The lowest rank of `sources` of which something is not here yet, given that there is one."""
    if COUNT == 1:
        first = sources[0]
    else:
        late = tl.where(values[0] == EMPTY, sources[0], R)
        late_scales = tl.where(scales[0] == EMPTY, sources[0], R)
        for step in tl.static_range(1, COUNT):
            late = tl.minimum(late, tl.where(values[step] == EMPTY, sources[step], R))
            late_scales = tl.minimum(late_scales, tl.where(scales[step] == EMPTY, sources[step], R))
        first = tl.min(late, 0)
        if WIRE != 0:
            first = tl.minimum(first, tl.min(late_scales, 0))
    return first


@triton.jit
def _take_partial(
    values, scales, partials_ptr, scales_ptr, source, bucket, token, column, block, awaited,
    y_type: tl.constexpr, H: tl.constexpr, G: tl.constexpr, BLOCK: tl.constexpr,
    WIRE: tl.constexpr, GROUP: tl.constexpr, POLL: tl.constexpr,
):  # fmt: skip
    """fp32 [BLOCK] of bits that were read, -0 where not `awaited`, which changes no number. Their
    memory is empty again."""
    row = source.to(tl.int64) * bucket + token
    mask = (column < H) & awaited
    tl.store(partials_ptr + row * H + column, EMPTY, mask=mask)
    if WIRE != 0:
        groups: tl.constexpr = BLOCK // GROUP
        group = block * groups + tl.arange(0, groups)
        tl.store(scales_ptr + row * G + group, EMPTY, mask=(group < G) & awaited)
        # What each thread read is the same once all is here.
        once = tl.max(scales.reshape(POLL // groups, groups), 0).to(scales.dtype)
        scale_type: tl.constexpr = tl.uint8 if WIRE == 2 else tl.float32
        factor = scale_to_f32(once.to(scale_type, bitcast=True), WIRE == 2)
        wide = values.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        value = (wide.reshape(groups, GROUP) * factor[:, None]).reshape(BLOCK)
    else:
        value = values.to(y_type, bitcast=True).to(tl.float32)
    return tl.where(mask, value, -0.0)


@triton.jit
def _await_partials(
    sources, partials_ptr, scales_ptr, bucket, token, column, block, flags_ptr, state_ptr,
    status_ptr, channel, rank, timeout_ns,
    H: tl.constexpr, G: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, WIRE: tl.constexpr,
    GROUP: tl.constexpr, COUNT: tl.constexpr, NUM_CHANNELS: tl.constexpr,
    CHANNELS_P: tl.constexpr, POLL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """_read_partials again and again until all is here, at most timeout_ns. The last is whether it
    is not, after a timeout, a phase error or where the status word held either before."""
    values, scales, missing = _read_partials(
        sources, partials_ptr, scales_ptr, bucket, token, column, block, H, G, BLOCK, WIRE, GROUP,
        COUNT, POLL,
    )  # fmt: skip
    lost = tl.full((), 0, tl.int32)
    if missing > 0:
        lost += is_fatal(status_ptr, POLL)
    spins = 0
    start = tl.full((), 0, tl.int64)
    while (missing > 0) & (lost == 0):
        values, scales, missing = _read_partials(
            sources, partials_ptr, scales_ptr, bucket, token, column, block, H, G, BLOCK, WIRE,
            GROUP, COUNT, POLL,
        )  # fmt: skip
        spins += 1
        if (missing > 0) & is_due(spins, INTERPRET):
            lost, start = lose_patience(
                spins, start, flags_ptr, status_ptr, channel, wanted(state_ptr, channel, 1),
                _first_late(sources, values, scales, WIRE, R, COUNT), rank, timeout_ns,
                NUM_CHANNELS, CHANNELS_P, R, POLL, INTERPRET,
            )  # fmt: skip
    return values, scales, lost


@triton.jit
def fold_returned(
    acc, own, partials_ptr, scales_ptr, fold_rank_ptr, count, token, rank, bucket, column, block,
    flags_ptr, state_ptr, status_ptr, channel, timeout_ns, y_type: tl.constexpr,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
    WIRE: tl.constexpr, GROUP: tl.constexpr, UNROLL: tl.constexpr, NUM_CHANNELS: tl.constexpr,
    CHANNELS_P: tl.constexpr, POLL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """acc plus the partial sums of the token's `count` ranks in fold_rank's order; `own` is this
    rank's, the others' are at partials_ptr + (source * bucket + token) * H. And whether one of
    them was lost."""
    lost = tl.full((), 0, tl.int32)
    if (R == 2) & (K >= 2):
        first = tl.load(fold_rank_ptr + token * K)
        second = tl.load(fold_rank_ptr + token * K + 1)
        awaited = ((count > 0) & (first != rank)) | (count > 1)
        source = tl.where(awaited, 1 - rank, -1)
        values, scales, lost = _await_partials(
            (source,), partials_ptr, scales_ptr, bucket, token, column, block, flags_ptr,
            state_ptr, status_ptr, channel, rank, timeout_ns, H, G, R, BLOCK, WIRE, GROUP, 1,
            NUM_CHANNELS, CHANNELS_P, POLL, INTERPRET,
        )  # fmt: skip
        other = _take_partial(
            values[0], scales[0], partials_ptr, scales_ptr, source, bucket, token, column, block,
            awaited, y_type, H, G, BLOCK, WIRE, GROUP, POLL,
        )  # fmt: skip
        acc = acc + tl.where(count > 0, tl.where(first == rank, own, other), -0.0)
        acc = acc + tl.where(count > 1, tl.where(second == rank, own, other), -0.0)
    else:
        for start in range(0, count, UNROLL):
            sources = ()
            for step in tl.static_range(UNROLL):
                source = _fold_source(fold_rank_ptr, token, start + step, count, rank, K)
                sources = sources + (source,)  # type: ignore[assignment]
            values, scales, gone = _await_partials(
                sources, partials_ptr, scales_ptr, bucket, token, column, block, flags_ptr,
                state_ptr, status_ptr, channel, rank, timeout_ns, H, G, R, BLOCK, WIRE, GROUP,
                UNROLL, NUM_CHANNELS, CHANNELS_P, POLL, INTERPRET,
            )  # fmt: skip
            lost += gone
            for step in tl.static_range(UNROLL):
                value = _take_partial(
                    values[step], scales[step], partials_ptr, scales_ptr, sources[step], bucket,
                    token, column, block, sources[step] >= 0, y_type, H, G, BLOCK, WIRE, GROUP,
                    POLL,
                )  # fmt: skip
                mine = (start + step < count) & (sources[step] < 0)
                acc = acc + tl.where(mine, own, value)
    return acc, lost


@triton.jit
def _fold_source(fold_rank_ptr, token, place, count, rank, K: tl.constexpr):
    """The rank whose row is the place-th to be added; -1 for this rank, and past the count."""
    inside = place < count
    source = tl.load(fold_rank_ptr + token * K + place, mask=inside, other=-1)
    return tl.where(source == rank, -1, source)
