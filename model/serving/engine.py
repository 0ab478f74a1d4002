"""Engine: steps of the scheduler through the model, in lockstep with the other ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist

from moe_comm.model.serving.batch import ForwardBatch, SequenceSlice, make_batch
from moe_comm.model.serving.lockstep import agree
from moe_comm.model.serving.requests import StepPlan, Work
from moe_comm.model.serving.scheduler import Scheduler

LogitsHook = Callable[[str, int, torch.Tensor], None]
Sampler = Callable[[torch.Tensor], torch.Tensor]


class Model(Protocol):
    """The part of a model that serving needs. Collective where experts are spread over ranks: it
    is called in every step, with zero sequences too."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits of each sequence's last token, [S, vocab]; updates state and cache in place."""
        ...


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """The largest logit's token, the lowest id among equals. [S, vocab] to [S]."""
    return logits.argmax(dim=-1)


class Engine:
    """Runs one rank's scheduler. `step()` is collective over `group`, and waits for its ranks at
    most `timeout_s`: then PeerTimeoutError. A process can end after that only once the group's own
    timeout is over, so give it a group that has the same.

    `on_logits(name, position, logits)` sees every row that a token is chosen from; `position` is
    the number of tokens the row has seen.
    """

    def __init__(
        self,
        model: Model,
        scheduler: Scheduler,
        *,
        group: dist.ProcessGroup | None = None,
        timeout_s: float = 60.0,
        sample: Sampler = greedy,
        on_logits: LogitsHook | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.model, self.scheduler = model, scheduler
        self.group, self.timeout_s = group, timeout_s
        self.sample, self.on_logits = sample, on_logits
        began = time.monotonic()
        self.clock = clock or (lambda: time.monotonic() - began)
        self._agreed_now = 0.0
        self.idle = True

    def step(self) -> bool:
        """One step on all ranks; False when no rank has requests left. `idle` says afterwards
        whether no rank had a token: requests are still to arrive, and the caller may sleep.

        A forward that raises leaves no state behind: its requests are queued again, then the error
        goes to the caller.
        """
        plan = self.scheduler.plan(self._agreed_now)
        try:
            agreement = agree(
                plan.num_tokens,
                unfinished=self.scheduler.unfinished > 0,
                now=self.clock(),
                group=self.group,
                timeout_s=self.timeout_s,
            )
            self._agreed_now = agreement.now
            self.idle = agreement.bucket == 0
            sampled: dict[str, int] = {}
            if agreement.bucket > 0:
                logits = self.model.forward(self.batch(plan, agreement.bucket))
                sampled = self._sample(plan, logits)
        except BaseException:
            self.scheduler.abandon(plan)
            raise
        self.scheduler.complete(plan, sampled, self.clock())
        return agreement.unfinished

    def run(self, *, max_steps: int) -> int:
        """Steps until no rank has requests left; the number taken. RuntimeError at `max_steps`,
        so that a request that cannot proceed does not look like a slow one."""
        for step in range(max_steps):
            if not self.step():
                return step
        raise RuntimeError(
            f"{self.scheduler.unfinished} requests are unfinished after {max_steps} steps"
        )

    def batch(self, plan: StepPlan, bucket: int) -> ForwardBatch:
        """The packed input of a plan."""
        return make_batch(
            [_slice(item) for item in plan.work],
            pool=self.scheduler.pool,
            cache=self.scheduler.cache.rows,
            bucket=bucket,
        )

    def _sample(self, plan: StepPlan, logits: torch.Tensor) -> dict[str, int]:
        if not plan.work:
            return {}
        tokens = self.sample(logits).tolist()  # a host sync: the next step's input
        sampled = {}
        for i, item in enumerate(plan.work):
            if item.samples:
                sampled[item.tracked.name] = int(tokens[i])
                if self.on_logits is not None:
                    self.on_logits(item.tracked.name, item.end, logits[i])
        return sampled


def _slice(item: Work) -> SequenceSlice:
    tracked = item.tracked
    assert tracked.state is not None
    return SequenceSlice(
        token_ids=tuple(tracked.tokens[item.start : item.end]),
        start=item.start,
        slot=tracked.state.slot,
        pages=tracked.pages,
    )
