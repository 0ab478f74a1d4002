"""The loop of a soak: windows of pairs, after each of which the ranks add up what they booked."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from moe_comm.errors import MoeCommError, PeerTimeoutError
from moe_comm.launch.slab_soak_calls import Ledger
from moe_comm.launch.slab_soak_pairs import check_pair, run_pairs
from moe_comm.launch.slab_soak_world import Plan, World, build_worlds, capture
from moe_comm.launch.spawn import LOST
from moe_comm.launch.worker import WRONG, Ranks


@dataclass(kw_only=True, eq=False)
class Window:
    """What this rank called: (index of the world, bucket) of each entry of the ledger, and
    (index of the world, wrong elements, the first in words) of what was compared with the
    reference."""

    calls: list[tuple[int, int]] = field(default_factory=list)
    checked: list[tuple[int, int, str]] = field(default_factory=list)


class _Booked(NamedTuple):
    """What a rank tells the others after a window."""

    entries: Tensor
    wrong: Tensor
    checked: list[tuple[int, int, str]]
    error: str
    timed_out: bool
    time_is_up: bool


class Soak:
    """Runs a Plan on this rank; every method but `tokens` is collective.

    Attributes:
        done: pairs that are agreed on. seconds: since setup ended. setup_s: before.
        errors: what ended the soak early, of all ranks; hangs: how many of them timed out.
        complete: the end was reached, of pairs or of time.
    """

    def __init__(self, plan: Plan, ranks: Ranks) -> None:
        self.plan, self.ranks = plan, ranks
        self.num_ranks = plan.virtual or ranks.num_ranks
        self.nodes = [0] * plan.virtual if plan.virtual else list(ranks.group.node_of_rank)
        self.split = plan.split or plan.virtual > 0
        # The same on all ranks: who calls what. What is drawn on the device is a rank's own.
        self.order = random.Random(plan.seed)
        torch.manual_seed(plan.seed * 1009 + ranks.rank)
        self.done, self.hangs, self.seconds, self.setup_s = 0, 0, 0.0, 0.0
        self.errors: list[str] = []
        self.complete = False
        self.worlds: list[World] = []

    def run(self, report: Callable[[Soak], None]) -> int:
        """Everything; `report` is called after each window. Returns the exit code."""
        began, plan, device = time.monotonic(), self.plan, self.ranks.device
        self.worlds = build_worlds(plan, self.ranks)
        ledger = Ledger(plan.window, self.num_ranks, device)
        with _watched(self, report) as alive, self._stream() as stream:
            if stream is not None and plan.graphs:
                capture(plan, self.worlds, ledger, stream)
            started = time.monotonic()
            self.setup_s = started - began
            time_is_up = False
            while not self.errors and not time_is_up and self.done < plan.pairs:
                alive()
                window = Window()
                ledger.clear()
                error = self._attempt(window, ledger)
                self.seconds = time.monotonic() - started
                booked = _Booked(
                    ledger.entries.cpu(),
                    ledger.wrong.cpu(),
                    window.checked,
                    f"{type(error).__name__}: {error}" if error else "",
                    isinstance(error, PeerTimeoutError),
                    plan.seconds is not None and self.seconds >= plan.seconds,
                )
                try:
                    told = self.ranks.gather(booked, what="the soak's agreement")
                except PeerTimeoutError as lost:
                    self.hangs, self.errors = 1, [booked.error or str(lost)]
                else:
                    time_is_up = any(one.time_is_up for one in told)
                    self._add_up(window, told)
                report(self)
            self.complete = not self.errors
        return self._end()

    @contextlib.contextmanager
    def _stream(self) -> Iterator[torch.cuda.Stream | None]:
        if self.ranks.device.type != "cuda":
            yield None
            return
        stream = torch.cuda.Stream(self.ranks.device)
        stream.wait_stream(torch.cuda.current_stream(self.ranks.device))
        with torch.cuda.stream(stream):
            yield stream

    def _attempt(self, window: Window, ledger: Ledger) -> MoeCommError | None:
        """Pairs up to the next agreement, and what the device recorded meanwhile."""
        try:
            self._pairs(window, ledger)
            for world in self.worlds:
                for member in world.members:
                    member.comm.check()
        except MoeCommError as error:
            return error
        return None

    def _pairs(self, window: Window, ledger: Ledger) -> None:
        plan, calls = self.plan, window.calls
        size = min(plan.window, plan.pairs - self.done)
        while len(calls) < size - 1:
            index = self.order.randrange(len(self.worlds))
            world, bucket = self.worlds[index], self.order.choice(plan.buckets)
            graph, eager = world.graphs.get(bucket), self.order.random() < plan.eager
            if graph is not None and not eager and size - 1 - len(calls) >= plan.lanes:
                graph.replay()
                calls += [(index, bucket)] * plan.lanes
                continue
            tokens = [self.tokens(bucket) for _ in range(self.num_ranks)]
            run_pairs(
                world.members,
                bucket,
                1,
                ledger,
                split=self.split,
                # Each rank has a T of its own; the bucket is what ranks share.
                tokens=tokens if plan.virtual else [tokens[self.ranks.rank]],
                flip=self.ranks.rank == 0 and self.done + len(calls) == plan.flip_pair,
            )
            calls.append((index, bucket))
            world.tally.eager += 1
        self._check_one(window, self.done + size - 1)

    def _check_one(self, window: Window, number: int) -> None:
        index = self.order.randrange(len(self.worlds))
        bucket = self.order.choice(self.plan.buckets)
        found = check_pair(
            self.worlds[index].members,
            bucket,
            [self.tokens(bucket) for _ in range(self.num_ranks)],
            number=number,
            split=self.split,
            node_of_rank=self.nodes,
        )
        first = [text for one in found for text in one.first[:1]]
        wrong = sum(one.wrong for one in found)
        window.checked.append((index, wrong, f"pair {number}: {'; '.join(first)}"))

    def tokens(self, bucket: int) -> int:
        """T of one rank: 0 and the bucket more often than others."""
        beyond = max(1, bucket // 8)
        return min(max(self.order.randint(-beyond, bucket + beyond), 0), bucket)

    def _add_up(self, window: Window, told: list[_Booked]) -> None:
        self.errors = [one.error for one in told if one.error]
        self.hangs = sum(one.timed_out for one in told)
        if self.errors:
            # What was booked of an interrupted window says nothing.
            for error in self.errors:
                self.ranks.say(f"slab_soak: {error}")
            return
        entries = torch.stack([one.entries for one in told]).sum(dim=0)
        wrong = torch.stack([one.wrong for one in told]).sum(dim=0).tolist()
        differ = entries.flatten(1).any(dim=1).tolist()
        for position, (index, bucket) in enumerate(window.calls):
            world = self.worlds[index]
            world.tally.pairs += 1
            if differ[position] or wrong[position]:
                world.tally.wrong_pairs += 1
                world.tally.note(
                    f"pair {self.done + position}, bucket {bucket}: checksums differ (from, to) "
                    f"{entries[position].nonzero().tolist()}; {wrong[position]} combined elements"
                )
        for index, _, _ in window.checked:
            self.worlds[index].tally.pairs += 1
            self.worlds[index].tally.checked += 1
        for one in told:
            for index, count, text in one.checked:
                self.worlds[index].tally.wrong_elements += count
                if count:
                    self.worlds[index].tally.note(text)
        self.done += len(window.calls) + len(window.checked)

    def _end(self) -> int:
        if self.errors:
            return LOST if self.hangs else WRONG
        for world in self.worlds:
            world.graphs.clear()
            # A virtual world's memory is this process's own.
            for member in [] if self.plan.virtual else world.members:
                member.comm.destroy()
        tallies = [world.tally for world in self.worlds]
        return WRONG if any(t.wrong_pairs or t.wrong_elements for t in tallies) else 0


@contextlib.contextmanager
def _watched(soak: Soak, report: Callable[[Soak], None]) -> Iterator[Callable[[], None]]:
    """End the process where a window takes longer than all bounded waits together: a hang that no
    wait noticed. Yields what the loop calls to say that it is alive."""
    # Setup compiles; then a wait may time out, and the ranks' agreement after it.
    allowed = 2 * soak.ranks.timeout_s + 120.0
    ended = threading.Event()
    last = [time.monotonic()]

    def watch() -> None:
        while not ended.wait(1.0):
            if time.monotonic() - last[0] > allowed:
                soak.hangs, soak.errors = 1, [f"a window did not end within {allowed:g} s"]
                report(soak)
                os._exit(LOST)

    def alive() -> None:
        last[0] = time.monotonic()

    thread = threading.Thread(target=watch, name="soak-watch", daemon=True)
    thread.start()
    try:
        yield alive
    finally:
        ended.set()
        thread.join()
