"""Exchanges between the ranks of a group: what the c10d modes need of a transport.

Two implementations: c10d_messages (one message a peer, over gloo) and c10d_collectives (every
other backend). Buffers are contiguous and travel as bytes: gloo knows no fp8. Ranks are the
communicator's, also after some of them were masked: `alive` lists those that take part.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from moe_comm.backends.c10d_peers import Peers
from moe_comm.errors import ConfigMismatchError, PeerTimeoutError, PhaseError


class Phase(enum.IntEnum):
    """What a rank is doing: the phase word."""

    DISPATCH = 1
    COMBINE = 2
    GRADIENT = 3

    @property
    def label(self) -> str:
        """As errors and hooks name it."""
        return {1: "dispatch", 2: "combine", 3: "dispatch backward"}[self.value]


class Kind(enum.IntEnum):
    """Messages that may be under way at the same time, for the tag."""

    HEADER = 0
    RECORDS = 1
    ROWS = 2
    BACK_ROWS = 3
    BACK_SCALES = 4
    FORWARD_RECORDS = 5
    FORWARD_ROWS = 6
    NODE_ROWS = 7
    NODE_SCALES = 8


@dataclass(frozen=True)
class Header:
    """What a rank tells a peer before data moves; int32 each.

    Attributes:
        phase: Phase.
        call: number of the dispatch this belongs to.
        num_tokens: the sender's T.
        num_rows: rows that follow for the peer.
        bucket: B of the call.
        row_bytes, record_bytes: of one row's values, and of what travels beside it.
    """

    phase: int
    call: int
    num_tokens: int
    num_rows: int
    bucket: int
    row_bytes: int
    record_bytes: int

    @staticmethod
    def width() -> int:
        """Numbers in a header."""
        return 7


HEADER_BYTES = 4 * Header.width()


def check_header(mine: Header, theirs: Header, rank: int) -> None:
    """Raise PhaseError or ConfigMismatchError where rank `rank` is in another call."""
    if (theirs.phase, theirs.call) != (mine.phase, mine.call):
        expected, got = Phase(mine.phase).label, Phase(theirs.phase).label
        if expected == got:
            expected, got = f"{expected} {mine.call}", f"{got} {theirs.call}"
        raise PhaseError(rank, expected, got)
    for name, what in (
        ("bucket", "the bucket"),
        ("row_bytes", "bytes of a row (its dtype)"),
        ("record_bytes", "bytes beside a row (its payloads)"),
    ):
        here, there = getattr(mine, name), getattr(theirs, name)
        if here != there:
            raise ConfigMismatchError(
                f"{Phase(mine.phase).label}: {what}: this rank has {here}, rank {rank} has {there}"
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class Headers:
    """Headers of all ranks, int32 [R, width]; those of ranks that took no part are zero.

    Attributes:
        mine: what this rank told each rank, on the host.
        theirs: what each rank told this one, on the host.
        on_device: theirs, where the data is.
    """

    mine: Tensor
    theirs: Tensor
    on_device: Tensor


class Transfer(abc.ABC):
    """Messages under way."""

    @abc.abstractmethod
    def wait(self) -> None:
        """Until what was to be received is there, for the current stream where there is one.

        Raises PeerTimeoutError."""


class Done(Transfer):
    """Nothing was to be sent."""

    def wait(self) -> None:
        """Returns at once."""


class Transport(abc.ABC):
    """Exchanges of one group.

    Attributes:
        alive: the communicator's ranks that take part, ascending, this one included.
        count: told (peer, bytes) of all that is sent.
        has_headers: headers are cheap here and are exchanged before every call.
        doing: a Header's numbers, of the call under way where headers are not exchanged before it.
        in_place: all_to_all takes every message from where it lies, one tensor for several peers
            included, and leaves it where it belongs.
    """

    has_headers: bool
    in_place = True

    def __init__(
        self,
        pg: dist.ProcessGroup,
        peers: Peers,
        alive: Sequence[int],
        wait_s: float,
        count: Callable[[int, int], None],
    ) -> None:
        self.pg, self.peers, self.alive, self.wait_s = pg, peers, list(alive), wait_s
        self.count = count
        self.rank = peers.rank
        # Leaves time to find out who is lost, so that the error comes within wait_s.
        self.patience_s = wait_s - min(1.0, 0.2 * wait_s)
        self.others = [rank for rank in self.alive if rank != self.rank]
        self.doing: tuple[int, ...] = ()
        self.lost: PeerTimeoutError | ConfigMismatchError | PhaseError | None = None

    @abc.abstractmethod
    def exchange_headers(
        self, phase: Phase, headers: Tensor, among: Sequence[int] | None = None
    ) -> Headers:
        """int32 [R, width] on the data's device, row r for rank r. Blocks the host.

        among: the ranks this one exchanges with, each of which names this one too; default all.
        """

    @abc.abstractmethod
    def all_to_all(
        self, phase: Phase, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor], kind: Kind
    ) -> Transfer:
        """Send and receive one contiguous uint8 tensor a peer; peers left out move nothing."""

    @abc.abstractmethod
    def all_gather(
        self, phase: Phase, buffer: Tensor, kind: Kind, *, inline: bool = False
    ) -> Transfer:
        """In place on uint8 [R, n], rows contiguous: row `rank` of every rank comes to all.

        inline: what follows on the current stream needs it at once.
        """

    def gatherer(self, phase: Phase, buffer: Tensor, kind: Kind) -> Callable[[], Transfer]:
        """all_gather of one buffer, inline, for many times: what of it is known is worked out."""
        return lambda: self.all_gather(phase, buffer, kind, inline=True)

    @abc.abstractmethod
    def all_to_all_equal(self, phase: Phase, send: Tensor, recv: Tensor, kind: Kind) -> Transfer:
        """uint8 [R, n] each, contiguous: row r goes to rank r. This rank's own row of `recv` is
        left alone, or becomes that of `send`."""

    def to_host(self, phase: Phase, tensor: Tensor) -> Tensor:
        """A copy on the host, after what lies before it on the current stream; the wait is bounded.
        On a CPU the tensor itself."""
        del phase
        return tensor

    def mark(self) -> torch.Event | None:
        """A point of the current stream, for wait_mark. None on a CPU, where all is done."""
        return None

    def wait_mark(self, phase: Phase, mark: torch.Event | None) -> None:
        """Block the host until the device has come to the mark; the wait is bounded."""
        del phase, mark

    def close(self) -> None:  # noqa: B027 - only gloo's messages need it
        """Let go of what nobody has waited for."""

    def raise_if_lost(self) -> None:
        """A group that lost a rank stays lost: its connections are in an unknown state."""
        if self.lost is not None:
            raise self.lost

    def fail(
        self, phase: Phase, peer: int | None, detail: str
    ) -> PeerTimeoutError | ConfigMismatchError | PhaseError:
        """Remember and return the error; tells the other ranks whom this one missed. Ranks that
        failed because they were in different calls learn that instead."""
        self.lost = self._disagreement()
        if self.lost is None:
            peer = self.peers.culprit(peer)
            self.lost = PeerTimeoutError(
                phase.label, self.rank, peer, timeout_s=self.wait_s, detail=detail
            )
        return self.lost

    def _disagreement(self) -> ConfigMismatchError | PhaseError | None:
        """What another rank that failed was doing, if it is not what this one was doing."""
        if not self.doing or self.peers.gone():
            return None
        for rank, numbers in sorted(self.peers.notes(self.doing).items()):
            try:
                check_header(Header(*self.doing), Header(*numbers), rank)
            except (ConfigMismatchError, PhaseError) as error:
                return error
        return None


def header_rows(header: Header, num_rows: Tensor) -> Tensor:
    """[R, width] int32 on num_rows' device: the header for each rank, with its own row count
    ([R] int)."""
    line = torch.tensor(astuple(header), dtype=torch.int32)
    table = line.to(num_rows.device, non_blocking=True).repeat(num_rows.shape[0], 1)
    table[:, 3] = num_rows
    return table
