"""The error family of moe_comm. ValueError and TypeError stay what they are for bad arguments."""

from __future__ import annotations


class MoeCommError(RuntimeError):
    """Base of every error that is not a bad argument."""


class BackendUnavailableError(MoeCommError):
    """A backend that was asked for by name cannot run here; the message says why and what would."""


class ConfigMismatchError(MoeCommError):
    """Ranks of one group were given different configurations; names the field and both values."""


class SlotError(MoeCommError):
    """A handle was used out of order: no slot is free, or the handle's slot has moved on."""


class PhaseError(MoeCommError):
    """Ranks are in different calls: one dispatches while another combines.

    Attributes: `rank` (the other rank), `expected` and `got` (names of the two phases).
    """

    def __init__(self, rank: int, expected: str, got: str) -> None:
        super().__init__(f"rank {rank} is in {got!r} while this rank is in {expected!r}")
        self.rank, self.expected, self.got = rank, expected, got


class PeerTimeoutError(MoeCommError):
    """A peer did not arrive in time, or died.

    Attributes: `phase` (the call that waited), `rank` (the one that waited), `peer` (the one that
    did not arrive, or None where the transport does not say), `seen` and `wanted` (counter values,
    where the backend counts; else None).
    """

    def __init__(
        self,
        phase: str,
        rank: int,
        peer: int | None,
        *,
        timeout_s: float,
        seen: int | None = None,
        wanted: int | None = None,
        detail: str = "",
    ) -> None:
        who = f"rank {peer}" if peer is not None else "a peer (the transport does not say which)"
        counters = "" if seen is None else f", counter seen {seen}, wanted {wanted}"
        more = f": {detail}" if detail else ""
        super().__init__(
            f"{phase} on rank {rank}: {who} did not arrive within {timeout_s:g} s{counters}{more}"
        )
        self.phase, self.rank, self.peer = phase, rank, peer
        self.seen, self.wanted = seen, wanted


class ExpertRowsOverflowError(MoeCommError):
    """More rows than `max_expert_rows` arrived; the last rows in order were dropped."""


class InvalidRoutingError(MoeCommError):
    """An expert id outside [-1, num_experts) was dispatched; it was treated as -1."""


class WrongDataError(MoeCommError):
    """A verification failed; the message names the first coordinate and both values."""
