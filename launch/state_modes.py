"""verify-state on its two ranks: every mode on the first, decode of "migrated" on the second."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from moe_comm.launch.worker import Ranks
from moe_comm.model.serving.capture import relative_error
from moe_comm.model.serving.channels import ChannelClosedError, GroupChannel
from moe_comm.model.serving.diagnose import diagnose
from moe_comm.model.serving.handoff import Outcome, send_state
from moe_comm.model.serving.migration_header import MigrationError, make_header
from moe_comm.model.serving.modes import (
    RUNNERS,
    Case,
    Rig,
    Serving,
    Trail,
    compare,
    short_chunks,
)
from moe_comm.model.serving.receiver import Inbox, Receiver
from moe_comm.model.serving.requests import Request
from moe_comm.model.serving.segments import export_segments, whole_part
from moe_comm.model.serving.slots import StateError
from moe_comm.model.serving.transports import GroupTransport, MooncakeTransport, Transport

# Off the absolute grid the chunked form of KDA adds in another order: float32 rounding, which
# bf16 activations between layers make visible. Relative, in the 2-norm, over any one tensor.
SHORT_CHUNK_BOUND = 1e-2
MAX_STEPS = 10_000


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What both ranks know."""

    ranks: Ranks
    transport: str
    seed: int
    num_new: int

    def case(self, rig: Rig) -> Case:
        vocab = getattr(rig.model, "config").vocab_size  # noqa: B009 - not part of the protocol
        grid = rig.layout.snapshot_grid
        return Case.random(vocab, grid=grid, num_new=self.num_new, seed=self.seed)

    def connect(self) -> tuple[GroupChannel, Transport]:
        peer, timeout_s = 1 - self.ranks.rank, self.ranks.timeout_s
        if self.transport == "mooncake":
            return GroupChannel(peer), MooncakeTransport()
        return GroupChannel(peer), GroupTransport(peer, timeout_s=timeout_s)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One mode's line. `equal`: bit for bit, at every captured position."""

    mode: str
    equal: bool
    text: str

    def __str__(self) -> str:
        return f"{self.mode:<10} {'equal' if self.equal else 'DIFFERENT'}: {self.text}"


def as_first(rig: Rig, setup: Setup) -> int:
    """Every mode; the exit code."""
    case = setup.case(rig)
    channel, transport = setup.connect()
    runners: dict[str, Callable[[Rig, Case], Trail]] = {
        **RUNNERS,
        "migrated": lambda rig, case: _hand_over(rig, case, setup, channel, transport),
    }
    verdicts = list(judge_all(rig, case, runners, setup.ranks.say))
    return 0 if all(verdict.equal for verdict in verdicts) else 1


def judge_all(
    rig: Rig,
    case: Case,
    runners: dict[str, Callable[[Rig, Case], Trail]],
    say: Callable[[str], None],
) -> list[Verdict]:
    """Run and print every mode. `say` is told how long each took."""
    verdicts: list[Verdict] = []
    baseline = Trail(run={})
    for mode, runner in runners.items():
        began = time.perf_counter()
        try:
            trail = runner(rig, case)
            if mode == "whole":
                baseline = trail
            verdict = judge(rig, case, mode, baseline, trail)
            if mode == "chunked" and verdict.equal:
                verdict = _with_short_chunks(rig, case, baseline, verdict)
        except (StateError, MigrationError) as error:
            verdict = Verdict(mode=mode, equal=False, text=f"{type(error).__name__}: {error}")
        print(verdict, flush=True)
        say(f"{mode} took {time.perf_counter() - began:.1f} s")
        verdicts.append(verdict)
    return verdicts


def judge(rig: Rig, case: Case, mode: str, baseline: Trail, trail: Trail) -> Verdict:
    """Compare one mode with the baseline; a difference is diagnosed."""
    if mode == "whole":
        again = RUNNERS["whole"](rig, case)
        found = compare(rig, case, baseline, again)
        text = f"the baseline, twice: {len(case.prompt)} prompt tokens, {len(case.forced)} more"
    else:
        found = compare(rig, case, baseline, trail)
        text = f"{rig.layout.num_kda_layers} KDA and {rig.layout.num_mla_layers} MLA layers, "
        text += f"logits, at positions {', '.join(map(str, sorted(trail.run)))}"
        if trail.taken_over:
            text += f"; state taken over at {', '.join(map(str, sorted(trail.taken_over)))}"
    if found is None:
        return Verdict(mode=mode, equal=True, text=text)
    blame = diagnose(rig, case, *found)
    return Verdict(mode=mode, equal=False, text=f"{found[0]}; {blame}")


def _with_short_chunks(rig: Rig, case: Case, baseline: Trail, verdict: Verdict) -> Verdict:
    run = short_chunks(rig, case).run
    worst = max(relative_error(rig.layout, baseline.run[p], run[p]) for p in baseline.run)
    text = f"chunks of 1 to 3 tokens, off the grid: within {worst:.1e} (bound {SHORT_CHUNK_BOUND})"
    if worst > SHORT_CHUNK_BOUND:
        return Verdict(mode=verdict.mode, equal=False, text=text)
    return Verdict(mode=verdict.mode, equal=True, text=f"{verdict.text}; {text}")


def _hand_over(
    rig: Rig, case: Case, setup: Setup, channel: GroupChannel, transport: Transport
) -> Trail:
    """Prefill here, decode there; what both captured."""
    server = rig.serve(case)
    server.serve(case.request("migrated", hand_off=True))
    tracked = server.scheduler.tracked["migrated"]
    assert tracked.state is not None
    pool, cache = server.scheduler.pool, server.scheduler.cache
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
    result = send_state(channel, transport, header, segments, timeout_s=setup.ranks.timeout_s)
    channel.close()
    there: Trail = setup.ranks.gather(None, what="captures of the decode process")[1]
    if result.outcome is not Outcome.ACCEPTED:
        raise MigrationError(f"{result.outcome.value}: {result.reason}")
    server.scheduler.let_go("migrated")
    server.scheduler.audit()
    here = server.trail("migrated")
    return Trail(run={**here.run, **there.run}, taken_over=there.taken_over)


def as_second(rig: Rig, setup: Setup) -> int:
    """Take the state over and decode; the captures go back to the first rank."""
    case = setup.case(rig)
    channel, transport = setup.connect()
    server = rig.serve(case)
    # Busy before: nothing lands where it came from.
    server.serve(Request(name="neighbour", prompt=case.neighbour, max_new_tokens=2))
    _receive(server, case, channel, transport, setup.ranks.timeout_s)
    channel.close()
    setup.ranks.gather(server.trail("migrated"), what="captures of the decode process")
    return 0


def _receive(
    server: Serving,
    case: Case,
    channel: GroupChannel,
    transport: Transport,
    timeout_s: float,
) -> None:
    pool, cache = server.scheduler.pool, server.scheduler.cache
    inbox = Inbox(pool, cache, tokens_of=lambda _: case.prompt)
    receiver = Receiver(inbox, channel, transport, timeout_s=timeout_s)
    while True:
        try:
            arrived = receiver.poll(1.0)
        except ChannelClosedError:
            return
        if arrived is not None:
            server.scheduler.adopt(case.request("migrated"), arrived[1])
            server.run(max_steps=MAX_STEPS)
            server.scheduler.audit(inbox.held())
