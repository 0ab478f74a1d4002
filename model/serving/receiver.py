"""The decode side of a hand-off (`handoff.py` has the protocol): states come in and become visible.

One `Inbox` a pool; one `Receiver` a sender (its control channel and its transport).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from moe_comm.model.serving.channels import Channel, ChannelClosedError, ChannelTimeoutError
from moe_comm.model.serving.migration_header import Header, MigrationError, check_header
from moe_comm.model.serving.paged_cache import PagedCache
from moe_comm.model.serving.slots import Handle
from moe_comm.model.serving.staged_import import Imported, ImportState, StagedImport
from moe_comm.model.serving.state_pool import StatePool
from moe_comm.model.serving.transports import TransferError, Transport

logger = logging.getLogger("moe_comm")


@dataclass(slots=True, eq=False)
class _Inbound:
    """One request's import: who may still write, and who waits for the verdict."""

    request: str
    staged: StagedImport
    writers: list[_Transfer] = field(default_factory=list)
    waiting: list[_Transfer] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Transfer:
    receiver: Receiver
    number: int
    head: Header
    inbound: _Inbound
    deadline: float
    exposed: list[torch.Tensor] = field(default_factory=list)

    def answer(self, kind: str, **fields: Any) -> None:
        self.receiver.answer(self.number, kind, **fields)


class Inbox:
    """Imports of one pool and cache, from any number of senders.

    `tokens_of(request)` gives the prompt that this side knows for a request; None: any tokens;
    LookupError: nobody here expects that request, and it is refused.
    """

    def __init__(
        self,
        pool: StatePool,
        cache: PagedCache,
        *,
        tokens_of: Callable[[str], Sequence[int] | None] = lambda _: None,
    ) -> None:
        self.pool, self.cache, self._tokens_of = pool, cache, tokens_of
        self._inbound: dict[str, _Inbound] = {}
        self._quarantined: list[_Inbound] = []
        self._accepted: set[str] = set()

    def held(self) -> list[tuple[Handle, tuple[int, ...]]]:
        """Slots and pages of imports under way and in quarantine, for an audit."""
        live = [*self._inbound.values(), *self._quarantined]
        return [(inbound.staged.slot, inbound.staged.pages) for inbound in live]

    @property
    def quarantined(self) -> int:
        """Imports whose memory waits for a writer to be known gone."""
        return len(self._quarantined)

    def forget(self, request: str) -> None:
        """Drop the memory of an accepted request, once no sender can ask for it again."""
        self._accepted.discard(request)

    def accepted(self, request: str) -> bool:
        return request in self._accepted

    def open(self, raw: Any, *, direct: bool) -> tuple[_Inbound, Header]:
        """Check an offer and reserve what it needs; MigrationError says why not."""
        if not isinstance(raw, dict):
            raise MigrationError(f"header: expected an object, got {type(raw).__name__}")
        request = str(raw.get("request"))
        try:
            tokens = self._tokens_of(request)
        except LookupError as error:
            raise MigrationError(f"request: {request!r} is not expected here") from error
        head = check_header(raw, self.pool.layout, tokens=tokens)
        inbound = self._inbound.get(request)
        if inbound is None:
            staged = StagedImport.open(self.pool, self.cache, head)
            if staged is None:
                raise MigrationError("no room: no free slot, or too few free pages")
            inbound = self._inbound[request] = _Inbound(request, staged)
        try:
            inbound.staged.add_part(raw, direct=direct)
        except MigrationError as error:
            self.fail(inbound, str(error))
            raise
        return inbound, head

    def finish(self, inbound: _Inbound) -> tuple[str, Imported] | None:
        """Publish an import whose last part is verified; None while parts are missing."""
        if inbound.staged.missing():
            return None
        imported = inbound.staged.publish()
        del self._inbound[inbound.request]
        self._accepted.add(inbound.request)
        for transfer in inbound.waiting:
            transfer.answer("accepted")
        return inbound.request, imported

    def fail(self, inbound: _Inbound, reason: str) -> None:
        """Give an import up. Its memory is free at once where nobody can write it any more."""
        inbound.staged.abort(reason, writer_gone=not inbound.writers)
        if inbound.staged.state is ImportState.QUARANTINED and inbound not in self._quarantined:
            self._quarantined.append(inbound)
        if self._inbound.get(inbound.request) is inbound:
            del self._inbound[inbound.request]
        for transfer in inbound.waiting:
            transfer.answer("refuse", reason=reason)
        inbound.waiting.clear()

    def settle(self, transfer: _Transfer) -> None:
        """No byte of this transfer can arrive any more."""
        inbound = transfer.inbound
        if transfer in inbound.writers:
            inbound.writers.remove(transfer)
        if not inbound.writers and inbound in self._quarantined:
            inbound.staged.writer_is_gone()
            self._quarantined.remove(inbound)


class Receiver:
    """One sender's connection. `timeout_s` bounds the time from a grant to "written"; after it the
    slot and pages are QUARANTINED until the sender says that it has settled, or is gone."""

    def __init__(
        self, inbox: Inbox, channel: Channel, transport: Transport, *, timeout_s: float
    ) -> None:
        self.inbox, self.channel, self.transport = inbox, channel, transport
        self.timeout_s = timeout_s
        host = inbox.pool.recurrent.device.type == "cpu"
        # Into a staged slot where a writer can reach it, else into host buffers.
        self._direct = transport.direct and host
        if self._direct:
            transport.expose([*inbox.pool.tensors.values(), inbox.cache.rows])
        self._transfers: dict[int, _Transfer] = {}

    def poll(self, timeout_s: float) -> tuple[str, Imported] | None:
        """Handle at most one message; (request, state) when a request became visible.

        Raises ChannelClosedError, after cleaning up, where the sender is gone.
        """
        self._expire()
        try:
            message = self.channel.receive(timeout_s)
            transfer, kind = message.get("transfer"), message.get("type")
            if not isinstance(transfer, int):
                return None
            if kind == "offer":
                self._offer(transfer, message.get("header"))
            elif kind == "written":
                return self._written(transfer)
            elif kind == "failed":
                self._failed(transfer, settled=message.get("settled") is True)
        except ChannelTimeoutError:
            self._expire()
        except ChannelClosedError:
            self.sender_is_gone()
            raise
        return None

    def sender_is_gone(self) -> None:
        """Free what this sender left unfinished: its process is known to have ended."""
        for transfer in list(self._transfers.values()):
            self._end(transfer, "the sender is gone", settled=True)

    def answer(self, transfer: int, kind: str, **fields: Any) -> None:
        """Send a verdict. A sender that is gone learns nothing; its next poll cleans up."""
        try:
            self.channel.send({"type": kind, "transfer": transfer, **fields})
        except ChannelClosedError as error:
            logger.warning("transfer %d: %s was not delivered: %s", transfer, kind, error)

    # -- messages --------------------------------------------------------------------------------
    def _offer(self, number: int, raw: Any) -> None:
        request = raw.get("request") if isinstance(raw, dict) else None
        for older in list(self._transfers.values()):
            # A sender does one thing at a time: what it offers again it no longer writes.
            if older.head.request == request:
                self._end(older, "offered again", settled=True)
        if isinstance(request, str) and self.inbox.accepted(request):
            self.answer(number, "accepted")
            return
        try:
            inbound, head = self.inbox.open(raw, direct=self._direct)
        except MigrationError as error:
            self.answer(number, "refuse", reason=str(error))
            return
        deadline = time.monotonic() + self.timeout_s
        transfer = _Transfer(self, number, head, inbound, deadline)
        self._transfers[number] = transfer
        inbound.writers.append(transfer)
        if not self._direct:
            transfer.exposed = list(inbound.staged.landing(head.part).values())
            self.transport.expose(transfer.exposed)
        regions = [[r.address, r.nbytes] for r in inbound.staged.regions(head.part)]
        self.answer(number, "grant", regions=regions, target=self.transport.describe())
        if not self.transport.direct:
            try:
                landing = inbound.staged.landing(head.part)
                self.transport.collect(landing, self.timeout_s)
            except TransferError as error:
                self._end(transfer, str(error), settled=error.settled)

    def _written(self, number: int) -> tuple[str, Imported] | None:
        transfer = self._transfers.get(number)
        if transfer is None or transfer.inbound.staged.state is not ImportState.OPEN:
            if transfer is not None:
                self._end(transfer, "given up", settled=True)
            self.answer(number, "refuse", reason="the transfer was given up before it ended")
            return None
        inbound = transfer.inbound
        inbound.writers.remove(transfer)
        inbound.waiting.append(transfer)
        self._close(transfer)
        try:
            inbound.staged.verify_part(transfer.head.part)
        except MigrationError as error:
            self.inbox.fail(inbound, str(error))
            return None
        return self.inbox.finish(inbound)

    def _failed(self, number: int, *, settled: bool) -> None:
        transfer = self._transfers.get(number)
        if transfer is not None:
            self._end(transfer, "the sender's write failed", settled=settled)

    def _expire(self) -> None:
        now = time.monotonic()
        for transfer in list(self._transfers.values()):
            if now > transfer.deadline and transfer.inbound.staged.state is ImportState.OPEN:
                reason = f"nothing was written within {self.timeout_s:g} s"
                self._end(transfer, reason, settled=False)

    def _end(self, transfer: _Transfer, reason: str, *, settled: bool) -> None:
        """A transfer came to nothing; it is kept until it is settled."""
        if settled:
            self._close(transfer)
            self.inbox.settle(transfer)
        self.inbox.fail(transfer.inbound, reason)

    def _close(self, transfer: _Transfer) -> None:
        self._transfers.pop(transfer.number, None)
        self.transport.withdraw(transfer.exposed)
