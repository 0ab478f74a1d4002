"""The router's choice after its product: sigmoid, bias, top k with ties to the lowest id, weights.

One program a token. Legend: T tokens, E experts, K choices. No expert groups: those take the torch
form in model/layers/router.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _router_topk_kernel(
    logits_ptr,
    bias_ptr,
    idx_ptr,
    weight_ptr,
    scaling,
    E: tl.constexpr,
    K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK_E)
    inside = expert < E
    logits = tl.load(logits_ptr + token * E + expert, mask=inside, other=0.0)
    score = tl.sigmoid(logits)
    choice = score + tl.load(bias_ptr + expert, mask=inside, other=0.0)
    # NaN would never win a comparison and leave fewer than K choices; it counts as the worst.
    choice = tl.where(inside & (choice == choice), choice, float("-inf"))
    left = inside
    slot = tl.arange(0, BLOCK_K)
    ids = tl.zeros([BLOCK_K], tl.int32)
    weights = tl.zeros([BLOCK_K], tl.float32)
    for k in tl.static_range(K):
        best = tl.max(tl.where(left, choice, float("-inf")), 0)
        chosen = tl.min(tl.where(left & (choice == best), expert, E), 0)
        taken = tl.sum(tl.where(expert == chosen, score, 0.0), 0)
        ids = tl.where(slot == k, chosen, ids)
        weights = tl.where(slot == k, taken, weights)
        left = left & (expert != chosen)
    if RENORMALIZE:
        weights = weights / (tl.sum(weights, 0) + 1e-20)
    tl.store(idx_ptr + token * K + slot, ids.to(tl.int64), mask=slot < K)
    tl.store(weight_ptr + token * K + slot, weights * scaling, mask=slot < K)


def router_topk(
    logits: torch.Tensor,
    bias: torch.Tensor,
    *,
    top_k: int,
    renormalize: bool = True,
    scaling: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [T, E] fp32, bias [E] fp32 to (ids [T, K] int64, best first; weights [T, K] fp32).

    Example (E = 4, K = 2, logits all 0, bias [0, 0.1, 0, 0.1]): ids [1, 3], weights [0.5, 0.5].
    """
    num, experts = logits.shape
    if logits.dtype != torch.float32 or not logits.is_contiguous():
        raise ValueError(f"logits: expected contiguous float32, got {logits.dtype}")
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k: expected 1 to {experts}, got {top_k}")
    idx = torch.empty(num, top_k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(num, top_k, dtype=torch.float32, device=logits.device)
    if num:
        _router_topk_kernel[(num,)](
            logits,
            bias,
            idx,
            weights,
            scaling,
            E=experts,
            K=top_k,
            BLOCK_E=triton.next_power_of_2(experts),
            BLOCK_K=triton.next_power_of_2(top_k),
            RENORMALIZE=renormalize,
            num_warps=4,
        )
    return idx, weights
