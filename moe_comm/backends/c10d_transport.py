"""Messages between the ranks of a group over any torch.distributed backend.

Two transports behind one interface. gloo gets one message a peer: a wait that fails then names its
peer, rows are received where they belong, and small headers compare what ranks are doing before
any data moves. Every other backend gets collectives, which are all that vendors' backends promise.

Buffers are contiguous and travel as bytes: gloo knows no fp8. Ranks are the communicator's,
also after some of them were masked: `alive` lists those that take part.
"""

from __future__ import annotations

import abc
import contextlib
import datetime
import enum
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from moe_comm.backends.c10d_peers import Peers
from moe_comm.errors import ConfigMismatchError, PeerTimeoutError, PhaseError
from moe_comm.group import Group, backend_for

# How often a bounded wait on a device looks at the clock and at its peers' processes.
_POLL_S = 0.0002
_LOOK_S = 0.25
# Tags of point-to-point messages. Ranks call in one order, so one a kind is enough.
_TAG = 0x4D0E0000


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
    """

    has_headers: bool

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
        self.lost: PeerTimeoutError | None = None

    @abc.abstractmethod
    def exchange_headers(
        self, phase: Phase, headers: Tensor, among: Sequence[int] | None = None
    ) -> Tensor:
        """int32 [R, width], row r for rank r, on the data's device -> [R, width] on the host, row
        r from rank r. Rows of ranks that take no part are zero. Blocks the host.

        among: the ranks this one exchanges with, each of which names this one too; default all.
        """

    @abc.abstractmethod
    def all_to_all(
        self, phase: Phase, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor], kind: Kind
    ) -> Transfer:
        """Send and receive one contiguous uint8 tensor a peer; peers left out move nothing."""

    @abc.abstractmethod
    def all_gather(self, phase: Phase, buffer: Tensor, kind: Kind) -> Transfer:
        """In place on uint8 [R, n], contiguous: row `rank` of every rank comes to all."""

    @abc.abstractmethod
    def all_to_all_equal(self, phase: Phase, send: Tensor, recv: Tensor, kind: Kind) -> Transfer:
        """uint8 [R, n] each, contiguous: row r goes to rank r. This rank's own row of `recv` is
        undefined afterwards."""

    def raise_if_lost(self) -> None:
        """A group that lost a rank stays lost: its connections are in an unknown state."""
        if self.lost is not None:
            raise self.lost

    def fail(self, phase: Phase, peer: int | None, detail: str) -> PeerTimeoutError:
        """Remember and return the error; tells the other ranks whom this one missed."""
        peer = self.peers.culprit(peer)
        self.lost = PeerTimeoutError(
            phase.label, self.rank, peer, timeout_s=self.wait_s, detail=detail
        )
        return self.lost


class PointToPoint(Transport):
    """One message a peer, over gloo on the CPU."""

    has_headers = True

    def exchange_headers(
        self, phase: Phase, headers: Tensor, among: Sequence[int] | None = None
    ) -> Tensor:
        """See Transport."""
        theirs = torch.zeros_like(headers)
        peers = self.others if among is None else [p for p in self.others if p in among]
        self._messages(
            phase,
            {peer: headers[peer] for peer in peers},
            {peer: theirs[peer] for peer in peers},
            Kind.HEADER,
        ).wait()
        return theirs

    def all_to_all(
        self, phase: Phase, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor], kind: Kind
    ) -> Transfer:
        """See Transport."""
        return self._messages(phase, sends, recvs, kind)

    def all_gather(self, phase: Phase, buffer: Tensor, kind: Kind) -> Transfer:
        """See Transport."""
        return self._messages(
            phase,
            dict.fromkeys(self.others, buffer[self.rank]),
            {peer: buffer[peer] for peer in self.others},
            kind,
        )

    def all_to_all_equal(self, phase: Phase, send: Tensor, recv: Tensor, kind: Kind) -> Transfer:
        """See Transport."""
        return self._messages(
            phase,
            {peer: send[peer] for peer in self.others},
            {peer: recv[peer] for peer in self.others},
            kind,
        )

    def _messages(
        self, phase: Phase, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor], kind: Kind
    ) -> Transfer:
        self.raise_if_lost()
        works: list[tuple[int, dist.Work]] = []
        failures: dict[int, str] = {}
        # Receives first: a message that finds its receive waiting is written in place.
        for recv, messages in ((True, recvs), (False, sends)):
            for peer, tensor in messages.items():
                if tensor.numel() == 0 or peer in failures:
                    continue
                # The group's own rank of a peer: after masking they differ.
                at = self.alive.index(peer)
                try:
                    if recv:
                        works.append((peer, self.pg.recv([tensor], at, _TAG + kind)))
                    else:
                        self.count(peer, tensor.nbytes)
                        works.append((peer, self.pg.send([tensor], at, _TAG + kind)))
                except RuntimeError as error:
                    failures[peer] = str(error)
        if failures:
            raise self._failure(phase, failures)
        return _PeerTransfer(self, phase, works, (sends, recvs))

    def wait_all(self, phase: Phase, works: Sequence[tuple[int, dist.Work]]) -> None:
        """Wait for every message; after the first failure the rest is only asked for its state."""
        deadline = time.monotonic() + self.patience_s
        failures: dict[int, str] = {}
        for peer, work in works:
            left = max(deadline - time.monotonic(), 0.001) if not failures else 0.001
            try:
                work.wait(datetime.timedelta(seconds=left))
            except RuntimeError as error:
                failures.setdefault(peer, str(error))
        if failures:
            raise self._failure(phase, failures)

    def _failure(self, phase: Phase, failures: Mapping[int, str]) -> PeerTimeoutError:
        # A broken connection says more than a timeout, and a timeout more than the connections
        # that gloo closes after one.
        def weight(item: tuple[int, str]) -> int:
            text = item[1]
            if "Timed out" in text:
                return 1
            return 2 if "caused pair closure" in text else 0

        peer, text = min(failures.items(), key=weight)
        return self.fail(phase, peer, text.splitlines()[0][:200])


class _PeerTransfer(Transfer):
    """See PointToPoint."""

    def __init__(
        self,
        transport: PointToPoint,
        phase: Phase,
        works: list[tuple[int, dist.Work]],
        held: object,
    ) -> None:
        self.transport, self.phase, self.works = transport, phase, works
        # Memory of messages under way must not be freed.
        self.held = held

    def wait(self) -> None:
        """See Transfer."""
        works, self.works = self.works, []
        self.transport.wait_all(self.phase, works)
        self.held = None


class Collective(Transport):
    """Collectives on uint8, over NCCL or any other backend."""

    has_headers = False

    def __init__(
        self,
        pg: dist.ProcessGroup,
        peers: Peers,
        alive: Sequence[int],
        wait_s: float,
        count: Callable[[int, int], None],
    ) -> None:
        super().__init__(pg, peers, alive, wait_s, count)
        self.device = peers.device
        # The list form takes each message from where it lies. Only NCCL's is known to work so.
        self.has_lists = backend_for(pg, self.device.type) == "nccl"

    def exchange_headers(
        self, phase: Phase, headers: Tensor, among: Sequence[int] | None = None
    ) -> Tensor:
        """See Transport. A collective: all ranks take part, whoever they need to hear."""
        del among
        self.raise_if_lost()
        for peer in self.others:
            self.count(peer, HEADER_BYTES)
        sends = headers[self.alive] if len(self.alive) < headers.shape[0] else headers
        theirs = torch.empty_like(sends)
        with self.errors(phase):
            work = dist.all_to_all_single(theirs, sends.contiguous(), group=self.pg, async_op=True)
        self.wait_work(phase, work)
        host = self._to_host(phase, theirs)
        out = torch.zeros(headers.shape, dtype=headers.dtype)
        out[self.alive] = host
        return out

    def _to_host(self, phase: Phase, tensor: Tensor) -> Tensor:
        """A bounded copy: torch's own would wait for ever where a peer never comes."""
        if tensor.device.type == "cpu":
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        event = torch.Event(tensor.device)
        event.record()
        start = looked = time.monotonic()
        while not event.query():
            now = time.monotonic()
            if now - looked > _LOOK_S:
                looked = now
                gone = self.peers.gone()
                if gone or now - start > self.patience_s:
                    peer = gone[0] if gone else None
                    raise self.fail(phase, peer, "headers did not arrive")
            if now - start > 0.001:
                time.sleep(_POLL_S)
        return host

    def all_to_all(
        self, phase: Phase, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor], kind: Kind
    ) -> Transfer:
        """See Transport."""
        del kind
        self.raise_if_lost()
        empty = torch.empty(0, dtype=torch.uint8, device=self.device)
        for peer, tensor in sends.items():
            self.count(peer, tensor.nbytes)
        give = [sends.get(rank, empty).view(-1) for rank in self.alive]
        take = [recvs.get(rank, empty).view(-1) for rank in self.alive]
        if self.has_lists:
            with self.errors(phase):
                work = dist.all_to_all(take, give, group=self.pg, async_op=True)
            return _CollectiveTransfer(self, phase, work, held=(give, take))
        # One contiguous buffer each way; where only one peer has a message, that is the buffer.
        packed = _as_one(give)
        landing = _as_one(take, copy=False)
        with self.errors(phase):
            work = dist.all_to_all_single(
                landing,
                packed,
                [tensor.numel() for tensor in take],
                [tensor.numel() for tensor in give],
                group=self.pg,
                async_op=True,
            )
        copies = []
        if sum(tensor.numel() > 0 for tensor in take) > 1:
            parts = landing.split([tensor.numel() for tensor in take])
            copies = list(zip(take, parts, strict=True))
        return _CollectiveTransfer(self, phase, work, held=(packed, landing), copies=copies)

    def all_gather(self, phase: Phase, buffer: Tensor, kind: Kind) -> Transfer:
        """See Transport."""
        self.raise_if_lost()
        if buffer.numel() == 0:
            return Done()
        if len(self.alive) < buffer.shape[0]:
            return self.all_to_all(
                phase,
                dict.fromkeys(self.others, buffer[self.rank]),
                {peer: buffer[peer] for peer in self.others},
                kind,
            )
        for peer in self.others:
            self.count(peer, buffer[self.rank].nbytes)
        with self.errors(phase):
            work = dist.all_gather_into_tensor(
                buffer.view(-1), buffer[self.rank], group=self.pg, async_op=True
            )
        return _CollectiveTransfer(self, phase, work, held=buffer)

    def all_to_all_equal(self, phase: Phase, send: Tensor, recv: Tensor, kind: Kind) -> Transfer:
        """See Transport."""
        self.raise_if_lost()
        if send.numel() == 0:
            return Done()
        if self.has_lists or len(self.alive) < send.shape[0]:
            # Leaves out the copy of the own row.
            return self.all_to_all(
                phase,
                {peer: send[peer] for peer in self.others},
                {peer: recv[peer] for peer in self.others},
                kind,
            )
        for peer in self.others:
            self.count(peer, send[peer].nbytes)
        with self.errors(phase):
            work = dist.all_to_all_single(
                recv.view(-1), send.view(-1), group=self.pg, async_op=True
            )
        return _CollectiveTransfer(self, phase, work, held=(send, recv))

    def wait_work(self, phase: Phase, work: dist.Work | None) -> None:
        """Let the current stream wait; on a CPU backend, block for a bounded time."""
        if work is None:
            return
        with self.errors(phase):
            if self.device.type == "cpu":
                work.wait(datetime.timedelta(seconds=self.patience_s))
            else:
                work.wait()

    @contextlib.contextmanager
    def errors(self, phase: Phase) -> Iterator[None]:
        """Turn what the backend raises into PeerTimeoutError."""
        try:
            yield
        except (ValueError, TypeError, NotImplementedError):
            raise
        except RuntimeError as error:
            gone = self.peers.gone()
            detail = (str(error).splitlines() or [type(error).__name__])[0][:200]
            raise self.fail(phase, gone[0] if gone else None, detail) from error


class _CollectiveTransfer(Transfer):
    """See Collective; `copies` are (target, source) once it is there."""

    def __init__(
        self,
        transport: Collective,
        phase: Phase,
        work: dist.Work | None,
        *,
        held: object,
        copies: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> None:
        self.transport, self.phase, self.work, self.held = transport, phase, work, held
        self.copies = copies

    def wait(self) -> None:
        """See Transfer."""
        work, self.work = self.work, None
        self.transport.wait_work(self.phase, work)
        for target, source in self.copies:
            target.copy_(source)
        self.copies = ()
        self.held = None


def _as_one(tensors: Sequence[Tensor], *, copy: bool = True) -> Tensor:
    """The tensors one after another: the only non-empty one itself, else a new buffer."""
    full = [tensor for tensor in tensors if tensor.numel()]
    if len(full) == 1:
        return full[0]
    if copy:
        return torch.cat(list(tensors))
    return tensors[0].new_empty(sum(tensor.numel() for tensor in tensors))


def header_rows(header: Header, num_rows: Tensor) -> Tensor:
    """[R, width] int32 on num_rows' device: the header for each rank, with its own row count
    ([R] int)."""
    line = torch.tensor(astuple(header), dtype=torch.int32)
    table = line.to(num_rows.device, non_blocking=True).repeat(num_rows.shape[0], 1)
    table[:, 3] = num_rows
    return table


def make_transport(
    group: Group,
    pg: dist.ProcessGroup,
    alive: Sequence[int],
    wait_s: float,
    count: Callable[[int, int], None],
) -> Transport:
    """The transport for the group's device. Collective: peers learn each other's processes."""
    peers = Peers(group, pg, alive)
    if group.device.type == "cpu" and backend_for(pg, "cpu") == "gloo":
        return PointToPoint(pg, peers, alive, wait_s, count)
    return Collective(pg, peers, alive, wait_s, count)
