"""What a slot is and how a tenancy of one is named."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from moe_comm.errors import MoeCommError


class StateError(MoeCommError):
    """A handle, a position or a slot was used in a way that would give wrong state."""


class SlotState(enum.Enum):
    FREE = "free"
    ACTIVE = "active"
    SNAPSHOT = "snapshot"
    STAGING = "staging"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, kw_only=True)
class Handle:
    """One tenancy of a slot: plain integers, so nothing the pool does later changes them."""

    pool: int
    slot: int
    generation: int


@dataclass(slots=True)
class Slot:
    """The pool's own record of a slot."""

    state: SlotState = SlotState.FREE
    generation: int = 0
    position: int = 0
    updating_to: int | None = None
    draft: bool = False
    references: int = 0
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class PoolAudit:
    """Where every slot is. `counts` sums to `total`; `positions` is per slot in use."""

    total: int
    counts: Mapping[SlotState, int]
    positions: Mapping[int, int] = field(default_factory=dict)

    @property
    def in_use(self) -> int:
        return self.total - self.counts[SlotState.FREE]
