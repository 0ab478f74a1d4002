"""Messages for DeepEP on the device: rows with their records put in place, and who gets which.

The same in torch: MessageForm.write in moe_comm/backends/deepep_messages.py, and route() in
deepep_v1_ht.py beside it. Legend: T tokens here, h header messages behind them, R ranks, K choices,
W bytes of a message.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_tokens", "num_rows", "source"])
def _pack_messages_kernel(
    values_ptr, rank_ptr, slot_ptr, weights_ptr, messages_ptr, count_ptr, num_tokens, num_rows,
    source, width, words, row_bytes, start, source_at, token_at, count_at, ids_at, weights_at,
    ROUTING: tl.constexpr, COUNT: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program t: message t, whose record begins at byte `start`. Those past num_rows are headers:
    token -1, no row, ids of -1."""
    t = tl.program_id(0).to(tl.int64)
    is_row = t < num_rows
    message = messages_ptr + t * row_bytes
    record = message + start
    count = num_tokens
    if COUNT:
        count = tl.load(count_ptr).to(tl.int32)
    tl.store((record + source_at).to(tl.pointer_type(tl.int32)), source)
    token = tl.where(is_row, t, -1).to(tl.int32)
    tl.store((record + token_at).to(tl.pointer_type(tl.int32)), token)
    tl.store((record + count_at).to(tl.pointer_type(tl.int32)), count)
    if ROUTING:
        choice = tl.arange(0, KP)
        inside = choice < K
        here = inside & is_row
        rank = tl.load(rank_ptr + t * K + choice, mask=here, other=-1)
        slot = tl.load(slot_ptr + t * K + choice, mask=here, other=-1)
        weight = tl.load(weights_ptr + t * K + choice, mask=here, other=0.0)
        ids = tl.where(rank >= 0, rank * width + slot, -1).to(tl.int32)
        tl.store((record + ids_at).to(tl.pointer_type(tl.int32)) + choice, ids, mask=inside)
        to_weights = (record + weights_at).to(tl.pointer_type(tl.float32))
        tl.store(to_weights + choice, weight, mask=inside)
    target = message.to(tl.pointer_type(tl.int32))
    for first in range(0, words, BLOCK):
        word = first + tl.arange(0, BLOCK)
        mask = is_row & (word < words)
        row = tl.load(values_ptr + t * words + word, mask=mask, other=0)
        tl.store(target + word, row, mask=mask)


@triton.jit(do_not_specialize=["num_rows", "num_messages"])
def _destinations_kernel(
    rank_ptr, goes_ptr, counts_ptr, num_rows, num_messages, K: tl.constexpr, R: tl.constexpr,
    RP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of messages: goes[t, r] and, added up, counts[r]; headers go to every rank."""
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    r = tl.arange(0, RP)
    goes = tl.zeros((BLOCK, RP), tl.int32)
    for k in range(K):
        rank = tl.load(rank_ptr + t * K + k, mask=t < num_rows, other=-1)
        goes = goes | (rank[:, None] == r[None, :]).to(tl.int32)
    goes = tl.where((t >= num_rows)[:, None], 1, goes)
    inside = (t < num_messages)[:, None] & (r < R)[None, :]
    goes = tl.where(inside, goes, 0)
    tl.store(goes_ptr + t[:, None] * R + r[None, :], goes.to(tl.uint8), mask=inside)
    tl.atomic_add(counts_ptr + r, tl.sum(goes, 0), mask=r < R, sem="relaxed")


def pack_messages(
    values: torch.Tensor,
    rank: torch.Tensor,
    slot: torch.Tensor,
    weights: torch.Tensor,
    messages: torch.Tensor,
    *,
    num_tokens: int | torch.Tensor,
    source: int,
    experts_a_rank: int,
    start: int,
    at: tuple[int, ...],
) -> None:
    """Fill messages uint8 [T + h, W]: rows, and of each record what does not depend on the wire.

    Args:
        values: int32 [T, words], the rows as words.
        rank, slot: int32 [T, K], where choices lie, -1 where masked. weights: fp32 [T, K].
        num_tokens: T as told to others, an int or a scalar integer tensor.
        source: this rank.
        experts_a_rank: ids travel as rank * experts_a_rank + slot.
        start: byte of a message at which its record begins.
        at: bytes of a record at which source, token, count and, where the routing travels, ids and
            weights begin.
    """
    num_rows, words = values.shape
    counted, routing = isinstance(num_tokens, torch.Tensor), len(at) == 5
    ids_at, weights_at = at[3:] if routing else (0, 0)
    num_topk = rank.shape[1]
    _pack_messages_kernel[(messages.shape[0],)](
        values, rank, slot, weights, messages, num_tokens if counted else rank,
        0 if counted else num_tokens, num_rows, source, experts_a_rank, words, messages.stride(0),
        start, *at[:3], ids_at, weights_at, ROUTING=routing, COUNT=counted, K=num_topk,
        KP=triton.next_power_of_2(num_topk), BLOCK=min(2048, triton.next_power_of_2(words)),
        num_warps=4,
    )  # fmt: skip


def destinations(
    rank: torch.Tensor, *, num_ranks: int, num_headers: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Who gets which message, from the ranks of choices int [T, K], -1 where masked.

    Returns: bool [T + h, R] and its columns' sums int32 [R]. Headers go to every rank.

    Example: rank [[0, 0], [-1, 1]], 2 ranks, 1 header -> [[1, 0], [0, 1], [1, 1]] and [2, 2].
    """
    num_rows, num_topk = rank.shape
    num = num_rows + num_headers
    goes = torch.empty(num, num_ranks, dtype=torch.uint8, device=rank.device)
    counts = torch.zeros(num_ranks, dtype=torch.int32, device=rank.device)
    block = 128
    _destinations_kernel[(triton.cdiv(num, block),)](
        rank, goes, counts, num_rows, num, K=num_topk, R=num_ranks,
        RP=triton.next_power_of_2(num_ranks), BLOCK=block, num_warps=4,
    )  # fmt: skip
    return goes.view(torch.bool), counts
