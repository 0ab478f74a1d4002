"""Rows of a dispatch that tell of themselves, for few tokens: no fence stands between the stores of
a row and what tells of it, which would take longer than all of its way.

Legend: R ranks, B the bucket, H hidden, G scale groups; a row is put in blocks of BLOCK columns.
Received: arriving rows [R, B, H] and their scales [R, B, G], which hold all ones (EMPTY) between
calls; words, int64 [R, B, blocks], tagged with the number of the call (moe_comm.kernels.signal).
Entry (source, token) is written by that source alone, except that the receiver empties it again.

A source tells every rank of every block: NOT_HERE; ARRIVING, where it has put it among the arriving
rows, and the receiver waits until no element of it is EMPTY, and copies it to where rows belong; or
PUT, for a block with an element of all ones, a NaN: that one it has put where rows belong, and
ordered the word behind it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_comm.kernels.returned_rows import EMPTY
from moe_comm.kernels.signal import (
    high_half,
    is_fatal,
    lose_patience,
    low_half,
    read_words,
    tagged,
)

# Up to this many tokens of a rank, and ranks, rows tell of themselves.
TOLD_TOKENS = 256
TOLD_RANKS = 8
# Programs that take rows, at most: while they wait they keep other work off their multiprocessors.
TAKERS = 128
_TAKERS = tl.constexpr(TAKERS)
# What a word's low half says.
NOT_HERE = tl.constexpr(0)
ARRIVING = tl.constexpr(1)
PUT = tl.constexpr(2)


@triton.jit
def _bits(values):
    """Values as whole numbers of their size."""
    if values.dtype.primitive_bitwidth == 8:
        bits = values.to(tl.int8, bitcast=True)
    elif values.dtype.primitive_bitwidth == 16:
        bits = values.to(tl.int16, bitcast=True)
    else:
        bits = values.to(tl.int32, bitcast=True)
    return bits


@triton.jit
def has_empty(values, mask):
    """1 where one of the values, where `mask`, is all ones."""
    return tl.max((mask & (_bits(values) == EMPTY)).to(tl.int32), 0)


@triton.jit
def tell_row(
    token, block, usable, call, to_rank, plain, alive_ptr, peers_ptr, told_offset, rank, bucket,
    H: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr, RP: tl.constexpr,
):  # fmt: skip
    """Tell every other rank of a block that this program has put: `plain`, where it is among the
    rows themselves. to_rank: ranks of the token's choices, [1, KP]."""
    ranks = tl.arange(0, RP)
    others = (ranks < R) & (ranks != rank)
    others = others & (tl.load(alive_ptr + ranks, mask=ranks < R, other=0) != 0) & (usable != 0)
    base = tl.load(peers_ptr + ranks, mask=others, other=0)
    here = tl.max((tl.trans(to_rank) == ranks[None, :]).to(tl.int32), 0)
    said = tl.where(here > 0, tl.where(plain > 0, PUT, ARRIVING), NOT_HERE)
    blocks: tl.constexpr = (H + BLOCK - 1) // BLOCK
    at = ((rank.to(tl.int64) * bucket + token) * blocks + block) * 8
    words_ptr = (base + told_offset + at).to(tl.pointer_type(tl.int64))
    if plain > 0:
        tl.debug_barrier()
        tl.atomic_xchg(words_ptr, tagged(call, said), mask=others, sem="release", scope="sys")
    else:
        tl.store(words_ptr, tagged(call, said), mask=others)


@triton.jit
def _look(
    call, word_ptr, awaited, arriving_ptr, scales_ptr, in_row, in_scales, WIRE: tl.constexpr,
    POLL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """A block's values, its scales, what has been said of it, and whether something is missing."""
    lane = tl.arange(0, POLL)
    word = tl.sum(read_words(word_ptr + lane * 0, awaited & (lane < 1), INTERPRET), 0)
    values = tl.load(arriving_ptr, mask=in_row & awaited, other=0, volatile=True)
    missing = tl.max((in_row & (values == EMPTY)).to(tl.int32), 0)
    scales = values
    if WIRE != 0:
        scales = tl.load(scales_ptr, mask=in_scales & awaited, other=0, volatile=True)
        missing = tl.maximum(missing, tl.max((in_scales & (scales == EMPTY)).to(tl.int32), 0))
    said = low_half(word)
    late = (high_half(word) != call).to(tl.int32)
    missing = tl.where(awaited, tl.where(said == ARRIVING, missing, 0) | late, 0)
    return values, scales, said, missing


@triton.jit
def num_takers(bucket, H: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr):
    """Programs of take_rows."""
    return tl.minimum((R - 1) * bucket * ((H + BLOCK - 1) // BLOCK), _TAKERS)


@triton.jit
def take_rows(
    program, call, arriving_ptr, arriving_scales_ptr, told_ptr, rows_ptr, scales_ptr, alive_ptr,
    flags_ptr, status_ptr, channel, rank, timeout_ns, bucket, H: tl.constexpr, G: tl.constexpr,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, WIRE: tl.constexpr, R: tl.constexpr,
    NUM_CHANNELS: tl.constexpr, CHANNELS_P: tl.constexpr, POLL: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """One program's blocks of the (R - 1) * B rows of other ranks, whose memory is empty again
    afterwards. Waits for each at most timeout_ns. Pointers of values and scales are of whole
    numbers of their size."""
    blocks: tl.constexpr = (H + BLOCK - 1) // BLOCK
    for item in range(program, (R - 1) * bucket * blocks, num_takers(bucket, H, BLOCK, R)):
        _take_block(
            item, call, arriving_ptr, arriving_scales_ptr, told_ptr, rows_ptr, scales_ptr,
            alive_ptr, flags_ptr, status_ptr, channel, rank, timeout_ns, bucket, H, G, BLOCK,
            GROUP, WIRE, R, NUM_CHANNELS, CHANNELS_P, POLL, INTERPRET,
        )  # fmt: skip


@triton.jit
def _take_block(
    number, call, arriving_ptr, arriving_scales_ptr, told_ptr, rows_ptr, scales_ptr, alive_ptr,
    flags_ptr, status_ptr, channel, rank, timeout_ns, bucket, H: tl.constexpr, G: tl.constexpr,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, WIRE: tl.constexpr, R: tl.constexpr,
    NUM_CHANNELS: tl.constexpr, CHANNELS_P: tl.constexpr, POLL: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """One of take_rows' blocks."""
    blocks: tl.constexpr = (H + BLOCK - 1) // BLOCK
    # The interpreter's loops count in ints.
    number = tl.full((), 0, tl.int32) + number
    item = number % (bucket * blocks)
    # A rank's left neighbour puts to it first.
    source = (rank + R - 1 - number // (bucket * blocks)) % R
    token = item // blocks
    block = item % blocks
    row = source.to(tl.int64) * bucket + token
    awaited = tl.load(alive_ptr + source) != 0
    # An element a thread at least: what others write is read.
    LANES: tl.constexpr = BLOCK if BLOCK > POLL else POLL
    lane = tl.arange(0, LANES)
    column = block * BLOCK + lane
    in_row = (lane < BLOCK) & (column < H)
    per_block: tl.constexpr = BLOCK // GROUP
    GROUPS: tl.constexpr = per_block if per_block > POLL else POLL
    lane = tl.arange(0, GROUPS)
    group = block * per_block + lane
    in_scales = (lane < per_block) & (group < G)
    values_from = arriving_ptr + row * H + column
    scales_from = arriving_scales_ptr + row * G + group
    word_ptr = told_ptr + row * blocks + block
    values, scales, said, missing = _look(
        call, word_ptr, awaited, values_from, scales_from, in_row, in_scales, WIRE, POLL, INTERPRET
    )
    lost = tl.full((), 0, tl.int32)
    if missing > 0:
        lost += is_fatal(status_ptr, POLL)
    spins = 0
    began = tl.full((), 0, tl.int64)
    while (missing > 0) & (lost == 0):
        values, scales, said, missing = _look(
            call, word_ptr, awaited, values_from, scales_from, in_row, in_scales, WIRE, POLL,
            INTERPRET,
        )  # fmt: skip
        spins += 1
        if missing > 0:
            lost, began = lose_patience(
                spins, began, flags_ptr, status_ptr, channel, call, source, rank, timeout_ns,
                NUM_CHANNELS, CHANNELS_P, R, POLL, INTERPRET,
            )  # fmt: skip
    takes = awaited & (said == ARRIVING) & (lost == 0)
    tl.store(rows_ptr + row * H + column, values, mask=in_row & takes)
    tl.store(values_from, EMPTY, mask=in_row & takes)
    if WIRE != 0:
        tl.store(scales_ptr + row * G + group, scales, mask=in_scales & takes)
        tl.store(scales_from, EMPTY, mask=in_scales & takes)


def taking_programs(num_ranks: int, bucket: int, blocks: int) -> int:
    """The same on the host. blocks: of a row."""
    return min((num_ranks - 1) * bucket * blocks, TAKERS)
