"""A request, and what the scheduler knows about it while it runs."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from moe_comm.model.serving.segments import Segments
from moe_comm.model.serving.slots import Handle


class Phase(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    HELD = "held"
    FINISHED = "finished"
    CANCELLED = "cancelled"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a user asks for.

    `forced`: tokens to continue with instead of sampled ones (teacher forcing; at least
    `max_new_tokens` of them). `arrival_s`: seconds on the scheduler's clock. `stop_token`: ends the
    request early. `chunk_ends`: positions where a prefill chunk must end, besides those that the
    scheduler needs (for comparing chunkings). `hand_off`: after the first token the state is held
    as a snapshot for another process, instead of going on. Raises ValueError for an empty prompt or
    nothing to generate.
    """

    name: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    arrival_s: float = 0.0
    forced: tuple[int, ...] | None = None
    stop_token: int | None = None
    chunk_ends: tuple[int, ...] = ()
    hand_off: bool = False

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError(f"prompt: expected at least one token in {self.name!r}, got none")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens: expected at least 1, got {self.max_new_tokens}")
        if self.forced is not None and len(self.forced) < self.max_new_tokens:
            raise ValueError(
                f"forced: expected at least {self.max_new_tokens} tokens, got {len(self.forced)}"
            )

    @property
    def max_tokens(self) -> int:
        """Tokens whose state is ever needed: the last generated one is never processed."""
        return len(self.prompt) + self.max_new_tokens - 1


@dataclass(slots=True, eq=False)
class Tracked:
    """A request under way. `tokens` are prompt and generated tokens; the state holds the first
    `processed` of them. `state` is set while running (a snapshot while held), `parcel` while
    preempted. `order` is the order of submission: lower is older."""

    request: Request
    order: int
    tokens: list[int]
    phase: Phase = Phase.WAITING
    state: Handle | None = None
    pages: tuple[int, ...] = ()
    processed: int = 0
    stops: tuple[int, ...] = ()
    parcel: Segments | None = None
    bypassed: int = 0
    cancelled: bool = False
    prefix_hit: int = 0
    preemptions: int = 0
    token_times: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.request.name

    @property
    def prefilling(self) -> bool:
        """Whether prompt tokens are left to process."""
        return self.processed < len(self.request.prompt)

    @property
    def generated(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :]

    def next_token(self, sampled: int) -> int:
        """The token to append: the forced one where there is one."""
        forced = self.request.forced
        return sampled if forced is None else forced[len(self.generated)]

    @property
    def complete(self) -> bool:
        """Whether all tokens that were asked for are there."""
        made = self.generated
        if len(made) >= self.request.max_new_tokens:
            return True
        return bool(made) and made[-1] == self.request.stop_token


@dataclass(frozen=True, kw_only=True)
class Work:
    """One request's share of a step: its tokens [start, end)."""

    tracked: Tracked
    start: int
    end: int

    @property
    def samples(self) -> bool:
        """Whether the step reaches the request's last known token, so that a new one follows."""
        return self.end == len(self.tracked.tokens)


@dataclass(frozen=True, kw_only=True, eq=False)
class StepPlan:
    """What one rank does in one step; empty on an idle rank."""

    work: tuple[Work, ...]

    @property
    def num_tokens(self) -> int:
        return sum(item.end - item.start for item in self.work)
