"""Records of an all-gather on the device: every rank gets all routing and picks its own.

Legend: T tokens here, R ranks, B the bucket, K choices. A rank's block is `head` bytes, which begin
with T as int32, and B records of `record_bytes`: int32 ids [K] at `ids_at` as rank * width + slot
(-1 where masked), fp32 weights [K] at `weights_at`, and fields that are nobody's business here.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def _gathered_out_kernel(
    rank_ptr, slot_ptr, weights_ptr, block_ptr, count_ptr, num_tokens, num_rows, width,
    record_bytes, ids_at, weights_at, HEAD: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    """Program t < B: record t of this rank's block, ids as rank * width + slot; the first also
    writes T into the head. Tokens past num_rows get ids of -1."""
    t = tl.program_id(0).to(tl.int64)
    choice = tl.arange(0, KP)
    inside = choice < K
    if t == 0:
        count = num_tokens
        if COUNT:
            count = tl.load(count_ptr).to(tl.int32)
        tl.store(block_ptr.to(tl.pointer_type(tl.int32)), count)
    record = block_ptr + HEAD + t * record_bytes
    here = inside & (t < num_rows)
    rank = tl.load(rank_ptr + t * K + choice, mask=here, other=-1)
    slot = tl.load(slot_ptr + t * K + choice, mask=here, other=-1)
    weight = tl.load(weights_ptr + t * K + choice, mask=here, other=0.0)
    ids_ptr = (record + ids_at).to(tl.pointer_type(tl.int32))
    tl.store(ids_ptr + choice, tl.where(rank >= 0, rank * width + slot, -1), mask=inside)
    to_weights = (record + weights_at).to(tl.pointer_type(tl.float32))
    tl.store(to_weights + choice, weight, mask=inside)


@triton.jit(do_not_specialize=["me", "bucket", "block_bytes"])
def _gathered_in_kernel(
    blocks_ptr, local_ptr, received_ptr, tokens_ptr, alive_ptr, me, bucket, width, block_bytes,
    record_bytes, ids_at, weights_at, HEAD: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    ALIVE: tl.constexpr,
):  # fmt: skip
    """Program (t, r): record t of rank r's block, its ids made local, -1 where not here."""
    t = tl.program_id(0).to(tl.int64)
    r = tl.program_id(1).to(tl.int64)
    choice = tl.arange(0, KP)
    inside = choice < K
    block = blocks_ptr + r * block_bytes
    alive = 1
    if ALIVE:
        alive = tl.load(alive_ptr + r).to(tl.int32)
    if t == 0:
        tokens = tl.load(block.to(tl.pointer_type(tl.int32)))
        tl.store(tokens_ptr + r, tl.where(alive != 0, tokens, 0))
    record = block + HEAD + t * record_bytes
    ids_ptr = (record + ids_at).to(tl.pointer_type(tl.int32))
    local = tl.load(ids_ptr + choice, mask=inside, other=-1) - me * width
    here = (local >= 0) & (local < width) & (alive != 0)
    from_weights = (record + weights_at).to(tl.pointer_type(tl.float32))
    weight = tl.load(from_weights + choice, mask=inside, other=0.0)
    place = (r * bucket + t) * K
    tl.store(local_ptr + place + choice, tl.where(here, local, -1), mask=inside)
    tl.store(received_ptr + place + choice, weight, mask=inside)


def gathered_out(
    rank: torch.Tensor,
    slot: torch.Tensor,
    weights: torch.Tensor,
    *,
    block: torch.Tensor,
    bucket: int,
    num_tokens: int | torch.Tensor,
    experts_a_rank: int,
    head: int,
    record_bytes: int,
    at: tuple[int, ...],
) -> None:
    """Fill this rank's block, uint8 [head + B * record_bytes]: T as int32, then B records with ids
    as rank * experts_a_rank + slot. Other fields of the records are left alone."""
    num_rows, num_topk = rank.shape
    counted = isinstance(num_tokens, torch.Tensor)
    _gathered_out_kernel[(bucket,)](
        rank, slot, weights, block, num_tokens if counted else rank, 0 if counted else num_tokens,
        num_rows, experts_a_rank, record_bytes, *at, HEAD=head, K=num_topk,
        KP=triton.next_power_of_2(num_topk), COUNT=counted, num_warps=1,
    )  # fmt: skip


def gathered_in(
    blocks: torch.Tensor,
    *,
    me: int,
    bucket: int,
    num_topk: int,
    alive: torch.Tensor | None,
    experts_a_rank: int,
    head: int,
    record_bytes: int,
    at: tuple[int, ...],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Read all ranks' blocks, uint8 [R, head + B * record_bytes].

    Returns: local ids int32 [R, B, K], weights fp32 [R, B, K], T int32 [R].
    """
    num_ranks = blocks.shape[0]
    shape, device = (num_ranks, bucket, num_topk), blocks.device
    local_idx = torch.empty(shape, dtype=torch.int32, device=device)
    weights = torch.empty(shape, dtype=torch.float32, device=device)
    tokens = torch.empty(num_ranks, dtype=torch.int32, device=device)
    _gathered_in_kernel[(bucket, num_ranks)](
        blocks, local_idx, weights, tokens, tokens if alive is None else alive, me, bucket,
        experts_a_rank, blocks.stride(0), record_bytes, *at, HEAD=head, K=num_topk,
        KP=triton.next_power_of_2(num_topk), ALIVE=alive is not None, num_warps=1,
    )  # fmt: skip
    return local_idx, weights, tokens
