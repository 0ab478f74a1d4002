"""The cases of slab_faults, each run by every rank of a launch; and the process of one rank."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import torch

from moe_comm.communicator import Communicator
from moe_comm.launch.oracle import locate
from moe_comm.launch.results import device_facts
from moe_comm.launch.slab_faults_rank import (
    PATIENCE_S,
    Rank,
    Report,
    Settings,
    data_of,
    plain_pair,
    raise_wrong,
    wrong_of_pair,
)

_GRAPH_PAIRS = 6
# The captured pair that a stalled rank holds up.
_HELD_PAIR = 3
_CLOCK_HZ = 2.0e9


class Captured:
    """Pairs in one graph. Each token has one choice of weight 1 and experts change nothing, so its
    row comes back as it was. `hold` (clock cycles, read on the device) delays one pair."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.hold = torch.zeros(1, dtype=torch.int64, device=comm.device)
        self.data = data_of(comm, 4, None)[comm.rank]
        idx = self.data.topk_idx.clone()
        idx[:, 1:] = -1
        self.idx, self.weights = idx, torch.ones_like(self.data.topk_weights)
        self.out = torch.empty_like(self.data.x)
        stream = torch.cuda.Stream(comm.device)
        stream.wait_stream(torch.cuda.current_stream(comm.device))
        with torch.cuda.stream(stream):
            for pair in range(_GRAPH_PAIRS):
                self._pair(pair)
        torch.cuda.synchronize(comm.device)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
            for pair in range(_GRAPH_PAIRS):
                self._pair(pair)

    def _pair(self, number: int) -> None:
        from moe_comm.kernels.delay import delay

        if number == _HELD_PAIR:
            delay(self.hold, 0)
        d = self.comm.dispatch(self.data.x, self.idx, self.weights)
        rows = d.rows.flatten(0, 1).index_select(0, d.row_index.clamp_min(0))
        self.out.fill_(torch.nan)
        self.comm.combine(rows, d.handle, out=self.out)

    def replay(self) -> None:
        """Once, to its end; raises what the device recorded."""
        self.graph.replay()
        torch.cuda.synchronize(self.comm.device)
        self.comm.check()

    def wrong(self, lost: int | None = None) -> int:
        """Elements of the last pair that differ; a lost rank's experts give zeros."""
        owner, _ = locate(self.idx, self.comm.placement, source_rank=self.comm.rank)
        served = (owner[:, :1] >= 0) & (owner[:, :1] != (-2 if lost is None else lost))
        return int((self.out != torch.where(served, self.data.x, 0.0)).sum())


def stall_eager(here: Rank) -> Report:
    """The victim does not come to a pair; all go on with a new communicator."""
    comm, everyone = here.created_warm(), range(here.settings.num_ranks)
    here.meet("stall eager", everyone)
    if here.is_victim:
        time.sleep(here.settings.timeout_s + 2.0)
        report: Report = {}
    else:
        report = here.failing(lambda: plain_pair(comm))
        report["later"] = here.failing(lambda: plain_pair(comm))
    here.meet("stall eager over", everyone)
    comm.destroy()
    return report | {"rebuilt_wrong": here.rebuilt(everyone)}


def stall_graph(here: Rank) -> Report:
    """The victim's stream stands still inside a replay."""
    comm, everyone = here.created_warm(), range(here.settings.num_ranks)
    captured = Captured(comm)
    for _ in range(3):
        captured.replay()
    raise_wrong(captured.wrong())
    if here.is_victim:
        captured.hold.fill_(int((here.settings.timeout_s + 2.0) * _CLOCK_HZ))
    torch.cuda.synchronize(here.device)
    here.meet("stall graph", everyone)
    report = here.failing(captured.replay)
    captured.hold.zero_()
    report["later"] = here.failing(captured.replay)
    here.meet("stall graph over", everyone)
    captured.graph.reset()
    comm.destroy()
    return report | {"rebuilt_wrong": here.rebuilt(everyone)}


def kill_eager(here: Rank) -> Report:
    """The victim dies before a pair; the survivors mask it, and build a new communicator."""
    comm = here.created_warm()
    here.meet("kill eager", range(here.settings.num_ranks))
    if here.is_victim:
        os.kill(os.getpid(), signal.SIGKILL)
    report = here.failing(lambda: plain_pair(comm))
    here.meet("kill eager over", here.survivors)
    comm.mask_rank(here.settings.victim)
    wrong = [wrong_of_pair(comm, seed, lost=here.settings.victim) for seed in range(5, 8)]
    here.meet("kill eager masked", here.survivors)
    comm.destroy()
    return report | {"masked_wrong": sum(wrong), "rebuilt_wrong": here.rebuilt(here.survivors)}


def kill_graph(here: Rank) -> Report:
    """The victim dies while all replay; the survivors mask it and replay the same graph."""
    comm = here.created_warm()
    captured = Captured(comm)
    captured.replay()
    raise_wrong(captured.wrong())
    here.meet("kill graph", range(here.settings.num_ranks))
    if here.is_victim:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    end = time.monotonic() + PATIENCE_S
    report: Report = {"error": None}
    while report["error"] is None and time.monotonic() < end:
        report = here.failing(captured.replay)
    here.meet("kill graph over", here.survivors)
    comm.mask_rank(here.settings.victim)
    here.meet("kill graph masked", here.survivors)
    captured.replay()
    report["masked_wrong"] = captured.wrong(here.settings.victim)
    here.meet("kill graph replayed", here.survivors)
    captured.graph.reset()
    comm.destroy()
    return report | {"rebuilt_wrong": here.rebuilt(here.survivors)}


CASES: dict[str, Callable[[Rank], Report]] = {
    "stall-eager": stall_eager,
    "stall-graph": stall_graph,
    "kill-eager": kill_eager,
    "kill-graph": kill_graph,
}


def serve(rank: int, settings: Settings, pipe: Connection) -> None:
    """One rank's process: (name, report) of its device and each case; what is raised ends it."""
    for name, report in _reports(rank, settings):
        pipe.send((name, report))


def _reports(rank: int, settings: Settings) -> Iterator[tuple[str, Report]]:
    name = "start"
    try:
        here = Rank(settings, rank)
        yield "device", device_facts(rank, here.device)
        for name in settings.cases:
            yield name, CASES[name](here)
    except Exception:  # noqa: BLE001 - whatever it is, the parent must hear of it
        yield name, {"traceback": traceback.format_exc()}
