"""The receiver's rules, with sender and receiver in one process."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch

from moe_comm.model.serving.channels import ChannelClosedError, PipeChannel
from moe_comm.model.serving.handoff import Outcome, send_state
from moe_comm.model.serving.migration_header import make_header
from moe_comm.model.serving.receiver import Inbox, Receiver
from moe_comm.model.serving.segments import PartSpec, export_segments, import_segments, whole_part
from moe_comm.model.serving.slots import SlotState
from moe_comm.model.serving.staged_import import Region
from moe_comm.model.serving.transports import TransferError

sys.path.append(str(Path(__file__).parent))
from serving_cases import Server, prompt, small_layout

TOKENS = prompt(11)


class MemoryTransport:
    """Writes straight into the receiver's memory, as a one-sided transport does; can be told to
    fail."""

    direct = True

    def __init__(self) -> None:
        self.fail: TransferError | None = None

    def describe(self):
        return {"kind": "memory"}

    def expose(self, tensors):
        pass

    def withdraw(self, tensors):
        pass

    def collect(self, landing, timeout_s):
        pass

    def write(self, target, regions: list[Region], source):
        data = torch.cat([s.reshape(-1).view(torch.uint8) for s in source.values()])
        at = data.data_ptr()
        for region in regions[: 3 if self.fail else None]:
            ctypes.memmove(region.address, at, region.nbytes)
            at += region.nbytes
        if self.fail:
            raise self.fail


class Pair:
    """One source state and a receiver of it, with as many senders as wanted."""

    def __init__(self, *, senders: int = 1, timeout_s: float = 5.0, layout=None) -> None:
        layout = layout or small_layout()
        self.source, self.target = Server(layout, prefix=False), Server(layout, prefix=False)
        pool, cache = self.source.pool, self.source.cache
        draw = torch.Generator().manual_seed(1)
        slot, self.pages = pool.stage(), cache.allocate(2)
        for tensor in [*pool.tensors.values(), cache.rows]:
            tensor.copy_(torch.randn(tensor.shape, generator=draw).to(tensor.dtype))
        self.state = pool.publish(slot, len(TOKENS))
        self.inbox = Inbox(self.target.pool, self.target.cache)
        self.channels, self.transports, self.receivers, self.pipes = [], [], [], []
        for _ in range(senders):
            ours, theirs = Pipe()
            self.pipes.append(ours)
            self.channels.append(PipeChannel(ours))
            self.transports.append(MemoryTransport())
            self.receivers.append(
                Receiver(self.inbox, PipeChannel(theirs), self.transports[-1], timeout_s=timeout_s)
            )
        self.arrived: list = []

    def offer(self, part=None, **fields):
        part = part or whole_part(self.source.layout)
        segments = export_segments(
            self.source.pool, self.source.cache, self.state, self.pages, part=part
        )
        fields = {"request": "r", "tokens": TOKENS, "pending": [4], **fields}
        return make_header(self.source.layout, segments, part=part, **fields), segments

    def send(self, index=0, part=None, timeout_s=5.0, **fields):
        """Send in a thread of its own; the result, once `pump` has run."""
        box = {}

        def go():
            box["result"] = send_state(
                self.channels[index],
                self.transports[index],
                *self.offer(part, **fields),
                timeout_s=timeout_s,
            )

        thread = threading.Thread(target=go)
        thread.start()
        return thread, box

    def pump(self, *threads, index=None) -> None:
        while any(thread.is_alive() for thread in threads):
            for receiver in self.receivers if index is None else [self.receivers[index]]:
                got = receiver.poll(0.01)
                if got:
                    self.arrived.append(got)

    def poll_until_written(self, index: int) -> None:
        """Until a sender waits for its verdict."""
        end = time.monotonic() + 30
        while not any(inbound.waiting for inbound in self.inbox._inbound.values()):
            assert time.monotonic() < end
            assert self.receivers[index].poll(0.01) is None

    def one(self, **fields) -> tuple:
        thread, box = self.send(**fields)
        self.pump(thread)
        return box["result"].outcome, box["result"].reason

    def audit(self) -> None:
        others = [*self.inbox.held(), *((i.snapshot, i.pages) for _, i in self.arrived)]
        self.target.scheduler.audit(others)


LOW = PartSpec(first_head=0, last_head=2, with_mla=True)
HIGH = PartSpec(first_head=2, last_head=4, with_mla=False)


def test_two_senders_bring_one_state_and_both_wait_for_it():
    pair = Pair(senders=2)
    first, box1 = pair.send(0, LOW)
    pair.poll_until_written(0)
    assert first.is_alive()  # half a state is no state
    assert pair.arrived == []
    assert pair.target.pool.audit().counts[SlotState.STAGING] == 1
    second, box2 = pair.send(1, HIGH)
    pair.pump(first, second)
    assert box1["result"].outcome is box2["result"].outcome is Outcome.ACCEPTED
    ((name, imported),) = pair.arrived
    got = export_segments(pair.target.pool, pair.target.cache, imported.snapshot, imported.pages)
    _, want = pair.offer()
    assert name == "r"
    assert all(torch.equal(got[k], want[k]) for k in want)
    pair.audit()


def test_one_failing_sender_refuses_the_other_and_frees_what_both_brought():
    pair = Pair(senders=2)
    first, box1 = pair.send(0, LOW)
    pair.poll_until_written(0)
    pair.transports[1].fail = TransferError("cable", settled=True)
    second, box2 = pair.send(1, HIGH)
    pair.pump(first, second)
    for _ in range(5):
        pair.receivers[1].poll(0.01)
    first.join()
    assert box1["result"].outcome is Outcome.REFUSED
    assert box2["result"].outcome is Outcome.FAILED
    assert pair.target.pool.audit().in_use == 0
    assert pair.target.cache.audit().used == 0


def test_an_unsettled_failure_quarantines_until_the_sender_is_gone():
    pair = Pair()
    pair.transports[0].fail = TransferError("timed out", settled=False)
    assert pair.one()[0] is Outcome.FAILED
    pair.receivers[0].poll(0.1)
    assert pair.inbox.quarantined == 1
    assert pair.target.pool.audit().counts[SlotState.QUARANTINED] == 1
    pair.audit()
    # Another transfer runs meanwhile, elsewhere.
    pair.transports[0].fail = None
    assert pair.one(request="s")[0] is Outcome.ACCEPTED
    assert pair.inbox.quarantined == 1
    pair.audit()
    pair.pipes[0].close()
    with pytest.raises(ChannelClosedError):
        pair.receivers[0].poll(0.1)
    assert pair.inbox.quarantined == 0
    pair.audit()


def test_offering_again_replaces_what_was_left_of_the_last_try():
    pair = Pair()
    pair.transports[0].fail = TransferError("timed out", settled=False)
    pair.one()
    pair.receivers[0].poll(0.1)
    pair.transports[0].fail = None
    assert pair.one()[0] is Outcome.ACCEPTED
    assert pair.inbox.quarantined == 0
    assert pair.one()[0] is Outcome.ACCEPTED
    assert len(pair.arrived) == 1
    pair.inbox.forget("r")
    assert pair.one()[0] is Outcome.ACCEPTED
    assert len(pair.arrived) == 2
    pair.audit()


def test_a_sender_that_never_writes_is_timed_out():
    pair = Pair(timeout_s=0.05)
    header, _ = pair.offer()
    pair.channels[0].send({"type": "offer", "transfer": 1, "header": header})
    pair.receivers[0].poll(1.0)
    assert pair.channels[0].receive(1.0)["type"] == "grant"
    pair.receivers[0].poll(0.1)
    pair.receivers[0].poll(0.01)
    assert pair.inbox.quarantined == 1
    pair.channels[0].send({"type": "written", "transfer": 1})
    pair.receivers[0].poll(0.1)
    assert pair.channels[0].receive(1.0)["type"] == "refuse"
    assert pair.inbox.quarantined == 0
    assert pair.target.pool.audit().in_use == 0


def test_a_late_grant_is_turned_down():
    pair = Pair()
    thread, box = pair.send(timeout_s=0.05)
    thread.join()
    assert box["result"].outcome is Outcome.UNKNOWN
    pair.receivers[0].poll(0.1)  # grants what nobody waits for any more
    assert pair.target.pool.audit().counts[SlotState.STAGING] == 1
    assert pair.one(request="s")[0] is Outcome.ACCEPTED
    pair.receivers[0].poll(0.05)
    assert [name for name, _ in pair.arrived] == ["s"]
    pair.audit()
    assert pair.inbox.held() == []


def test_no_room_is_a_reason_not_an_error():
    pair = Pair()
    held = pair.target.pool.allocate(8)
    outcome, reason = pair.one()
    assert outcome is Outcome.REFUSED
    assert "no room" in reason
    pair.target.pool.free(held[0])
    assert pair.one()[0] is Outcome.ACCEPTED


def test_a_request_that_nobody_expects_is_refused():
    pair = Pair()
    pair.inbox._tokens_of = {"r": TOKENS}.__getitem__
    outcome, reason = pair.one(request="s")
    assert outcome is Outcome.REFUSED
    assert "'s' is not expected" in reason
    assert pair.one()[0] is Outcome.ACCEPTED


def test_garbage_on_the_channel_is_survived():
    pair = Pair()
    channel = pair.channels[0]
    for message in (
        {},
        {"transfer": "x"},
        {"transfer": 1, "type": "offer"},
        {"transfer": 1, "type": "offer", "header": {"request": ["r"]}},
        {"transfer": 9, "type": "written"},
        {"transfer": 9, "type": "failed"},
    ):
        channel.send(message)
        pair.receivers[0].poll(0.1)
    assert pair.target.pool.audit().in_use == 0
    pair.pipes[0].send_bytes(b"not json")
    with pytest.raises(ChannelClosedError):
        pair.receivers[0].poll(0.1)


def test_states_restored_from_host_copies_are_exact():
    """The host copy that preemption makes: the same path as an export and an import."""
    server = Server(prefix=False)
    (handle,) = server.pool.allocate(1)
    pages = server.cache.allocate(2)
    draw = torch.Generator().manual_seed(3)
    for tensor in [*server.pool.tensors.values(), server.cache.rows]:
        tensor.copy_(torch.randn(tensor.shape, generator=draw).to(tensor.dtype))
    server.pool.begin(handle, 0, 13)
    server.pool.commit(handle, 13)
    kept = export_segments(server.pool, server.cache, handle, pages)
    slot, fresh = server.pool.stage(), server.cache.allocate(2)
    part = whole_part(server.layout)
    import_segments(server.pool, server.cache, slot.slot, fresh, kept, part=part)
    back = server.pool.publish(slot, 13)
    again = export_segments(server.pool, server.cache, back, fresh)
    assert all(torch.equal(kept[name], again[name]) for name in kept)
    with pytest.raises(ValueError, match="heads"):
        export_segments(
            server.pool,
            server.cache,
            back,
            fresh,
            part=PartSpec(first_head=2, last_head=5, with_mla=True),
        )
