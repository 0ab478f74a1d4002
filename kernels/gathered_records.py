"""Records of an all-gather on the device: every rank gets all routing and picks its own.

Legend: T tokens here, R ranks, B the bucket, K choices, E experts, C copies of an expert. A rank's
block is HEAD bytes of FACTS facts (int32: phase, call, T, 0, bucket, bytes of a row, bytes of a
record, and whether its dispatch before was full), and B records of `record_bytes`: int32 ids [K] at
`ids_at` as rank * width + slot (-1 where masked), fp32 weights [K] at `weights_at`, and fields that
are nobody's business here.

What the host must know before rows can be packed is left in a table it can read, int32
[R, FACTS + 2 * P] with P = programs(B): of each rank its facts, then how many of its tokens come
here, then how many of this rank's tokens go there, each as P numbers to be added up.

Launches: moe_comm.backends.c10d_blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Tokens of a program.
TOKENS = 64
# 32-bit words that a program copies.
COPIED = 4096


def programs(bucket: int) -> int:
    """P."""
    return -(-bucket // TOKENS)


def copiers(words: int) -> int:
    """Programs that copy so many words."""
    return -(-words // COPIED)


@triton.jit
def _copy_words(program, source_ptr, target_ptr, words, COPY: tl.constexpr):
    """The program's COPY of so many 32-bit words."""
    word = program.to(tl.int64) * COPY + tl.arange(0, COPY)
    source = source_ptr.to(tl.pointer_type(tl.int32))
    target = target_ptr.to(tl.pointer_type(tl.int32))
    value = tl.load(source + word, mask=word < words)
    tl.store(target + word, value, mask=word < words)


@triton.jit(
    do_not_specialize=["me", "num_tokens", "num_rows", "bucket", "phase", "call", "was_full"]
)
def _announce_kernel(
    ids_ptr, weights_ptr, rank_ptr, rows_ptr, own_ptr, block_ptr, told_ptr, table_ptr, copies_ptr,
    alive_ptr, count_ptr, status_ptr, me, num_tokens, num_rows, bucket, phase, call, was_full,
    row_bytes, words, E, R, width, record_bytes, ids_at, weights_at, K: tl.constexpr,
    KP: tl.constexpr, C: tl.constexpr, COUNT: tl.constexpr, ALIVE: tl.constexpr, TOLD: tl.constexpr,
    HEAD: tl.constexpr, FACTS: tl.constexpr, TOKENS: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    """Program p < P: the ranks on which the choices of its tokens lie, -1 where masked, and their
    records in this rank's block; ids of tokens past num_rows are -1. With TOLD also how many of
    its tokens go to each other rank. The first writes the facts. With COPY the programs after them
    copy this rank's rows, so many words, to their place, and the ranks are left to
    _gathered_kernel.

    Example: source 1, token 2, an expert with copies (0, 5) and (3, 1): (1 + 2) % 2 = 1, so the
    choice lies on rank 3, slot 1, and travels as 3 * width + 1.
    """
    p = tl.program_id(0)
    parts = (bucket + TOKENS - 1) // TOKENS
    if (COPY > 0) & (p >= parts):
        _copy_words(p - parts, rows_ptr, own_ptr, words, COPY if COPY > 0 else 1)
    else:
        _announce(
            p, parts, ids_ptr, weights_ptr, rank_ptr, block_ptr, told_ptr, table_ptr, copies_ptr,
            alive_ptr, count_ptr, status_ptr, me, num_tokens, num_rows, bucket, phase, call,
            was_full, row_bytes, E, R, width, record_bytes, ids_at, weights_at, K, KP, C, COUNT,
            ALIVE, TOLD, HEAD, FACTS, TOKENS, COPY,
        )  # fmt: skip


@triton.jit
def _announce(
    p, parts, ids_ptr, weights_ptr, rank_ptr, block_ptr, told_ptr, table_ptr, copies_ptr, alive_ptr,
    count_ptr, status_ptr, me, num_tokens, num_rows, bucket, phase, call, was_full, row_bytes, E, R,
    width, record_bytes, ids_at, weights_at, K: tl.constexpr, KP: tl.constexpr, C: tl.constexpr,
    COUNT: tl.constexpr, ALIVE: tl.constexpr, TOLD: tl.constexpr, HEAD: tl.constexpr,
    FACTS: tl.constexpr, TOKENS: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    """Program p of P = parts: see _announce_kernel."""
    t = p * TOKENS + tl.arange(0, TOKENS)
    choice = tl.arange(0, KP)
    limit = num_tokens
    if COUNT:
        limit = tl.minimum(tl.maximum(tl.load(count_ptr), 0), num_rows).to(tl.int32)
    at = t[:, None].to(tl.int64) * K + choice[None, :]
    given = (t < num_rows)[:, None] & (choice < K)[None, :]
    expert = tl.load(ids_ptr + at, mask=given, other=-1).to(tl.int64)
    weight = tl.load(weights_ptr + at, mask=given, other=0.0)
    live = given & (t < limit)[:, None]
    known = (expert >= 0) & (expert < E)
    wrong = live & (expert != -1) & (known == 0)
    if tl.max(tl.max(wrong.to(tl.int32), 1), 0) > 0:
        tl.atomic_or(status_ptr, 1)
    valid = live & known
    safe = tl.where(valid, expert, 0)
    entry = safe * C
    if C > 1:
        entry += (me + t)[:, None] % tl.load(copies_ptr + safe)
    rank = tl.load(table_ptr + entry * 2)
    slot = tl.load(table_ptr + entry * 2 + 1)
    if ALIVE:
        valid = valid & (tl.load(alive_ptr + rank) != 0)
    rank = tl.where(valid, rank, -1)
    if COPY == 0:
        tl.store(rank_ptr + at, rank, mask=given)
    record = (block_ptr + HEAD + t.to(tl.int64) * record_bytes)[:, None]
    inside = (t < bucket)[:, None] & (choice < K)[None, :]
    to_ids = (record + ids_at).to(tl.pointer_type(tl.int32)) + choice[None, :]
    tl.store(to_ids, tl.where(valid, rank * width + slot, -1), mask=inside)
    to_weights = (record + weights_at).to(tl.pointer_type(tl.float32)) + choice[None, :]
    tl.store(to_weights, weight, mask=inside)
    if p == 0:
        head = block_ptr.to(tl.pointer_type(tl.int32))
        tl.store(head, phase)
        tl.store(head + 1, call)
        tl.store(head + 2, limit)
        tl.store(head + 3, 0)
        tl.store(head + 4, bucket)
        tl.store(head + 5, row_bytes)
        tl.store(head + 6, record_bytes)
        tl.store(head + 7, was_full)
    if TOLD:
        for d in range(0, R):
            hits = tl.sum(tl.max((rank == d).to(tl.int32), 1), 0)
            place = d * (FACTS + 2 * parts) + FACTS + parts + p
            tl.store(told_ptr + place, tl.where(d == me, 0, hits))


@triton.jit(do_not_specialize=["me", "bucket", "block_bytes"])
def _gathered_kernel(
    blocks_ptr, local_ptr, received_ptr, tokens_ptr, rank_ptr, told_ptr, alive_ptr, me, bucket,
    width, block_bytes, record_bytes, ids_at, weights_at, K: tl.constexpr, KP: tl.constexpr,
    ALIVE: tl.constexpr, TOLD: tl.constexpr, HEAD: tl.constexpr, FACTS: tl.constexpr,
    TOKENS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """Program (r, p): records of rank r's block, their ids made local, -1 where not here. With TOLD
    also how many of these tokens have a choice here; the first of a rank copies its facts. With
    RANK also the ranks of this rank's own choices, -1 where masked."""
    parts = (bucket + TOKENS - 1) // TOKENS
    r = (tl.program_id(0) // parts).to(tl.int64)
    p = tl.program_id(0) % parts
    t = p * TOKENS + tl.arange(0, TOKENS)
    choice = tl.arange(0, KP)
    block = blocks_ptr + r * block_bytes
    alive = 1
    if ALIVE:
        alive = tl.load(alive_ptr + r).to(tl.int32)
    record = (block + HEAD + t.to(tl.int64) * record_bytes)[:, None]
    inside = (t < bucket)[:, None] & (choice < K)[None, :]
    from_ids = (record + ids_at).to(tl.pointer_type(tl.int32)) + choice[None, :]
    ids = tl.load(from_ids, mask=inside, other=-1)
    if RANK:
        of_choice = tl.where(ids >= 0, ids // width, -1)
        own = t[:, None].to(tl.int64) * K + choice[None, :]
        tl.store(rank_ptr + own, of_choice, mask=inside & (r == me))
    local = ids - me * width
    here = inside & (local >= 0) & (local < width) & (alive != 0)
    from_weights = (record + weights_at).to(tl.pointer_type(tl.float32)) + choice[None, :]
    weight = tl.load(from_weights, mask=inside, other=0.0)
    place = (r * bucket + t)[:, None] * K + choice[None, :]
    tl.store(local_ptr + place, tl.where(here, local, -1), mask=inside)
    tl.store(received_ptr + place, weight, mask=inside)
    if p == 0:
        word = tl.arange(0, FACTS)
        facts = tl.load(block.to(tl.pointer_type(tl.int32)) + word)
        facts = tl.where(alive != 0, facts, 0)
        tl.store(tokens_ptr + r, tl.sum(tl.where(word == 2, facts, 0), 0))
        if TOLD:
            tl.store(told_ptr + r * (FACTS + 2 * parts) + word, facts)
    if TOLD:
        hits = tl.sum(tl.max(here.to(tl.int32), 1), 0)
        tl.store(told_ptr + r * (FACTS + 2 * parts) + FACTS + p, hits)
