"""What one rank must receive and return, computed from the seed alone, with no communication.

The numeric contract of moe_comm.backends.reference for one rank's own share, vectorised so that a
benchmark can afford it at any size. A test holds it against that reference bit for bit.

Shape legend: R ranks, B bucket, T tokens, K choices, H hidden, L local experts, N expert rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_comm.config import EPConfig
from moe_comm.launch.experts import apply_expert, expert_factors
from moe_comm.launch.rank_data import RankData
from moe_comm.numerics import fma_f32_fast
from moe_comm.placement import ExpertPlacement
from moe_comm.wire import dequantize, quantize

_CHUNK_TOKENS = 256


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpectedDispatch:
    """What a rank must receive.

    Attributes:
        values: [R, B, H] on the wire; meaningful where `reached`.
        scales: [R, B, G], or None.
        reached: [R, B] bool, token (r, t) chose an expert of this rank.
        local_idx: [R, B, K] int64 local expert ids, -1 elsewhere.
        weights: [R, B, K] fp32; meaningful where local_idx is not -1.
        expert_offsets: [L + 1] int64.
        row_index: [N] int64, r * B + t in order of (expert, r, t, choice).
    """

    values: Tensor
    scales: Tensor | None
    reached: Tensor
    local_idx: Tensor
    weights: Tensor
    expert_offsets: Tensor
    row_index: Tensor


def locate(
    topk_idx: Tensor, placement: ExpertPlacement, *, source_rank: int
) -> tuple[Tensor, Tensor]:
    """[T, K] int64 rank and slot of each choice, -1 where it is masked."""
    table = placement.copy_table.to(topk_idx.device).long()
    copies = placement.num_copies.to(topk_idx.device).long()
    valid = (topk_idx >= 0) & (topk_idx < placement.num_experts)
    ids = topk_idx.long().clamp(0, placement.num_experts - 1)
    token = torch.arange(topk_idx.shape[0], device=topk_idx.device).unsqueeze(-1)
    chosen = table[ids, (source_rank + token) % copies[ids]]
    return (
        torch.where(valid, chosen[..., 0], -1),
        torch.where(valid, chosen[..., 1], -1),
    )


def expected_dispatch(
    config: EPConfig,
    data: Sequence[RankData],
    placement: ExpertPlacement,
    *,
    rank: int,
    bucket: int,
) -> ExpectedDispatch:
    """What `rank` receives where every rank dispatches its data."""
    device, ranks, topk = data[0].x.device, len(data), config.num_topk
    local_idx = torch.full((ranks, bucket, topk), -1, dtype=torch.int64, device=device)
    weights = torch.zeros(ranks, bucket, topk, device=device)
    sent = []
    for source, given in enumerate(data):
        to_rank, slot = locate(given.topk_idx, placement, source_rank=source)
        here, tokens = to_rank == rank, given.num_tokens
        local_idx[source, :tokens] = torch.where(here, slot, -1)
        weights[source, :tokens] = given.topk_weights
        x = torch.zeros(bucket, config.hidden, dtype=given.x.dtype, device=device)
        x[:tokens] = given.x
        sent.append(quantize(x, config.wire))
    scales = [scale for _, scale in sent if scale is not None]
    # Stable order by expert keeps (r, t, choice) ascending inside each.
    flat = local_idx.flatten()
    chosen = (flat >= 0).nonzero().flatten()
    order = chosen[torch.sort(flat[chosen], stable=True).indices]
    counts = torch.bincount(flat[chosen], minlength=placement.num_local_experts(rank))
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return ExpectedDispatch(
        values=torch.stack([values for values, _ in sent]),
        scales=torch.stack(scales) if scales else None,
        reached=(local_idx >= 0).any(dim=-1),
        local_idx=local_idx,
        weights=weights,
        expert_offsets=offsets,
        row_index=order // topk,
    )


def expected_combine(
    config: EPConfig,
    given: RankData,
    placement: ExpertPlacement,
    *,
    node_of_rank: Sequence[int],
) -> Tensor:
    """[T, H]: what the rank of `given` gets back after the expert step of launch/experts.py."""
    owner_rank, _ = locate(given.topk_idx, placement, source_rank=given.rank)
    factors = expert_factors(config.num_experts, given.x.device)
    out = []
    for start in range(0, given.num_tokens, _CHUNK_TOKENS):
        here = slice(start, start + _CHUNK_TOKENS)
        rows = dequantize(*quantize(given.x[here], config.wire), config.wire)
        out.append(
            _combine_chunk(
                config,
                rows,
                owner_rank[here],
                given.topk_weights[here],
                factors[given.topk_idx[here].clamp(0, config.num_experts - 1)],
                node_of_rank,
            )
        )
    return torch.cat(out) if out else given.x.new_zeros(0, config.hidden)


def expected_rows_layout(
    config: EPConfig,
    data: Sequence[RankData],
    placement: ExpertPlacement,
    *,
    rank: int,
    bucket: int,
) -> Tensor:
    """[R, B, H]: the partial sums of `rank` over its own experts, the input of combine's layout
    "rows"; rows of tokens that did not reach the rank are NaN."""
    factors = expert_factors(config.num_experts, data[0].x.device)
    y = torch.full(
        (len(data), bucket, config.hidden),
        float("nan"),
        dtype=torch.bfloat16,
        device=data[0].x.device,
    )
    for source, given in enumerate(data):
        owner, _ = locate(given.topk_idx, placement, source_rank=source)
        tokens = (owner == rank).any(dim=1).nonzero().flatten()
        for chunk in tokens.split(_CHUNK_TOKENS):
            rows = dequantize(*quantize(given.x[chunk], config.wire), config.wire)
            ids = given.topk_idx[chunk].clamp(0, config.num_experts - 1)
            one_rank = torch.where(owner[chunk] == rank, 0, -1)
            partial = _partials(rows, one_rank, given.topk_weights[chunk], factors[ids], 1)
            y[source, chunk] = partial[0].to(torch.bfloat16)
    return y


def _combine_chunk(
    config: EPConfig,
    rows: Tensor,
    owner_rank: Tensor,
    weights: Tensor,
    factors: Tensor,
    node_of_rank: Sequence[int],
) -> Tensor:
    num_ranks = len(node_of_rank)
    dtype = torch.float64 if rows.dtype == torch.float64 else torch.bfloat16
    terms = _through(_partials(rows, owner_rank, weights, factors, num_ranks).to(dtype), config)
    if config.reduction == "rank":
        return _fold(terms, owner_rank).to(dtype)
    nodes = torch.tensor(node_of_rank, device=rows.device)
    inside = [
        _fold(terms, torch.where((owner_rank >= 0) & (nodes[owner_rank] == n), owner_rank, -1))
        for n in range(max(node_of_rank) + 1)
    ]
    folded = _through(torch.stack(inside).to(dtype), config)
    return _fold(folded, torch.where(owner_rank >= 0, nodes[owner_rank], -1)).to(dtype)


def _partials(
    rows: Tensor, owner: Tensor, weights: Tensor, factors: Tensor, num_owners: int
) -> Tensor:
    """[num_owners, T, H]: each owner's multiply-adds over its choices, k ascending."""
    dtype = torch.float64 if rows.dtype == torch.float64 else torch.float32
    acc = torch.zeros(num_owners, *rows.shape, dtype=dtype, device=rows.device)
    for k in range(owner.shape[1]):
        token = (owner[:, k] >= 0).nonzero().flatten()
        at = owner[token, k]
        y = apply_expert(rows[token], factors[token, k])
        w = weights[token, k].unsqueeze(-1)
        if dtype == torch.float64:
            acc[at, token] += w.double() * y
        else:
            acc[at, token] = fma_f32_fast(w, y, acc[at, token])
    return acc


def _fold(terms: Tensor, owner: Tensor) -> Tensor:
    """[T, H]: each owner's term added once, at the last choice that it owns."""
    wide = torch.float64 if terms.dtype == torch.float64 else torch.float32
    total = torch.zeros(terms.shape[1:], dtype=wide, device=terms.device)
    for k in range(owner.shape[1]):
        comes_again = (owner[:, k + 1 :] == owner[:, k, None]).any(dim=1)
        token = ((owner[:, k] >= 0) & ~comes_again).nonzero().flatten()
        total[token] += terms[owner[token, k], token].to(wide)
    return total


def _through(rows: Tensor, config: EPConfig) -> Tensor:
    wire = config.return_wire
    return dequantize(*quantize(rows, wire), wire)
