"""Collectives on bytes, over NCCL or any other backend: all that vendors' plug-ins promise.

On an accelerator nothing blocks the host but the exchange of headers, whose wait is bounded; the
other waits are the backend's own to bound (NCCL's watchdog may abort the process).
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions

from moe_comm.backends.c10d_transport import (
    HEADER_BYTES,
    Done,
    Headers,
    Kind,
    Phase,
    Transfer,
    Transport,
)
from moe_comm.group import backend_for

# How often a bounded wait on a device looks at the clock, and at its peers' processes.
_POLL_S = 0.0002
_LOOK_S = 0.25


def _options(kind: type[Any], *, apart: bool) -> Any:
    """apart: on a stream of the backend's own."""
    options = kind()
    options.asyncOp = apart
    return options


class Collective(Transport):
    """Collectives on uint8, over NCCL or any other backend."""

    has_headers = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.device = self.peers.device
        # The list form takes each message from where it lies, and what nobody waits for at once
        # runs on a stream of its own. Only of NCCL both are known.
        self.on_nccl = backend_for(self.pg, self.device.type) == "nccl"
        self.in_place = self.on_nccl or len(self.others) <= 1
        self._nothing = torch.empty(0, dtype=torch.uint8, device=self.device)
        # By whether what follows on the current stream needs it at once: NCCL's kernel runs on
        # that stream itself then, and no other waits for it, or it for them.
        self._exchange = [_options(AllToAllOptions, apart=apart) for apart in (True, False)]
        self._gather = [_options(AllgatherOptions, apart=apart) for apart in (True, False)]

    def exchange_headers(
        self, phase: Phase, headers: Tensor, among: Sequence[int] | None = None
    ) -> Headers:
        """See Transport. A collective: all ranks take part, whoever they need to hear."""
        del among
        self.raise_if_lost()
        for peer in self.others:
            self.count(peer, HEADER_BYTES)
        everyone = len(self.alive) == headers.shape[0]
        sends = headers if everyone else headers[self.alive]
        came = torch.empty_like(sends)
        with self.errors(phase):
            work = dist.all_to_all_single(came, sends, group=self.pg, async_op=True)
        self.wait_work(phase, work)
        theirs = came
        if not everyone:
            theirs = torch.zeros_like(headers)
            theirs[self.alive] = came
        # One copy, since every copy to the host waits for the device.
        mine, host = self.to_host(phase, torch.stack((headers, theirs)))
        return Headers(mine=mine, theirs=host, on_device=theirs)

    def to_host(self, phase: Phase, tensor: Tensor) -> Tensor:
        """See Transport. Torch's own copy would wait for ever where a peer never comes."""
        if tensor.device.type == "cpu":
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        self.wait_mark(phase, self.mark())
        return host

    def mark(self) -> torch.Event | None:
        """See Transport."""
        if self.device.type == "cpu":
            return None
        event = torch.Event(self.device)
        event.record()
        return event

    def wait_mark(self, phase: Phase, mark: torch.Event | None) -> None:
        """See Transport."""
        start = looked = time.monotonic()
        while mark is not None and not mark.query():
            now = time.monotonic()
            if now - looked > _LOOK_S:
                looked = now
                gone = self.peers.gone()
                if gone or now - start > self.patience_s:
                    peer = gone[0] if gone else None
                    raise self.fail(phase, peer, "counts did not arrive")
            if now - start > 0.001:
                time.sleep(_POLL_S)

    def all_to_all(
        self, phase: Phase, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor], kind: Kind
    ) -> Transfer:
        """See Transport."""
        del kind
        self.raise_if_lost()
        if not self.others:
            return Done()
        for peer, tensor in sends.items():
            self.count(peer, tensor.nbytes)
        if len(self.others) == 1:
            (peer,) = self.others
            return self._one_message(
                phase, peer, sends.get(peer, self._nothing), recvs.get(peer, self._nothing)
            )
        give = [sends.get(rank, self._nothing).view(-1) for rank in self.alive]
        take = [recvs.get(rank, self._nothing).view(-1) for rank in self.alive]
        if self.on_nccl:
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

    def _one_message(
        self, phase: Phase, peer: int, give: Tensor, take: Tensor, *, inline: bool = False
    ) -> Transfer:
        """To and from the only other rank: no list, and nothing packed."""
        given, taken = [0] * len(self.alive), [0] * len(self.alive)
        at = self.alive.index(peer)
        given[at], taken[at] = give.shape[0], take.shape[0]
        with self.errors(phase):
            if self.on_nccl:
                # What dist.all_to_all_single calls, without its checks.
                work = self.pg.alltoall_base(take, give, taken, given, self._exchange[inline])
            else:
                work = dist.all_to_all_single(
                    take, give, taken, given, group=self.pg, async_op=True
                )
        return _CollectiveTransfer(self, phase, work, held=(give, take))

    def all_gather(
        self, phase: Phase, buffer: Tensor, kind: Kind, *, inline: bool = False
    ) -> Transfer:
        """See Transport."""
        self.raise_if_lost()
        if buffer.numel() == 0:
            return Done()
        mine = buffer[self.rank]
        if len(self.others) == 1 and not buffer.is_contiguous():
            (peer,) = self.others
            self.count(peer, mine.nbytes)
            return self._one_message(phase, peer, mine, buffer[peer], inline=inline)
        if len(self.alive) < buffer.shape[0]:
            others = self.others
            return self.all_to_all(
                phase, dict.fromkeys(others, mine), {peer: buffer[peer] for peer in others}, kind
            )
        for peer in self.others:
            self.count(peer, mine.nbytes)
        with self.errors(phase):
            if self.on_nccl:
                # As above.
                work = self.pg._allgather_base(buffer.view(-1), mine, self._gather[inline])
            else:
                work = dist.all_gather_into_tensor(
                    buffer.view(-1), mine, group=self.pg, async_op=True
                )
        return _CollectiveTransfer(self, phase, work, held=buffer)

    def gatherer(self, phase: Phase, buffer: Tensor, kind: Kind) -> Callable[[], Transfer]:
        """See Transport."""
        if not self.on_nccl or len(self.alive) < buffer.shape[0]:
            return super().gatherer(phase, buffer, kind)
        whole, mine, options = buffer.view(-1), buffer[self.rank], self._gather[True]
        size = mine.nbytes

        def gather() -> Transfer:
            self.raise_if_lost()
            for peer in self.others:
                self.count(peer, size)
            with self.errors(phase):
                work = self.pg._allgather_base(whole, mine, options)
            return _CollectiveTransfer(self, phase, work, held=buffer)

        return gather

    def all_to_all_equal(self, phase: Phase, send: Tensor, recv: Tensor, kind: Kind) -> Transfer:
        """See Transport."""
        self.raise_if_lost()
        if send.numel() == 0:
            return Done()
        if self.in_place or len(self.alive) < send.shape[0]:
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

    def errors(self, phase: Phase) -> _Errors:
        """Turn what the backend raises into PeerTimeoutError."""
        return _Errors(self, phase)


class _Errors:
    """See Collective.errors. A class, since a generator costs a call more than all it does."""

    __slots__ = ("_phase", "_transport")

    def __init__(self, transport: Collective, phase: Phase) -> None:
        self._transport, self._phase = transport, phase

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not isinstance(error, RuntimeError) or isinstance(error, NotImplementedError):
            return
        transport = self._transport
        gone = transport.peers.gone()
        detail = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise transport.fail(self._phase, gone[0] if gone else None, detail) from error


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
