"""The phase moe_layer of `run`: route, dispatch, experts, combine; checked, then timed.

The layer is what lies between the latent projections of a LatentMoE: they, the norm and the shared
experts are dense work of every token's own rank, and not in it. Experts have synthetic MXFP4
weights of the preset's full shape, drawn on the device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_comm.kernels.expert_gemm import LAYOUT_OF, choose_implementation
from moe_comm.launch.bench import PER_EXPERT, Outcome, Plan
from moe_comm.launch.expert_mlps import bf16_mlp, mxfp4_mlp
from moe_comm.launch.expert_source import ExpertSet, ExpertSource
from moe_comm.launch.limits import Limits
from moe_comm.launch.modes import can_capture, config_for, expand
from moe_comm.launch.moe_layer_case import LayerCase, build_case
from moe_comm.launch.moe_layer_check import check_layer
from moe_comm.launch.moe_layer_rows import empty_row, fill_row
from moe_comm.launch.moe_layer_subjects import CommunicatorLayer, Layer, PerExpertLayer
from moe_comm.launch.moe_layer_timing import time_layer
from moe_comm.launch.options import BadInput
from moe_comm.launch.results import Row
from moe_comm.launch.routing import Routing
from moe_comm.launch.worker import Ranks
from moe_comm.negotiate import create_communicator
from moe_comm.topology import Topology


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """What moe_layer needs beside the Plan of `run`; equal on all ranks.

    Attributes:
        plan: grid, backends, wires, seeds.
        router_hidden: D, the width that the router reads.
        inter: I of an expert.
        experts_by: "torch", "triton", "humming"; None: the default of the device and shape.
        emulate: sizes P of larger groups, a rank's share of which is timed too.
    """

    plan: Plan
    router_hidden: int
    inter: int
    experts_by: str | None = None
    emulate: Sequence[int] = ()


class LayerBench:
    """Runs a LayerPlan on this rank. Every method is collective."""

    def __init__(self, layers: LayerPlan, ranks: Ranks, *, quiet: bool = False) -> None:
        self.layers, self.plan, self.ranks, self.quiet = layers, layers.plan, ranks, quiet
        on_cpu = ranks.device.type == "cpu"
        self.iters = self.plan.iters or (5 if on_cpu else 50)
        self.warmup = self.plan.warmup if self.plan.warmup is not None else (1 if on_cpu else 5)
        self.limits = Limits(ranks=ranks, iters=self.iters, warmup=self.warmup)
        self.topology = Topology.detect(ranks.group)
        given = [name for name in self.plan.backends if name != PER_EXPERT]
        self.names = expand(given, self.plan.config, ranks)
        self.experts_by = layers.experts_by or choose_implementation(
            ranks.device, hidden=self.plan.config.hidden, inter=layers.inter
        )
        for size in layers.emulate:
            self._check_size(size)

    def _check_size(self, size: int) -> None:
        experts, ranks = self.plan.config.num_experts, self.ranks.num_ranks
        if experts % size or size % ranks:
            raise BadInput(
                f"--emulate-ep: expected a divisor of {experts} experts and a multiple of {ranks} "
                f"ranks, got {size}"
            )
        if experts * ranks // size < self.plan.config.num_topk:
            raise BadInput(
                f"--emulate-ep: expected at least {self.plan.config.num_topk} experts, the top-k, "
                f"on {ranks} ranks of {size}, got {experts * ranks // size}"
            )

    def run(self, outcome: Outcome, *, after_case: Callable[[], None] | None = None) -> None:
        """All cases; weights of one shape at a time. `after_case` is collective too."""
        for size in (None, *self.layers.emulate):
            group = size or self.ranks.num_ranks
            count = self.plan.config.num_experts // group
            source = ExpertSource(
                seed=self.plan.seed,
                hidden=self.plan.config.hidden,
                inter=self.layers.inter,
                device=self.ranks.device,
            )
            weights = ExpertSet(
                source=source,
                ids=self._local_ids(size, count),
                layout=LAYOUT_OF[self.experts_by],
            )
            for routing in self.plan.routings:
                for num_tokens in self.plan.num_tokens:
                    self.measure_case(self.case(routing, num_tokens, size), weights, outcome)
                    if after_case is not None:
                        after_case()
            del weights
            if self.ranks.device.type == "cuda":
                torch.cuda.empty_cache()

    def _local_ids(self, size: int | None, count: int) -> Sequence[int]:
        if size is not None:
            return range(self.ranks.rank * count, (self.ranks.rank + 1) * count)
        placement = self.plan.config.placement_for(self.ranks.num_ranks)
        return list(placement.local_expert_ids(self.ranks.rank))

    def case(self, routing: Routing, num_tokens: int, size: int | None) -> LayerCase:
        """This rank's share of one point of the grid."""
        return build_case(
            self.plan.config,
            routing,
            rank=self.ranks.rank,
            num_ranks=self.ranks.num_ranks,
            num_tokens=num_tokens,
            emulated=size,
            router_hidden=self.layers.router_hidden,
            seed=self.plan.seed,
            device=self.ranks.device,
        )

    def measure_case(self, case: LayerCase, weights: ExpertSet, outcome: Outcome) -> None:
        """Ours on every backend, then the baselines."""
        expected: dict[str, tuple[Tensor, Tensor]] = {}
        name = f"EP{case.emulated}'s share" if case.emulated else "all experts"
        for layer in self.subjects(case, weights):
            if not self.quiet:
                self.ranks.say(
                    f"moe_layer: {layer.backend}:{layer.mode}, {case.num_tokens} tokens, {name}, "
                    f"{case.routing}"
                )
            try:
                self.measure(layer, case, weights.source, expected, outcome)
            finally:
                layer.close()

    def subjects(self, case: LayerCase, weights: ExpertSet) -> Iterator[Layer]:
        """One at a time, so that their buffers take turns."""
        by, source = self.experts_by, weights.source
        for name in self.names:
            config = config_for(name, case.config, self.topology)
            comm = create_communicator(config, self.ranks.group, name)
            yield CommunicatorLayer(
                comm,
                dataclasses.replace(case, config=config),
                self.ranks,
                weights.mxfp4,
                experts_by=by,
                expert_bytes=source.mxfp4_bytes,
                can_capture=can_capture(comm) and by != "torch",
            )
        if PER_EXPERT not in self.plan.backends:
            return
        mlp = mxfp4_mlp(weights.mxfp4, experts_by=by, expected_rows=case.mean_rows)
        yield PerExpertLayer(
            case, self.ranks, mlp, mode="mxfp4", experts_by=by, expert_bytes=source.mxfp4_bytes
        )
        yield PerExpertLayer(
            case,
            self.ranks,
            bf16_mlp(*weights.bf16),
            mode="bf16",
            experts_by="torch._grouped_mm",
            expert_bytes=source.bf16_bytes,
        )

    def measure(
        self,
        layer: Layer,
        case: LayerCase,
        source: ExpertSource,
        expected: dict[str, tuple[Tensor, Tensor]],
        outcome: Outcome,
    ) -> None:
        """Check, then time captured where it can be and eager, unless one of them was asked for."""
        wrong = self.check(layer, case, source, expected, outcome) if self.plan.check else None
        sent, known = layer.sent_bytes()
        remote = max(self.ranks.gather(sent))
        if self.plan.graph is None:
            ways = [True, False] if layer.can_capture else [False]
        else:
            ways = [self.plan.graph and layer.can_capture]
        for graph in ways:
            row = empty_row(layer, case, num_ranks=self.ranks.num_ranks, graph=graph)
            row.params["timing"] = self.timing_words(graph)
            row.remote_bytes, row.wrong = remote, wrong
            row.params["bytes"] = known
            if not wrong:
                self.fill(row, layer, case, graph=graph)
            outcome.rows.append(row)

    def check(
        self,
        layer: Layer,
        case: LayerCase,
        source: ExpertSource,
        expected: dict[str, tuple[Tensor, Tensor]],
        outcome: Outcome,
    ) -> int:
        """Wrong elements over all ranks, of the router's choice and of the layer's result."""
        rank = self.ranks.rank
        flip = self.plan.flip_rank == rank and layer.backend != PER_EXPERT
        found = check_layer(layer, case, source, expected, rank=rank, flip=flip)
        total = 0
        for count, first in self.ranks.gather((found.wrong, found.first[:1])):
            total += count
            outcome.mismatches += first
        return total

    def fill(self, row: Row, layer: Layer, case: LayerCase, *, graph: bool) -> None:
        """Times, shares and the limit."""
        mine = time_layer(
            layer,
            self.ranks,
            iters=self.iters,
            warmup=self.warmup,
            graph=graph,
            flush_l2=self.plan.flush_l2,
        )
        fill_row(row, self.ranks.gather(mine))
        if self.plan.limit:
            row.limit_us, row.limit_kind = self.limit(layer, case)

    def limit(self, layer: Layer, case: LayerCase) -> tuple[float | None, str | None]:
        """Microseconds of the experts alone: the longer of reading the weights of those with rows,
        and the products of the busiest rank's rows with gate, up and down; and which it is."""
        reads = self.limits.memory_us(case.active_experts * layer.expert_bytes)
        weights = 3 * case.config.hidden * self.layers.inter
        products = self.limits.products_us(2 * case.expert_rows * weights)
        if reads is None or products is None:
            return None, None
        if products > reads:
            return products, "experts' products, at the rate of a large bf16 one"
        return reads, "weights of active experts, read"

    def timing_words(self, graph: bool) -> str:
        """How the figures were taken, for the result file."""
        if self.ranks.device.type != "cuda":
            return "wall clock at the end of each stage, after a barrier"
        cache = ", L2 flushed before each layer" if self.plan.flush_l2 else ""
        if graph:
            return f"events inside a captured graph of back-to-back layers{cache}"
        return f"events around eager stages, after a barrier{cache}"
