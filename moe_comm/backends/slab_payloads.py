"""Payloads of a dispatch: a token's further tensors, side by side in one run of bytes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moe_comm.calls import DispatchCall

PAYLOAD_ALIGNMENT = 16


def payload_layout(call: DispatchCall, limit: int) -> tuple[list[tuple[str, int, int]], int]:
    """(name, first byte, bytes) of each payload of a token, and the bytes of all.

    Raises ValueError where they need more than `limit` bytes (EPConfig.max_payload_bytes).
    """
    layout, at = [], 0
    for name, tensor in call.payloads.items():
        size = math.prod(tensor.shape[1:]) * tensor.element_size()
        layout.append((name, at, size))
        at += -(-size // PAYLOAD_ALIGNMENT) * PAYLOAD_ALIGNMENT
    if at > limit:
        raise ValueError(
            f"payloads: expected at most max_payload_bytes = {limit} bytes a token (each payload "
            f"rounded up to {PAYLOAD_ALIGNMENT}), got {at}"
        )
    return layout, at


def pack_payloads(call: DispatchCall, limit: int) -> Tensor:
    """uint8 [T, bytes of a token]."""
    layout, width = payload_layout(call, limit)
    packed = torch.zeros(call.num_rows, width, dtype=torch.uint8, device=call.x.device)
    for name, at, size in layout:
        flat = call.payloads[name].contiguous().view(torch.uint8).view(call.num_rows, size)
        packed[:, at : at + size] = flat
    return packed


def payload_views(call: DispatchCall, limit: int, received: Tensor) -> dict[str, Tensor]:
    """Each payload as it arrived: views [R, B, ...] into `received`, uint8 [R, B, bytes]."""
    views = {}
    for name, at, size in payload_layout(call, limit)[0]:
        like = call.payloads[name]
        part = received[..., at : at + size].view(like.dtype)
        views[name] = part.unflatten(-1, like.shape[1:]) if like.dim() > 1 else part[..., 0]
    return views
