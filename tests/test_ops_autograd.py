"""Gradients through dispatch and combine, and the custom ops under torch.compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comm_cases import SHAPE, assert_same_bits
from rank_pool import RankContext, run_ranks

from moe_comm import EPConfig, ops, ops_registry
from moe_comm.launch.rank_data import RankData

BARE: dict[str, Any] = {**SHAPE, "dispatch_wire": "none", "combine_wire": "none", "num_slots": 3}
MODES = ["exact", "dense", "hierarchical"]


def small(mode: str, **fields: Any) -> tuple[EPConfig, str]:
    """A config of gradcheck's size and its backend."""
    shape = {"num_experts": 7, "num_topk": 3, "hidden": 4, "max_tokens_per_rank": 4}
    reduction = "node" if mode == "hierarchical" else "rank"
    return EPConfig(**{**BARE, **shape, "reduction": reduction, **fields}), f"c10d:{mode}"


def experts(d: Any, factor: torch.Tensor) -> torch.Tensor:
    """y [N, H]: tanh of the row, scaled by its expert; differentiable in rows and factor [L]."""
    total = int(d.expert_offsets[-1])
    rows = d.rows.flatten(0, 1)[d.row_index[:total].long()]
    return rows.tanh() * factor.repeat_interleave(d.num_tokens_per_expert.long()).unsqueeze(-1)


def check_numerically(context: RankContext, mode: str, how: str) -> None:
    """gradcheck in float64; all ranks perturb at the same time, and no rank's output depends on
    another's input."""
    config, backend = small(mode)
    with context.communicator(config, backend) as comm:
        data = RankData.create(
            config, rank=context.rank, num_tokens=[3] * context.num_ranks,
            routing="uniform+masked:0.2", seed=3, dtype=torch.float64, device=comm.device,
        )  # fmt: skip
        whole = {"dtype": torch.float64, "device": comm.device}
        factor = torch.linspace(0.5, 1.5, comm.num_local_experts, **whole)
        x = data.x.requires_grad_()
        weights = data.topk_weights.double().requires_grad_()
        bias = torch.randn(3, config.hidden, requires_grad=True, **whole)

        def layer(x: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            d = comm.dispatch(x, data.topk_idx, weights)
            y = experts(d, factor)
            if how == "weights-by-caller":
                places = d.handle.choice_position
                chosen = (places >= 0).nonzero()
                order = places[chosen[:, 0], chosen[:, 1]].argsort()
                given = d.topk_weights.flatten(0, 1)[chosen[:, 0], chosen[:, 1]][order]
                y = y * given.unsqueeze(-1)
                return comm.combine(y, d.handle, weights_applied=True, bias=bias)
            if how == "rows":
                reached = (d.topk_idx >= 0).any(dim=-1, keepdim=True)
                y = torch.where(reached, d.rows, 0).sin() * d.topk_weights.sum(-1, keepdim=True)
                return comm.combine(y, d.handle, layout="rows", bias=bias)
            return comm.combine(y, d.handle, bias=bias)

        assert torch.autograd.gradcheck(layer, (x, weights, bias))
        assert not comm._busy_slots


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["expert", "weights-by-caller", "rows"])
def test_gradcheck(mode, how):
    run_ranks(2, check_numerically, mode, how)


def through_ops(comm: Any, x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> Any:
    """A layer on the ops themselves: what a compiled model holds."""
    name = ops.name_of(comm)
    rows, _, _, _, _, _, row_index, token = torch.ops.moe_comm.dispatch(
        x, None, idx, weights, name, -1, None, -1, [], None
    )
    live = (row_index >= 0).unsqueeze(-1)
    y = torch.where(live, rows.flatten(0, 1)[row_index.clamp_min(0).long()], 0)
    return torch.ops.moe_comm.combine(y * 2, weights, token, name, "expert", False, []).sin()


def through_methods(comm: Any, x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> Any:
    """The same layer as users write it."""
    d = comm.dispatch(x, idx, weights)
    live = (d.row_index >= 0).unsqueeze(-1)
    y = torch.where(live, d.rows.flatten(0, 1)[d.row_index.clamp_min(0).long()], 0)
    return comm.combine(y * 2, d.handle).sin()


def compare_compiled(context: RankContext, mode: str, form: str, dtype: str) -> None:
    """Outputs and gradients of the compiled layer are the eager ones, bit for bit."""
    wire = "bf16" if dtype == "bfloat16" else "none"
    config, backend = small(mode, dispatch_wire=wire, combine_wire=wire)
    layer = {"ops": through_ops, "methods": through_methods}[form]
    with context.communicator(config, backend) as comm:
        data = RankData.create(
            config, rank=context.rank, num_tokens=[4, 3], seed=4, dtype=getattr(torch, dtype),
            device=comm.device,
        )  # fmt: skip
        torch._dynamo.reset()
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        results = []
        for run in (layer, compiled):
            x = data.x.clone().requires_grad_()
            weights = data.topk_weights.clone().requires_grad_()
            out = run(comm, x, data.topk_idx, weights)
            out.float().square().sum().backward()
            results.append((out.detach(), x.grad, weights.grad))
        for name, eager, traced in zip(("out", "x.grad", "weights.grad"), *results, strict=True):
            assert eager.abs().sum() > 0, name
            assert_same_bits(name, traced.cpu(), eager.cpu())
        with torch.no_grad():
            assert_same_bits(
                "inference",
                compiled(comm, data.x, data.topk_idx, data.topk_weights).cpu(),
                out.detach().cpu(),
            )
        del out, results
        assert not comm._busy_slots
        assert not ops_registry._routings


@pytest.mark.parametrize("form", ["ops", "methods"])
@pytest.mark.parametrize("mode", MODES)
def test_compiled_equals_eager(mode, form):
    run_ranks(2, compare_compiled, mode, form, "bfloat16")
