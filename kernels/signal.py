"""Signals between ranks: counters in symmetric memory that are released by a sender and waited for
by a receiver. Device functions, inlined by the kernels of dispatch and combine.

Legend: R ranks, S receive slots, P phases. A channel is one (slot, phase): index slot * P + phase.

Symmetric memory holds `flags`, int64 [S * P, R]: word (channel, source) is written by that source
alone, its high half the count of the source's releases on the channel (wrapping int32), its low
half the number of tokens the release speaks of. Private memory holds `state`, int32 [3, S * P]:
row 0 counts this rank's settled releases, row 1 those that are out and not settled yet, row 2 the
programs that have arrived. A call releases a channel once, or once a sending program: as often on
every rank. It waits for row 0 plus that number, so row 0 must not change while the call runs: a
later call on the slot settles it. Counts are compared as (seen - wanted) < 0, so they may wrap.

Every call releases at least one channel on the calls' own stream, and all ranks do so in one order.
Copies run beside it, so what they carry is released on the channel ROWS at any later time; the call
has told of itself on the main stream before, by DISPATCH. Whether a rank is in another call is
therefore judged by main-stream channels alone.

`status`, int32 [STATUS_WORDS], private: bits, channel + 1 of the first failure, peer, seen, wanted,
channel of the peer's unexpected release + 1. After it, an int64 address: of as many words in host
memory, where the first failure is written too, so that the host sees it without waiting.

Memory that another rank or program may change while it is read is read by tensors with one element
a thread and then reduced (POLL elements, at least the threads of a program): Triton takes a scalar
for equal in all warps, and warps that branch apart would meet at different barriers.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Phases of a slot.
DISPATCH = 0
ROWS = 1
RELEASE = 2
COMBINE = 3
NUM_PHASES = 4

# StatusBit of moe_comm.status; a test holds the two together.
INVALID_ID = tl.constexpr(1)
ROWS_OVERFLOW = tl.constexpr(2)
TIMEOUT = tl.constexpr(4)
PHASE = tl.constexpr(8)
FATAL = tl.constexpr(12)

STATE_ROWS = 3
STATUS_WORDS = 8

_ROWS = tl.constexpr(ROWS)
_DISPATCH = tl.constexpr(DISPATCH)
_NUM_PHASES = tl.constexpr(NUM_PHASES)
_STATUS_WORDS = tl.constexpr(STATUS_WORDS)


@triton.jit
def now_ns(POLL: tl.constexpr, INTERPRET: tl.constexpr):
    """The device's nanosecond clock, the latest of the program's threads. The interpreter has no
    clock, and nothing to wait for either."""
    if INTERPRET:
        time = tl.full((), 0, tl.int64)
    else:
        time = tl.max(
            tl.inline_asm_elementwise(
                "mov.u64 $0, %globaltimer;", "=l,r", [tl.arange(0, POLL)], dtype=tl.int64,
                is_pure=False, pack=1,
            ), 0,
        )  # fmt: skip
    return time


@triton.jit
def is_fatal(status_ptr, POLL: tl.constexpr):
    """1 after a timeout or a phase error: sends are left out and waits return at once."""
    lane = tl.arange(0, POLL)
    bits = tl.load(status_ptr + lane, mask=lane < 1, other=0, volatile=True)
    return tl.max(((bits & FATAL) != 0).to(tl.int32), 0)


@triton.jit
def is_usable(status_ptr):
    """0 after a timeout or a phase error. A plain read, so warps may differ for a moment: only for
    masks of stores, never for a branch."""
    return ((tl.load(status_ptr, volatile=True) & FATAL) == 0).to(tl.int32)


@triton.jit
def release_target(
    peers_ptr, alive_ptr, flags_offset, channel, rank, R: tl.constexpr, RP: tl.constexpr
):
    """int64 [RP] addresses of this rank's word on every live rank, 0 elsewhere. Asked for early,
    so that a release does not wait for it."""
    ranks = tl.arange(0, RP)
    live = (ranks < R) & (tl.load(alive_ptr + ranks, mask=ranks < R, other=0) != 0)
    base = tl.load(peers_ptr + ranks, mask=live, other=0)
    return tl.where(live, base + flags_offset + (channel * R + rank) * 8, 0)


@triton.jit
def release(
    target, state_ptr, channel, releases, more_tokens, usable, NUM_CHANNELS: tl.constexpr,
    RP: tl.constexpr, ORDERED: tl.constexpr = True,
):  # fmt: skip
    """Release `channel` once on every live rank, this one included; a call does so `releases`
    times in all. What the calling program stored before, and what is ordered before it, can be read
    by whoever has waited for it; with ORDERED = False nothing can, and it waits for no store.
    Tokens are told as what they are more than on the channel's last call, by one of the releases
    alone. Not after a failure: where `usable` is 0 nothing is released.

    Example: R = 2, rank 1, a call of two releases after three, 5 tokens after 7: word (0, 1) of
    both ranks goes from (3 << 32) | 7 to (5 << 32) | 5.
    """
    sem: tl.constexpr = "release" if ORDERED else "relaxed"
    tl.store(state_ptr + NUM_CHANNELS + channel, releases, mask=usable != 0)
    if ORDERED:
        tl.debug_barrier()
    word = (tl.full((), 1, tl.int64) << 32) + more_tokens
    tl.atomic_add(
        target.to(tl.pointer_type(tl.int64)), tl.zeros([RP], tl.int64) + word,
        mask=(target != 0) & (usable != 0), sem=sem, scope="sys",
    )  # fmt: skip


@triton.jit
def settle(state_ptr, first, COUNT_P: tl.constexpr, count, NUM_CHANNELS: tl.constexpr):
    """Count the releases that are out on `count` channels from `first` on. By one program, in a
    launch of which no other program releases or waits on them."""
    step = tl.arange(0, COUNT_P)
    at = state_ptr + first + step
    out = tl.load(at + NUM_CHANNELS, mask=step < count, other=0)
    settled = tl.load(at, mask=step < count, other=0)
    tl.debug_barrier()
    tl.store(at, settled + out, mask=step < count)
    tl.store(at + NUM_CHANNELS, tl.zeros([COUNT_P], tl.int32), mask=step < count)


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
def wanted(state_ptr, channel, releases):
    """The count that a wait on `channel` is for, in a call that releases it `releases` times."""
    return tl.load(state_ptr + channel) + releases


@triton.jit
def read_words(words_ptr, awaited, INTERPRET: tl.constexpr):
    """The words of `awaited` lanes, 0 elsewhere, each with acquire order: once a barrier follows,
    all threads of the program see what was stored before the releases that the words count."""
    if INTERPRET:
        words = tl.load(words_ptr, mask=awaited, other=0, volatile=True)
    else:
        words = tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.u64 $0, 0; "
            "@p ld.acquire.sys.global.u64 $0, [$1]; }",
            "=l,l,r", [words_ptr.to(tl.int64), awaited.to(tl.int32)], dtype=tl.int64,
            is_pure=False, pack=1,
        )  # fmt: skip
    return words


@triton.jit
def tagged(call, low):
    """int64: a word that tells by itself that it has arrived: the number of the call, 32 bits."""
    return (call.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def high_half(word):
    """int32: of a flag, its count; of a tagged word, the call."""
    return (word >> 32).to(tl.int32)


@triton.jit
def low_half(word):
    """int32: of a flag, its tokens; of a tagged word, the 32 bits."""
    return word.to(tl.int32)


@triton.jit
def wait(
    flags_ptr, alive_ptr, state_ptr, status_ptr, channel, want, rank, timeout_ns,
    NUM_CHANNELS: tl.constexpr, CHANNELS_P: tl.constexpr, R: tl.constexpr, RP: tl.constexpr,
    POLL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Wait until every live rank released `channel` at least `want` times, at most timeout_ns.

    After it, everything those ranks stored before their release is visible to this program.
    Returns 1 where it is; 0 after a timeout, a phase error, or where the status word held either
    before. A late peer that is in another call (unexpected_channel) is a phase error, known as
    soon as patience is lost for the first time.
    """
    # One element a thread, of which the first R read: few requests, and one verdict for all warps.
    source = tl.arange(0, POLL)
    awaited = source < R
    awaited = awaited & (tl.load(alive_ptr + source, mask=awaited, other=0) != 0)
    poll_ptr = flags_ptr + channel * R + source
    late = _first_late(poll_ptr, awaited, want, source, R, INTERPRET)
    lost = tl.full((), 0, tl.int32)
    if late < R:
        lost += is_fatal(status_ptr, POLL)
    spins = 0
    start = tl.full((), 0, tl.int64)
    while (late < R) & (lost == 0):
        late = _first_late(poll_ptr, awaited, want, source, R, INTERPRET)
        spins += 1
        if late < R:
            lost, start = lose_patience(
                spins, start, flags_ptr, status_ptr, channel, want, late, rank, timeout_ns,
                NUM_CHANNELS, CHANNELS_P, R, POLL, INTERPRET,
            )  # fmt: skip
    tl.debug_barrier()
    return (late >= R).to(tl.int32)


@triton.jit
def _first_late(poll_ptr, awaited, want, source, R: tl.constexpr, INTERPRET: tl.constexpr):
    """The first awaited source whose word counts fewer than `want`; R where none does."""
    seen = high_half(read_words(poll_ptr, awaited, INTERPRET))
    return tl.min(tl.where(awaited & ((seen - want) < 0), source, R), 0)


@triton.jit
def is_due(spins, INTERPRET: tl.constexpr):
    """Whether lose_patience finds out anything after the spins-th look."""
    return (spins % 256 == 0) | INTERPRET


@triton.jit
def lose_patience(
    spins, start, flags_ptr, status_ptr, channel, want, peer, rank, timeout_ns,
    NUM_CHANNELS: tl.constexpr, CHANNELS_P: tl.constexpr, R: tl.constexpr, POLL: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """After the spins-th look in vain for something of `peer`, the first being 1: (1 where waiting
    is over, when it began). Finds out where is_due, on every 256th look: that takes as long as some
    ten others, and nearly always what is waited for comes before."""
    over = tl.full((), 0, tl.int32)
    if is_due(spins, INTERPRET):
        if start == 0:
            start = now_ns(POLL, INTERPRET)
        over += is_over(
            flags_ptr, status_ptr, channel, want, peer, rank, start, timeout_ns, NUM_CHANNELS,
            CHANNELS_P, R, POLL, INTERPRET,
        )  # fmt: skip
    return over, start


@triton.jit
def is_over(
    flags_ptr, status_ptr, channel, want, peer, rank, start, timeout_ns,
    NUM_CHANNELS: tl.constexpr, CHANNELS_P: tl.constexpr, R: tl.constexpr, POLL: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """1 where waiting for `peer` since `start` has no point any more: after a failure, where the
    peer is in another call, or after timeout_ns. The latter two are noted in the status, unless
    another program has noted a failure before."""
    over = is_fatal(status_ptr, POLL)
    if over == 0:
        other = unexpected_channel(
            flags_ptr, channel, want, peer, rank, NUM_CHANNELS, CHANNELS_P, R
        )
        expired = (now_ns(POLL, INTERPRET) - start > timeout_ns) | INTERPRET
        if (other >= 0) | expired:
            over = over + 1
            if tl.atomic_cas(status_ptr + 1, 0, channel + 1) == 0:
                at = tl.atomic_add(flags_ptr + channel * R + peer, 0)
                host = tl.load((status_ptr + _STATUS_WORDS).to(tl.pointer_type(tl.int64)))
                host_ptr = host.to(tl.pointer_type(tl.int32))
                tl.store(host_ptr + 1, channel + 1)
                _store_failure(status_ptr, peer, high_half(at), want, other)
                _store_failure(host_ptr, peer, high_half(at), want, other)
                tl.debug_barrier()
                bit = tl.where(other >= 0, PHASE, TIMEOUT)
                tl.atomic_or(status_ptr, bit, sem="release", scope="sys")
                tl.store(host_ptr, bit)
    return over


@triton.jit
def _store_failure(words_ptr, peer, seen, want, other):
    """Words 2 to 5 of a status."""
    tl.store(words_ptr + 2, peer)
    tl.store(words_ptr + 3, seen)
    tl.store(words_ptr + 4, want)
    tl.store(words_ptr + 5, other + 1)


@triton.jit
def announcing(channel):
    """The channel by which the main stream tells of a release on `channel`: DISPATCH for ROWS, else
    `channel` itself."""
    return tl.where(channel % _NUM_PHASES == _ROWS, channel - _ROWS + _DISPATCH, channel)


@triton.jit
def unexpected_channel(
    flags_ptr, channel, want, peer, rank,
    NUM_CHANNELS: tl.constexpr, CHANNELS_P: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """The main-stream channel on which a late peer ran ahead of this rank, or -1.

    All ranks release these channels in one order. So once this rank's own release of the call is
    out, a peer that has released another channel more often, but not this one, has issued another
    call in its place. A peer that has announced the call is in it, however late its copies are.
    Everything is read by atomics, which one thread performs for all. The peer's words are read
    first and this rank's last: what is released in between can only look as if this rank were
    ahead.
    """
    channels = tl.arange(0, CHANNELS_P)
    ordered = (channels < NUM_CHANNELS) & (announcing(channels) == channels)
    none = tl.zeros([CHANNELS_P], tl.int64)
    words_ptr = flags_ptr + channels * R
    theirs = high_half(
        tl.atomic_add(words_ptr + peer, none, mask=ordered, sem="acquire", scope="sys")
    )
    tl.debug_barrier()
    by = announcing(channel)
    own = high_half(tl.atomic_add(flags_ptr + by * R + rank, 0, sem="acquire", scope="sys"))
    late = high_half(tl.atomic_add(flags_ptr + by * R + peer, 0, sem="acquire", scope="sys"))
    tl.debug_barrier()
    mine = high_half(
        tl.atomic_add(words_ptr + rank, none, mask=ordered, sem="acquire", scope="sys")
    )
    is_out = (by != channel) | ((own - want) >= 0)
    ahead = tl.where(ordered & ((theirs - mine) > 0), channels, CHANNELS_P)
    elsewhere = tl.min(ahead, 0)
    wrong = is_out & ((late - own) < 0) & (elsewhere < CHANNELS_P)
    return tl.where(wrong, elsewhere, -1)
