"""Settings of a slab sweep on this rank: each checked against the reference, timed, checked again
after what was timed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from moe_comm.communicator import Communicator
from moe_comm.config import EPConfig
from moe_comm.launch.limits import Limits
from moe_comm.launch.results import Row
from moe_comm.launch.slab_sweep_graphs import (
    HALVES_PHASES,
    Body,
    Recorder,
    calls_body,
    captured,
    halves_body,
    sample,
    split_body,
    streams_body,
    work_body,
)
from moe_comm.launch.slab_sweep_ports import Port, join_copies, open_slab, shared_expert
from moe_comm.launch.slab_sweep_problem import (
    IN_A_ROW,
    PAIRS,
    Plan,
    Problem,
    build_problem,
    sweep_row,
)
from moe_comm.launch.slab_sweep_settings import CALLS, HALVES, Setting
from moe_comm.launch.timing import Samples, Statistics, time_graph
from moe_comm.launch.verify import check_combined, check_dispatched
from moe_comm.launch.worker import Ranks

T = TypeVar("T")
PHASES = ("dispatch", "combine")
# Problems that are kept: settings take them in turns. The largest holds 1.2 GB.
_KEPT = 8


class SettingFailedError(Exception):
    """A setting cannot run here, as every rank knows."""


@dataclass(kw_only=True, eq=False)
class _Run:
    """A setting under way. `wrong`: elements found so far, by phase, over all ranks."""

    setting: Setting
    problem: Problem
    port: Port
    wrong: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))


@dataclass(kw_only=True, eq=False)
class Sweep:
    """Measures settings. Every method is collective.

    Attributes:
        plan, ranks: see there.
        open: makes a setting's communicator.
        record: makes a body ready to run.
        compiled: how many kernels this process has compiled so far.
    """

    plan: Plan
    ranks: Ranks
    open: Callable[[EPConfig, Ranks, Setting], Communicator] = open_slab
    record: Recorder = captured
    compiled: Callable[[], int] = lambda: 0
    _problems: dict[tuple[int, tuple[str, str]], Problem] = field(default_factory=dict)
    _limits: Limits = field(init=False)

    def __post_init__(self) -> None:
        self._limits = Limits(ranks=self.ranks, iters=self.plan.replays, warmup=3)

    def measure(self, setting: Setting) -> list[Row]:
        """The setting's rows; one row with params.error where it cannot run."""
        began, compiled = time.monotonic(), self.compiled()
        problem = self.problem(setting)
        try:
            with self._opened(setting, problem) as port:
                run = _Run(setting=setting, problem=problem, port=port)
                self._agreed("check", port.pair)
                self._compare(run)
                rows = [] if any(run.wrong.values()) else self._time(run)
            rows = rows or [self._row(run, phase, None) for phase in PHASES]
            for row in rows:
                # Halves are as right as their call.
                row.wrong = run.wrong.get(row.phase.partition("_")[0])
        except SettingFailedError as error:
            rows = [
                sweep_row(
                    self.plan, self.ranks.num_ranks, setting, problem, "dispatch", None,
                    error=str(error),
                )
            ]  # fmt: skip
        facts = {
            "compiled": max(self.ranks.gather(self.compiled() - compiled)),
            "seconds": round(time.monotonic() - began, 2),
        }
        for row in rows:
            row.params.update(facts)
        return rows

    def problem(self, setting: Setting) -> Problem:
        """Of the setting's size and wires, made once."""
        key = (setting.num_tokens, setting.wires)
        if key not in self._problems:
            while len(self._problems) >= _KEPT:
                del self._problems[next(iter(self._problems))]
            self._problems[key] = build_problem(self.plan, self.ranks, self._limits, *key)
        return self._problems[key]

    def _agreed(self, what: str, step: Callable[[], T]) -> T:
        """step() on every rank. Where it fails on one, SettingFailedError on all: what comes next
        would wait for that one. Waits on the device are bounded, so they fail here too."""
        result: list[T] = []
        error = ""
        try:
            result.append(step())
        except Exception as found:  # noqa: BLE001 - compiler, driver, allocator: several types
            error = f"rank {self.ranks.rank}: {what}: {type(found).__name__}: {found}"
        failed = [text for text in self.ranks.gather(error, what=what) if text]
        if failed:
            raise SettingFailedError(failed[0][:400])
        return result[0]

    @contextlib.contextmanager
    def _opened(self, setting: Setting, problem: Problem) -> Iterator[Port]:
        comm = self._agreed("open", lambda: self.open(problem.case.config, self.ranks, setting))
        mine = problem.case.data[self.ranks.rank]
        port = Port(
            comm=comm, mine=mine, y=problem.y, out=torch.empty_like(mine.x), calls=self.plan.calls
        )
        try:
            yield port
        finally:
            # Views would keep the memory.
            port.last = None
            comm.destroy()

    def _compare(self, run: _Run) -> None:
        """Count what is wrong in the latest dispatch and combine."""
        self._agreed("status", run.port.comm.check)
        rank, last = self.ranks.rank, run.port.last
        assert last is not None
        found = (
            check_dispatched(last, run.problem.arrived, rank=rank),
            check_combined(run.port.out, run.problem.combined, rank=rank),
        )
        for of_rank in self.ranks.gather([(f.phase, f.wrong, f.first[:1]) for f in found]):
            for phase, wrong, first in of_rank:
                run.wrong[phase] += wrong
                for text in first:
                    self.ranks.say(f"wrong: {text}")

    def _time(self, run: _Run) -> list[Row]:
        setting, port = run.setting, run.port
        if setting.kind == HALVES:
            body = halves_body(port, lambda: join_copies(port.comm, setting.tuning.mode))
            return self._rows(run, self._sampled(run, body, HALVES_PHASES), timing=IN_A_ROW)
        if setting.kind != CALLS:
            return self._overlap(run)
        rows = self._rows(run, self._sampled(run, calls_body(port), PHASES), timing=IN_A_ROW)
        if not setting.changed and self.record is captured:
            replays = self.plan.replays
            pairs = time_graph(port, self.ranks, iters=2 * replays, warmup=3, flush_l2=False)
            self._compare(run)
            del pairs["round_trip"]
            rows += self._rows(run, pairs, timing=PAIRS)
        return rows

    def _overlap(self, run: _Run) -> list[Row]:
        """Calls alone, the GEMM alone, and one beside the other."""
        port, on_cuda = run.port, self.ranks.device.type == "cuda"
        work = shared_expert(run.setting.num_tokens, self.ranks.device)
        alone = self._sampled(run, calls_body(port), PHASES)
        gemm = self._sampled(run, work_body(work, port.calls), ("gemm",), moves=False)
        rows = self._rows(run, alone, timing=IN_A_ROW, beside="nothing")
        rows += self._rows(run, gemm, timing=IN_A_ROW)
        took = {row.phase: row.slowest_rank_p50_us or 0.0 for row in rows}
        bodies = {"split": split_body(port, work)}
        for name, priority in (("streams", 0), ("streams, calls first", -1)) if on_cuda else ():
            stream = torch.cuda.Stream(self.ranks.device, priority=priority)
            bodies[name] = streams_body(port, work, stream)
        for name, body in bodies.items():
            for row in self._rows(
                run, self._sampled(run, body, PHASES), timing=IN_A_ROW, beside=name
            ):
                call, both = took[row.phase], row.slowest_rank_p50_us or 0.0
                hidden = round((call + took["gemm"] - both) / call, 3) if call else None
                row.params |= {"call_us": call, "gemm_us": took["gemm"], "hidden_share": hidden}
                rows.append(row)
        return rows

    def _sampled(
        self, run: _Run, body: Body, names: Sequence[str], *, moves: bool = True
    ) -> Samples:
        """Samples of a body's intervals; what its last calls bring, where it `moves` rows, is
        checked."""
        replay = self._agreed("capture", lambda: self.record(body))
        if moves:
            run.port.poison()
        taken = sample(replay, self.ranks, names, calls=self.plan.calls, replays=self.plan.replays)
        if moves:
            self._compare(run)
        return taken

    def _rows(self, run: _Run, samples: Samples, **params: Any) -> list[Row]:
        return [
            self._row(run, phase, Statistics.of(self.ranks.gather(taken)), **params)
            for phase, taken in samples.items()
        ]

    def _row(self, run: _Run, phase: str, found: Statistics | None, **params: Any) -> Row:
        return sweep_row(
            self.plan, self.ranks.num_ranks, run.setting, run.problem, phase, found, **params
        )
