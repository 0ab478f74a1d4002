"""Timing loops: dispatch, combine and round trip of one subject, per rank, in microseconds.

On a CPU, and on accelerators other than CUDA: a barrier, then the wall clock around the call, the
device's own work included. On CUDA: events on the stream, either around eager calls that all ranks
of a host begin at one agreed time, or inside a captured graph, so that neither the host nor the
launch is in the figure. A mark inside a graph keeps the device idle for microseconds, which no
graph of a model has between its kernels; so calls run in rows, several dispatches and then their
combines, and each counts as its share of its row.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from moe_comm.launch.worker import Ranks

# Rows of dispatches and their combines in one captured graph; one more runs ahead of them, untimed.
GRAPH_ROWS = 10
# Larger than any L2 so far (H200: 50 MB).
_FLUSH_BYTES = 256 << 20
# Longer than an exchange between processes takes.
_HEAD_START_NS = 1_000_000


class Subject(Protocol):
    """What is timed: the two halves of one MoE layer's communication."""

    def dispatch(self) -> Any:
        """Rows to their experts; returns what combine needs."""

    def combine(self, arrived: Any) -> Tensor:
        """Rows back to their tokens."""


Samples = dict[str, list[float]]


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Of one phase over all ranks: pooled percentiles, and the slowest rank's own median."""

    samples: int
    p50_us: float
    p99_us: float
    slowest_rank_p50_us: float

    @classmethod
    def of(cls, per_rank: Sequence[Sequence[float]]) -> Statistics:
        """Summarise each rank's samples."""
        pooled = [sample for samples in per_rank for sample in samples]
        return cls(
            samples=len(pooled),
            p50_us=percentile(pooled, 50),
            p99_us=percentile(pooled, 99),
            slowest_rank_p50_us=max(percentile(samples, 50) for samples in per_rank),
        )


def percentile(samples: Sequence[float], percent: float) -> float:
    """Linear interpolation between the two nearest samples. Raises ValueError without samples."""
    if not samples:
        raise ValueError("samples: expected at least one, got none")
    ordered = sorted(samples)
    position = (len(ordered) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def time_host(subject: Subject, ranks: Ranks, *, iters: int, warmup: int) -> Samples:
    """Wall clock until the work is done, on whatever device. Collective."""
    samples: Samples = {"dispatch": [], "combine": [], "round_trip": []}
    wait = _waiter(ranks.device)
    for index in range(warmup + iters):
        ranks.barrier(what="dispatch")
        start = time.perf_counter()
        arrived = subject.dispatch()
        wait()
        middle = time.perf_counter()
        ranks.barrier(what="combine")
        resumed = time.perf_counter()
        subject.combine(arrived)
        wait()
        end = time.perf_counter()
        # In the same loop, so that a machine that slows down does so for all three.
        ranks.barrier(what="round trip")
        began = time.perf_counter()
        subject.combine(subject.dispatch())
        wait()
        finished = time.perf_counter()
        if index >= warmup:
            samples["dispatch"].append((middle - start) * 1e6)
            samples["combine"].append((end - resumed) * 1e6)
            samples["round_trip"].append((finished - began) * 1e6)
    return samples


def time_eager(
    subject: Subject, ranks: Ranks, *, iters: int, warmup: int, flush_l2: bool
) -> Samples:
    """CUDA events around eager calls that all ranks begin together. Collective."""
    flush = _flusher(ranks.device, enabled=flush_l2)
    marks = []
    for index in range(warmup + iters):
        flush()
        torch.cuda.synchronize(ranks.device)
        begin_together(ranks)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        record_row(subject, events, 1)
        if index >= warmup:
            marks.append(events)
    torch.cuda.synchronize(ranks.device)
    return _read_marks(marks)


def begin_together(ranks: Ranks) -> None:
    """Return on all ranks at once. After an exchange between processes one rank goes on a hundred
    microseconds before another, which its first call would then spend waiting; so ranks of one host
    agree on a time of its clock. Across hosts the exchange is all there is. Collective."""
    start = max(ranks.gather(time.monotonic_ns(), what="dispatch")) + _HEAD_START_NS
    if ranks.group.num_nodes == 1:
        while time.monotonic_ns() < start:
            pass


def time_graph(
    subject: Subject, ranks: Ranks, *, iters: int, warmup: int, flush_l2: bool, calls: int = 1
) -> Samples:
    """CUDA events inside a captured graph of GRAPH_ROWS times `calls` dispatches in a row and their
    combines in a row; a sample is a row's time divided by `calls`. Collective.

    The first row of each replay absorbs the ranks' skew and is not counted.
    """
    device = ranks.device
    flush = _flusher(device, enabled=flush_l2)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(max(warmup, 3)):
            subject.combine(subject.dispatch())
    torch.cuda.synchronize(device)
    marks = [
        [torch.cuda.Event(enable_timing=True, external=True) for _ in range(3)]
        for _ in range(GRAPH_ROWS + 1)
    ]
    graph = torch.cuda.CUDAGraph()
    # thread_local: NCCL's watchdog queries events from a thread of its own meanwhile.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for events in marks:
            flush()
            record_row(subject, events, calls)
    samples: Samples = {"dispatch": [], "combine": [], "round_trip": []}
    replays = math.ceil(iters / GRAPH_ROWS)
    for index in range(1 + replays):
        torch.cuda.synchronize(device)
        ranks.gather(None, what="graph replay")
        with torch.cuda.stream(stream):
            graph.replay()
        torch.cuda.synchronize(device)
        if index > 0:
            for phase, values in _read_marks(marks[1:]).items():
                samples[phase] += [value / calls for value in values]
    return samples


def time_calls(
    call: Callable[[], object],
    ranks: Ranks,
    *,
    iters: int,
    warmup: int,
    graph: bool,
    calls: int = 1,
) -> list[float]:
    """One call, the way its device is timed, in rows of `calls` where captured: for the limits.
    Collective."""
    subject = _Alone(call)
    if ranks.device.type != "cuda":
        samples = []
        wait = _waiter(ranks.device)
        for index in range(warmup + iters):
            ranks.barrier(what="limit")
            start = time.perf_counter()
            call()
            wait()
            if index >= warmup:
                samples.append((time.perf_counter() - start) * 1e6)
        return samples
    if graph:
        found = time_graph(subject, ranks, iters=iters, warmup=warmup, flush_l2=False, calls=calls)
    else:
        found = time_eager(subject, ranks, iters=iters, warmup=warmup, flush_l2=False)
    return found["dispatch"]


class _Alone:
    """A subject whose dispatch is the call, and whose combine is nothing."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self._nothing = torch.empty(0)

    def dispatch(self) -> Any:
        return self._call()

    def combine(self, arrived: Any) -> Tensor:
        del arrived
        return self._nothing


def record_row(subject: Subject, events: Sequence[torch.cuda.Event], calls: int) -> None:
    """Enqueue `calls` dispatches, then their combines, between three marks."""
    events[0].record()
    arrived = [subject.dispatch() for _ in range(calls)]
    events[1].record()
    for one in arrived:
        subject.combine(one)
    events[2].record()


def _read_marks(marks: Sequence[Sequence[torch.cuda.Event]]) -> Samples:
    """Microseconds of each phase; elapsed_time gives milliseconds."""
    return {
        "dispatch": [e[0].elapsed_time(e[1]) * 1e3 for e in marks],
        "combine": [e[1].elapsed_time(e[2]) * 1e3 for e in marks],
        "round_trip": [e[0].elapsed_time(e[2]) * 1e3 for e in marks],
    }


def _waiter(device: torch.device) -> Callable[[], None]:
    """What makes the host wait for the device: nothing on a CPU."""
    if device.type == "cpu":
        return lambda: None
    return lambda: torch.accelerator.synchronize(device)


def _flusher(device: torch.device, *, enabled: bool) -> Callable[[], None]:
    if not enabled:
        return lambda: None
    scratch = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)

    def flush() -> None:
        scratch.zero_()

    return flush
