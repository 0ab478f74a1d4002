"""Prefill and decode in two real processes (`serving_pd.py`); Mooncake; a lost rank in a step."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from lost_rank import first_rank_says

from moe_comm.errors import BackendUnavailableError
from moe_comm.model.serving.transports import MooncakeTransport

NAMESPACE = ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
BOUNDS = """
import torch
from moe_comm.model.serving.staged_import import Region
from moe_comm.model.serving.transports import MooncakeTransport, TransferError
a, b = MooncakeTransport(), MooncakeTransport()
target = torch.zeros(64, dtype=torch.uint8)
a.expose([target])
source = {"x": torch.arange(32, dtype=torch.uint8)}
regions = [Region(address=target.data_ptr() + at, nbytes=16) for at in (8, 40)]
b.write(a.describe(), regions, source)
assert target[8:24].tolist() == list(range(16))
assert target[40:56].tolist() == list(range(16, 32))
assert target[:8].sum() == target[24:40].sum() == target[56:].sum() == 0
for bad, settled in (([regions[0]], True), ([Region(address=1 << 40, nbytes=32)], False)):
    try:
        b.write(a.describe(), bad, source)
    except TransferError as error:
        assert error.settled == settled
    else:
        raise SystemExit("a bad region was written")
a.withdraw([target])
try:
    b.write(a.describe(), regions, source)
except TransferError:
    print("right")
"""


def run_pair(kind: str, scenario: str) -> dict:
    script = Path(__file__).with_name("serving_pd.py")
    command = [sys.executable, str(script), kind, scenario]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MC_LOG_LEVEL": "ERROR"}
    if kind == "mooncake":
        # Its ports listen on every interface: keep them inside a namespace with nothing but lo.
        command = [*NAMESPACE, *command]
        env["MC_TRANSFER_TIMEOUT"] = "3"
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=150, env=env, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def need_mooncake() -> None:
    pytest.importorskip(
        "mooncake.engine",
        reason="mooncake-transfer-engine-non-cuda and libibverbs1 are needed",
        exc_type=ImportError,
    )
    if os.geteuid() != 0 or not shutil.which("unshare") or not shutil.which("ip"):
        pytest.skip("needs root, unshare and iproute2 for a network namespace")


def check_hundred(report: dict) -> None:
    decode = report["decode"]
    assert report["exit_codes"] == [0, 0]
    assert decode["visible"] == [f"r{i}" for i in range(100)]
    assert decode["sums"] == report["sums"]
    assert len(report["sums"]) == 100
    assert decode["wrong_logits"] == []
    assert decode["states"] == {"free": 3}
    kinds = {}
    for what, outcome, reason in report["results"]:
        kinds.setdefault(what, set()).add((outcome, reason.split(":")[0]))
    assert kinds == {
        "byte": {("refused", "conv.k")},
        "fingerprint": {("refused", "layout.model_id")},
        "position": {("refused", "position")},
        "header": {("refused", "header")},
        "good": {("accepted", "")},
        "again": {("accepted", "")},
    }


def check_killed(report: dict) -> None:
    assert report["exit_codes"] == [-9, 0]
    assert report["decode"]["visible"] == []
    assert report["decode"]["states"] == {"free": 2}


def test_a_hundred_requests_move_between_two_processes_over_torch_distributed():
    check_hundred(run_pair("group", "hundred"))


@pytest.mark.netns
def test_a_hundred_requests_move_between_two_processes_over_mooncake():
    need_mooncake()
    check_hundred(run_pair("mooncake", "hundred"))


@pytest.mark.slow
def test_a_sender_killed_in_the_middle_leaves_nothing_over_torch_distributed():
    check_killed(run_pair("group", "killed"))


@pytest.mark.netns
def test_a_sender_killed_in_the_middle_leaves_nothing_over_mooncake():
    need_mooncake()
    check_killed(run_pair("mooncake", "killed"))


@pytest.mark.slow
def test_a_frozen_receiver_breaks_the_pair_over_torch_distributed():
    """gloo gives a connection up for good, so nothing can be retried on it; nothing leaks."""
    report = run_pair("group", "frozen")
    assert report["first"][0] in ("failed", "unknown")
    assert set(report["then"]) == {"failed"}
    assert report["decode"]["visible"] == []
    assert report["decode"]["states"] == {"free": 2}


@pytest.mark.slow
@pytest.mark.netns
def test_a_frozen_receiver_quarantines_and_the_retry_is_taken_once_over_mooncake():
    need_mooncake()
    report = run_pair("mooncake", "frozen")
    assert report["first"][0] in ("failed", "unknown")
    assert report["then"][-1] == "accepted"
    assert report["decode"]["visible"] == ["big"]
    assert report["decode"]["states"] == {"free": 2}


@pytest.mark.netns
def test_mooncake_refuses_memory_that_was_not_offered():
    need_mooncake()
    done = subprocess.run(
        [*NAMESPACE, sys.executable, "-c", BOUNDS],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.stdout.splitlines()[-1:] == ["right"], done.stderr[-2000:]


def test_a_missing_mooncake_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mooncake", None)
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(BackendUnavailableError, match="pip install"):
        MooncakeTransport()


LOST = """
import datetime, sys, time
import torch.distributed as dist
from moe_comm.errors import PeerTimeoutError
from moe_comm.model.serving.lockstep import agree
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
got = agree(3 + rank, unfinished=rank == 1, now=float(rank), group=dist.group.WORLD)
assert (got.bucket, got.unfinished, got.now) == (4, True, 1.0)
if rank == 1:
    time.sleep(3)
    raise SystemExit
try:
    agree(1, unfinished=True, now=0.0, group=dist.group.WORLD, timeout_s=1.0)
except PeerTimeoutError as error:
    print("lost", error.phase, error.rank)
"""


LOST_STEP = """
import sys, time
import torch.distributed as dist
from serving_cases import Server
from moe_comm.errors import PeerTimeoutError
from moe_comm.model.parallel import Parallel
from moe_comm.model.serving.engine import Engine
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
group = Parallel.create(1, timeout_s=1.0).ep_group
server = Server()
engine = Engine(server.model, server.scheduler, group=group, timeout_s=1.0)
assert not engine.step()
if rank == 1:
    time.sleep(60)
    raise SystemExit
began = time.monotonic()
try:
    engine.step()
except PeerTimeoutError as error:
    print("lost", error.phase, error.rank, time.monotonic() - began < 10)
"""


def test_a_rank_that_does_not_come_to_a_step_is_an_error_in_time(tmp_path):
    assert first_rank_says(LOST, tmp_path / "store") == ["lost scheduler step 0"]


def test_an_engine_waits_as_long_as_it_was_told_and_its_process_ends(tmp_path):
    assert first_rank_says(LOST_STEP, tmp_path / "store") == ["lost scheduler step 0 True"]
