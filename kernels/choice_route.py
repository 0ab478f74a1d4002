"""Where a token's choices go: the copy of each expert that serves them, as ExpertPlacement says.

Legend: K choices, C copies of an expert at most.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def locate(ids, valid, token, rank, copy_table_ptr, num_copies_ptr, C: tl.constexpr):
    """Rank and local slot of choices `ids` of tokens `token`; -1 where not `valid`, or where the
    table says -1 because the rank is masked. The copy is (rank + token) % num_copies."""
    safe = tl.where(valid, ids, 0)
    if C == 1:
        entry = safe
    else:
        copies = tl.load(num_copies_ptr + safe)
        entry = safe * C + (rank + token) % copies
    # Rank and slot in one load: where ids lie anywhere, looking them up takes longest.
    pair = tl.load(copy_table_ptr.to(tl.pointer_type(tl.int64)) + entry, mask=valid, other=-1)
    return pair.to(tl.int32), (pair >> 32).to(tl.int32)


@triton.jit
def route(
    at, token, inside, topk_idx_ptr, rank, E, copy_table_ptr, num_copies_ptr, C: tl.constexpr
):
    """Rank and local slot of the choices at topk_idx[at] of tokens `token`, -1 where masked or not
    `inside`; and where ids are neither an expert nor -1."""
    # Told from masked ones before they are narrowed: 2^32 + 1 is not expert 1.
    wide_ids = tl.load(topk_idx_ptr + at, mask=inside, other=-1)
    valid = inside & (wide_ids >= 0) & (wide_ids < E)
    ids = wide_ids.to(tl.int32)
    to_rank, slot = locate(ids, valid, token, rank, copy_table_ptr, num_copies_ptr, C)
    return to_rank, slot, inside & (valid == 0) & (wide_ids != -1)


@triton.jit
def route_tokens(
    token, real, topk_idx_ptr, rank, E, copy_table_ptr, num_copies_ptr, K: tl.constexpr,
    KP: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """`route` of all choices [TOKENS, KP] of tokens `token` [TOKENS, 1], where `real`."""
    choice = tl.arange(0, KP)[None, :]
    return route(
        token * K + choice, token, (choice < K) & real, topk_idx_ptr, rank, E, copy_table_ptr,
        num_copies_ptr, C,
    )  # fmt: skip
