"""Causal depthwise convolution over packed sequences, with the last W - 1 inputs as state.

y_t = silu(sum_j w[:, j] * x_{t - (W - 1) + j}); inputs before the sequence's first new token come
from the state, oldest first.

Shapes: N packed tokens, S sequences, C channels, W taps.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from moe_comm.model.layers.sequence_plan import SequencePlan


def short_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    state: torch.Tensor,
    plan: SequencePlan,
    wide: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Convolve x [N, C] with weight [C, W]; returns [N, C] in x's dtype.

    `state` [num_slots, C, W - 1] is read and updated in place at the batch's slots. Any length
    is fine, also one shorter than W - 1. Sums are in `wide`, taps in order.
    """
    if x.is_cuda:
        from moe_comm.kernels import short_conv as kernel

        return kernel.short_conv(
            x,
            weight,
            state,
            plan.batch.slots,
            plan.batch.cu_seqlens,
            plan.seq_of_token,
            all_single=plan.all_single,
        )
    width = weight.shape[1]
    slots = plan.batch.slots
    remembered, new, kept = plan.window_rows(width)
    rows = x.new_empty(x.shape[0] + remembered.numel(), x.shape[1])
    rows[remembered] = state[slots].transpose(1, 2).to(x.dtype)
    rows[new] = x
    taps = weight.to(wide).t().contiguous()
    mixed = rows[new - (width - 1)].to(wide) * taps[0]
    for j in range(1, width):
        mixed = mixed + rows[new - (width - 1) + j].to(wide) * taps[j]
    state[slots] = rows[kept].transpose(1, 2).to(state.dtype)
    return F.silu(mixed).to(x.dtype)
