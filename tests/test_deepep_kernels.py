"""The kernels that pack DeepEP's messages, interpreted, against the same in torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moe_comm.backends.c10d_routing import Located
from moe_comm.backends.deepep_messages import MessageForm
from moe_comm.backends.deepep_v1_ht import HighThroughput

WIDTH, TOPK = 5, 3


def located(num: int, num_ranks: int, generator: torch.Generator) -> Located:
    rank = torch.randint(-1, num_ranks, (num, TOPK), generator=generator, dtype=torch.int32)
    slot = torch.randint(0, WIDTH, (num, TOPK), generator=generator, dtype=torch.int32)
    slot = torch.where(rank >= 0, slot, -1)
    return Located(rank=rank, slot=slot, ids=torch.zeros(num, TOPK, dtype=torch.int64))


def check_pack(device: str, num: int, hidden: int, *, routing: bool, on_device: bool) -> None:
    from moe_comm.kernels.deepep_messages import pack_messages

    generator = torch.Generator().manual_seed(num)
    place = located(num, 4, generator)
    values = torch.randn(num, hidden, generator=generator).bfloat16()
    call = SimpleNamespace(
        topk_idx=place.ids, topk_weights=torch.rand(num, TOPK, generator=generator), payloads={}
    )
    form = MessageForm(call, values, None, routing=routing)
    row_bytes = form.num_bytes + 16 - form.num_bytes % 16
    wanted = torch.full((num + 2, row_bytes), 77, dtype=torch.uint8)
    form.write(wanted, place, rank=3, num_tokens=num, experts_a_rank=WIDTH)
    got = torch.full((num + 2, row_bytes), 77, dtype=torch.uint8, device=device)
    names = ("source", "token", "count", *(("ids", "weights") if routing else ()))
    pack_messages(
        values.to(device).view(torch.int32), place.rank.to(device), place.slot.to(device),
        call.topk_weights.to(device), got,
        num_tokens=torch.tensor(num, device=device) if on_device else num,
        source=3, experts_a_rank=WIDTH, start=form.start, at=form.layout.start(*names),
    )  # fmt: skip
    got = got.cpu()
    assert torch.equal(got[:num], wanted[:num])
    # Of a header, ids and weights mean nothing.
    for name in ("source", "token", "count"):
        for messages in (got, wanted):
            record = messages[num:, form.start : form.num_bytes]
            expected = {"source": 3, "token": -1, "count": num}[name]
            assert form.layout.view(record, name).tolist() == [expected] * 2


def check_destinations(device: str, num: int, num_ranks: int) -> None:
    from moe_comm.kernels.deepep_messages import destinations

    rank = located(num, num_ranks, torch.Generator().manual_seed(num + 9)).rank
    transport = SimpleNamespace(num_headers=2, _num_ranks=num_ranks)
    wanted = HighThroughput.route(transport, rank)
    goes, counts = destinations(rank.to(device), num_ranks=num_ranks, num_headers=2)
    assert torch.equal(goes.cpu(), wanted.goes)
    assert torch.equal(counts.cpu(), wanted.counts)


def check_all(device: str) -> None:
    for num, hidden in ((0, 8), (1, 2), (7, 30), (130, 4100)):
        check_pack(device, num, hidden, routing=True, on_device=num == 7)
        check_pack(device, num, hidden, routing=False, on_device=False)
        for num_ranks in (2, 4, 8):
            check_destinations(device, num, num_ranks)


def interpreted() -> None:
    """In a process of its own: TRITON_INTERPRET is read when triton is imported."""
    check_all("cpu")
    print("equal")


def test_interpreted():
    code = f"import runpy; runpy.run_path({str(Path(__file__))!r})['interpreted']()"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == "equal", done.stderr


@pytest.mark.gpu
def test_on_a_gpu():
    check_all("cuda")
