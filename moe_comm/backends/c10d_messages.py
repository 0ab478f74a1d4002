"""One message a peer, over gloo on the CPU.

A wait that fails names its peer, rows are received where they belong, and small headers compare
what ranks are doing before any data moves. gloo itself sends an all_to_all in the same way.
"""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_comm.backends.c10d_transport import Headers, Kind, Phase, Transfer, Transport
from moe_comm.errors import PeerTimeoutError

# Tags of the messages. Ranks call in one order, so one a kind is enough.
_TAG = 0x4D0E0000


class PointToPoint(Transport):
    """One message a peer, over gloo on the CPU."""

    has_headers = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # Of calls that nobody waits for too: a message whose receive is gone stops its connection,
        # and everything else on it.
        self._open: dict[_PeerTransfer, None] = {}

    def exchange_headers(
        self, phase: Phase, headers: Tensor, among: Sequence[int] | None = None
    ) -> Headers:
        """See Transport."""
        theirs = torch.zeros_like(headers)
        peers = self.others if among is None else [p for p in self.others if p in among]
        self._messages(
            phase,
            {peer: headers[peer] for peer in peers},
            {peer: theirs[peer] for peer in peers},
            Kind.HEADER,
        ).wait()
        return Headers(mine=headers, theirs=theirs, on_device=theirs)

    def all_to_all(
        self, phase: Phase, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor], kind: Kind
    ) -> Transfer:
        """See Transport."""
        return self._messages(phase, sends, recvs, kind)

    def all_gather(
        self, phase: Phase, buffer: Tensor, kind: Kind, *, inline: bool = False
    ) -> Transfer:
        """See Transport."""
        del inline
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
        transfer = _PeerTransfer(self, phase, works, (sends, recvs))
        self._open[transfer] = None
        return transfer

    def close(self) -> None:
        """Wait for the messages under way, in all as long as a call would."""
        for transfer in list(self._open):
            if self.lost is None:
                with contextlib.suppress(PeerTimeoutError):
                    transfer.wait()
        self._open.clear()

    def closed(self, transfer: _PeerTransfer) -> None:
        """Somebody waits for it."""
        self._open.pop(transfer, None)

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

    def _failure(self, phase: Phase, failures: Mapping[int, str]) -> Exception:
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
        self.transport.closed(self)
        self.transport.wait_all(self.phase, works)
        self.held = None
