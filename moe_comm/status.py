"""The status word: what the device recorded, and the exceptions it turns into."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from moe_comm.errors import (
    ExpertRowsOverflowError,
    InvalidRoutingError,
    MoeCommError,
    PeerTimeoutError,
    PhaseError,
)


class StatusBit(enum.IntFlag):
    """Bits of the device status word. TIMEOUT and PHASE are sticky; the others are cleared by
    `Communicator.check()`."""

    INVALID_ID = 1
    ROWS_OVERFLOW = 2
    TIMEOUT = 4
    PHASE = 8


NOTHING = StatusBit(0)


@dataclass(frozen=True, kw_only=True)
class Status:
    """A status word read back: `bits`, and for a timeout or a phase error who and what.

    Attributes:
        bits: the recorded StatusBits.
        phase: the call that failed.
        peer: the rank that did not arrive, or was elsewhere.
        seen, wanted: the counters of the wait that failed, where the backend counts.
        other_phase: the peer's phase, for a phase error.
    """

    bits: StatusBit = NOTHING
    phase: str = ""
    peer: int | None = None
    seen: int | None = None
    wanted: int | None = None
    other_phase: str = ""

    def error(self, *, rank: int, timeout_s: float) -> MoeCommError | None:
        """The exception for this status, the gravest first; None where nothing is recorded."""
        if StatusBit.PHASE in self.bits:
            return PhaseError(
                self.peer if self.peer is not None else -1, self.phase, self.other_phase
            )
        if StatusBit.TIMEOUT in self.bits:
            return PeerTimeoutError(
                self.phase,
                rank,
                self.peer,
                timeout_s=timeout_s,
                seen=self.seen,
                wanted=self.wanted,
            )
        if StatusBit.ROWS_OVERFLOW in self.bits:
            return ExpertRowsOverflowError(
                f"rank {rank}: more than max_expert_rows expert rows arrived; the last in order "
                "were dropped. Raise EPConfig.max_expert_rows, or leave it at None"
            )
        if StatusBit.INVALID_ID in self.bits:
            return InvalidRoutingError(
                f"rank {rank}: topk_idx held ids outside [-1, num_experts); they were treated as "
                "-1. MOE_COMM_DEBUG=1 finds the call"
            )
        return None
