"""Rows that wait in memory of this rank, forwarded to ranks whose memory its stores do not reach.

Legend: R ranks, B the bucket. Every rank's block is laid out alike, so a place in a peer's block is
an offset. Dispatch and combine have written what is for peer p to part p of a staging area, at the
place of this rank's rows; a launch of its own forwards it and then writes the peer's flag
(moe_comm.kernels.signal), and the usual wait follows.

Two ways, by the constant NVSHMEM: its device-side puts (any peer), or plain stores to the peer's
address, which is how ranks of one process are tested. NVSHMEM takes an address of this rank's
block for the same place in the peer's, and puts only from memory it knows: the staging area lies
in the block.

Why the order holds: after its puts a program calls quiet, which returns when they have arrived, and
only then counts itself in; the last one to come writes the flag, and calls quiet again, so that no
later launch's flag overtakes it.
"""

from __future__ import annotations

import functools
from typing import Any

import triton
import triton.language as tl
from triton.language import core

from moe_comm.kernels.signal import is_fatal, settle, wanted

# NVSHMEM_SIGNAL_SET of its nvshmem_common_transport.h. (Torch's description of its own wrapper says
# 0, which NVSHMEM takes for another operation.)
SIGNAL_SET = tl.constexpr(9)
# A flag travels behind this many bytes: the call that writes one from a single thread puts data.
PAD_BYTES = 16
COPY_BYTES = tl.constexpr(1024)


@core.extern
def _putmem_block(dest, source, size, pe, _semantic=None):
    """Copy by all threads of the program; `source` may be overwritten once it returns."""
    address = core.dtype("int64")
    return core.extern_elementwise(
        "", "", [dest, source, size, pe],
        {(address, address, core.dtype("int64"), core.dtype("int32")): (
            "nvshmemx_putmem_block", core.dtype("int32"))},
        is_pure=False, _semantic=_semantic,
    )  # fmt: skip


@core.extern
def _putmem_signal_block(dest, source, size, flag, word, operation, pe, _semantic=None):
    """The same, then one thread writes the flag."""
    address, number = core.dtype("int64"), core.dtype("int32")
    return core.extern_elementwise(
        "", "", [dest, source, size, flag, word, operation, pe],
        {(address, address, core.dtype("int64"), address, core.dtype("int64"), number, number): (
            "nvshmemx_putmem_signal_block", number)},
        is_pure=False, _semantic=_semantic,
    )  # fmt: skip


@core.extern
def _quiet(_semantic=None):
    """Return when every put of this program has arrived."""
    return core.extern_elementwise(
        "", "", [], {(): ("nvshmem_quiet", core.dtype("int32"))}, is_pure=False,
        _semantic=_semantic,
    )  # fmt: skip


@triton.jit
def _put(peer, offset, source, size, block, peers_ptr, pes_ptr, NVSHMEM: tl.constexpr):
    """`size` bytes from address `source` to `offset` bytes into the peer's block."""
    if NVSHMEM:
        _putmem_block(block + offset, source, size, tl.load(pes_ptr + peer))
    else:
        target = (tl.load(peers_ptr + peer) + offset).to(tl.pointer_type(tl.uint8))
        from_ptr = source.to(tl.pointer_type(tl.uint8))
        for first in range(0, size, COPY_BYTES):
            i = first + tl.arange(0, COPY_BYTES)
            tl.store(target + i, tl.load(from_ptr + i, mask=i < size), mask=i < size)


@triton.jit
def _put_flag(
    peer, word, offset, block, pads_offset, rank, peers_ptr, pes_ptr, PAD: tl.constexpr,
    NVSHMEM: tl.constexpr,
):  # fmt: skip
    """Write `word` to `offset` bytes into the peer's block, after everything that is ordered before
    it. Returns when it has arrived, so flags of later launches come later."""
    if NVSHMEM:
        pad = block + pads_offset + rank.to(tl.int64) * PAD
        _putmem_signal_block(
            pad, pad, tl.full((), PAD, tl.int64), block + offset, word, SIGNAL_SET,
            tl.load(pes_ptr + peer),
        )  # fmt: skip
        _quiet()
    else:
        tl.debug_barrier()
        flag_ptr = (tl.load(peers_ptr + peer) + offset).to(tl.pointer_type(tl.int64))
        tl.atomic_xchg(flag_ptr, word, sem="release", scope="sys")


@triton.jit
def _put_rows(
    peer, part, piece, place, row_bytes, first, count, block, peers_ptr, pes_ptr,
    NVSHMEM: tl.constexpr,
):  # fmt: skip
    """Rows [first, first + count) of one piece, `piece` bytes into the part at address `part`, to
    the same rows at `place` in the peer's block. Nothing for a piece that the call has not got."""
    if row_bytes > 0:
        start = first.to(tl.int64) * row_bytes
        _put(
            peer, place + start, part + piece + start, count.to(tl.int64) * row_bytes, block,
            peers_ptr, pes_ptr, NVSHMEM,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "num_tokens_host", "num_rows", "rows_piece", "rows_place", "rows_bytes", "scales_piece",
        "scales_place", "scales_bytes", "ids_piece", "ids_place", "ids_bytes", "weights_piece",
        "weights_place", "weights_bytes", "payload_piece", "payload_place", "payload_bytes",
        "part_bytes", "marks_part", "pads_offset", "flags_offset", "channel", "rank",
        "token_begin", "token_end",
    ]
)  # fmt: skip
def _forward_kernel(
    block_ptr, staging_ptr, peers_ptr, pes_ptr, alive_ptr, marks_ptr, state_ptr, status_ptr,
    arrivals_ptr, num_tokens_ptr, num_tokens_host, num_rows,
    rows_piece, rows_place, rows_bytes, scales_piece, scales_place, scales_bytes,
    ids_piece, ids_place, ids_bytes, weights_piece, weights_place, weights_bytes,
    payload_piece, payload_place, payload_bytes,
    part_bytes, marks_part, pads_offset, flags_offset, channel, rank, token_begin, token_end,
    TILE: tl.constexpr, MARKS: tl.constexpr, MARKS_P: tl.constexpr, LEAST: tl.constexpr,
    OWN: tl.constexpr, T_ON_DEVICE: tl.constexpr, R: tl.constexpr,
    NUM_CHANNELS: tl.constexpr, PAD: tl.constexpr, POLL: tl.constexpr, NVSHMEM: tl.constexpr,
):  # fmt: skip
    """Tokens [token_begin, token_end) of every part to its peer, in tiles; then the flag.

    marks int32 [R, marks_part], MARKS of a token: it is for the peer where one is at least LEAST.
    Ids travel for every token, since they tell a peer that it was not reached; scales, weights and
    payloads for tiles with a token for the peer; rows one by one where fewer than three quarters of
    the tile are for it. With OWN this rank's own part is forwarded too (its rows wait like all
    others); without, which is combine, no row and no scales are put that are not for the peer:
    memory of partial sums stays empty but for those (moe_comm.kernels.returned_rows). arrivals
    int32 [channels, R], 0 before and after.

    Example: R = 2, 8 programs: programs 0, 2, 4, 6 forward to the right neighbour, every fourth
    tile each; 1, 3, 5, 7 to this rank itself. The last of each four writes that rank's flag.
    """
    program = tl.program_id(0)
    lane = program // R
    lanes = tl.num_programs(0) // R
    peer = (rank + 1 + program % R) % R
    block = block_ptr.to(tl.int64)
    if tl.load(alive_ptr + peer) != 0:
        if (is_fatal(status_ptr, POLL) == 0) & ((peer != rank) | OWN):
            part = staging_ptr.to(tl.int64) + peer.to(tl.int64) * part_bytes
            tiles = (token_end - token_begin + TILE - 1) // TILE
            for tile in range(lane, tiles, lanes):
                first = token_begin + tile * TILE
                count = tl.minimum(token_end - first, TILE)
                row = tl.arange(0, TILE)
                column = tl.arange(0, MARKS_P)
                at = peer.to(tl.int64) * marks_part + (first + row)[:, None] * MARKS
                marks = tl.load(
                    marks_ptr + at + column[None, :],
                    mask=(row < count)[:, None] & (column < MARKS)[None, :], other=LEAST - 1,
                )  # fmt: skip
                reached = (tl.max(marks, 1) >= LEAST).to(tl.int32)
                num_reached = tl.sum(reached, 0)
                _put_rows(
                    peer, part, ids_piece, ids_place, ids_bytes, first, count, block, peers_ptr,
                    pes_ptr, NVSHMEM,
                )  # fmt: skip
                if num_reached > 0:
                    if OWN:
                        _put_rows(
                            peer, part, scales_piece, scales_place, scales_bytes, first, count,
                            block, peers_ptr, pes_ptr, NVSHMEM,
                        )  # fmt: skip
                    _put_rows(
                        peer, part, weights_piece, weights_place, weights_bytes, first, count,
                        block, peers_ptr, pes_ptr, NVSHMEM,
                    )  # fmt: skip
                    _put_rows(
                        peer, part, payload_piece, payload_place, payload_bytes, first, count,
                        block, peers_ptr, pes_ptr, NVSHMEM,
                    )  # fmt: skip
                    # How many rows at a time: the tile's, or one.
                    whole = 4 * num_reached >= (3 if OWN else 4) * count
                    size = tl.where(whole, count, 1)
                    for r in range(0, count, size):
                        if whole | (tl.sum(tl.where(row == r, reached, 0), 0) > 0):
                            _put_rows(
                                peer, part, rows_piece, rows_place, rows_bytes, first + r, size,
                                block, peers_ptr, pes_ptr, NVSHMEM,
                            )  # fmt: skip
                            if OWN == 0:
                                _put_rows(
                                    peer, part, scales_piece, scales_place, scales_bytes,
                                    first + r, size, block, peers_ptr, pes_ptr, NVSHMEM,
                                )  # fmt: skip
            if NVSHMEM:
                _quiet()
        if T_ON_DEVICE:
            num_tokens = tl.load(num_tokens_ptr).to(tl.int32)
            num_tokens = tl.minimum(tl.maximum(num_tokens, 0), num_rows)
        else:
            num_tokens = num_tokens_host
        count_ptr = arrivals_ptr + channel * R + peer
        tl.debug_barrier()
        if tl.atomic_add(count_ptr, 1, sem="acq_rel", scope="sys") == lanes - 1:
            tl.store(count_ptr, 0)
            # Asked again: a program that found a failure has put nothing.
            if is_fatal(status_ptr, POLL) == 0:
                tl.store(state_ptr + NUM_CHANNELS + channel, 1)
                word = (wanted(state_ptr, channel, 1).to(tl.int64) << 32) | num_tokens
                _put_flag(
                    peer, word, flags_offset + (channel.to(tl.int64) * R + rank) * 8, block,
                    pads_offset, rank, peers_ptr, pes_ptr, PAD, NVSHMEM,
                )  # fmt: skip


@triton.jit(
    do_not_specialize=["pads_offset", "flags_offset", "channel", "dispatch_channel", "rank"]
)
def _put_release_kernel(
    block_ptr, peers_ptr, pes_ptr, alive_ptr, state_ptr, status_ptr, pads_offset, flags_offset,
    channel, dispatch_channel, rank,
    R: tl.constexpr, NUM_CHANNELS: tl.constexpr, PAD: tl.constexpr, FREES_SLOT: tl.constexpr,
    POLL: tl.constexpr, NVSHMEM: tl.constexpr,
):  # fmt: skip
    """Release a channel that speaks of no rows: one program a rank. With FREES_SLOT the slot's
    dispatch is settled as well."""
    step = tl.program_id(0)
    peer = (rank + 1 + step) % R
    if FREES_SLOT:
        if step == 0:
            settle(state_ptr, dispatch_channel, 2, 2, NUM_CHANNELS)
    if (is_fatal(status_ptr, POLL) == 0) & (tl.load(alive_ptr + peer) != 0):
        tl.store(state_ptr + NUM_CHANNELS + channel, 1)
        _put_flag(
            peer, wanted(state_ptr, channel, 1).to(tl.int64) << 32,
            flags_offset + (channel.to(tl.int64) * R + rank) * 8, block_ptr.to(tl.int64),
            pads_offset, rank, peers_ptr, pes_ptr, PAD, NVSHMEM,
        )  # fmt: skip


@triton.jit(do_not_specialize=["pads_offset", "words_offset", "rank"])
def _greet_kernel(
    block_ptr, peers_ptr, pes_ptr, pads_offset, words_offset, rank, PAD: tl.constexpr,
    NVSHMEM: tl.constexpr,
):  # fmt: skip
    """One program a rank writes this rank's number plus 1 to word `rank` of that rank: what a new
    communicator tries before it promises anything."""
    _put_flag(
        tl.program_id(0), rank.to(tl.int64) + 1, words_offset + rank.to(tl.int64) * 8,
        block_ptr.to(tl.int64), pads_offset, rank, peers_ptr, pes_ptr, PAD, NVSHMEM,
    )  # fmt: skip


@functools.cache
def over_nvshmem(kernel: Any) -> Any:
    """The kernel with NVSHMEM's device library linked, and set up for NVSHMEM when it is compiled.

    NVSHMEM must be initialized before its first launch. Raises RuntimeError where the device
    library (libnvshmem_device.bc; NVSHMEM_LIB_DIR names its folder) is not found.
    """
    from torch.distributed._symmetric_memory._nvshmem_triton import requires_nvshmem

    return requires_nvshmem(kernel)
