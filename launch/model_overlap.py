"""bench_model's section `overlap`: one MoE layer's communication beside its shared experts, in all
orders of moe_comm.model.layers.overlap, in one run.

Orders take turns, so that a device that slows down does so for all. Each is checked before it is
timed: eager and captured, against everything in sequence with the same products.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_comm.launch.model_checks import compare, compare_bits
from moe_comm.launch.model_measure import Bench, Setup
from moe_comm.launch.model_timeline import beside, timeline
from moe_comm.launch.timing import Statistics
from moe_comm.model.layers.latent_moe import LatentMoe
from moe_comm.model.layers.linear import linear
from moe_comm.model.layers.multiprocessors import can_leave_free
from moe_comm.model.layers.norm import rms_norm
from moe_comm.model.layers.overlap import FEW_TOKENS, Order, Overlap, Work
from moe_comm.model.parallel import Parallel

# Multiprocessors left free beside dispatch and combine, for comparison with the model's own.
FREE = ((0, 0), (20, 20), (20, 36), (20, 52))
FIGURES = ("comm", "shared", "both", "layer")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to overlap. `settings` says in a row what it is; `is_models`: the model's own."""

    settings: dict[str, Any]
    overlap: Overlap
    is_models: bool = False

    @property
    def name(self) -> str:
        """Example: "products-aside leave_free=20+52"."""
        parts = [f"{key}={value}" for key, value in self.settings.items() if key != "order"]
        return " ".join([self.settings["order"], *parts])


def variants(own: Overlap, device: torch.device, *, bucket: int) -> list[Variant]:
    """The model's own first, then all others that differ on this device in this bucket."""
    is_few = bucket <= FEW_TOKENS and can_leave_free(device)
    found: list[Variant] = []
    for order in (own.order_in(bucket), *Order):
        leaves = is_few and order is Order.PRODUCTS_ASIDE
        for free in (own.free_in(bucket), *FREE) if leaves else ((0, 0),):
            settings: dict[str, Any] = {"order": str(order)}
            if leaves:
                settings["leave_free"] = "+".join(map(str, free))
            if all(settings != variant.settings for variant in found):
                stream = own.stream if order is Order.PRODUCTS_ASIDE else None
                overlap = Overlap(order=order, stream=stream, leave_free=free)
                found.append(Variant(settings=settings, overlap=overlap, is_models=not found))
    return found


class Parts:
    """One MoE layer taken apart. Holds a slot of the communicator, whose rows stay readable, until
    `done`. `num`: tokens of this rank, and bucket."""

    def __init__(self, bench: Bench, setup: Setup, num: int) -> None:
        self.comm, model = setup.comm, setup.model
        self.layer = next(la.mlp for la in model.layers if isinstance(la.mlp, LatentMoe))
        self.num = num
        generator = torch.Generator(model.device).manual_seed(bench.ranks.rank)
        x = torch.randn(
            self.num, model.config.hidden_size, device=model.device, generator=generator
        )
        self.x = x.to(model.dtype)
        self.idx, self.weights = self.layer.router.forward(self.x)
        self.z = linear(self.x, self.layer.down, self.layer.numerics)
        self.arrived = self.comm.dispatch(self.z, self.idx, self.weights, bucket=self.num)
        self.rows = self.layer.experts(self.arrived)

    def done(self) -> None:
        """Give the held slot back. Collective."""
        self.comm.combine(self.rows, self.arrived.handle)

    def calls(self, variant: Variant) -> dict[str, Callable[[], Any]]:
        """What is timed of a variant, by FIGURES."""
        overlap = variant.overlap
        whole = self._work(overlap)
        comm = dataclasses.replace(whole, first=lambda: self.z, rest=lambda part: part)
        return {
            "comm": lambda: overlap.run(comm),
            "shared": lambda: whole.rest(whole.first()),
            "both": lambda: overlap.run(whole),
            "layer": lambda: self._layer(overlap),
        }

    def _work(self, overlap: Overlap) -> Work:
        """A round without its routed experts: their rows are there."""
        layer = dataclasses.replace(self.layer, overlap=overlap)
        work = layer.work(self.x, self.z, self.idx, self.weights, self.comm, bucket=self.num)
        return dataclasses.replace(work, experts=lambda arrived: self.rows)

    def _layer(self, overlap: Overlap) -> Tensor:
        layer = dataclasses.replace(self.layer, overlap=overlap)
        return layer.forward(self.x, self.comm, Parallel(), bucket=self.num)

    def without(self) -> Tensor:
        """The layer's launches but dispatch and combine, in sequence, with the rows of a dispatch
        done before."""
        layer = self.layer
        layer.router.forward(self.x)
        linear(self.x, layer.down, layer.numerics)
        layer.experts(self.arrived)
        shared = linear(layer.shared.hidden(self.x), layer.shared.down, layer.numerics)
        latent = rms_norm(self.z, layer.norm_weight, layer.eps)
        return torch.add(linear(latent, layer.up, layer.numerics), shared)


def overlap(bench: Bench, setup: Setup) -> None:
    """A row for each number of tokens and variant: `moe_layer` for the model's own, `overlap` for
    the others."""
    for num in bench.options.overlap_tokens:
        if bench.in_time(f"overlaps of {num} tokens"):
            _overlap_of(bench, setup, num)
            bench.save(bench)


def _overlap_of(bench: Bench, setup: Setup, num: int) -> None:
    graph = bench.options.graph and "capture" in setup.comm.capabilities
    with torch.inference_mode():
        parts = Parts(bench, setup, num)
        tried = variants(parts.layer.overlap, setup.model.device, bucket=parts.num)
        for variant in tried:
            _check(bench, parts, variant, graph=graph)
    samples = _time_in_turns(bench, parts, tried, graph=graph)
    rows = _add_rows(bench, setup, parts.num, tried, samples, graph=graph)
    if graph and bench.options.timeline:
        # A profiler is not the measurement: what is measured is safe before it starts.
        bench.save(bench)
        for variant in tried:
            if variant.name in rows and bench.in_time(f"timeline of {variant.name}"):
                with torch.inference_mode():
                    kernels = timeline(bench, parts.calls(variant)["both"])
                rows[variant.name].params.update(timeline=kernels, beside=beside(kernels))
    with torch.inference_mode():
        parts.done()


def _time_in_turns(
    bench: Bench, parts: Parts, tried: list[Variant], *, graph: bool
) -> dict[tuple[str, str], list[list[float]]]:
    """Microseconds of each rank's samples by (variant, figure), and by ("", "without"). Variants
    that there was no time to prepare are left out. Collective."""
    timers = {}
    with torch.inference_mode():
        timers["", "without"] = bench.timer(parts.without, graph=graph)
        for variant in tried:
            if bench.in_time(f"overlap by {variant.name}"):
                for figure, call in parts.calls(variant).items():
                    timers[variant.name, figure] = bench.timer(call, graph=graph)
        mine: dict[tuple[str, str], list[float]] = {key: [] for key in timers}
        for turn in range(bench.options.iters):
            if turn == 0 or bench.in_time(f"turn {turn + 1} of overlaps"):
                for key, timer in timers.items():
                    mine[key] += timer()
    gathered = bench.ranks.gather(mine, what="samples")
    return {key: [rank[key] for rank in gathered] for key in timers}


def _check(bench: Bench, parts: Parts, variant: Variant, *, graph: bool) -> None:
    """The layer by a variant, eager and captured, against the layer in sequence: the same bits,
    where two runs in sequence give the same; else within CHECK_BOUND. Collective."""
    sequence = Variant(
        settings={"order": str(Order.SEQUENCE)},
        overlap=dataclasses.replace(variant.overlap, order=Order.SEQUENCE),
    )
    in_sequence = parts.calls(sequence)["layer"]
    wanted, again = in_sequence().clone(), in_sequence().clone()
    repeats = all(bench.ranks.gather(torch.equal(wanted, again), what="check"))
    call = parts.calls(variant)["layer"]
    results = {"eager": call().clone()}
    if graph:
        captured, out = bench.capture(call)
        out.fill_(torch.nan)
        bench.replay(captured)
        results["captured"] = out
    for how, got in results.items():
        (compare_bits if repeats else compare)(
            bench, got, wanted, f"overlap, {variant.name}, {how}, against the sequence"
        )


def _add_rows(
    bench: Bench,
    setup: Setup,
    num_tokens: int,
    tried: list[Variant],
    samples: dict[tuple[str, str], list[list[float]]],
    *,
    graph: bool,
) -> dict[str, Any]:
    """The rows of all variants that were timed, by name; definitions: bench_model.DEFINITIONS."""
    us = {key: Statistics.of(per_rank).slowest_rank_p50_us for key, per_rank in samples.items()}
    timed = [variant for variant in tried if (variant.name, "layer") in us]
    if not timed:
        return {}
    comm = min(us[variant.name, "comm"] for variant in timed)
    shared = min(us[variant.name, "shared"] for variant in timed)
    without = us["", "without"]
    in_sequence = us.get((str(Order.SEQUENCE), "layer"))
    rows = {}
    for variant in timed:
        own = {figure: us[variant.name, figure] for figure in FIGURES}
        rows[variant.name] = bench.add(
            setup,
            "moe_layer" if variant.is_models else "overlap",
            samples[variant.name, "layer"],
            num_tokens=num_tokens,
            graph=graph,
            variant=variant.name,
            **variant.settings,
            comm_us=comm,
            shared_us=shared,
            own_comm_us=own["comm"],
            own_shared_us=own["shared"],
            both_us=own["both"],
            without_us=without,
            one_stream_us=in_sequence,
            layer_us=own["layer"],
            hidden=1 - (own["both"] - shared) / comm,
            hidden_in_layer=1 - (own["layer"] - without) / comm,
            saved_in_layer=None if in_sequence is None else (in_sequence - own["layer"]) / comm,
        )
    return rows
