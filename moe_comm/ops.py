"""dispatch and combine as torch.library custom ops, with fake implementations and autograd.

    rows, scales, ids, weights, tokens, offsets, row_index, token = torch.ops.moe_comm.dispatch(
        x, None, topk_idx, topk_weights, name_of(comm), -1, None, -1, [], None)
    out = torch.ops.moe_comm.combine(y, topk_weights, token, name_of(comm), "expert", False, [])

torch.compile sees them as opaque. `Communicator.dispatch` and `combine` go through them where
gradients are recorded, or under torch.compile. What the ops return belongs to the caller: rows are
copied out of their slot, since autograd may keep them. A dispatch's routing travels as a CPU int64
token and is forgotten when the token's memory is freed.

Gradients. Of dispatch: the gradients of the received rows (and of the received weights) come back
to their tokens and are added in the order of combine. Of combine: the gradient of out is sent along
the routing; y's gradient is the weight times it, a weight's gradient is y dot it, returned to the
source. Gradients travel in their own dtype, never quantized; roundings (to bf16, to the combine
wire) have gradient one. Forward and backward are collective: every rank records the same calls.

Shape legend: T tokens, R ranks, B bucket, K choices, H hidden, N expert rows, L local experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe_comm.calls import Rows
from moe_comm.handle import Dispatched
from moe_comm.ops_registry import communicator_of, name_of, new_token, routing_of

__all__ = ["combine", "combine_backward", "dispatch", "name_of", "return_rows"]

# dispatch


@torch.library.custom_op("moe_comm::dispatch", mutates_args=())
def dispatch(
    x: Tensor,
    scales: Tensor | None,
    topk_idx: Tensor | None,
    topk_weights: Tensor | None,
    communicator: str,
    num_tokens: int,
    num_tokens_tensor: Tensor | None,
    bucket: int,
    payloads: Sequence[Tensor],
    repeat: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Communicator.dispatch. -1 for num_tokens or bucket: not given. `repeat`: the token of a
    dispatch whose routing is used again.

    Returns rows, scales (empty for a wire without), topk_idx, topk_weights, num_tokens_per_rank,
    expert_offsets, row_index, as Dispatched has them; and the token, CPU int64 [1].
    """
    comm = communicator_of(communicator)
    given: int | Tensor | None = num_tokens_tensor
    if given is None:
        given = None if num_tokens < 0 else num_tokens
    rows: Rows = x.detach() if scales is None else (x.detach(), scales)
    arrived = comm._dispatch_now(
        rows,
        topk_idx,
        None if topk_weights is None else topk_weights.detach(),
        num_tokens=given,
        bucket=None if bucket < 0 else bucket,
        payloads={str(i): tensor.detach() for i, tensor in enumerate(payloads)},
        handle=None if repeat is None else routing_of(repeat).handle,
        async_op=False,
    )
    assert isinstance(arrived, Dispatched)
    copied = arrived.rows.clone(memory_format=torch.contiguous_format)
    token = new_token(arrived)
    return (
        copied,
        copied.new_empty(0) if arrived.scales is None else arrived.scales.clone(),
        arrived.topk_idx.clone(),
        arrived.topk_weights.clone(),
        arrived.num_tokens_per_rank.clone(),
        arrived.expert_offsets.clone(),
        arrived.row_index.clone(),
        token,
    )


@dispatch.register_fake
def _(
    x: Tensor,
    scales: Tensor | None,
    topk_idx: Tensor | None,
    topk_weights: Tensor | None,
    communicator: str,
    num_tokens: int,
    num_tokens_tensor: Tensor | None,
    bucket: int,
    payloads: Sequence[Tensor],
    repeat: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    del num_tokens, num_tokens_tensor, topk_idx, payloads, repeat
    comm = communicator_of(communicator)
    config, wire = comm.config, comm.config.wire
    room = (comm.num_ranks, config.bucket if bucket < 0 else bucket)
    rows = x.new_empty(
        *room, config.hidden, dtype=x.dtype if wire.value_dtype is None else wire.value_dtype
    )
    factors = x.new_empty(0, dtype=rows.dtype)
    if wire.scale_dtype is not None:
        groups = wire.num_groups(config.hidden)
        factors = x.new_empty(*room, groups, dtype=wire.scale_dtype)
    kind = torch.float32 if topk_weights is None else topk_weights.dtype
    return (
        rows,
        factors,
        x.new_empty(*room, config.num_topk, dtype=torch.int32),
        x.new_empty(*room, config.num_topk, dtype=kind),
        x.new_empty(room[0], dtype=torch.int32),
        x.new_empty(comm.num_local_experts + 1, dtype=torch.int32),
        x.new_empty(comm.expert_row_capacity(room[1]), dtype=torch.int32),
        torch.empty(1, dtype=torch.int64),
    )


def _keep_for_dispatch(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    ctx.num_rows, ctx.communicator = inputs[0].shape[0], inputs[4]
    ctx.num_payloads = len(inputs[8])
    ctx.save_for_backward(output[-1])
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*(output[i] for i in (2, 4, 5, 6, 7)))


def _dispatch_backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
    (token,) = ctx.saved_tensors
    grad_x = grad_weights = None
    if ctx.needs_input_grad[0] and grads[0] is not None:
        grad_x = torch.ops.moe_comm.return_rows(grads[0], token, ctx.communicator, ctx.num_rows)
    if ctx.needs_input_grad[3] and grads[3] is not None:
        grad_weights = torch.ops.moe_comm.return_rows(
            grads[3], token, ctx.communicator, ctx.num_rows
        )
    no_payloads = [None] * ctx.num_payloads
    return grad_x, None, None, grad_weights, None, None, None, None, no_payloads, None


@torch.library.custom_op("moe_comm::return_rows", mutates_args=())
def return_rows(rows: Tensor, token: Tensor, communicator: str, num_rows: int) -> Tensor:
    """[R, B, D] -> [T, D]: each token's rows from the ranks it reached, added up unweighted; T is
    num_rows. Collective. Gradients are not recorded through it."""
    del num_rows
    return communicator_of(communicator)._return_rows(rows, routing_of(token).handle)


@return_rows.register_fake
def _(rows: Tensor, token: Tensor, communicator: str, num_rows: int) -> Tensor:
    del token, communicator
    return rows.new_empty(num_rows, rows.shape[-1])


dispatch.register_autograd(_dispatch_backward, setup_context=_keep_for_dispatch)


# combine


@torch.library.custom_op("moe_comm::combine", mutates_args=())
def combine(
    y: Tensor,
    topk_weights: Tensor,
    token: Tensor,
    communicator: str,
    layout: str,
    weights_applied: bool,
    biases: Sequence[Tensor],
) -> Tensor:
    """Communicator.combine: [T, H]. `topk_weights` [T, K] are those of the dispatch: given again so
    that their gradient has somewhere to go."""
    comm = communicator_of(communicator)
    handle = routing_of(token).handle
    if topk_weights.shape != handle.topk_weights.shape:
        raise ValueError(
            f"topk_weights: expected the dispatch's, {list(handle.topk_weights.shape)}, got "
            f"{list(topk_weights.shape)}"
        )
    out = comm._combine_now(
        y.detach(),
        handle,
        layout=layout,
        weights_applied=weights_applied,
        bias=tuple(bias.detach() for bias in biases) or None,
        out=None,
        async_op=False,
    )
    assert isinstance(out, Tensor)
    return out


@combine.register_fake
def _(
    y: Tensor,
    topk_weights: Tensor,
    token: Tensor,
    communicator: str,
    layout: str,
    weights_applied: bool,
    biases: Sequence[Tensor],
) -> Tensor:
    del token, communicator, layout, weights_applied, biases
    return y.new_empty(topk_weights.shape[0], y.shape[-1])


def _keep_for_combine(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    y, _, token, ctx.communicator, ctx.layout, ctx.weights_applied, biases = inputs
    ctx.num_biases = len(biases)
    ctx.save_for_backward(y, token)


def _combine_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    y, token = ctx.saved_tensors
    grad_y, grad_weights = torch.ops.moe_comm.combine_backward(
        grad.contiguous(),
        y,
        token,
        ctx.communicator,
        ctx.layout,
        ctx.weights_applied,
        ctx.needs_input_grad[1],
    )
    return (
        grad_y if ctx.needs_input_grad[0] else None,
        grad_weights if ctx.needs_input_grad[1] else None,
        None,
        None,
        None,
        None,
        [grad] * ctx.num_biases,
    )


@torch.library.custom_op("moe_comm::combine_backward", mutates_args=())
def combine_backward(
    grad: Tensor,
    y: Tensor,
    token: Tensor,
    communicator: str,
    layout: str,
    weights_applied: bool,
    wants_weights: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of y, and of topk_weights [T, K] (zeros where they were not asked for, or were
    applied before). Collective."""
    comm = communicator_of(communicator)
    handle = routing_of(token).handle
    rows = comm._repeat_rows(grad, handle)
    position = handle.choice_position
    here = position >= 0
    weights = handle.received_weights.flatten(0, 1)
    no_weights = torch.zeros_like(handle.topk_weights)
    if layout == "rows":
        reached = (handle.state.local_idx >= 0).any(dim=-1, keepdim=True)
        return torch.where(reached, rows, 0).to(y.dtype), no_weights
    # Each expert row's received row and weight; what no choice points at stays zero.
    count = y.shape[0]
    kind = torch.float64 if y.dtype == torch.float64 else torch.float32
    target = torch.where(here, position, count).to(torch.int64).flatten()
    source = torch.arange(position.shape[0], device=y.device).unsqueeze(-1).expand_as(position)
    from_row = torch.zeros(count + 1, dtype=torch.int64, device=y.device)
    from_row.scatter_(0, target, source.flatten())
    factor = torch.zeros(count + 1, dtype=kind, device=y.device)
    applied = torch.ones_like(weights) if weights_applied else weights
    factor.scatter_(0, target, applied.to(kind).flatten())
    live = torch.zeros(count + 1, dtype=torch.bool, device=y.device).scatter_(0, target, True)
    arrived = rows.flatten(0, 1)[from_row[:count]].to(kind)
    arrived = torch.where(live[:count, None], arrived, 0)
    grad_y = (factor[:count, None] * arrived).to(y.dtype)
    if weights_applied or not wants_weights:
        return grad_y, no_weights
    products = torch.zeros(count + 1, dtype=kind, device=y.device)
    products[:count] = (y.detach().to(kind) * arrived).sum(dim=-1)
    dots = torch.where(here, products[target].view_as(position), 0).to(weights.dtype)
    return grad_y, comm._return_rows(dots.view_as(handle.received_weights), handle)


@combine_backward.register_fake
def _(
    grad: Tensor,
    y: Tensor,
    token: Tensor,
    communicator: str,
    layout: str,
    weights_applied: bool,
    wants_weights: bool,
) -> tuple[Tensor, Tensor]:
    del token, layout, weights_applied, wants_weights
    config = communicator_of(communicator).config
    kind = torch.float64 if grad.dtype == torch.float64 else torch.float32
    return torch.empty_like(y), grad.new_empty(grad.shape[0], config.num_topk, dtype=kind)


combine.register_autograd(_combine_backward, setup_context=_keep_for_combine)
