"""Absorbed MLA attention of one token a sequence over a paged latent cache.

Split-KV: a program handles a block of heads and one of the splits of a sequence's context; a second
launch merges the splits. The grid depends on shapes alone, never on lengths, so a captured graph
serves every length up to what the block tables hold. The same in torch: `paged_decode_torch` in
model/layers/gated_mla.py, which needs no Triton.

Shapes: S sequences, H heads, L latent, R shared "rope" part, P tokens a page, X context.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


# Strides and splits follow the context: one compilation serves all of them.
@triton.jit(do_not_specialize=["num_heads", "table_stride", "splits"])
def _mla_decode_kernel(
    q_ptr,
    cache_ptr,
    table_ptr,
    length_ptr,
    partial_ptr,
    stats_ptr,
    num_heads,
    table_stride,
    splits,
    scale,
    PAGE: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    split = tl.program_id(2)
    width: tl.constexpr = LATENT + ROPE
    length = tl.load(length_ptr + seq)
    # Whole blocks of rows a split, so that only the last split has a ragged end.
    per_split = tl.cdiv(tl.cdiv(length, splits), BLOCK_N) * BLOCK_N
    first = split * per_split
    last = tl.minimum(first + per_split, length)

    col = tl.arange(0, BLOCK_L)
    rope = tl.arange(0, BLOCK_R)
    live = head < num_heads
    q_row = (seq * num_heads + head) * width
    q = tl.load(
        q_ptr + q_row[:, None] + col[None, :],
        mask=live[:, None] & (col < LATENT)[None, :],
        other=0.0,
    )
    q_rope = tl.load(
        q_ptr + q_row[:, None] + LATENT + rope[None, :],
        mask=live[:, None] & (rope < ROPE)[None, :],
        other=0.0,
    )
    best = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_L], tl.float32)
    for start in range(first, last, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        there = at < last
        page = tl.load(table_ptr + seq * table_stride + at // PAGE, mask=there, other=0)
        row = (page.to(tl.int64) * PAGE + at % PAGE) * width
        # Rows past the end are never loaded: freed pages may hold NaN.
        kv = tl.load(
            cache_ptr + row[:, None] + col[None, :],
            mask=there[:, None] & (col < LATENT)[None, :],
            other=0.0,
        )
        kv_rope = tl.load(
            cache_ptr + row[:, None] + LATENT + rope[None, :],
            mask=there[:, None] & (rope < ROPE)[None, :],
            other=0.0,
        )
        scores = tl.dot(q, tl.trans(kv)) + tl.dot(q_rope, tl.trans(kv_rope))
        scores = tl.where(there[None, :], scores * scale, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        weight = tl.exp(scores - new_best[:, None])
        shrink = tl.exp(best - new_best)
        total = total * shrink + tl.sum(weight, 1)
        acc = acc * shrink[:, None] + tl.dot(weight.to(kv.dtype), kv)
        best = new_best
    out = ((seq * num_heads + head) * splits + split).to(tl.int64)
    # An empty split leaves best at -inf and total at 0; the merge skips it.
    safe = tl.where(total > 0, total, 1.0)
    tl.store(
        partial_ptr + out[:, None] * LATENT + col[None, :],
        acc / safe[:, None],
        mask=live[:, None] & (col < LATENT)[None, :],
    )
    stat = tl.where(total > 0, best + tl.log(safe), float("-inf"))
    tl.store(stats_ptr + out, stat, mask=live)


@triton.jit(do_not_specialize=["splits"])
def _merge_splits_kernel(
    partial_ptr,
    stats_ptr,
    out_ptr,
    splits,
    LATENT: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK_L)
    best = float("-inf")
    for split in range(splits):
        best = tl.maximum(best, tl.load(stats_ptr + row * splits + split))
    total = 0.0
    acc = tl.zeros([BLOCK_L], tl.float32)
    for split in range(splits):
        weight = tl.exp(tl.load(stats_ptr + row * splits + split) - best)
        part = tl.load(
            partial_ptr + (row * splits + split) * LATENT + col, mask=col < LATENT, other=0.0
        )
        acc += weight * part
        total += weight
    tl.store(out_ptr + row * LATENT + col, acc / total, mask=col < LATENT)


def mla_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    *,
    latent: int,
    scale: float,
    splits: int | None = None,
) -> torch.Tensor:
    """softmax(q . rows * scale) rows[:latent], a sequence's rows being the first lengths[s].

    Args:
        q: [S, H, L + R], contiguous, the cache's dtype.
        cache: [num_pages, P, L + R], contiguous.
        tables: [S, pages] int32 page numbers; entries past a sequence's end are not read.
        lengths: [S] int, at least 1, at most pages * P.
        latent: L.
        scale: of the scores.
        splits: of the context; default: enough programs for the device at these shapes.

    Returns:
        [S, H, L] in q's dtype. fp32 inside; the weights are rounded to the cache's dtype before
        they meet the rows.
    """
    num_seqs, num_heads, width = q.shape
    if cache.shape[-1] != width or not 0 < latent <= width:
        raise ValueError(
            f"cache: expected rows of {width} values and latent within, got {cache.shape[-1]}, "
            f"latent={latent}"
        )
    if not (q.is_contiguous() and cache.is_contiguous()):
        raise ValueError("q, cache: expected contiguous tensors")
    out = torch.empty(num_seqs, num_heads, latent, dtype=q.dtype, device=q.device)
    if not num_seqs:
        return out
    # 32 heads is the most whose sums stay in registers (compiled for sm_90: no spills).
    block_h = 32 if num_heads > 16 else 16
    head_blocks = triton.cdiv(num_heads, block_h)
    page = cache.shape[1]
    if splits is None:
        # About four programs a multiprocessor, and at least 256 rows a split.
        room = max(1, 528 // (num_seqs * head_blocks))
        splits = min(room, max(1, tables.shape[1] * page // 256), 128)
    partial = torch.empty(num_seqs, num_heads, splits, latent, dtype=torch.float32, device=q.device)
    stats = torch.empty(num_seqs, num_heads, splits, dtype=torch.float32, device=q.device)
    block_l = triton.next_power_of_2(latent)
    _mla_decode_kernel[(num_seqs, head_blocks, splits)](
        q,
        cache,
        tables,
        lengths,
        partial,
        stats,
        num_heads,
        tables.stride(0),
        splits,
        scale,
        PAGE=page,
        LATENT=latent,
        ROPE=width - latent,
        BLOCK_H=block_h,
        BLOCK_N=32,
        BLOCK_L=block_l,
        BLOCK_R=max(16, triton.next_power_of_2(width - latent)),
        num_warps=8,
        num_stages=2,
    )
    _merge_splits_kernel[(num_seqs * num_heads,)](
        partial, stats, out, splits, LATENT=latent, BLOCK_L=block_l, num_warps=4
    )
    return out
