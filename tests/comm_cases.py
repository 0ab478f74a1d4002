"""Cases of dispatch and combine, run on every rank and compared bit for bit with the reference.

A Case is plain data, so it travels to the ranks of a pool. `check_case` runs there.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankContext
from torch import Tensor

from moe_comm import EPConfig, ExpertPlacement, quantize
from moe_comm.backends.reference import RankInput, ReferenceWorld
from moe_comm.errors import ExpertRowsOverflowError
from moe_comm.handle import Dispatched
from moe_comm.launch.experts import expert_factors
from moe_comm.launch.rank_data import RankData

# E not divisible by 3, hidden with a short last scale group for both wires.
SHAPE: dict[str, Any] = {
    "num_experts": 40, "num_topk": 6, "hidden": 176, "max_tokens_per_rank": 16, "timeout_s": 20.0
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """One dispatch and combine on every rank, or several on one communicator.

    Attributes:
        backend: as create_communicator has it.
        config: EPConfig's fields, over SHAPE.
        num_tokens: T of each rank, one tuple a call.
        routing: of RankData.
        seed: of the run; the call's number is added.
        bucket: of the calls.
        padding: rows of x past num_tokens; their routing is rubbish.
        num_tokens_as: "int", or "tensor".
        layout, weights_applied, num_biases: of combine.
        quantized: give (values, scales).
        payloads: send two payloads along.
        out: give out=, poisoned.
        split: async_op on both, with work between the halves.
        repeat: dispatch again by the handle, with other rows.
        dtype: of x and y for wire "none".
        load: build the placement from random load with this many redundant experts.
        counts: experts of each rank.
        edit: (rank, token, choice, id) written into the routing.
        overflow: more rows arrive than max_expert_rows.
        ranks_per_node: MOE_COMM_RANKS_PER_NODE during creation.
    """

    backend: str = "c10d:exact"
    config: dict[str, Any] = field(default_factory=dict)
    num_tokens: tuple[tuple[int, ...], ...]
    routing: str = "uniform"
    seed: int = 0
    bucket: int | None = None
    padding: int = 0
    num_tokens_as: str = "int"
    layout: str = "expert"
    weights_applied: bool = False
    num_biases: int = 0
    quantized: bool = False
    payloads: bool = False
    out: bool = False
    split: bool = False
    repeat: bool = False
    dtype: str = "bfloat16"
    load: int | None = None
    counts: tuple[int, ...] | None = None
    edit: tuple[tuple[int, int, int, int], ...] = ()
    overflow: bool = False
    ranks_per_node: int | None = None

    @property
    def num_ranks(self) -> int:
        """R."""
        return len(self.num_tokens[0])

    def ep_config(self) -> EPConfig:
        """The configuration with its placement."""
        fields = {**SHAPE, **self.config}
        experts, placement = fields["num_experts"], None
        if self.counts is not None:
            placement = ExpertPlacement.from_counts(self.counts)
        elif self.load is not None:
            generator = torch.Generator().manual_seed(self.seed)
            load = torch.rand(experts, generator=generator)
            placement = ExpertPlacement.from_load(load, self.num_ranks, num_redundant=self.load)
        return EPConfig(**fields, placement=placement)

    def replace(self, **changes: Any) -> Case:
        """A copy with fields replaced."""
        return dataclasses.replace(self, **changes)


def rank_inputs(case: Case, config: EPConfig, call: int) -> list[RankInput]:
    """Every rank's arguments of one call, padding and edits included."""
    tokens = case.num_tokens[call]
    seed = case.seed * 1000 + call
    data = RankData.create_all(
        config,
        num_tokens=tokens,
        routing=case.routing,
        seed=seed,
        dtype=getattr(torch, case.dtype),
    )
    generator = torch.Generator().manual_seed(seed)
    inputs = []
    for rank, given in enumerate(data):
        x, idx, weights = given.x, given.topk_idx.clone(), given.topk_weights
        for where, token, choice, expert in case.edit:
            if where == rank and token < idx.shape[0]:
                idx[token, choice] = expert
        if case.padding:
            x = torch.cat([x, x.new_full((case.padding, x.shape[1]), torch.nan)])
            rubbish = torch.randint(-9, 10**6, (case.padding, idx.shape[1]), generator=generator)
            idx = torch.cat([idx, rubbish])
            weights = torch.cat([weights, weights.new_full(rubbish.shape, torch.nan)])
        rows: Any = quantize(x, config.wire) if case.quantized else x
        payloads = None
        if case.payloads:
            length = idx.shape[0]
            payloads = {
                "position": torch.arange(length) * 1000 + rank,
                "side": torch.randn(length, 3, 2, generator=generator).to(torch.float16),
                "flag": torch.rand(length, 5, generator=generator) < 0.5,
            }
        inputs.append(
            RankInput(
                x=rows,
                topk_idx=idx,
                topk_weights=weights,
                num_tokens=tokens[rank],
                payloads=payloads,
            )
        )
    return inputs


def expert_rows(d: Dispatched, config: EPConfig, rank: int, ranks: int, dtype: Any) -> Tensor:
    """y [N, H]: each expert scales its rows by a factor of its own; in the dtype asked for."""
    total = int(d.expert_offsets[-1])
    rows = d.dequantized_rows().flatten(0, 1)[d.row_index[:total].long()]
    local = config.placement_for(ranks).local_expert_ids(rank)
    factors = expert_factors(config.num_experts)[local].double()
    each = factors.repeat_interleave(d.num_tokens_per_expert.long())
    return (rows.double() * each.unsqueeze(-1)).to(dtype)


def reduced_rows(d: Dispatched, y: Tensor) -> Tensor:
    """[R, B, H] for layout "rows": the sum of each row's expert rows, NaN where there are none."""
    position = d.handle.choice_position
    out = torch.full((position.shape[0], y.shape[1]), torch.nan, dtype=torch.float64)
    for row, places in enumerate(position.tolist()):
        mine = [place for place in places if place >= 0]
        if mine:
            out[row] = y[mine].double().sum(dim=0)
    return out.to(y.dtype).view(*d.topk_idx.shape[:2], -1)


def assert_same_bits(name: str, got: Tensor, want: Tensor) -> None:
    """Equal shape, dtype and bits; else the first differing coordinate and both values."""
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, want {tuple(want.shape)}"
    assert got.dtype == want.dtype, f"{name}: {got.dtype}, want {want.dtype}"
    if got.numel() == 0:
        return
    a, b = got.contiguous(), want.contiguous()
    if a.dtype != torch.bool:
        size = a.element_size()
        whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
        a, b = a.view(whole), b.view(whole)
    if torch.equal(a, b):
        return
    at = tuple(int(i) for i in (a != b).nonzero()[0])
    raise AssertionError(
        f"{name}: {int((a != b).sum())} of {a.numel()} differ, first at {at}: "
        f"{got[at]} instead of {want[at]}"
    )


def assert_arrived(got: Dispatched, want: Dispatched) -> None:
    """Everything that Dispatched defines, against the reference's."""
    reached = (want.topk_idx >= 0).any(dim=-1)
    chosen = want.topk_idx >= 0
    assert_same_bits("topk_idx", got.topk_idx, want.topk_idx)
    assert_same_bits("num_tokens_per_rank", got.num_tokens_per_rank, want.num_tokens_per_rank)
    assert_same_bits("expert_offsets", got.expert_offsets, want.expert_offsets)
    assert_same_bits("row_index", got.row_index, want.row_index)
    assert_same_bits("choice_position", got.handle.choice_position, want.handle.choice_position)
    assert_same_bits("weights", got.topk_weights[chosen], want.topk_weights[chosen])
    assert got.rows[0].is_contiguous()
    assert_same_bits("rows", got.rows[reached], want.rows[reached])
    assert (got.scales is None) == (want.scales is None)
    if got.scales is not None and want.scales is not None:
        assert_same_bits("scales", got.scales[reached], want.scales[reached])
    assert sorted(got.payloads) == sorted(want.payloads)
    for name, tensor in got.payloads.items():
        assert_same_bits(f"payload {name}", tensor[reached], want.payloads[name][reached])


@dataclass(kw_only=True)
class Answer:
    """What the reference says of one call: what arrives everywhere, y, and one rank's out."""

    arrived: list[Dispatched]
    y: list[Tensor]
    out: Tensor
    biases: list[list[Tensor]]


def answer(
    case: Case, config: EPConfig, inputs: Sequence[RankInput], call: int,
    node_of_rank: Sequence[int], rank: int,
) -> Answer:  # fmt: skip
    """The reference for the whole group, and `rank`'s result."""
    world = ReferenceWorld(config, case.num_ranks, node_of_rank=node_of_rank)
    arrived = world.dispatch(inputs, bucket=case.bucket)
    dtype = getattr(torch, case.dtype)
    y = [expert_rows(d, config, rank, case.num_ranks, dtype) for rank, d in enumerate(arrived)]
    if case.layout == "rows":
        y = [reduced_rows(d, rows) for d, rows in zip(arrived, y, strict=True)]
    generator = torch.Generator().manual_seed(case.seed * 77 + call)
    biases = [
        [
            torch.randn(given.num_rows, config.hidden, generator=generator).to(dtype)
            for _ in range(case.num_biases)
        ]
        for given in inputs
    ]
    out = world.combine(
        y,
        [d.handle for d in arrived],
        layout=case.layout,
        weights_applied=case.weights_applied,
        biases=biases,
        sources=[rank],
    )
    return Answer(arrived=arrived, y=y, out=out[0], biases=biases)


def other_group(backend: str) -> Any:
    """A process group of all ranks over another backend. "vendor": gloo under a name that nobody
    knows, as an accelerator's plug-in would register its own."""
    if backend == "vendor" and not hasattr(dist.Backend, "VENDOR"):
        dist.Backend.register_backend("vendor", dist.ProcessGroupGloo, devices=["cpu"])
    return dist.new_group(backend=backend)


def check_case(
    context: RankContext, case: Case, backend: str | None = None, *, kernels: bool = False
) -> dict[str, int]:
    """Run the case on this rank and compare; returns the communicator's metrics.

    backend: of a process group made for the case, where that is not the world.
    kernels: take c10d's routing steps from Triton, which interprets them on the CPU.
    """
    config = case.ep_config()
    if case.ranks_per_node is not None:
        os.environ["MOE_COMM_RANKS_PER_NODE"] = str(case.ranks_per_node)
    try:
        pg = None if backend is None else other_group(backend)
        comm = context.communicator(config, case.backend, pg=pg)
    finally:
        os.environ.pop("MOE_COMM_RANKS_PER_NODE", None)
    with comm:
        if kernels:
            comm._router.uses_kernels = True
        for call in range(len(case.num_tokens)):
            inputs = rank_inputs(case, config, call)
            _check_call(comm, case, config, inputs, call)
            if case.repeat:
                other = rank_inputs(case.replace(seed=case.seed + 1), config, call)
                again = [
                    dataclasses.replace(new, topk_idx=old.topk_idx, topk_weights=old.topk_weights)
                    for new, old in zip(other, inputs, strict=True)
                ]
                _check_call(comm, case, config, again, call, handle=comm.last_handle)
        if case.overflow:
            with pytest.raises(ExpertRowsOverflowError, match="max_expert_rows"):
                comm.check()
        comm.check()
        metrics: dict[str, int] = comm.metrics()
    return metrics


def _check_call(
    comm: Any, case: Case, config: EPConfig, inputs: Sequence[RankInput], call: int,
    handle: Any = None,
) -> None:  # fmt: skip
    rank, device = comm.rank, comm.device
    want = answer(case, config, inputs, call, comm.group.node_of_rank, rank)
    mine = inputs[rank]
    x = mine.x.to(device) if isinstance(mine.x, Tensor) else tuple(t.to(device) for t in mine.x)
    routing: dict[str, Any] = {"handle": handle}
    if handle is None:
        tokens: Any = mine.valid
        if case.num_tokens_as == "tensor":
            tokens = torch.tensor(tokens, dtype=torch.int32, device=device)
        routing = {
            "topk_idx": mine.topk_idx.to(device),
            "topk_weights": mine.topk_weights.to(device),
            "num_tokens": tokens,
            "bucket": case.bucket,
        }
    payloads = {name: tensor.to(device) for name, tensor in (mine.payloads or {}).items()}
    d = comm.dispatch(x, **routing, payloads=payloads, async_op=case.split)
    if case.split:
        torch.randn(50, 50).matmul(torch.randn(50, 50))
        d = d.wait()
    assert_arrived(moved_to(d, torch.device("cpu")), want.arrived[rank])
    out = torch.full_like(want.out, torch.nan).to(device) if case.out else None
    result = comm.combine(
        want.y[rank].to(device),
        d.handle,
        layout=case.layout,
        weights_applied=case.weights_applied,
        bias=tuple(bias.to(device) for bias in want.biases[rank]) or None,
        out=out,
        async_op=case.split,
    )
    if case.split:
        result = result.wait()
    if out is not None:
        assert result.data_ptr() == out.data_ptr()
    assert_same_bits("out", result.cpu(), want.out)
    comm.last_handle = d.handle


def moved_to(d: Dispatched, device: torch.device) -> Dispatched:
    """A copy on another device, of what tests look at."""
    if d.rows.device == device:
        return d

    def here(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) else value

    fields = {f.name: here(getattr(d, f.name)) for f in dataclasses.fields(d)}
    handle = dataclasses.replace(
        d.handle, choice_position=d.handle.choice_position.to(device), state=None
    )
    payloads = {name: tensor.to(device) for name, tensor in d.payloads.items()}
    return Dispatched(**{**fields, "payloads": payloads, "handle": handle})
