"""The same prompt by whole prefill, chunked, cached, preempted and migrated, captured on the way.

Each mode runs the real scheduler, pool, prefix cache and migration code on the caller's model. The
model must be batch-invariant: then every mode must give the baseline's bits, because all chunks end
on the absolute grid on which kernels end anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from moe_comm.model.serving.batch import ForwardBatch
from moe_comm.model.serving.capture import Capture, Difference, Recorder, Run, first_difference
from moe_comm.model.serving.engine import Engine, Model
from moe_comm.model.serving.layout import StateLayout
from moe_comm.model.serving.migration_header import check_header, make_header
from moe_comm.model.serving.paged_cache import PagedCache
from moe_comm.model.serving.prefix_cache import PrefixCache
from moe_comm.model.serving.requests import Phase, Request, StepPlan
from moe_comm.model.serving.scheduler import Scheduler, SchedulerConfig
from moe_comm.model.serving.segments import export_segments, whole_part
from moe_comm.model.serving.slots import StateError
from moe_comm.model.serving.staged_import import StagedImport
from moe_comm.model.serving.state_pool import StatePool

MODES = ("whole", "chunked", "cached", "migrated", "preempted")
_MAX_STEPS = 10_000


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is compared: `prompt`, then `forced` tokens fed one by one. `cousin` shares the prompt's
    first tokens, `neighbour` none."""

    prompt: tuple[int, ...]
    forced: tuple[int, ...]
    cousin: tuple[int, ...]
    neighbour: tuple[int, ...]

    @classmethod
    def random(cls, vocab: int, *, grid: int, num_new: int, seed: int) -> Case:
        """A prompt that ends two tokens into its third grid step (a last chunk shorter than the
        convolution window); a cousin that parts from it in the second. `num_new`: at least 3."""
        draw = torch.Generator().manual_seed(seed)

        def tokens(num: int) -> tuple[int, ...]:
            return tuple(torch.randint(0, vocab, (num,), generator=draw).tolist())

        prompt = tokens(2 * grid + 2)
        return cls(
            prompt=prompt,
            forced=tokens(max(3, num_new)),
            cousin=(*prompt[: grid + grid // 2], *tokens(grid)),
            neighbour=tokens(grid + 1),
        )

    def request(
        self, name: str, *, hand_off: bool = False, chunk_ends: tuple[int, ...] = ()
    ) -> Request:
        """The request whose states are compared."""
        return Request(
            name=name,
            prompt=self.prompt,
            max_new_tokens=len(self.forced),
            forced=self.forced,
            hand_off=hand_off,
            chunk_ends=chunk_ends,
        )


@dataclass(frozen=True, kw_only=True)
class Trail:
    """What one mode left: `run`, wherever a token was chosen, and `taken_over`, the states that it
    went on from without having computed them there."""

    run: Run
    taken_over: Run = field(default_factory=dict)


class Rig:
    """A model and the layout of its state; makes fresh servers around it. Slots and pages are
    poisoned while they are free, so that state which was not moved shows."""

    def __init__(
        self, model: Model, layout: StateLayout, *, device: torch.device | str = "cpu"
    ) -> None:
        self.model, self.layout, self.device = model, layout, device

    def serve(self, case: Case, *, budget: int | None = None, prefix: bool = False) -> Serving:
        """A server that holds a few requests of the case's size. `budget`: tokens of one prefill
        chunk (default: the whole prompt)."""
        most = len(case.prompt) + len(case.cousin) + len(case.forced) + len(case.neighbour)
        pool = StatePool(self.layout, 8, device=self.device, debug=True)
        cache = PagedCache(
            self.layout, 3 * self.layout.pages_for(most), device=self.device, debug=True
        )
        grid = self.layout.snapshot_grid
        config = SchedulerConfig(
            token_budget=max(budget or most, grid) + 2,
            max_seqs=2,
            snapshot_interval=grid,
            tail_snapshots=False,
        )
        prefixes = PrefixCache(pool, cache) if prefix else None
        return Serving(self.model, Scheduler(pool, cache, config, prefixes=prefixes))

    def probe(self, tokens: tuple[int, ...]) -> Capture:
        """State and logits after these tokens, by whole prefill."""
        case = Case(prompt=tokens, forced=(0,), cousin=tokens, neighbour=tokens)
        return whole(self, case).run[len(tokens)]


class Serving(Engine):
    """An engine that records."""

    def __init__(self, model: Model, scheduler: Scheduler) -> None:
        self.recorder = Recorder(scheduler)
        super().__init__(model, scheduler, on_logits=self.recorder)

    def batch(self, plan: StepPlan, bucket: int) -> ForwardBatch:
        self.recorder.watch(plan)
        return super().batch(plan, bucket)

    def serve(self, *requests: Request) -> None:
        """Run requests to their end, together."""
        for request in requests:
            self.scheduler.submit(request)
        self.run(max_steps=_MAX_STEPS)
        self.scheduler.audit()

    def trail(self, name: str) -> Trail:
        return Trail(
            run=self.recorder.runs.get(name, {}), taken_over=self.recorder.taken_over.get(name, {})
        )


def whole(rig: Rig, case: Case) -> Trail:
    """The baseline: the prompt in one chunk, alone."""
    server = rig.serve(case)
    server.serve(case.request("whole"))
    return server.trail("whole")


def chunked(rig: Rig, case: Case) -> Trail:
    """One grid step at a time, the last one cut short, with another request in the same steps."""
    grid = rig.layout.snapshot_grid
    server = rig.serve(case, budget=grid)
    other = Request(name="neighbour", prompt=case.neighbour, max_new_tokens=2)
    ends = tuple(range(grid, len(case.prompt), grid))
    server.serve(case.request("chunked", chunk_ends=ends), other)
    return server.trail("chunked")


def short_chunks(rig: Rig, case: Case) -> Trail:
    """Chunks of 1, 2, 3 and 1 tokens (none fills the convolution window) at the start, and short
    ones around a grid point: off the grid, so within a bound of the baseline, not equal to it."""
    grid = rig.layout.snapshot_grid
    server = rig.serve(case)
    ends = (1, 3, 6, 7, grid - 1, grid + 1, grid + 3, 2 * grid - 2)
    server.serve(case.request("short", chunk_ends=ends))
    return server.trail("short")


def cached(rig: Rig, case: Case) -> Trail:
    """After a request that shares the first tokens: from its snapshot and pages. Twice: the second
    one finds what the first has left of the snapshot. StateError where nothing is hit."""
    server = rig.serve(case, prefix=True)
    server.serve(Request(name="cousin", prompt=case.cousin, max_new_tokens=1))
    run: Run = {}
    taken_over: Run = {}
    for name in ("first", "second"):
        server.serve(case.request(name))
        hit = server.scheduler.tracked[name].prefix_hit
        if hit == 0:
            raise StateError(f"cached: the {name} request found no prefix")
        trail = server.trail(name)
        # What the first one took over at another depth stays in the comparison.
        taken_over = {**taken_over, **trail.taken_over}
        run = trail.run
    return Trail(run=run, taken_over=taken_over)


def preempted(rig: Rig, case: Case) -> Trail:
    """Pushed out to host memory in the middle of the prompt, and again after the first token, while
    another request runs; it comes back in another slot and other pages."""
    server = rig.serve(case, budget=rig.layout.snapshot_grid)
    scheduler = server.scheduler
    scheduler.submit(case.request("preempted"))
    tracked = scheduler.tracked["preempted"]
    server.step()
    left = tracked.state
    scheduler.preempt("preempted")
    scheduler.submit(Request(name="neighbour", prompt=case.neighbour, max_new_tokens=3))
    while server.step():
        if tracked.state and left and tracked.state.slot == left.slot:
            raise StateError("preempted: it came back in the slot that it left")
        if tracked.preemptions == 1 and tracked.phase is Phase.RUNNING and tracked.generated:
            left = tracked.state
            scheduler.preempt("preempted")
    scheduler.audit()
    if tracked.preemptions != 2:
        raise StateError(f"preempted: {tracked.preemptions} times, expected twice")
    return server.trail("preempted")


def migrated(rig: Rig, case: Case) -> Trail:
    """Prefilled by one server, handed over through header, staging and checksums, and decoded by
    another one in another slot and other pages. (Between two processes: `verify-state`.)"""
    prefill, decode = rig.serve(case), rig.serve(case)
    prefill.serve(case.request("migrated", hand_off=True))
    # The other side has been busy: nothing lands where it came from.
    decode.serve(Request(name="neighbour", prompt=case.neighbour, max_new_tokens=2))
    tracked = prefill.scheduler.tracked["migrated"]
    assert tracked.state is not None
    pool, cache = prefill.scheduler.pool, prefill.scheduler.cache
    part = whole_part(rig.layout)
    segments = export_segments(pool, cache, tracked.state, tracked.pages, part=part)
    header = make_header(
        rig.layout,
        segments,
        request="migrated",
        tokens=case.prompt,
        pending=tracked.generated,
        part=part,
    )
    pool, cache = decode.scheduler.pool, decode.scheduler.cache
    head = check_header(header, rig.layout, tokens=case.prompt)
    staged = StagedImport.open(pool, cache, head)
    if staged is None:
        raise StateError("migrated: no room on the other side")
    staged.add_part(header, direct=False)
    for name, landing in staged.landing(part).items():
        landing.copy_(segments[name])
    staged.verify_part(part)
    decode.scheduler.adopt(case.request("migrated"), staged.publish())
    decode.run(max_steps=_MAX_STEPS)
    decode.scheduler.audit()
    trail = decode.trail("migrated")
    return Trail(run={**prefill.trail("migrated").run, **trail.run}, taken_over=trail.taken_over)


RUNNERS: dict[str, Callable[[Rig, Case], Trail]] = {
    "whole": whole,
    "chunked": chunked,
    "cached": cached,
    "migrated": migrated,
    "preempted": preempted,
}


def compare(
    rig: Rig, case: Case, baseline: Trail, trail: Trail
) -> tuple[Difference, Capture, Capture] | None:
    """The first difference, and the two captures it is in; None where there is none.

    States that were taken over come first, each against a whole prefill up to its position: there
    the bytes have not been computed with yet, so they tell the most. Raises StateError where a
    mode did not choose tokens at the same positions.
    """
    tokens = (*case.prompt, *case.forced)
    for position, got in sorted(trail.taken_over.items()):
        want = baseline.run.get(position) or rig.probe(tokens[:position])
        difference = first_difference(rig.layout, want, got)
        if difference is not None:
            return difference, want, got
    if sorted(baseline.run) != sorted(trail.run):
        raise StateError(
            f"tokens were chosen at positions {sorted(trail.run)}, expected {sorted(baseline.run)}"
        )
    for position, want in sorted(baseline.run.items()):
        difference = first_difference(rig.layout, want, trail.run[position])
        if difference is not None:
            return difference, want, trail.run[position]
    return None
