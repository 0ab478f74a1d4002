"""What a slab sweep times: several calls in a row between marks, captured in one graph.

Every body begins with a dispatch and its combine ahead of the first mark: it takes up the ranks'
skew. Then all dispatches follow one another, each into a slot of its own, then all their combines,
so a call may begin while another rank still ends the one before, as layers of a model do.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from moe_comm.handle import Dispatched
from moe_comm.launch.slab_sweep_ports import Port
from moe_comm.launch.worker import Ranks

Mark = Callable[[], None]
Body = Callable[[Mark], None]
# Runs a body once and returns microseconds between its marks.
Replay = Callable[[], list[float]]


class Recorder(Protocol):
    """Makes a body ready to be run again and again."""

    def __call__(self, body: Body) -> Replay:
        """Run it, untimed, then make a Replay of it."""


def calls_body(port: Port) -> Body:
    """Intervals: dispatches, combines."""

    def body(mark: Mark) -> None:
        port.combine(port.dispatch())
        mark()
        arrived = [port.dispatch() for _ in range(port.calls)]
        mark()
        for each in arrived:
            port.combine(each)
        mark()

    return body


def halves_body(port: Port, join: Callable[[], None]) -> Body:
    """Intervals, for dispatch and again for combine: send halves; what is left of the copies beside
    them, which `join` waits for; receive halves of what has all arrived by then."""

    def body(mark: Mark) -> None:
        port.combine(port.dispatch())
        mark()
        sent = [port.start_dispatch() for _ in range(port.calls)]
        mark()
        join()
        mark()
        arrived = [each.wait() for each in sent]
        port.last = arrived[-1]
        mark()
        back = [port.start_combine(each) for each in arrived]
        mark()
        join()
        mark()
        for pending in back:
            pending.wait()
        mark()

    return body


HALVES_PHASES = tuple(
    f"{phase}_{part}"
    for phase, part in itertools.product(("dispatch", "combine"), ("send", "copies", "receive"))
)


def split_body(port: Port, work: Callable[[], object]) -> Body:
    """Intervals: dispatches, combines, each with `work` between its halves."""

    def body(mark: Mark) -> None:
        port.combine(port.dispatch())
        mark()
        arrived = []
        for _ in range(port.calls):
            sent = port.start_dispatch()
            work()
            arrived.append(sent.wait())
        port.last = arrived[-1]
        mark()
        for each in arrived:
            back = port.start_combine(each)
            work()
            back.wait()
        mark()

    return body


def streams_body(port: Port, work: Callable[[], object], other: torch.cuda.Stream) -> Body:
    """Intervals: dispatches, combines, each on the stream `other` beside `work` on this one."""

    def beside(call: Callable[[], Any]) -> None:
        here = torch.cuda.current_stream()
        other.wait_stream(here)
        with torch.cuda.stream(other):
            call()
        work()
        here.wait_stream(other)

    def body(mark: Mark) -> None:
        port.combine(port.dispatch())
        mark()
        arrived: list[Dispatched] = []
        for _ in range(port.calls):
            beside(lambda: arrived.append(port.dispatch()))
        mark()
        for each in arrived:
            beside(lambda each=each: port.combine(each))  # type: ignore[misc]
        mark()

    return body


def work_body(work: Callable[[], object], calls: int) -> Body:
    """Interval: `work` as often as calls in a row, alone. Once ahead."""

    def body(mark: Mark) -> None:
        work()
        mark()
        for _ in range(calls):
            work()
        mark()

    return body


def captured(body: Body) -> Replay:
    """A Recorder: the body in a CUDA graph, its marks events in it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            body(lambda: None)
    torch.cuda.synchronize()
    events: list[torch.cuda.Event] = []

    def mark() -> None:
        events.append(torch.cuda.Event(enable_timing=True, external=True))
        events[-1].record()

    graph = torch.cuda.CUDAGraph()
    # thread_local: NCCL's watchdog queries events from a thread of its own meanwhile.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        body(mark)

    def replay() -> list[float]:
        with torch.cuda.stream(stream):
            graph.replay()
        torch.cuda.synchronize()
        # elapsed_time gives milliseconds.
        return [start.elapsed_time(end) * 1e3 for start, end in itertools.pairwise(events)]

    return replay


def sample(replay: Replay, ranks: Ranks, names: Sequence[str], *, calls: int, replays: int) -> dict[
    str, list[float]
]:  # fmt: skip
    """Microseconds of one call of each interval, a sample a replay; the first replay is not
    counted. Collective."""
    samples: dict[str, list[float]] = {name: [] for name in names}
    for index in range(1 + replays):
        ranks.gather(None, what="graph replay")
        taken = replay()
        if index:
            for name, value in zip(names, taken, strict=True):
                samples[name].append(value / calls)
    return samples
