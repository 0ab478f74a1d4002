"""Signals between ranks: counters in symmetric memory that are released by a sender and waited for
by a receiver. Device functions, inlined by the kernels of dispatch and combine.

Legend: R ranks, S receive slots, P phases. A channel is one (slot, phase): index slot * P + phase.

Symmetric memory holds `flags`, int64 [S * P, R]: word (channel, source) is written by that source
alone, its high half the count of the source's releases on the channel (wrapping int32), its low
half the number of tokens the release speaks of. Private memory holds `state`, int32 [4, S * P]:
row 0 counts this rank's releases, row 1 what it waited for, row 2 and 3 the programs that have
arrived and are done. Counts are compared as (seen - wanted) < 0, so they may wrap.

`status`, int32 [8], private: bits, channel + 1 of the first failure, peer, seen, wanted,
channel of the peer's unexpected release + 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Phases of a slot. COMBINE is the first of MAX_CHUNKS phases, one a chunk of a combine.
DISPATCH = 0
ROWS = 1
RELEASE = 2
COMBINE = 3
MAX_CHUNKS = 8
NUM_PHASES = COMBINE + MAX_CHUNKS

# StatusBit of moe_comm.status; a test holds the two together.
INVALID_ID = tl.constexpr(1)
ROWS_OVERFLOW = tl.constexpr(2)
TIMEOUT = tl.constexpr(4)
PHASE = tl.constexpr(8)
FATAL = tl.constexpr(12)

STATE_ROWS = 4
STATUS_WORDS = 8


@triton.jit
def now_ns(INTERPRET: tl.constexpr):
    """The device's nanosecond clock. The interpreter has none, and nothing to wait for either."""
    if INTERPRET:
        time = tl.full((), 0, tl.int64)
    else:
        time = tl.extra.cuda.globaltimer().to(tl.int64)
    return time


@triton.jit
def is_fatal(status_ptr):
    """1 after a timeout or a phase error: sends are left out and waits return at once."""
    return (tl.load(status_ptr, volatile=True) & FATAL) != 0


@triton.jit
def release(
    peers_ptr, alive_ptr, state_ptr, flags_offset, channel, num_tokens, rank,
    NUM_CHANNELS: tl.constexpr, R: tl.constexpr, RP: tl.constexpr,
):  # fmt: skip
    """Count one release on `channel` and tell every live rank, this one included. One program
    calls it, after everything the release speaks of is ordered before it.

    Example: R = 2, rank 1, third release on channel 0, 5 tokens: word (0, 1) of both ranks becomes
    (3 << 32) | 5.
    """
    count = tl.load(state_ptr + channel) + 1
    tl.store(state_ptr + channel, count)
    tl.debug_barrier()
    ranks = tl.arange(0, RP)
    live = (ranks < R) & (tl.load(alive_ptr + ranks, mask=ranks < R, other=0) != 0)
    base = tl.load(peers_ptr + ranks, mask=live, other=0)
    word_ptr = (base + flags_offset + (channel * R + rank) * 8).to(tl.pointer_type(tl.int64))
    word = (count.to(tl.int64) << 32) | num_tokens.to(tl.int64)
    tl.atomic_xchg(word_ptr, tl.zeros([RP], tl.int64) + word, mask=live, sem="release", scope="sys")


@triton.jit
def arrive(state_ptr, channel, NUM_CHANNELS: tl.constexpr):
    """Count this program in on `channel`; returns how many had arrived before. Every earlier store
    of this program is ordered before it, and after the last arrival all programs' stores are."""
    tl.debug_barrier()
    return tl.atomic_add(state_ptr + 2 * NUM_CHANNELS + channel, 1, sem="acq_rel", scope="sys")


@triton.jit
def reset_arrivals(state_ptr, channel, NUM_CHANNELS: tl.constexpr):
    """By the last to arrive, before it releases."""
    tl.store(state_ptr + 2 * NUM_CHANNELS + channel, 0)


@triton.jit
def finish_wait(state_ptr, channel, programs, NUM_CHANNELS: tl.constexpr):
    """Count this program out; the last one moves the channel's expectation on. Each waiting
    program calls it once, after its last use of `wanted`."""
    tl.debug_barrier()
    done_ptr = state_ptr + 3 * NUM_CHANNELS + channel
    if tl.atomic_add(done_ptr, 1, sem="acq_rel", scope="gpu") == programs - 1:
        tl.store(done_ptr, 0)
        expected_ptr = state_ptr + NUM_CHANNELS + channel
        tl.store(expected_ptr, tl.load(expected_ptr) + 1)


@triton.jit
def wanted(state_ptr, channel, NUM_CHANNELS: tl.constexpr):
    """The count that this wait is for."""
    return tl.load(state_ptr + NUM_CHANNELS + channel) + 1


@triton.jit
def count_of(word):
    """The count half of a word."""
    return (word >> 32).to(tl.int32)


@triton.jit
def tokens_of(word):
    """The token half of a word."""
    return (word & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def wait(
    flags_ptr, alive_ptr, state_ptr, status_ptr, channel, want, rank, timeout_ns,
    NUM_CHANNELS: tl.constexpr, CHANNELS_P: tl.constexpr, R: tl.constexpr, RP: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """Wait until every live rank released `channel` at least `want` times, at most timeout_ns.

    After it, everything those ranks stored before their release is visible to this program.
    Returns 1 where it is; 0 after a timeout, a phase error, or where the status word held either
    before. A late peer whose releases on all channels together have passed this rank's is in
    another call: a phase error, known at once.
    """
    ranks = tl.arange(0, RP)
    live = (ranks < R) & (tl.load(alive_ptr + ranks, mask=ranks < R, other=0) != 0)
    word_ptr = flags_ptr + channel * R + ranks
    seen = count_of(tl.load(word_ptr, mask=live, other=0, volatile=True))
    late = live & ((seen - want) < 0)
    waiting = tl.sum(late.to(tl.int32), 0)
    fatal = is_fatal(status_ptr)
    if fatal:
        waiting = waiting * 0
    start = now_ns(INTERPRET)
    spins = 0
    while waiting > 0:
        seen = count_of(tl.load(word_ptr, mask=live, other=0, volatile=True))
        late = live & ((seen - want) < 0)
        waiting = tl.sum(late.to(tl.int32), 0)
        spins += 1
        if (waiting > 0) & ((spins % 256 == 0) | INTERPRET):
            peer = tl.min(tl.where(late, ranks, RP), 0)
            if is_fatal(status_ptr):
                waiting = waiting * 0
            else:
                other = unexpected_channel(
                    flags_ptr, state_ptr, channel, want, peer, rank, NUM_CHANNELS, CHANNELS_P, R
                )
                expired = (now_ns(INTERPRET) - start > timeout_ns) | INTERPRET
                if (other >= 0) | expired:
                    first = tl.atomic_cas(status_ptr + 1, 0, channel + 1)
                    if first == 0:
                        tl.store(status_ptr + 2, peer)
                        at = tl.sum(tl.where(ranks == peer, seen, 0), 0)
                        tl.store(status_ptr + 3, at)
                        tl.store(status_ptr + 4, want)
                        tl.store(status_ptr + 5, other + 1)
                        tl.debug_barrier()
                        bit = tl.where(other >= 0, PHASE, TIMEOUT)
                        tl.atomic_or(status_ptr, bit, sem="release", scope="gpu")
                    waiting = waiting * 0
    # The acquire that pairs with each sender's release; its result keeps it from being weakened.
    word = tl.atomic_add(word_ptr, tl.zeros([RP], tl.int64), mask=live, sem="acquire", scope="sys")
    missing = tl.sum((live & ((count_of(word) - want) < 0)).to(tl.int32), 0)
    tl.debug_barrier()
    # A program that gave up on another's verdict must not go on as if all had come.
    return ((missing == 0) & (is_fatal(status_ptr) == 0)).to(tl.int32)


@triton.jit
def unexpected_channel(
    flags_ptr, state_ptr, channel, want, peer, rank,
    NUM_CHANNELS: tl.constexpr, CHANNELS_P: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """The channel on which a late peer ran ahead of this rank, or -1.

    All ranks release in one order. So once this rank's own release of the call is out, a peer with
    as many releases in total, but not this one, has issued another call in its place.
    """
    channels = tl.arange(0, CHANNELS_P)
    known = channels < NUM_CHANNELS
    theirs = count_of(
        tl.atomic_add(
            flags_ptr + channels * R + peer, tl.zeros([CHANNELS_P], tl.int64), mask=known,
            sem="acquire", scope="sys",
        )
    )  # fmt: skip
    tl.debug_barrier()
    own = count_of(tl.load(flags_ptr + channel * R + rank, volatile=True))
    late = count_of(tl.load(flags_ptr + channel * R + peer, volatile=True))
    mine = tl.load(state_ptr + channels, mask=known, other=0)
    ahead = tl.sum(tl.where(known, theirs - mine, 0), 0)
    wrong = ((own - want) >= 0) & ((late - want) < 0) & (ahead >= 0)
    elsewhere = tl.min(tl.where(known & ((theirs - mine) > 0), channels, CHANNELS_P), 0)
    return tl.where(wrong & (elsewhere < CHANNELS_P), elsewhere, -1)
