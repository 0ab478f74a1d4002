"""The arithmetic of backends without kernels of their own: torch on the CPU, Triton on CUDA.

Elsewhere, and for dtypes that the kernels do not take, plain torch without a host sync. All give
the same bits. Shape legend: M received rows, N expert rows, D row width, K choices, L local
experts, G terms of a sum (ranks or nodes), B rows a term has room for, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_comm import layout, numerics, wire
from moe_comm.backends import sum_launches
from moe_comm.backends.packing import as_bytes, put_rows, take_rows
from moe_comm.status import StatusBit
from moe_comm.wire import Wire

_KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# One float64 buffer of a block on the CPU: small enough for the caches, large enough that the
# interpreter's share does not count.
_BLOCK_BYTES = 1 << 20


def expert_index(
    local_idx: Tensor, *, num_local_experts: int, capacity: int, status: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Group received rows by expert: moe_comm.layout.expert_index, with the overflow bit.

    Args:
        local_idx: [M, K] int32 contiguous.
        num_local_experts: L. capacity: length of row_index.
        status: int32 [1]; ROWS_OVERFLOW is set where rows were dropped.

    Returns: expert_offsets [L + 1], row_index [capacity], choice_position [M, K], int32.
    """
    if local_idx.is_cuda:
        from moe_comm.kernels.expert_index import expert_index as on_cuda

        return on_cuda(
            local_idx, num_local_experts=num_local_experts, capacity=capacity, status=status
        )
    if local_idx.device.type == "cpu":
        return _expert_index_cpu(local_idx, num_local_experts, capacity, status)
    index = layout.expert_index(local_idx, num_local_experts=num_local_experts, capacity=capacity)
    set_bit(status, index.num_dropped > 0, StatusBit.ROWS_OVERFLOW)
    return index.expert_offsets, index.row_index, index.choice_position


def set_bit(status: Tensor, condition: Tensor, bit: StatusBit) -> None:
    """status |= bit where the scalar condition holds, without a host sync."""
    status.bitwise_or_(condition.to(torch.int32) * int(bit))


def quantize(x: Tensor, form: Wire) -> tuple[Tensor, Tensor | None]:
    """moe_comm.wire.quantize, in blocks on the CPU."""
    if form.scale_dtype is None:
        return x, None
    rows = x.reshape(-1, x.shape[-1])
    if rows.is_cuda:
        from moe_comm.kernels.quantize import quantize as on_cuda

        values, scales = on_cuda(rows, mx=form.name == "mxfp8")
    elif rows.device.type == "cpu" and rows.numel():
        parts = [wire.quantize(part, form) for part in rows.split(_rows_of_block(rows.shape[1]))]
        values = torch.cat([as_bytes(part[0]) for part in parts]).view(torch.float8_e4m3fn)
        scales = torch.cat([part[1] for part in parts if part[1] is not None])
    else:
        values, maybe = wire.quantize(rows, form)
        assert maybe is not None
        scales = maybe
    return values.view(x.shape), scales.view(*x.shape[:-1], scales.shape[-1])


def partial_sums(
    y: Tensor,
    weights: Tensor,
    position: Tensor,
    *,
    weights_applied: bool,
    fill_empty: bool,
    out: Tensor,
    rows: range | None = None,
) -> None:
    """The contract's partial(t, rank) of each received row, into `out`.

    Args:
        y: [N, D] expert rows.
        weights: [M, K], fp32 (or float64 with y in float64); any shape of as many elements, as
            out.
        position: [M, K] int32, the expert row of each choice, -1 where there is none.
        weights_applied: add without weights.
        fill_empty: make rows without a choice zero (a rank's choices may all have been dropped
            beyond the capacity); else they may stay undefined.
        out: [M, D] in y's dtype.
        rows: which of the M rows, consecutive ones; default all.
    """
    if y.is_cuda and y.dtype in _KERNEL_DTYPES and weights.dtype == torch.float32:
        sum_launches.partial_sums(
            y.contiguous(), position, weights, weights_applied=weights_applied, out=out, rows=rows
        )
        return
    weights, out = weights.view(position.shape), out.view(position.shape[0], y.shape[1])
    if rows is not None:
        part = slice(rows.start, rows.stop)
        weights, position, out = weights[part], position[part], out[part]
    if y.device.type == "cpu":
        if fill_empty:
            out.zero_()
        _partial_sums_cpu(y, weights, position, weights_applied, out)
    else:
        out.copy_(_partial_sums_everywhere(y, weights, position, weights_applied))


def fold(
    terms: Tensor,
    scales: Tensor | None,
    form: Wire,
    who: Tensor,
    *,
    biases: Sequence[Tensor] = (),
    out: Tensor,
) -> None:
    """The contract's out(t): each term added at the last choice that is its own.

    Args:
        terms: [G, B, D] on the wire, B >= T; entry (g, t) is read where token t has a choice of g.
        scales: [G, B, groups], or None.
        form: the wire.
        who: [T, K] int, the term of each choice, -1 where there is none.
        biases: [T, D] each, added first in order.
        out: [T, D].
    """
    if terms.is_cuda and out.dtype in _KERNEL_DTYPES:
        rows = wire.dequantize(terms, scales, form)
        whole = out.contiguous()
        sum_launches.fold(rows, who.to(torch.int32), bias=_bias_sum(biases, out), out=whole)
        if whole is not out:
            out.copy_(whole)
    elif terms.device.type == "cpu":
        _fold_cpu(terms, scales, form, who, biases, out)
    else:
        _fold_everywhere(terms, scales, form, who, biases, out)


def _expert_index_cpu(
    local_idx: Tensor, num_local_experts: int, capacity: int, status: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """As layout.expert_index: one sort of short keys, those of choices that are not here last."""
    flat = local_idx.reshape(-1)
    kind = torch.int16 if num_local_experts < 2**15 else torch.int32
    # Of -1 the sign's bit is all that goes, which leaves the largest key.
    keys = flat.clamp_min(-1).to(kind).bitwise_and_(torch.iinfo(kind).max)
    found = torch.sort(keys, stable=True)
    ends = torch.searchsorted(found.values, torch.arange(num_local_experts + 1, dtype=kind))
    total = int(ends[-1])
    if total > capacity:
        status.bitwise_or_(int(StatusBit.ROWS_OVERFLOW))
        total = capacity
    chosen = found.indices[:total]
    row_index = torch.empty(capacity, dtype=torch.int32)
    row_index[:total] = chosen.to(torch.int32) // local_idx.shape[1]
    row_index[total:] = -1
    position = torch.full(local_idx.shape, -1, dtype=torch.int32)
    position.view(-1).scatter_(0, chosen, torch.arange(total, dtype=torch.int32))
    return ends.clamp_max(capacity).to(torch.int32), row_index, position


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _bias_sum(biases: Sequence[Tensor], out: Tensor) -> Tensor | None:
    if not biases:
        return None
    total = torch.zeros(out.shape, dtype=_accumulator(out.dtype), device=out.device)
    for bias in biases:
        total += bias
    return total


def _rows_of_block(width: int) -> int:
    return max(8, _BLOCK_BYTES // (8 * max(width, 1)))


def _partial_sums_cpu(
    y: Tensor, weights: Tensor, position: Tensor, weights_applied: bool, out: Tensor
) -> None:
    here = position >= 0
    count = here.sum(dim=1)
    # Rows with most choices first: the rows of a block that still have a j-th choice are then
    # always its first ones, so every step works on a slice.
    rows = torch.argsort(count, descending=True, stable=True)
    rows = rows[: int((count > 0).sum())]
    choices = torch.argsort((~here).to(torch.int8), dim=1, stable=True)
    where = position.gather(1, choices).index_select(0, rows)
    weight = weights.gather(1, choices).index_select(0, rows)
    count = count.index_select(0, rows)
    width, kind = y.shape[1], _accumulator(y.dtype)
    block = _rows_of_block(width)
    step = numerics.FusedMultiplyAdd(block, width) if kind == torch.float32 else None
    flat, target = as_bytes(y), as_bytes(out)
    acc = torch.empty(block, width, dtype=kind)
    taken = torch.empty(block, width, dtype=y.dtype)
    for start in range(0, rows.shape[0], block):
        end = min(start + block, rows.shape[0])
        acc.zero_()
        for j in range(int(count[start])):
            n = int((count[start:end] > j).sum())
            index = where[start : start + n, j]
            value = take_rows(flat, index, as_bytes(taken[:n])).view(y.dtype)
            if weights_applied:
                acc[:n] += value
            elif step is not None:
                step(weight[start : start + n, j], value, acc[:n])
            else:
                acc[:n] += weight[start : start + n, j, None].to(kind) * value
        done = acc[: end - start].to(out.dtype)
        put_rows(target, rows[start:end], as_bytes(done))


def _fold_cpu(
    terms: Tensor,
    scales: Tensor | None,
    form: Wire,
    who: Tensor,
    biases: Sequence[Tensor],
    out: Tensor,
) -> None:
    num_terms, room, width = terms.shape
    order, live = _order_of_terms(who, num_terms)
    index = order * room + torch.arange(who.shape[0]).unsqueeze(-1)
    flat = as_bytes(terms.flatten(0, 1))
    groups = None if scales is None else as_bytes(scales.flatten(0, 1))
    kind, block = _accumulator(out.dtype), _rows_of_block(width)
    for start in range(0, who.shape[0], block):
        end = min(start + block, who.shape[0])
        acc = torch.zeros(end - start, width, dtype=kind)
        for bias in biases:
            acc += bias[start:end]
        for j in range(order.shape[1]):
            chosen, rows = live[start:end, j], index[start:end, j]
            everyone = bool(chosen.all())
            if not everyone:
                tokens = chosen.nonzero().flatten()
                rows = rows[tokens]
            value = take_rows(flat, rows).view(terms.dtype)
            if groups is not None and scales is not None:
                factors = take_rows(groups, rows).view(scales.dtype)
                value = wire.dequantize(value, factors, form)
            if everyone:
                acc += value
            elif rows.numel():
                acc.index_add_(0, tokens, value.to(kind))
        out[start:end] = acc.to(out.dtype)


def _order_of_terms(who: Tensor, num_terms: int) -> tuple[Tensor, Tensor]:
    """int64 [T, m] terms in order of their last choice, and bool [T, m], which of them count."""
    num_tokens, num_topk = who.shape
    last = torch.full((num_tokens, num_terms + 1), -1, device=who.device)
    column = torch.where(who >= 0, who, num_terms).long()
    for k in range(num_topk):
        last.scatter_(1, column[:, k : k + 1], k)
    last = last[:, :num_terms]
    most = min(num_terms, num_topk)
    sorted_last, order = last.sort(dim=1, stable=True)
    return order[:, num_terms - most :], sorted_last[:, num_terms - most :] >= 0


def _partial_sums_everywhere(
    y: Tensor, weights: Tensor, position: Tensor, weights_applied: bool
) -> Tensor:
    kind = _accumulator(y.dtype)
    acc = torch.zeros(position.shape[0], y.shape[1], dtype=kind, device=y.device)
    if y.shape[0] == 0:
        return acc.to(y.dtype)
    for k in range(position.shape[1]):
        here = (position[:, k] >= 0).unsqueeze(-1)
        value = y[position[:, k].clamp_min(0).long()]
        if weights_applied:
            added = acc + value.to(kind)
        elif kind == torch.float64:
            added = acc + weights[:, k, None].to(kind) * value
        else:
            added = numerics.fma_f32(weights[:, k, None], value, acc)
        acc = torch.where(here, added, acc)
    return acc.to(y.dtype)


def _fold_everywhere(
    terms: Tensor,
    scales: Tensor | None,
    form: Wire,
    who: Tensor,
    biases: Sequence[Tensor],
    out: Tensor,
) -> None:
    num_terms, room, width = terms.shape
    order, live = _order_of_terms(who, num_terms)
    token = torch.arange(who.shape[0], device=who.device)
    flat = wire.dequantize(terms, scales, form).reshape(num_terms * room, width)
    acc = _bias_sum(biases, out)
    if acc is None:
        acc = torch.zeros(out.shape, dtype=_accumulator(out.dtype), device=out.device)
    for j in range(order.shape[1]):
        value = flat.index_select(0, order[:, j] * room + token).to(acc.dtype)
        acc = torch.where(live[:, j, None], acc + value, acc)
    out.copy_(acc)
