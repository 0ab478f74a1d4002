"""Prefill and decode as two real processes, driven through one scenario; a JSON report on stdout.

    python serving_pd.py (group | mooncake) (hundred | killed | frozen)

hundred: 100 requests, and before some of them states that must not be taken. killed: the sender
dies in the middle of a write. frozen: the receiver stops in the middle of one, and goes on later.
The decode process decides what "right" is: it computes every request alone and compares.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing as mp
import os
import signal
import sys
import tempfile
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from moe_comm.model.serving.channels import ChannelClosedError, GroupChannel, PipeChannel
from moe_comm.model.serving.handoff import Outcome, send_state
from moe_comm.model.serving.migration_header import header_checksum, make_header
from moe_comm.model.serving.receiver import Inbox, Receiver
from moe_comm.model.serving.requests import Request
from moe_comm.model.serving.segments import checksum, export_segments, whole_part
from moe_comm.model.serving.slots import SlotState
from moe_comm.model.serving.transports import GroupTransport, MooncakeTransport

sys.path.append(str(Path(__file__).parent))
from serving_cases import Server, alone, prompt, small_layout

# One slot of this layout (100 MB) takes long enough to write that a signal lands in the middle.
BIG = {"num_heads": 32, "head_dim_k": 256, "head_dim_v": 256, "kda_layer_ids": (0, *range(2, 13))}


def requests(num: int) -> list[Request]:
    return [
        Request(name=f"r{i}", prompt=prompt(1 + i % 14, seed=i), max_new_tokens=2)
        for i in range(num)
    ]


def connect(kind: str, rank: int, store: str, pipe: Connection | None, timeout_s: float):
    """(channel, transport) of one side; rank 0 is the sender."""
    if kind == "group":
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=2,
            timeout=timedelta(seconds=20),
        )
        return GroupChannel(1 - rank), GroupTransport(1 - rank, timeout_s=timeout_s)
    return PipeChannel(pipe), MooncakeTransport()


def prefill(kind: str, scenario: str, store: str, pipe, control: Connection) -> None:
    torch.set_num_threads(1)
    channel, transport = connect(kind, 0, store, pipe, 3.0)
    if scenario in ("killed", "frozen"):
        big(kind, channel, transport, control, scenario)
        return
    server = Server(prefix=False, num_slots=4, token_budget=64)
    results = []
    for i, item in enumerate(requests(100)):
        server.run(dataclasses.replace(item, hand_off=True))
        held = server.scheduler.tracked[item.name]
        part = whole_part(server.layout)
        segments = export_segments(server.pool, server.cache, held.state, held.pages)
        fields = {"request": item.name, "pending": held.generated, "part": part}
        header = make_header(server.layout, segments, tokens=item.prompt, **fields)
        if i % 33 == 0:
            for what, bad, data in wrong(server, header, segments, item):
                result = send_state(channel, transport, bad, data, timeout_s=20)
                results.append([what, result.outcome.value, result.reason])
        result = send_state(channel, transport, header, segments, timeout_s=20)
        results.append(["good", result.outcome.value, result.reason])
        if i % 33 == 0:
            # A sender that missed the answer asks again; the state is not taken twice.
            result = send_state(channel, transport, header, segments, timeout_s=20)
            results.append(["again", result.outcome.value, result.reason])
        if result.outcome is Outcome.ACCEPTED:
            control.send(("sums", item.name, {n: checksum(t) for n, t in segments.items()}))
        server.scheduler.let_go(item.name)
    server.expect_empty()
    control.send(("results", results))
    channel.close()


def wrong(server, header, segments, item):
    """(name, header, segments): states that must not be taken."""

    def reseal(**fields):
        changed = {**header, **fields}
        return {**changed, "header_sha256": header_checksum(changed)}

    name = "conv.k"
    damaged = {**segments, name: segments[name].clone()}
    damaged[name].view(torch.uint8)[0, 0, 0] ^= 1
    other = small_layout(model_id="another model")
    foreign = make_header(
        other,
        segments,
        request=item.name,
        tokens=item.prompt,
        pending=[1],
        part=whole_part(other),
    )
    yield "byte", header, damaged
    yield "fingerprint", foreign, segments
    yield "position", reseal(position=header["position"] + 1), segments
    yield "header", {**header, "pending": [3]}, segments


def big(kind: str, channel, transport, control: Connection, scenario: str) -> None:
    """One large state. A sender that is to be killed never gets past its write."""
    server = Server(small_layout(**BIG), num_slots=1, num_pages=1, max_seqs=1, prefix=False)
    (handle,) = server.pool.allocate(1)
    for tensor in server.pool.tensors.values():
        tensor[:, handle.slot] = 1
    server.pool.begin(handle, 0, 2)
    server.pool.commit(handle, 2)
    pages = server.cache.allocate(1)
    server.cache.rows[:, pages[0]] = 1
    segments = export_segments(server.pool, server.cache, handle, pages)
    part = whole_part(server.layout)
    header = make_header(
        server.layout, segments, request="big", tokens=[1, 2], pending=[3], part=part
    )
    write = transport.write

    def unfinished(target, regions, source):
        if kind == "group":
            source = {"recurrent": source["recurrent"]}
        write(target, regions, source)
        control.send(("half",))
        control.recv()

    if scenario == "killed" or kind == "group":
        transport.write = unfinished
    result = send_state(channel, transport, header, segments, timeout_s=4)
    control.send(("first", result.outcome.value, result.reason))
    control.recv()  # the receiver runs again
    transport.write = write
    outcomes = []
    for _ in range(5):
        result = send_state(channel, transport, header, segments, timeout_s=20)
        outcomes.append(result.outcome.value)
        if result.outcome is Outcome.ACCEPTED:
            break
        time.sleep(0.2)
    control.send(("then", outcomes))
    control.recv()
    channel.close()


def landed(server: Server, inbox: Inbox) -> bool:
    """Whether the first byte of a staged state is there."""
    return any(not server.pool.recurrent[0, h.slot, 0, 0, 0].isnan() for h, _ in inbox.held())


def decode(kind: str, scenario: str, store: str, pipe, control: Connection) -> None:
    torch.set_num_threads(1)
    channel, transport = connect(kind, 1, store, pipe, 8.0)
    large = scenario != "hundred"
    layout = small_layout(**(BIG if large else {}))
    slots, pages = (2, 2) if large else (3, 9)
    server = Server(layout, prefix=False, num_slots=slots, num_pages=pages, max_seqs=3)
    known = {item.name: item for item in requests(100)}
    known["big"] = Request(name="big", prompt=(1, 2), max_new_tokens=2)
    inbox = Inbox(server.pool, server.cache, tokens_of=lambda name: known[name].prompt)
    receiver = Receiver(inbox, channel, transport, timeout_s=2.0 if scenario == "frozen" else 8.0)
    control.send(("ready", os.getpid()))
    report = {"sums": {}, "wrong_logits": [], "quarantined_at_most": 0, "visible": []}
    struck = kind == "group" or not large
    end = time.monotonic() + 120
    while time.monotonic() < end:
        try:
            arrived = receiver.poll(0.001 if large else 0.1)
        except ChannelClosedError:
            break
        if not struck and landed(server, inbox):
            struck = True
            control.send(("landing",))
            if scenario == "frozen":
                os.kill(os.getpid(), signal.SIGSTOP)
        report["quarantined_at_most"] = max(report["quarantined_at_most"], inbox.quarantined)
        if arrived is None:
            server.scheduler.audit(inbox.held())
            continue
        name, imported = arrived
        report["visible"].append(name)
        there = export_segments(server.pool, server.cache, imported.snapshot, imported.pages)
        report["sums"][name] = {n: checksum(t) for n, t in there.items()}
        if name == "big":
            server.pool.release(imported.snapshot)
            server.cache.release(imported.pages)
            continue
        server.scheduler.adopt(known[name], imported)
        server.engine.run(max_steps=10)
        want = alone(known[name])
        (last,) = server.logits[name].values()
        if not torch.equal(last, want[len(known[name].prompt) + 1]):
            report["wrong_logits"].append(name)
    channel.close()
    server.expect_empty()
    report["states"] = {s.value: n for s, n in server.pool.audit().counts.items() if n}
    report["free_of_transfers"] = server.pool.audit().counts[SlotState.QUARANTINED] == 0
    control.send(("report", report))


def drive(kind: str, scenario: str) -> dict:
    context = mp.get_context("spawn")
    left, right = context.Pipe()
    ours, prefill_end = context.Pipe()
    theirs, decode_end = context.Pipe()
    store = tempfile.mkdtemp() + "/store"
    sender = context.Process(target=prefill, args=(kind, scenario, store, left, prefill_end))
    receiver = context.Process(target=decode, args=(kind, scenario, store, right, decode_end))
    out: dict = {"sums": {}}
    try:
        receiver.start()
        sender.start()
        for end in (left, right, prefill_end, decode_end):
            end.close()  # so that a process that ends closes its pipes
        _, receiver_pid = theirs.recv()
        if scenario == "killed":
            (ours if kind == "group" else theirs).recv()
            os.kill(sender.pid, signal.SIGKILL)
        elif scenario == "frozen":
            if kind == "group":
                ours.recv()
                os.kill(receiver_pid, signal.SIGSTOP)
                ours.send("go")
            else:
                theirs.recv()
            out["first"] = ours.recv()[1:]
            os.kill(receiver_pid, signal.SIGCONT)
            time.sleep(3)  # past the receiver's deadline
            ours.send("go")
            out["then"] = ours.recv()[1]
            ours.send("go")
        else:
            while (message := ours.recv())[0] == "sums":
                out["sums"][message[1]] = message[2]
            out["results"] = message[1]
        assert theirs.poll(60), "the decode process does not report"
        out["decode"] = theirs.recv()[1]
        receiver.join(20)
        sender.join(20)
        out["exit_codes"] = [sender.exitcode, receiver.exitcode]
    finally:
        for process in (sender, receiver):
            if process.is_alive():
                process.kill()
    return out


if __name__ == "__main__":
    print(json.dumps(drive(sys.argv[1], sys.argv[2])))
