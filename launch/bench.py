"""The measuring loop of `run`: every case is checked, then timed, then set against its limits."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from moe_comm.config import EPConfig
from moe_comm.launch.limits import Limits
from moe_comm.launch.modes import can_capture, config_for, expand
from moe_comm.launch.rank_data import RankData
from moe_comm.launch.results import Row
from moe_comm.launch.routing import Routing
from moe_comm.launch.subjects import Case, CommunicatorSubject, Measured, PerExpertSubject
from moe_comm.launch.timing import Samples, Statistics, time_eager, time_graph, time_host
from moe_comm.launch.verify import Findings
from moe_comm.launch.worker import Ranks
from moe_comm.negotiate import create_communicator
from moe_comm.topology import Topology
from moe_comm.traffic import RoutingTraffic

PHASES = ("dispatch", "combine", "round_trip")
PER_EXPERT = "per-expert"
# Dispatches in a row in a captured graph, as far as their receive memory stays within the bytes.
CALLS_IN_A_ROW = 8
ROW_BYTES = 8 << 30


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What `run` was asked for; equal on all ranks.

    Attributes:
        config: the shape and wires; its capacity is replaced case by case.
        backends: names, "name:mode", "auto", "all", "per-expert".
        num_tokens, routings: the grid.
        phases: rows to keep.
        layout: of combine.
        iters, warmup: None takes the device's default.
        graph: captured (True), eager (False), captured where a mode can be (None).
        calls: in a row, where captured; None: CALLS_IN_A_ROW, or fewer.
        flush_l2, check, limit: see the options.
        flip_rank: rank whose first received row gets a flipped bit, for tests.
    """

    config: EPConfig
    backends: Sequence[str]
    num_tokens: Sequence[int]
    routings: Sequence[Routing]
    phases: Sequence[str] = PHASES
    layout: str = "expert"
    iters: int | None = None
    warmup: int | None = None
    graph: bool | None = None
    calls: int | None = None
    flush_l2: bool = False
    check: bool = True
    limit: bool = True
    seed: int = 0
    flip_rank: int | None = None


@dataclass(kw_only=True)
class Outcome:
    """Rows, and the first mismatches of each case in words."""

    rows: list[Row] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)


class Bench:
    """Runs a Plan on this rank. Every method is collective."""

    def __init__(self, plan: Plan, ranks: Ranks, *, quiet: bool = False) -> None:
        self.plan, self.ranks, self.quiet = plan, ranks, quiet
        on_cpu = ranks.device.type == "cpu"
        self.iters = plan.iters or (20 if on_cpu else 200)
        self.warmup = plan.warmup if plan.warmup is not None else (3 if on_cpu else 20)
        self.limits = Limits(ranks=ranks, iters=self.iters, warmup=self.warmup)
        self.topology = Topology.detect(ranks.group)
        self.names = expand(list(plan.backends), plan.config, ranks)

    def run(self) -> Outcome:
        """All cases."""
        outcome = Outcome()
        cases = [(r, t, b) for r in self.plan.routings for t in self.plan.num_tokens
                 for b in self.names]  # fmt: skip
        last: tuple[Routing, int] | None = None
        case: Case | None = None
        for index, (routing, num_tokens, name) in enumerate(cases):
            if case is None or last != (routing, num_tokens):
                case, last = self.build_case(routing, num_tokens), (routing, num_tokens)
            self.progress(f"[{index + 1}/{len(cases)}] {name}, {num_tokens} tokens, {case.routing}")
            for subject in self.subjects(name, case):
                try:
                    self.measure(subject, case, outcome)
                finally:
                    subject.close()
        return outcome

    def progress(self, text: str) -> None:
        """A line on stderr."""
        if not self.quiet:
            self.ranks.say(text)

    def build_case(self, routing: Routing, num_tokens: int) -> Case:
        """Every rank's data, regenerated on this one."""
        ranks = self.ranks.num_ranks
        note = routing.wrap_note(num_ranks=ranks, num_tokens=num_tokens)
        if note:
            self.progress(f"note: {note}")
        config = self.plan.config.replace(max_tokens_per_rank=num_tokens, chunk_tokens=None)
        self.limits.calls = calls = self.calls_of(config)
        config = config.replace(num_slots=max(config.num_slots, calls))
        data = RankData.create_all(
            config,
            num_tokens=[num_tokens] * ranks,
            routing=routing,
            seed=self.plan.seed,
            device=self.ranks.device,
        )
        traffic = RoutingTraffic.of(
            [given.topk_idx for given in data],
            config.placement_for(ranks),
            node_of_rank=self.ranks.group.node_of_rank,
        )
        return Case(
            config=config,
            data=data,
            traffic=traffic,
            routing=routing.text,
            layout=self.plan.layout,
        )

    def calls_of(self, config: EPConfig) -> int:
        """Dispatches in a row in a captured graph: each takes a slot."""
        if self.ranks.device.type != "cuda" or self.plan.graph is False or self.plan.flush_l2:
            return 1
        slot = config.buffer_bytes(self.ranks.num_ranks)["total"] // config.num_slots
        most = max(1, ROW_BYTES // max(slot, 1))
        return self.plan.calls or min(CALLS_IN_A_ROW, most)

    def subjects(self, name: str, case: Case) -> Iterator[Measured]:
        """The subject of one name."""
        if name == PER_EXPERT:
            yield PerExpertSubject(case, self.ranks)
            return
        config = config_for(name, case.config, self.topology)
        comm = create_communicator(config, self.ranks.group, name)
        captures = can_capture(comm)
        case = dataclasses.replace(case, config=config)
        yield CommunicatorSubject(comm, case, self.ranks, can_capture=captures)

    def measure(self, subject: Measured, case: Case, outcome: Outcome) -> None:
        """Check, count, time; add the rows."""
        flip = self.plan.flip_rank == self.ranks.rank
        found = subject.prepare(check=self.plan.check, flip=flip)
        wrong = self.agree(found, outcome) if self.plan.check else None
        sent, known = subject.sent_bytes()
        sent["round_trip"] = sent["dispatch"] + sent["combine"]
        per_rank = self.ranks.gather(sent)
        graph = subject.can_capture and self.plan.graph is not False
        statistics: dict[str, Statistics] = {}
        alone: dict[str, Statistics] = {}
        calls = self.limits.calls if graph else 1
        if not wrong or not any(wrong.values()):
            statistics = self.time(subject, graph=graph, calls=calls)
            alone = self.time(subject, graph=graph, calls=1) if calls > 1 else statistics
        words = self.timing_words(graph=graph, calls=calls)
        params = {"bytes": known, "timing": words, "calls_in_a_row": calls}
        for phase in self.plan.phases:
            row = self.row(subject, case, phase, graph=graph, params=dict(params))
            row.remote_bytes = max(rank[phase] for rank in per_rank)
            if wrong is not None:
                row.wrong = wrong[phase]
            if phase in statistics:
                self.fill(row, statistics[phase])
                if calls > 1:
                    row.params["alone_us"] = round(alone[phase].slowest_rank_p50_us, 2)
                if self.plan.limit and row.remote_bytes:
                    self.set_limit(row, case, per_rank, graph=graph)
            outcome.rows.append(row)

    def agree(self, found: dict[str, Findings], outcome: Outcome) -> dict[str, int]:
        """Sum the findings of all ranks; keep the first mismatch of each rank and phase."""
        totals = dict.fromkeys(PHASES, 0)
        for mine in self.ranks.gather({p: (f.wrong, f.first[:1]) for p, f in found.items()}):
            for phase, (count, first) in mine.items():
                totals[phase] += count
                totals["round_trip"] += count
                outcome.mismatches += first
        return totals

    def time(self, subject: Measured, *, graph: bool, calls: int) -> dict[str, Statistics]:
        """Statistics over all ranks, by phase."""
        ranks, iters, warmup, flush = self.ranks, self.iters, self.warmup, self.plan.flush_l2
        samples: Samples
        if ranks.device.type != "cuda":
            samples = time_host(subject, ranks, iters=iters, warmup=warmup)
        elif graph:
            samples = time_graph(
                subject, ranks, iters=iters, warmup=warmup, flush_l2=flush, calls=calls
            )
        else:
            samples = time_eager(subject, ranks, iters=iters, warmup=warmup, flush_l2=flush)
        gathered = ranks.gather(samples)
        return {phase: Statistics.of([mine[phase] for mine in gathered]) for phase in PHASES}

    def timing_words(self, *, graph: bool, calls: int) -> str:
        """How the figures were taken, for the result file."""
        if self.ranks.device.type != "cuda":
            return "wall clock around the call, after a barrier"
        cache = ", L2 flushed before each pair" if self.plan.flush_l2 else ""
        if graph and calls > 1:
            return f"events inside a captured graph around {calls} calls in a row, divided by them"
        if graph:
            return f"events inside a captured graph of back-to-back pairs{cache}"
        return f"events around eager calls, after a barrier{cache}"

    def row(
        self, subject: Measured, case: Case, phase: str, *, graph: bool, params: dict[str, Any]
    ) -> Row:
        """A row without figures."""
        config, wires = case.config, subject.wires
        params["reduction"] = subject.reduction
        wire = {"dispatch": wires[0], "combine": wires[1]}.get(
            phase, wires[0] if wires[0] == wires[1] else "/".join(wires)
        )
        return Row(
            backend=subject.backend,
            mode=subject.mode,
            phase=phase,
            layout=subject.layout,
            num_tokens=case.num_tokens,
            hidden=config.hidden,
            num_topk=config.num_topk,
            num_experts=config.num_experts,
            ep_size=self.ranks.num_ranks,
            wire=wire,
            routing=case.routing,
            cuda_graph=graph,
            params=params,
            minimum_bytes=case.traffic.minimum_bytes(
                phase,
                dispatch_row_bytes=_row_bytes(config, wires[0]),
                combine_row_bytes=_row_bytes(config, wires[1]),
            ),
        )

    @staticmethod
    def fill(row: Row, statistics: Statistics) -> None:
        """Put times, and the rate that follows, into a row."""
        row.samples = statistics.samples
        row.p50_us, row.p99_us = statistics.p50_us, statistics.p99_us
        row.slowest_rank_p50_us = statistics.slowest_rank_p50_us
        if row.remote_bytes is not None and row.slowest_rank_p50_us > 0:
            row.remote_gbps = row.remote_bytes / row.slowest_rank_p50_us / 1e3

    def set_limit(
        self, row: Row, case: Case, per_rank: Sequence[dict[str, int]], *, graph: bool
    ) -> None:
        """Measure the same bytes by plainer means. A round trip's limit is the two phases' sum."""
        total, kinds, raw = 0.0, [], 0.0
        for phase in PHASES[:2] if row.phase == "round_trip" else (row.phase,):
            matrix = byte_matrix(case.traffic, phase, [rank[phase] for rank in per_rank])
            plain = self.limits.raw(matrix, graph=graph).slowest_rank_p50_us
            raw += plain
            copy = self.limits.peer_copy_us(matrix)
            limit, kind = (plain, "all_to_all_single") if copy is None else (copy, "peer copy")
            memory = self.limits.memory_us(memory_bytes(case, phase))
            if memory is not None and memory > limit:
                limit, kind = memory, "device memory"
            total += limit
            kinds.append(kind)
        row.limit_us, row.limit_kind = total, " + ".join(dict.fromkeys(kinds))
        row.params["raw_all_to_all_us"] = round(raw, 2)
        row.params["empty_us"] = round(self.limits.empty_us(graph=graph), 2)


def byte_matrix(traffic: RoutingTraffic, phase: str, sent: Sequence[int]) -> list[list[int]]:
    """[R][R] bytes: each rank's sent bytes, spread over destinations as its rows are."""
    rows = traffic.rows if phase == "dispatch" else traffic.rows.t()
    rows = rows.clone()
    rows.fill_diagonal_(0)
    share = rows / rows.sum(dim=1, keepdim=True).clamp_min(1)
    return (share * torch.tensor(sent).unsqueeze(1)).round().long().tolist()


def memory_bytes(case: Case, phase: str) -> int:
    """Bytes the busiest rank's device memory must move: rows read and written once each.

    dispatch: T rows read, received rows written. combine: expert rows read, partial sums written,
    returned rows read, T rows written.
    """
    config, traffic = case.config, case.traffic
    plain = 2 * config.hidden
    there, back = config.wire.row_bytes(config.hidden), config.return_wire.row_bytes(config.hidden)
    if phase == "dispatch":
        return case.num_tokens * plain + int(traffic.rows.sum(dim=0).max()) * there
    busiest = traffic.choices.sum(dim=0) * plain + traffic.rows.sum(dim=0) * back
    return int((busiest + traffic.rows.sum(dim=1) * back).max()) + case.num_tokens * plain


def _row_bytes(config: EPConfig, wire: str) -> int:
    return config.replace(dispatch_wire=wire).wire.row_bytes(config.hidden)


def report_mismatches(outcome: Outcome) -> None:
    """The first mismatches on stderr."""
    for text in outcome.mismatches[:8]:
        print(f"wrong: {text}", file=sys.stderr)
    if len(outcome.mismatches) > 8:
        print(f"wrong: and {len(outcome.mismatches) - 8} more", file=sys.stderr)
