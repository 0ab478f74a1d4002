"""One point of the moe_layer grid: hidden rows, a router, and the rows that are dispatched.

Routing. The router is real (fp32 product with [E, D] bf16 weights, sigmoid, top k), and its hidden
rows are made so that it chooses what the run's routing says, with weights within about 1% of the
routing's: x is the least-norm solution of x W^T = logits. So the timed path is the model's, and the
traffic is the recorded text's.

A share of a larger group. With R ranks here, `emulated` = P > R gives each of them what a rank of a
P-rank group has: E / P experts, and exactly the rows that rank r < R of that group receives from
all P (the tokens of P / R source ranks lie on each rank here; choices of experts on other ranks are
masked, and tokens without any choice left are dropped). Expert rows, rows received and rows
returned are those of the large group; what differs is that (R - 1) / R of the rows, not
(P - 1) / P, cross between ranks, that messages go to R - 1 peers, and that combine writes more,
sparser tokens. The router is timed on a rank's own T tokens; dispatch takes prepared choices.

Shape legend: R ranks here, P ranks emulated, T tokens of a rank of the group, N rows dispatched
here, E experts of the model, K choices, H hidden of a row, D hidden of the router.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_comm.config import EPConfig
from moe_comm.launch.routing import Routing
from moe_comm.model.layers.router import Router
from moe_comm.traffic import RoutingTraffic

# Of experts that are not chosen; a chosen one has at least the logit of _LEAST.
_IDLE_LOGIT = -8.0
_MOST, _LEAST = 0.9, 0.02


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerCase:
    """What one rank feeds the layer, and what all ranks know of the rows.

    Attributes:
        config: of the ranks here: its experts are E, or R / P of them.
        emulated: P, or None.
        num_tokens: T.
        routing: its canonical text.
        x, router: [T, D] bf16, and the layer's router.
        wanted_idx: [T, K] int64 what the routing says of x's tokens.
        z: [N, H] bf16 rows to dispatch.
        prepared: choices [N, K] int64 and weights [N, K] of z's rows; None: the router's own.
        traffic: rows between ranks.
        expert_rows: of the busiest rank.
        active_experts: most experts with rows on one rank.
    """

    config: EPConfig
    emulated: int | None
    num_tokens: int
    routing: str
    x: Tensor
    router: Router
    wanted_idx: Tensor
    z: Tensor
    prepared: tuple[Tensor, Tensor] | None
    traffic: RoutingTraffic
    expert_rows: int
    active_experts: int

    @property
    def mean_rows(self) -> int:
        """Expert rows of a rank under even routing."""
        return self.num_tokens * self.config.num_topk

    def choices(self, routed: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """What to dispatch: the router's choice, or the prepared one."""
        return routed if self.prepared is None else self.prepared


def build_case(
    config: EPConfig,
    routing: Routing,
    *,
    rank: int,
    num_ranks: int,
    num_tokens: int,
    emulated: int | None,
    router_hidden: int,
    seed: int,
    device: torch.device,
) -> LayerCase:
    """A rank's case. Deterministic in its arguments; every rank computes all ranks' routing.

    ValueError where `emulated` does not divide the experts or is no multiple of num_ranks.
    """
    group = emulated or num_ranks
    if config.num_experts % group or group % num_ranks:
        raise ValueError(
            f"emulated: expected a divisor of {config.num_experts} experts and a multiple of "
            f"{num_ranks} ranks, got {group}"
        )
    drawn = [
        routing.draw(rank=r, num_tokens=num_tokens, seed=seed, first_token=r * num_tokens)
        for r in range(group)
    ]
    rows = drawn if emulated is None else _share(drawn, config.num_experts, num_ranks)
    experts = config.num_experts * num_ranks // group
    counts = torch.stack([torch.bincount(idx[idx >= 0], minlength=experts) for idx, _ in rows]).sum(
        dim=0
    )
    by_rank = counts.view(num_ranks, -1)
    expert_rows = int(by_rank.sum(dim=1).max())
    capacity = max(idx.shape[0] for idx, _ in rows)
    shape = config.replace(
        num_experts=experts, max_tokens_per_rank=capacity, chunk_tokens=None, placement=None
    )
    if emulated is not None:
        # What the GEMM takes for the number of rows to expect: a rank's even share.
        most = max(expert_rows, num_tokens * config.num_topk)
        shape = shape.replace(max_expert_rows=-(-most // 128) * 128)
    idx, weights = drawn[rank if emulated is None else rank * group // num_ranks]
    router, x = make_router(
        idx, weights, num_experts=config.num_experts, hidden=router_hidden, seed=seed, device=device
    )
    generator = torch.Generator(device).manual_seed((seed << 8) + rank)
    mine = rows[rank]
    z = torch.randn(mine[0].shape[0], config.hidden, generator=generator, device=device)
    return LayerCase(
        config=shape,
        emulated=emulated,
        num_tokens=num_tokens,
        routing=routing.text,
        x=x,
        router=router,
        wanted_idx=idx.to(device),
        z=z.to(torch.bfloat16),
        prepared=None if emulated is None else (mine[0].to(device), mine[1].to(device)),
        traffic=RoutingTraffic.of([idx for idx, _ in rows], shape.placement_for(num_ranks)),
        expert_rows=expert_rows,
        active_experts=int((by_rank > 0).sum(dim=1).max()),
    )


def _share(
    drawn: Sequence[tuple[Tensor, Tensor]], num_experts: int, num_ranks: int
) -> list[tuple[Tensor, Tensor]]:
    """Of a group's routing, what concerns its first num_ranks ranks, on as many ranks."""
    group = len(drawn)
    kept = num_experts * num_ranks // group
    shares = []
    for rank in range(num_ranks):
        sources = drawn[rank * group // num_ranks : (rank + 1) * group // num_ranks]
        idx = torch.cat([one for one, _ in sources])
        weights = torch.cat([one for _, one in sources])
        here = (idx >= 0) & (idx < kept)
        tokens = here.any(dim=1)
        shares.append((torch.where(here, idx, -1)[tokens], weights[tokens]))
    return shares


def make_router(
    idx: Tensor,
    weights: Tensor,
    *,
    num_experts: int,
    hidden: int,
    seed: int,
    device: torch.device,
) -> tuple[Router, Tensor]:
    """A router of random weights [E, D], and hidden rows [T, D] bf16 for which it chooses `idx`
    [T, K] (distinct) in proportion to `weights` [T, K]. `hidden` is at least 2 E, so that its rows
    are well apart."""
    generator = torch.Generator(device).manual_seed(seed)
    w = torch.randn(num_experts, hidden, generator=generator, device=device) / hidden**0.5
    w = w.to(torch.bfloat16)
    wide = w.float()
    share = weights.to(device) / weights.to(device).amax(dim=1, keepdim=True).clamp_min(1e-20)
    score = (share * _MOST).clamp_min(_LEAST)
    logits = torch.full((idx.shape[0], num_experts), _IDLE_LOGIT, device=device)
    logits.scatter_(1, idx.to(device), torch.logit(score))
    x = torch.linalg.solve(wide @ wide.T, logits.T).T @ wide
    bias = torch.zeros(num_experts, device=device)
    return Router(weight=w, bias=bias, top_k=idx.shape[1]), x.to(torch.bfloat16)
