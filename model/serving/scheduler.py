"""Scheduler: which tokens of which requests run in the next step, on one data-parallel rank.

Rules
- Decode first: every running request whose prompt is done gets its next token. What is left of the
  token budget goes to prefill chunks, oldest request first; the budget always leaves room for one
  grid step of prefill, so decode cannot starve it.
- Admission is by state slots and pages, in order of arrival, while prefill has budget left. A
  request that does not fit keeps its place: later ones may pass it `max_bypass` times, then they
  wait.
- When pages run out, unpinned cached prefixes go first, then the youngest running request: its
  state and rows move to host memory (a copy, no recomputation), and it resumes where it stopped,
  before any new request is admitted. The oldest is never preempted for a younger one, and no
  request is accepted that the empty pool could not hold: so every request finishes.
- Decisions depend on arrivals, counts and the clock that is passed in, not on timing: ranks of one
  tensor-parallel group that are given the same requests and clock decide the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from moe_comm.model.serving.chunking import chunk_end
from moe_comm.model.serving.paged_cache import PagedCache
from moe_comm.model.serving.prefix_cache import PrefixCache
from moe_comm.model.serving.requests import Phase, Request, StepPlan, Tracked, Work
from moe_comm.model.serving.residency import Counters, Residency
from moe_comm.model.serving.slots import Handle, StateError
from moe_comm.model.serving.staged_import import Imported
from moe_comm.model.serving.state_pool import StatePool


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """`token_budget`: tokens a step, decode and prefill together. `max_seqs`: requests that run at
    once. `snapshot_interval`: tokens between snapshots kept for the prefix cache, a multiple of the
    layout's snapshot grid (0: only branch points and prompt ends). `tail_snapshots`: also keep
    snapshots off the grid; a prompt that continues from one is right, but its bits are those of
    another chunking. `max_bypass`: how often later requests may pass one that does not fit."""

    token_budget: int
    max_seqs: int
    snapshot_interval: int = 0
    tail_snapshots: bool = True
    max_bypass: int = 8


class Scheduler:
    """Owns the requests; borrows slots and pages from `pool` and `cache`.

    `prefixes=None` turns prefix caching off. `plan()` opens a step, `complete()` closes it. Raises
    ValueError for a token budget that could starve prefill, or an interval off the grid.
    """

    def __init__(
        self,
        pool: StatePool,
        cache: PagedCache,
        config: SchedulerConfig,
        *,
        prefixes: PrefixCache | None = None,
    ) -> None:
        grid = pool.layout.snapshot_grid
        if config.max_seqs < 1:
            raise ValueError(f"max_seqs: expected at least 1, got {config.max_seqs}")
        if config.token_budget < config.max_seqs + grid:
            raise ValueError(
                f"token_budget: expected at least max_seqs + one grid step = "
                f"{config.max_seqs + grid}, got {config.token_budget}"
            )
        if config.snapshot_interval % grid:
            raise ValueError(
                f"snapshot_interval: expected a multiple of {grid}, got {config.snapshot_interval}"
            )
        self.pool, self.cache, self.config = pool, cache, config
        self.residency = Residency(
            pool, cache, prefixes, interval=config.snapshot_interval, tails=config.tail_snapshots
        )
        self.tracked: dict[str, Tracked] = {}
        self._waiting: list[Tracked] = []
        self._preempted: list[Tracked] = []
        self._running: list[Tracked] = []
        self._held: list[Tracked] = []
        self._order = itertools.count()
        self._open: StepPlan | None = None

    @property
    def counters(self) -> Counters:
        return self.residency.counters

    @property
    def prefixes(self) -> PrefixCache | None:
        return self.residency.prefixes

    @property
    def unfinished(self) -> int:
        """Requests that still need steps."""
        return len(self._waiting) + len(self._preempted) + len(self._running)

    @property
    def running(self) -> int:
        return len(self._running)

    # -- requests --------------------------------------------------------------------------------
    def submit(self, request: Request) -> None:
        """Queue a request. ValueError where its name is known, or the whole cache could not hold
        it (the message says what would)."""
        self._expect_new(request)
        needed = self.cache.layout.pages_for(request.max_tokens)
        if needed > self.cache.num_pages:
            raise ValueError(
                f"request {request.name!r}: {request.max_tokens} tokens need {needed} pages, the "
                f"cache has {self.cache.num_pages}"
            )
        tracked = Tracked(request=request, order=next(self._order), tokens=list(request.prompt))
        self.tracked[request.name] = tracked
        self._waiting.append(tracked)

    def adopt(self, request: Request, imported: Imported) -> None:
        """Take over a request whose prompt another process has prefilled.

        The state becomes this request's own; the pending token is its first generated one, and is
        processed here, once. Raises StateError, and takes nothing, where the state is not the
        prompt's.
        """
        self._expect_new(request)
        if imported.position != len(request.prompt) or len(imported.pending) != 1:
            raise StateError(
                f"adopt: {len(request.prompt)} prompt tokens and one pending expected, got a state "
                f"of {imported.position} and {len(imported.pending)} pending"
            )
        tracked = Tracked(
            request=request,
            order=next(self._order),
            tokens=[*request.prompt, *imported.pending],
            phase=Phase.RUNNING,
            state=self.pool.activate(imported.snapshot),
            pages=imported.pages,
            processed=imported.position,
        )
        self.tracked[request.name] = tracked
        self._running.append(tracked)
        if tracked.complete:
            self._end(tracked, Phase.FINISHED)

    def cancel(self, name: str) -> None:
        """End a request wherever it is; one inside an open step ends when the step completes.
        Unknown and finished requests are left alone."""
        tracked = self.tracked.get(name)
        if tracked is None or tracked.phase in (Phase.FINISHED, Phase.CANCELLED):
            return
        tracked.cancelled = True
        if self._open is None or all(item.tracked is not tracked for item in self._open.work):
            self._end(tracked, Phase.CANCELLED)

    def preempt(self, name: str) -> None:
        """Move a running request to host memory; it resumes when there is room. StateError inside
        an open step, or where it is not running."""
        tracked = self.tracked[name]
        if self._open is not None or tracked.phase is not Phase.RUNNING:
            raise StateError(f"preempt: {name!r} is {tracked.phase.value}, or a step is open")
        self._push_out(tracked)

    def let_go(self, name: str) -> None:
        """End the hold on a request that was handed off: the other side has it, or it is lost."""
        tracked = self.tracked[name]
        if tracked.phase is not Phase.HELD:
            raise StateError(f"let_go: {name!r} is {tracked.phase.value}, expected held")
        self._end(tracked, Phase.FINISHED)

    # -- steps -----------------------------------------------------------------------------------
    def plan(self, now: float) -> StepPlan:
        """Open a step: resume and admit what fits, then choose tokens. Requests that arrive after
        `now` are not seen."""
        if self._open is not None:
            raise StateError("plan: the last step has not been completed")
        self._resume()
        self._admit(now)
        work = self._plan_decode()
        work += self._plan_prefill(self.config.token_budget - len(work))
        for item in work:
            assert item.tracked.state is not None
            self.pool.begin(item.tracked.state, item.start, item.end)
        self._open = StepPlan(work=tuple(work))
        return self._open

    def complete(self, plan: StepPlan, sampled: Mapping[str, int], now: float) -> None:
        """Close a step whose forward is enqueued. `sampled`: a token for each request whose work
        reached its last known token."""
        self._expect_open(plan)
        self._open = None
        self.counters.steps += 1
        for item in plan.work:
            tracked = item.tracked
            assert tracked.state is not None
            self.pool.commit(tracked.state, item.end)
            tracked.processed = item.end
            if tracked.cancelled:
                self._end(tracked, Phase.CANCELLED)
                continue
            if item.end in tracked.stops:
                self.residency.leave_prefix(tracked)
            if item.samples:
                tracked.tokens.append(tracked.next_token(sampled[tracked.name]))
                tracked.token_times.append(now)
                if tracked.request.hand_off:
                    self._running.remove(tracked)
                    self.residency.hold(tracked)
                    tracked.phase = Phase.HELD
                    self._held.append(tracked)
                elif tracked.complete:
                    self._end(tracked, Phase.FINISHED)

    def abandon(self, plan: StepPlan) -> None:
        """Close a step whose forward failed: what its states hold is unknown, so they are given
        back, and the requests start again from their tokens."""
        self._expect_open(plan)
        self._open = None
        for item in plan.work:
            tracked = item.tracked
            self._running.remove(tracked)
            self.residency.give_back(tracked)
            tracked.processed = 0
            self._wait(tracked)
            if tracked.cancelled:
                self._end(tracked, Phase.CANCELLED)

    def audit(self, others: Iterable[tuple[Handle, Sequence[int]]] = ()) -> None:
        """Account for every slot and page, between steps. `others`: slots and pages that transfers
        hold. StateError names what leaks."""
        self.residency.audit([*self._running, *self._held], others)

    # -- inside ----------------------------------------------------------------------------------
    def _plan_decode(self) -> list[Work]:
        work: list[Work] = []
        # Oldest first, and growth preempts the youngest: what is chosen stays.
        for tracked in sorted(self._running, key=lambda t: t.order):
            if tracked.phase is not Phase.RUNNING or tracked.prefilling:
                continue
            if len(tracked.tokens) - tracked.processed == 1 and self._grow(tracked):
                start = tracked.processed
                work.append(Work(tracked=tracked, start=start, end=start + 1))
        return work

    def _plan_prefill(self, budget: int) -> list[Work]:
        work: list[Work] = []
        for tracked in sorted(self._running, key=lambda t: t.order):
            start = tracked.processed
            if len(tracked.tokens) - start == 1 and not tracked.prefilling:
                continue
            end = chunk_end(
                start, len(tracked.tokens), budget=budget, grid=self._grid, stops=tracked.stops
            )
            if end is not None:
                work.append(Work(tracked=tracked, start=start, end=end))
                budget -= end - start
        return work

    @property
    def _grid(self) -> int:
        return self.pool.layout.snapshot_grid

    def _grow(self, tracked: Tracked) -> bool:
        """Pages for one more row; preempts the youngest until there is room, the request itself if
        it is the youngest. Whether it still runs."""
        while not self.residency.grow(tracked, tracked.processed + 1):
            youngest = max(self._running, key=lambda t: t.order)
            self._push_out(youngest)
            if youngest is tracked:
                return False
        return True

    def _push_out(self, tracked: Tracked) -> None:
        self._running.remove(tracked)
        self.residency.push_out(tracked)
        if tracked.parcel is None:
            self._wait(tracked)
        else:
            tracked.phase = Phase.PREEMPTED
            self._preempted.append(tracked)

    def _resume(self) -> None:
        for tracked in sorted(self._preempted, key=lambda t: t.order):
            full = len(self._running) >= self.config.max_seqs
            if full or not self.residency.bring_back(tracked):
                return
            self._preempted.remove(tracked)
            tracked.phase = Phase.RUNNING
            self._running.append(tracked)

    def _admit(self, now: float) -> None:
        blocked: list[Tracked] = []
        for tracked in list(self._waiting):
            # A request that could not start its prefill in this step would only hold a slot, and
            # miss the prefix that the ones before it are about to leave.
            backlog = sum(len(t.tokens) - t.processed for t in self._running if t.prefilling)
            if backlog >= self.config.token_budget:
                return
            if len(self._running) >= self.config.max_seqs or self._preempted:
                return
            if tracked.request.arrival_s > now:
                continue
            if any(older.bypassed >= self.config.max_bypass for older in blocked):
                return
            if not self.residency.start(tracked, alone=not self._running):
                blocked.append(tracked)
                continue
            self._waiting.remove(tracked)
            self._running.append(tracked)
            tracked.phase = Phase.RUNNING
            self.counters.admitted += 1
            for older in blocked:
                older.bypassed += 1

    def _wait(self, tracked: Tracked) -> None:
        tracked.phase = Phase.WAITING
        self._waiting.append(tracked)
        self._waiting.sort(key=lambda t: t.order)

    def _end(self, tracked: Tracked, phase: Phase) -> None:
        held = tracked.phase is Phase.HELD
        for queue in (self._waiting, self._preempted, self._running, self._held):
            if tracked in queue:
                queue.remove(tracked)
        if held:
            self.residency.let_go(tracked)
        elif phase is Phase.FINISHED:
            self.residency.finish(tracked)
        else:
            self.residency.give_back(tracked)
        tracked.parcel, tracked.phase = None, phase

    def _expect_new(self, request: Request) -> None:
        if request.name in self.tracked:
            raise ValueError(f"name: {request.name!r} was submitted before")

    def _expect_open(self, plan: StepPlan) -> None:
        if plan is not self._open:
            raise StateError("complete: this is not the open step")
