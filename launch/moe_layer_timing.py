"""Timing of whole layers, stage by stage: marks around each stage, in a captured graph or eager.

A stage ends where the next begins on the device, so waiting for another rank counts for the stage
that waits, and, in eager calls, so does a device left idle by the host. Ranks of a host begin each
eager layer at one agreed time, and the first layer of a graph is not counted, so that none waits
for how much later another began.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moe_comm.launch.moe_layer_subjects import Layer
from moe_comm.launch.timing import begin_together
from moe_comm.launch.worker import Ranks

STAGES = ("route", "dispatch", "experts", "combine")
LAYER = "layer"
# Layers in one captured graph; one more runs ahead of them, untimed.
GRAPH_LAYERS = 5
# Larger than any L2 so far (H200: 50 MB).
_FLUSH_BYTES = 256 << 20

Samples = dict[str, list[float]]


def run_layer(layer: Layer, mark: Callable[[], None]) -> Tensor:
    """The four stages, with a mark before each and one after the last."""
    mark()
    routed = layer.route()
    mark()
    arrived = layer.dispatch(routed)
    mark()
    y = layer.experts(arrived)
    mark()
    out = layer.combine(y, arrived, routed)
    mark()
    return out


def time_layer(
    layer: Layer, ranks: Ranks, *, iters: int, warmup: int, graph: bool, flush_l2: bool
) -> Samples:
    """Microseconds of each stage and of the layer, on this rank. Collective."""
    if ranks.device.type != "cuda":
        return _time_host(layer, ranks, iters=iters, warmup=warmup)
    scratch = torch.empty(_FLUSH_BYTES if flush_l2 else 0, dtype=torch.uint8, device=ranks.device)
    timer = _time_graph if graph else _time_eager
    return timer(layer, ranks, iters=iters, warmup=warmup, flush=scratch.zero_)


def _time_host(layer: Layer, ranks: Ranks, *, iters: int, warmup: int) -> Samples:
    samples = _no_samples()
    for index in range(warmup + iters):
        ranks.barrier(what="layer")
        clock = _Clock(ranks.device)
        run_layer(layer, clock.mark)
        if index >= warmup:
            _add(samples, [(end - start) * 1e6 for start, end in itertools.pairwise(clock.times)])
    return samples


class _Clock:
    """Wall-clock marks, each after the device's work so far."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.times: list[float] = []

    def mark(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        self.times.append(time.perf_counter())


def _time_eager(
    layer: Layer, ranks: Ranks, *, iters: int, warmup: int, flush: Callable[[], object]
) -> Samples:
    samples = _no_samples()
    marks = []
    for index in range(warmup + iters):
        flush()
        torch.cuda.synchronize(ranks.device)
        begin_together(ranks)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(STAGES) + 1)]
        run_layer(layer, _recorder(events))
        if index >= warmup:
            marks.append(events)
    torch.cuda.synchronize(ranks.device)
    for events in marks:
        _add(samples, _elapsed(events))
    return samples


def _time_graph(
    layer: Layer, ranks: Ranks, *, iters: int, warmup: int, flush: Callable[[], object]
) -> Samples:
    device = ranks.device
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(max(warmup, 3)):
            run_layer(layer, lambda: None)
    torch.cuda.synchronize(device)
    marks = [
        [torch.cuda.Event(enable_timing=True, external=True) for _ in range(len(STAGES) + 1)]
        for _ in range(GRAPH_LAYERS + 1)
    ]
    graph = torch.cuda.CUDAGraph()
    # thread_local: NCCL's watchdog queries events from a thread of its own meanwhile.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for events in marks:
            flush()
            run_layer(layer, _recorder(events))
    samples = _no_samples()
    for index in range(1 + math.ceil(iters / GRAPH_LAYERS)):
        torch.cuda.synchronize(device)
        ranks.gather(None, what="graph replay")
        with torch.cuda.stream(stream):
            graph.replay()
        torch.cuda.synchronize(device)
        if index > 0:
            for events in marks[1:]:
                _add(samples, _elapsed(events))
    return samples


def _recorder(events: Sequence[torch.cuda.Event]) -> Callable[[], None]:
    left = iter(events)
    return lambda: next(left).record()


def _no_samples() -> Samples:
    return {name: [] for name in (*STAGES, LAYER)}


def _add(samples: Samples, stages: Sequence[float]) -> None:
    for name, value in zip(STAGES, stages, strict=True):
        samples[name].append(value)
    samples[LAYER].append(sum(stages))


def _elapsed(events: Sequence[torch.cuda.Event]) -> list[float]:
    """Microseconds between neighbours; elapsed_time gives milliseconds."""
    return [start.elapsed_time(end) * 1e3 for start, end in itertools.pairwise(events)]
