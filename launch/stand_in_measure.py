"""Cases of slab_stand_in: each checked against the reference, timed on two GPUs, checked again."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moe_comm.backends.slab_modes import SlabTuning
from moe_comm.config import EPConfig
from moe_comm.launch.matrix_copies import Copies, Load
from moe_comm.launch.rank_data import RankData
from moe_comm.launch.results import Row
from moe_comm.launch.routing import Routing
from moe_comm.launch.slab_sweep_settings import HALVES, Setting
from moe_comm.launch.stand_in_world import Meeting, Problem, StandInWorld
from moe_comm.launch.timing import Statistics, percentile
from moe_comm.launch.virtual_ranks import on
from moe_comm.traffic import RoutingTraffic

TIMEOUT_S = 10.0
PHASES = ("dispatch", "combine")
# Beyond so many rows only two ranks are compared.
_ALL_CHECKED = 4096
DEFINITIONS = {
    "stand-in": "one rank of ep_size, with a GPU to itself; the memory of all others is a second "
    "GPU's, over one link that carries as much in the other direction. They have sent before it "
    "begins: waiting for them is not in a time",
    "slowest_rank_p50_us": "of the two GPUs, which do the same at once: the larger median, over "
    "replays, of params.calls calls in a row in one captured graph, over their number",
    "remote_bytes": "what rank 0 sends to others in one call",
    "limit_us": "copies of remote_bytes in both directions at once, in a graph",
    "wrong": "elements of ranks 0 and others, of the last call, eager and after the timed ones",
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing to time."""

    preset: str
    num_ranks: int
    num_tokens: int
    wires: tuple[str, str]
    routing: Routing
    tuning: SlabTuning
    calls: int

    @property
    def config(self) -> EPConfig:
        """As many slots as calls."""
        return EPConfig.preset(
            self.preset, max_tokens_per_rank=self.num_tokens, num_slots=self.calls,
            dispatch_wire=self.wires[0], combine_wire=self.wires[1], timeout_s=TIMEOUT_S,
        )  # fmt: skip

    @property
    def setting(self) -> Setting:
        """As slab_sweep names it."""
        return Setting(
            section="stand-in", num_tokens=self.num_tokens, tuning=self.tuning, wires=self.wires,
            kind=HALVES,
        )  # fmt: skip

    @property
    def identity(self) -> str:
        """The same for cases that time the same."""
        return f"{self.preset} {self.num_ranks} {self.routing.text} {self.calls} {self.setting}"


class Kept:
    """The data of one size, for the cases that have it, which follow one another; and limits."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._key: tuple[Any, ...] = ()
        self._data: list[RankData] = []
        self._limits: dict[int, float] = {}

    def data(self, case: Case) -> list[RankData]:
        """Every rank's, on the CPU."""
        key = (case.preset, case.num_ranks, case.num_tokens, case.routing.text)
        if key != self._key:
            self._key = key
            self._data = RankData.create_all(
                case.config, num_tokens=[case.num_tokens] * case.num_ranks, routing=case.routing,
                seed=self._seed,
            )  # fmt: skip
        return self._data

    def limit_us(self, size: int) -> float:
        """Copies of so many bytes between both GPUs, in both directions at once."""
        if size not in self._limits:
            samples, _ = Copies(size, 2).measure(Load(name="both", pairs=((0, 1), (1, 0))))
            self._limits[size] = percentile(samples, 50)
        return self._limits[size]


def measure(
    case: Case, kept: Kept, devices: Sequence[torch.device], meeting: Meeting | None, replays: int
) -> list[Row]:
    """Rows of a case, with times on GPUs. `devices`: two, each the home of one world."""
    # What the case before has held, tens of GB where it was large.
    gc.collect()
    problem = Problem(config=case.config, data=kept.data(case))
    ends = (devices, tuple(reversed(devices)))
    worlds = [StandInWorld(problem, home, away, case.tuning) for home, away in ends]
    every = case.num_ranks * case.num_tokens <= _ALL_CHECKED
    checked = range(case.num_ranks) if every else (0, case.num_ranks - 1)
    _round(worlds, devices, lambda w: worlds[w].dispatch(), lambda w: worlds[w].combine())
    wrong = _wrong(worlds, checked)
    taken: dict[str, list[list[float]]] = {}
    if meeting is not None and not wrong:
        taken = _timed(worlds, devices, meeting, replays, case.calls)
        wrong = _wrong(worlds, checked)
    return [_row(case, phase, taken.get(phase), wrong, kept) for phase in PHASES]


def _round(
    worlds: Sequence[StandInWorld], devices: Sequence[torch.device],
    dispatch: Callable[[int], object], combine: Callable[[int], object],
) -> None:  # fmt: skip
    """All calls of all ranks once; what is given makes rank 0's, on its stream."""

    def at_home(calls: Callable[[int], object]) -> None:
        _meet(devices)
        for index, world in enumerate(worlds):
            with on(world.home, world.streams[world.home]):
                calls(index)
        _meet(devices)

    for world in worlds:
        if world.arrived:
            world.poison()
        world.others_send()
    at_home(dispatch)
    for world in worlds:
        world.others_receive_and_return()
    at_home(combine)
    for world in worlds:
        world.others_end()
    _meet(devices)


def _meet(devices: Sequence[torch.device]) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _wrong(worlds: Sequence[StandInWorld], ranks: Sequence[int]) -> int:
    findings = [found for world in worlds for found in world.check(ranks)]
    for found in findings:
        for text in found.first[:1]:
            print(f"wrong: {text}", file=sys.stderr)
    return sum(found.wrong for found in findings)


def _timed(
    worlds: Sequence[StandInWorld], devices: Sequence[torch.device], meeting: Meeting,
    replays: int, calls: int,
) -> dict[str, list[list[float]]]:  # fmt: skip
    """Microseconds of a call by phase, device and replay."""
    graphs = [
        {phase: _captured(world, index, meeting, phase) for phase in PHASES}
        for index, world in enumerate(worlds)
    ]
    taken: dict[str, list[list[float]]] = {phase: [[] for _ in worlds] for phase in PHASES}
    for replay in range(replays + 1):
        _round(
            worlds, devices, lambda w: graphs[w]["dispatch"][0].replay(),
            lambda w: graphs[w]["combine"][0].replay(),
        )  # fmt: skip
        if replay:
            for index, of_world in enumerate(graphs):
                for phase, (_graph, begin, end) in of_world.items():
                    # elapsed_time gives milliseconds.
                    taken[phase][index].append(begin.elapsed_time(end) * 1e3 / calls)
    return taken


def _captured(
    world: StandInWorld, index: int, meeting: Meeting, phase: str
) -> tuple[torch.cuda.CUDAGraph, torch.cuda.Event, torch.cuda.Event]:
    """A graph of rank 0's calls between two events, behind a meeting of both devices."""
    stream = world.streams[world.home]
    with on(world.home, stream):
        begin, end = (torch.cuda.Event(enable_timing=True, external=True) for _ in range(2))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            meeting.join(index)
            begin.record()
            world.dispatch() if phase == "dispatch" else world.combine()
            end.record()
    return graph, begin, end


def _row(
    case: Case, phase: str, taken: Sequence[Sequence[float]] | None, wrong: int, kept: Kept
) -> Row:
    config = case.config
    mode = case.tuning.mode_of(config, case.num_tokens, case.num_ranks)
    placement = config.placement_for(case.num_ranks)
    traffic = RoutingTraffic.of([one.topk_idx for one in kept.data(case)], placement)
    wire = config.wire if phase == "dispatch" else config.return_wire
    row_bytes = wire.row_bytes(config.hidden)
    # Rows, ids and weights there, rows back.
    bytes_of_row = row_bytes + 8 * config.num_topk if phase == "dispatch" else row_bytes
    moved = traffic.remote_rows if phase == "dispatch" else traffic.returned_rows
    needed = sent = int(moved[0]) * bytes_of_row
    if phase == "dispatch" and mode == "high-throughput" and wire.scale_dtype is None:
        # Copies bring every row to every rank; what is quantized on the way is not copied.
        sent = (case.num_ranks - 1) * case.num_tokens * bytes_of_row
    row = Row(
        backend="slab", mode=mode, phase=phase, layout="expert", num_tokens=case.num_tokens,
        hidden=config.hidden, num_topk=config.num_topk, num_experts=config.num_experts,
        ep_size=case.num_ranks, wire=wire.name, routing=case.routing.text,
        cuda_graph=taken is not None, remote_bytes=sent, minimum_bytes=needed, wrong=wrong,
        params={
            "case": case.identity, "stand_in": True, "calls": case.calls,
            "wires": list(case.wires), "asked_mode": case.tuning.mode,
            "changed": case.setting.changed,
        },
    )  # fmt: skip
    if taken is not None:
        found = Statistics.of(taken)
        row.samples, row.p50_us, row.p99_us = found.samples, found.p50_us, found.p99_us
        row.slowest_rank_p50_us = found.slowest_rank_p50_us
        row.remote_gbps = sent / found.slowest_rank_p50_us / 1e3
        row.limit_us, row.limit_kind = kept.limit_us(needed), "peer copy"
    return row
