r"""What one rank of R does in dispatch and combine, timed on two GPUs; R may be any number.

    python -m moe_comm.launch.slab_stand_in --out FILE --ranks 2,4,8 --num-tokens 1,128,4096
    python -m moe_comm.launch.slab_stand_in --out FILE --ranks 8 --modes low-latency,high-throughput
    python -m moe_comm.launch.slab_stand_in --out FILE --ranks 8 --knob combine_block=2048,4096 \
        --knob combine_warps=8,16

Rank 0 has a GPU to itself and the other ranks' memory is the second GPU's, twice at once, the other
way round (stand_in_world). What is timed is what a rank computes and what its link carries among R
GPUs behind one switch; waiting for ranks that begin later is not in it. The same for two ranks,
beside a run of two, says what that waiting is: launch/matrix_predict.py adds it. Every case is
checked against the reference before and after it is timed. The file is written after every case;
run again with the same file, it goes on. Exit codes: 0 right, 1 wrong data, 2 usage, 3 fewer than
two GPUs that reach each other, 124 time is up and cases are left.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import datetime
import gc
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch

from moe_comm.backends.slab_modes import MODES, SlabTuning
from moe_comm.config import PRESETS, EPConfig
from moe_comm.launch import results, spawn
from moe_comm.launch.matrix_copies import Copies, Load
from moe_comm.launch.options import (
    BadInput,
    CannotRun,
    check_outputs,
    known,
    many,
    routings_of,
    token_count,
)
from moe_comm.launch.rank_data import RankData
from moe_comm.launch.results import Row
from moe_comm.launch.routing import Routing
from moe_comm.launch.slab_sweep_compile import compile_ahead, count_compiles
from moe_comm.launch.slab_sweep_settings import HALVES, Setting
from moe_comm.launch.stand_in_world import Meeting, Problem, StandInWorld, on
from moe_comm.launch.timing import Statistics, percentile
from moe_comm.traffic import RoutingTraffic
from moe_comm.wire import WIRES

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


def changes_of(text: str) -> list[tuple[str, int]]:
    """(name, value) of NAME=VALUE[,VALUE...], a knob of SlabTuning that is a number."""
    name, _, values = text.partition("=")
    numbers = [f.name for f in dataclasses.fields(SlabTuning) if f.name != "mode"]
    known(numbers)(name)
    try:
        return [(name, int(value)) for value in values.split(",")]
    except ValueError as error:
        raise click.BadParameter(f"expected NAME=NUMBER[,NUMBER...], got {text!r}") from error


def _each_knob(
    ctx: click.Context, param: click.Parameter, texts: Sequence[str]
) -> list[list[tuple[str, int]]]:
    del ctx, param
    return [changes_of(text) for text in texts]


def _above_one(text: str) -> int:
    count = token_count(text)
    if count < 2:
        raise click.BadParameter(f"expected ranks >= 2, got {text!r}")
    return int(count)


@click.command(context_settings={"show_default": True})
@click.option("--out", metavar="FILE", required=True, help="the result file, gone on with")
@click.option("--ranks", default="2,4,8", callback=many(_above_one))
@click.option("--presets", default="kimi-k3", callback=many(known(list(PRESETS))))
@click.option("--num-tokens", default="1,8,32,128,512,4096", callback=many(token_count))
@click.option("--wires", default="bf16,fp8", callback=many(known(list(WIRES))),
              help="of dispatch; combine's is bf16")  # fmt: skip
@click.option("--routing", default="uniform", help="see moe-bench run")
@click.option("--modes", default="auto", callback=many(known(list(MODES))))
@click.option("--knob", "knobs", multiple=True, callback=_each_knob, metavar="NAME=N[,N...]",
              help="a case for each value of a SlabTuning knob; of several, for each "
              "combination")  # fmt: skip
@click.option("--calls", type=click.IntRange(1, 32), default=8, help="in a row, and slots")
@click.option("--replays", type=click.IntRange(3), default=15, help="samples of each graph")
@click.option("--seconds", type=click.FloatRange(min=1), default=300.0, help="of the whole run")
@click.option("--seed", type=click.IntRange(min=0), default=0)
def command(**given: Any) -> int:
    """Time one rank of many."""
    check_outputs(given["out"])
    cases = list(_cases(given))
    began = time.monotonic()
    devices = _two_gpus()
    path = Path(given["out"])
    document = _opened(path, cases[0], given["seed"], devices)
    done = {row["params"]["case"] for row in document["rows"]}
    left = [case for case in cases if case.identity not in done]
    _ahead(left, devices[0], seconds=0.4 * given["seconds"])
    meeting, kept, longest = Meeting(devices, TIMEOUT_S), _Kept(given["seed"]), 0.0
    compiled = count_compiles()
    for index, case in enumerate(left):
        started, before = time.monotonic(), compiled()
        if index and started - began + longest > given["seconds"]:
            print(f"out of time: {len(left) - index} cases left; run it again", file=sys.stderr)
            return spawn.LOST
        rows = measure(case, kept, devices, meeting, given["replays"])
        longest = max(time.monotonic() - started, 0.8 * longest)
        facts = {"compiled": compiled() - before, "seconds": round(time.monotonic() - started, 2)}
        for row in rows:
            row.params |= facts
        document["rows"] += [dataclasses.asdict(row) for row in rows]
        results.validate(document)
        results.write_json(str(path), document)
        words = ", ".join(
            f"{row.phase} {row.slowest_rank_p50_us:.1f} (copies {row.limit_us or 0:.1f})"
            for row in rows
            if row.slowest_rank_p50_us is not None
        )
        print(f"{case.identity}: {words} us, wrong {rows[0].wrong}; {facts}", flush=True)
    return 1 if any(row["wrong"] for row in document["rows"]) else 0


def _cases(given: dict[str, Any]) -> Iterator[Case]:
    """Large ones last; what a knob changes next to each other."""
    changes = [dict(combination) for combination in itertools.product(*given["knobs"])]
    for preset, count, tokens, wire in itertools.product(
        given["presets"], given["ranks"], given["num_tokens"], given["wires"]
    ):
        routing = routings_of([given["routing"]], EPConfig.preset(preset))[0]
        for mode, change in itertools.product(given["modes"], changes):
            yield Case(
                preset=preset, num_ranks=count, num_tokens=tokens, wires=(wire, "bf16"),
                routing=routing, tuning=SlabTuning(mode=mode, **change), calls=given["calls"],
            )  # fmt: skip


def _two_gpus() -> list[torch.device]:
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < 2 or not torch.cuda.can_device_access_peer(0, 1):
        raise CannotRun(f"slab_stand_in: needs two GPUs that reach each other, found {found}")
    return [torch.device("cuda", 0), torch.device("cuda", 1)]


def _opened(
    path: Path, case: Case, seed: int, devices: Sequence[torch.device]
) -> dict[str, Any]:  # fmt: skip
    if path.exists():
        try:
            document = results.read_json(path)
        except (OSError, ValueError) as error:
            raise BadInput(f"{path.name}: {error}") from error
        if document["command"] != "slab_stand_in" or document["seed"] != seed:
            raise BadInput(f"{path.name}: expected a file of slab_stand_in with seed {seed}")
        return document
    return {
        "schema_version": results.SCHEMA_VERSION,
        "command": "slab_stand_in",
        "argv": results.without_directories(sys.argv[1:]),
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "git": results.git_facts(),
        "versions": results.versions(),
        "devices": [results.device_facts(i, device) for i, device in enumerate(devices)],
        "topology": {"num_ranks": 1, "num_nodes": 1, "transport": "stores, copies"},
        "config": case.config.describe(),
        "seed": seed,
        "definitions": DEFINITIONS,
        "rows": [],
    }


def _ahead(cases: Sequence[Case], device: torch.device, *, seconds: float) -> None:
    """Compile the cases' kernels in many processes at once."""
    kinds = {(case.preset, case.num_ranks) for case in cases}
    workers = max(1, (len(os.sched_getaffinity(0)) - 2) // max(1, len(kinds)))

    def compile_kind(kind: tuple[str, int]) -> None:
        of_kind = [case for case in cases if (case.preset, case.num_ranks) == kind]
        compile_ahead(
            [case.setting for case in of_kind], of_kind[0].config,
            num_ranks=kind[1], capability=torch.cuda.get_device_capability(device),
            workers=workers, seconds=seconds, say=lambda text: print(text, file=sys.stderr),
        )  # fmt: skip

    with concurrent.futures.ThreadPoolExecutor(max(1, len(kinds))) as pool:
        list(pool.map(compile_kind, sorted(kinds)))


class _Kept:
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
    case: Case, kept: _Kept, devices: Sequence[torch.device], meeting: Meeting | None, replays: int
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
    for world in worlds:
        world.poison() if world.arrived else None
        world.others_send()
    _meet(devices)
    for index, world in enumerate(worlds):
        with on(world.home, world.streams[world.home]):
            dispatch(index)
    _meet(devices)
    for world in worlds:
        world.others_receive_and_return()
    _meet(devices)
    for index, world in enumerate(worlds):
        with on(world.home, world.streams[world.home]):
            combine(index)
    _meet(devices)
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
    case: Case, phase: str, taken: Sequence[Sequence[float]] | None, wrong: int, kept: _Kept
) -> Row:
    config, plan = case.config, case.tuning.plan(case.config, case.num_tokens)
    placement = config.placement_for(case.num_ranks)
    traffic = RoutingTraffic.of([one.topk_idx for one in kept.data(case)], placement)
    wire = config.wire if phase == "dispatch" else config.return_wire
    row_bytes = wire.row_bytes(config.hidden)
    # Rows, ids and weights there, rows back.
    bytes_of_row = row_bytes + 8 * config.num_topk if phase == "dispatch" else row_bytes
    moved = traffic.remote_rows if phase == "dispatch" else traffic.returned_rows
    sent = int(moved[0]) * bytes_of_row
    row = Row(
        backend="slab", mode=plan.mode, phase=phase, layout="expert", num_tokens=case.num_tokens,
        hidden=config.hidden, num_topk=config.num_topk, num_experts=config.num_experts,
        ep_size=case.num_ranks, wire=wire.name, routing=case.routing.text,
        cuda_graph=taken is not None, remote_bytes=sent, minimum_bytes=sent, wrong=wrong,
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
        row.limit_us, row.limit_kind = kept.limit_us(sent), "peer copy"
    return row


def main() -> None:
    """Entry point."""
    spawn.run_command(command)


if __name__ == "__main__":
    main()
