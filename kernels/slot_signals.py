"""Signals of a slot beside other kernels: a channel has been released, the slot is free. One
program each.

Channels, counters and their settling: moe_comm.kernels.signal.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_comm.kernels.signal import is_usable, release, release_target, settle, wait, wanted


@triton.jit(do_not_specialize=["channel", "releases", "rank", "timeout_ns"])
def _wait_kernel(
    alive_ptr, state_ptr, status_ptr, flags_ptr, channel, releases, rank, timeout_ns,
    R: tl.constexpr,
    RP: tl.constexpr, NUM_CHANNELS: tl.constexpr, CHANNELS_P: tl.constexpr, POLL: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """Wait for a channel that this call releases `releases` times."""
    wait(
        flags_ptr, alive_ptr, state_ptr, status_ptr, channel, wanted(state_ptr, channel, releases),
        rank, timeout_ns, NUM_CHANNELS, CHANNELS_P, R, RP, POLL, INTERPRET,
    )  # fmt: skip


@triton.jit(do_not_specialize=["channel", "dispatch_channel", "rank", "timeout_ns"])
def _free_slot_kernel(
    peers_ptr, alive_ptr, state_ptr, status_ptr, flags_ptr, flags_offset, channel,
    dispatch_channel, rank, timeout_ns, R: tl.constexpr, RP: tl.constexpr,
    NUM_CHANNELS: tl.constexpr, CHANNELS_P: tl.constexpr, SEND: tl.constexpr,
    RECEIVE: tl.constexpr, POLL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Give a slot back without a combine. SEND: release its RELEASE channel and settle its
    dispatch. RECEIVE: wait until every rank has done so, and settle the release. After that no rank
    reads the slot, so whatever follows on the stream may write into it, copies included."""
    if SEND:
        release(
            release_target(peers_ptr, alive_ptr, flags_offset, channel, rank, R, RP), state_ptr,
            channel, 1, 0, is_usable(status_ptr), NUM_CHANNELS, RP,
        )  # fmt: skip
        settle(state_ptr, dispatch_channel, 2, 2, NUM_CHANNELS)
    if RECEIVE:
        wait(
            flags_ptr, alive_ptr, state_ptr, status_ptr, channel, wanted(state_ptr, channel, 1),
            rank, timeout_ns, NUM_CHANNELS, CHANNELS_P, R, RP, POLL, INTERPRET,
        )  # fmt: skip
        settle(state_ptr, channel, 1, 1, NUM_CHANNELS)
