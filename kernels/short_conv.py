"""Causal depthwise convolution of packed sequences with SiLU, and its W - 1 remembered inputs.

Legend: N packed tokens, S sequences, C channels, W taps. A state row is [C, W - 1], oldest first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _short_conv_kernel(
    x_ptr,
    weight_ptr,
    state_ptr,
    slot_ptr,
    cu_ptr,
    seq_ptr,
    out_ptr,
    C: tl.constexpr,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    SINGLE: tl.constexpr,
):
    """One token, one block of channels. SINGLE: every sequence has one token, so this program alone
    touches its piece of state, and moves it on."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < C
    if SINGLE:
        seq = token
        offset = token * 0
    else:
        seq = tl.load(seq_ptr + token).to(tl.int64)
        offset = token - tl.load(cu_ptr + seq).to(tl.int64)
    slot = tl.load(slot_ptr + seq).to(tl.int64)
    back: tl.constexpr = W - 1
    state = state_ptr + (slot * C + channel) * back
    acc = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(W):
        ago = back - j
        new = offset >= ago
        x = tl.load(x_ptr + (token - ago) * C + channel, mask=inside & new, other=0.0)
        old = tl.load(state + offset + j, mask=inside & (offset < ago), other=0.0)
        weight = tl.load(weight_ptr + channel * W + j, mask=inside, other=0.0)
        acc += tl.where(new, x.to(tl.float32), old.to(tl.float32)) * weight
        if SINGLE and j > 0:
            # Tap j of the window is remembered as tap j - 1, which was read one step earlier,
            # perhaps by another thread of this program.
            moved = tl.where(new, x.to(tl.float32), old.to(tl.float32))
            tl.debug_barrier()
            tl.store(state + j - 1, moved.to(state_ptr.dtype.element_ty), mask=inside)
    out = acc * tl.sigmoid(acc)
    tl.store(out_ptr + token * C + channel, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _remember_kernel(
    x_ptr, state_ptr, slot_ptr, cu_ptr, C: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr
):
    """One sequence, one block of channels: the last W - 1 of (old state, new tokens)."""
    seq = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < C
    slot = tl.load(slot_ptr + seq).to(tl.int64)
    end = tl.load(cu_ptr + seq + 1).to(tl.int64)
    length = end - tl.load(cu_ptr + seq).to(tl.int64)
    back: tl.constexpr = W - 1
    state = state_ptr + (slot * C + channel) * back
    for t in tl.static_range(back):
        ago = back - t
        new = length >= ago
        x = tl.load(x_ptr + (end - ago) * C + channel, mask=inside & new, other=0.0)
        # A short chunk keeps old inputs: place t gets what was at t + length, which lies further
        # on, so it has not been overwritten yet; what is overwritten now was read before, by this
        # or another thread.
        old = tl.load(state + t + length, mask=inside & (length < ago), other=0.0)
        kept = tl.where(new, x.to(tl.float32), old.to(tl.float32))
        tl.debug_barrier()
        tl.store(state + t, kept.to(state_ptr.dtype.element_ty), mask=inside)


def short_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_of_token: torch.Tensor,
    *,
    all_single: bool,
) -> torch.Tensor:
    """silu(conv(x)) [N, C] in x's dtype; `state` is updated in place at `slots`.

    Args:
        x: [N, C] contiguous. weight: [C, W] fp32 contiguous.
        state: [num_slots, C, W - 1] contiguous.
        slots: [S] int, distinct. cu_seqlens: [S + 1] int. seq_of_token: [N] int.
        all_single: every sequence has one token (N == S): one launch in place of two.

    Example (C = 1, W = 2, weight [1, 10], remembered [5], new inputs [1, 2]): sums 5 + 10 = 15 and
    1 + 20 = 21 before SiLU; then [2] is remembered.
    """
    num, channels = x.shape
    width = weight.shape[1]
    if not (x.is_contiguous() and weight.is_contiguous() and state.is_contiguous()):
        raise ValueError("x, weight, state: expected contiguous tensors")
    if tuple(state.shape[1:]) != (channels, width - 1):
        raise ValueError(
            f"state: expected [slots, {channels}, {width - 1}], got {tuple(state.shape)}"
        )
    out = torch.empty_like(x)
    if not num:
        return out
    block = min(1024, triton.next_power_of_2(channels))
    blocks = triton.cdiv(channels, block)
    _short_conv_kernel[(num, blocks)](
        x,
        weight,
        state,
        slots,
        cu_seqlens,
        seq_of_token,
        out,
        C=channels,
        W=width,
        BLOCK=block,
        SINGLE=all_single,
        num_warps=4,
    )
    if not all_single:
        _remember_kernel[(slots.shape[0], blocks)](
            x, state, slots, cu_seqlens, C=channels, W=width, BLOCK=block, num_warps=4
        )
    return out
