"""Calls that record gradients or are compiled: Communicator's methods by way of moe_comm.ops."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_comm import ops
from moe_comm.calls import Rows
from moe_comm.chunks import Pending
from moe_comm.handle import Dispatched, DispatchHandle
from moe_comm.ops_registry import name_of, new_token, routing_of

if TYPE_CHECKING:
    from moe_comm.communicator import Communicator


def wants_ops(comm: Communicator, *tensors: object) -> bool:
    """Whether a call with these arguments has to go through the ops.

    Raises ValueError where gradients are recorded and the backend has none.
    """
    if torch.compiler.is_compiling():
        return True
    recorded = torch.is_grad_enabled() and any(
        isinstance(tensor, Tensor) and tensor.requires_grad for tensor in tensors
    )
    if recorded and "autograd" not in comm.capabilities:
        raise ValueError(
            f"requires_grad: backend {comm.backend} computes no gradients, got a tensor that "
            "records them; use a backend that does (c10d), or call under torch.no_grad()"
        )
    return recorded


def dispatch_through(
    comm: Communicator,
    x: Rows,
    topk_idx: Tensor | None,
    topk_weights: Tensor | None,
    *,
    num_tokens: int | Tensor | None,
    bucket: int | None,
    payloads: Mapping[str, Tensor] | None,
    handle: DispatchHandle | None,
) -> Dispatched:
    """Communicator.dispatch by way of the op."""
    values, scales = x if isinstance(x, tuple) else (x, None)
    if values.requires_grad and comm.config.wire.scale_dtype is not None:
        raise ValueError(
            f"x: expected no gradients on dispatch wire {comm.config.wire.name!r}, whose rows are "
            "float8; use 'bf16' or 'none' for training"
        )
    given = payloads or {}
    repeat = None if handle is None else token_of(comm, handle)
    outputs = ops.dispatch(
        values,
        scales,
        topk_idx,
        topk_weights,
        name_of(comm),
        num_tokens if isinstance(num_tokens, int) else -1,
        num_tokens if isinstance(num_tokens, Tensor) else None,
        -1 if bucket is None else bucket,
        list(given.values()),
        repeat,
    )
    rows, factors, ids, weights, tokens, offsets, row_index, token = outputs
    if torch.compiler.is_compiling():
        return _traced(comm, outputs, topk_idx, topk_weights, bucket, given)
    arrived = routing_of(token)
    user_weights = arrived.handle.topk_weights if topk_weights is None else topk_weights
    if handle is not None:
        user_weights = handle.topk_weights
    return dataclasses.replace(
        arrived,
        rows=rows,
        scales=None if arrived.scales is None else factors,
        topk_idx=ids,
        topk_weights=weights,
        num_tokens_per_rank=tokens,
        expert_offsets=offsets,
        row_index=row_index,
        payloads={name: arrived.payloads[str(i)] for i, name in enumerate(given)},
        handle=dataclasses.replace(arrived.handle, topk_weights=user_weights, token=token),
    )


def _traced(
    comm: Communicator,
    outputs: tuple[Tensor, ...],
    topk_idx: Tensor | None,
    topk_weights: Tensor | None,
    bucket: int | None,
    payloads: Mapping[str, Tensor],
) -> Dispatched:
    """The result inside a graph. Its handle has what combine needs, and nothing else."""
    rows, factors, ids, weights, tokens, offsets, row_index, token = outputs
    if topk_idx is None or topk_weights is None or payloads:
        raise ValueError(
            "handle, payloads: expected None under torch.compile, where only rows and routing "
            "travel through the graph"
        )
    nothing = row_index.new_empty(0)
    return Dispatched(
        rows=rows,
        scales=None if comm.config.wire.scale_dtype is None else factors,
        topk_idx=ids,
        topk_weights=weights,
        num_tokens_per_rank=tokens,
        payloads={},
        expert_offsets=offsets,
        row_index=row_index,
        wire=comm.config.wire,
        handle=DispatchHandle(
            call=-1,
            slot=-1,
            bucket=comm.config.bucket if bucket is None else bucket,
            num_rows=topk_idx.shape[0],
            num_tokens=topk_idx.shape[0],
            topk_idx=topk_idx,
            choice_rank=nothing,
            topk_weights=topk_weights,
            received_weights=weights,
            choice_position=nothing,
            num_tokens_per_rank=tokens,
            token=token,
        ),
    )


def combine_through(
    comm: Communicator,
    y: Tensor,
    handle: DispatchHandle,
    *,
    layout: str,
    weights_applied: bool,
    bias: Tensor | tuple[Tensor, ...] | None,
    out: Tensor | None,
) -> Tensor:
    """Communicator.combine by way of the op."""
    if out is not None:
        raise ValueError("out: expected None where gradients are recorded, got a tensor")
    biases = [] if bias is None else [bias] if isinstance(bias, Tensor) else list(bias)
    token = token_of(comm, handle)
    result: Tensor = ops.combine(
        y, handle.topk_weights, token, name_of(comm), layout, weights_applied, biases
    )
    handle.combined = True
    return result


def token_of(comm: Communicator, handle: DispatchHandle) -> Tensor:
    """The token of a handle, made where its dispatch recorded nothing."""
    del comm
    if handle.token is None:
        inner = dataclasses.replace(handle, topk_weights=handle.topk_weights.detach())
        handle.token = new_token(_bare(inner))
    return handle.token


def _bare(handle: DispatchHandle) -> Dispatched:
    """A registry entry for a handle alone: its rows are nobody's business any more."""
    nothing = handle.topk_idx.new_empty(0)
    return Dispatched(
        rows=nothing,
        scales=None,
        topk_idx=nothing,
        topk_weights=handle.received_weights,
        num_tokens_per_rank=handle.num_tokens_per_rank,
        payloads={},
        expert_offsets=nothing,
        row_index=nothing,
        wire=handle._owner.config.wire,
        handle=handle,
    )


def as_pending(value: Any) -> Pending[Any]:
    """A call that is over already: recorded calls do not overlap."""
    return Pending(lambda: value)
