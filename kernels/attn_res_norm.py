"""One AttnRes site with the addition before it and the RMSNorm after it; every row is read once.

running' = running + update (rounded); h = the softmax mixture of the bank's rows and running' by
their scores, accumulated online and rounded; out = rmsnorm(h) * norm_weight.
Legend: N tokens, D hidden, R bank rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _attn_res_norm_kernel(
    bank_ptr,
    running_ptr,
    update_ptr,
    score_ptr,
    norm_ptr,
    new_running_ptr,
    out_ptr,
    bank_stride,
    site_eps,
    norm_eps,
    R: tl.constexpr,
    HAS_RUNNING: tl.constexpr,
    HAS_UPDATE: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    inside = col < D
    at = row * D + col
    dtype = out_ptr.dtype.element_ty
    current = tl.zeros([BLOCK], tl.float32)
    if HAS_RUNNING:
        current = tl.load(running_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_UPDATE:
        current += tl.load(update_ptr + at, mask=inside, other=0.0).to(tl.float32)
        rounded = current.to(dtype)
        tl.store(new_running_ptr + at, rounded, mask=inside)
        current = rounded.to(tl.float32)
    mixed = current
    if R > 0:
        weight = tl.load(score_ptr + col, mask=inside, other=0.0)
        best = tl.sum(current * weight, 0) * tl.rsqrt(tl.sum(current * current, 0) / D + site_eps)
        total = 1.0
        for r in tl.static_range(R):
            v = tl.load(bank_ptr + r * bank_stride + at, mask=inside, other=0.0).to(tl.float32)
            score = tl.sum(v * weight, 0) * tl.rsqrt(tl.sum(v * v, 0) / D + site_eps)
            new_best = tl.maximum(best, score)
            shrink = tl.exp(best - new_best)
            p = tl.exp(score - new_best)
            mixed = mixed * shrink + v * p
            total = total * shrink + p
            best = new_best
        mixed = (mixed / total).to(dtype).to(tl.float32)
    norm = tl.load(norm_ptr + col, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(mixed * mixed, 0) / D + norm_eps)
    tl.store(out_ptr + at, (mixed * scale * norm).to(dtype), mask=inside)


def attn_res_norm(
    bank: torch.Tensor,
    num_rows: int,
    running: torch.Tensor | None,
    update: torch.Tensor | None,
    score_weight: torch.Tensor,
    norm_weight: torch.Tensor,
    *,
    site_eps: float,
    norm_eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The site's result after its norm, and the new running sum.

    Args:
        bank: [rows, N, D]; the first `num_rows` are in use.
        running, update: [N, D] contiguous; at least one is given.
        score_weight: [D] fp32, the site's norm weight times its projection.
        norm_weight: [D], of the norm that follows.

    Returns:
        (normed [N, D], new running sum [N, D]), in the inputs' dtype.
    """
    given = running if running is not None else update
    if given is None:
        raise ValueError("running, update: expected at least one, got neither")
    for name, tensor in (("running", running), ("update", update)):
        if tensor is not None and not (tensor.is_contiguous() and tensor.shape == given.shape):
            raise ValueError(f"{name}: expected contiguous {tuple(given.shape)}")
    num, width = given.shape
    out = torch.empty_like(given)
    new_running = given if update is None else torch.empty_like(given)
    if num:
        block = triton.next_power_of_2(width)
        _attn_res_norm_kernel[(num,)](
            bank,
            given if running is None else running,
            given if update is None else update,
            score_weight,
            norm_weight,
            new_running,
            out,
            bank.stride(0),
            site_eps,
            norm_eps,
            R=num_rows,
            HAS_RUNNING=running is not None,
            HAS_UPDATE=update is not None,
            D=width,
            BLOCK=block,
            num_warps=min(8, max(1, block // 256)),
        )
    return out, new_running
