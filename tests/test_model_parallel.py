"""Tensor-parallel groups between processes."""

from __future__ import annotations

from lost_rank import first_rank_says

LOST = """
import sys, time
import torch
import torch.distributed as dist
from moe_comm.errors import PeerTimeoutError
from moe_comm.model.parallel import Parallel
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
parallel = Parallel.create(2, timeout_s=1.0)
assert parallel.all_reduce(torch.ones(3)).tolist() == [2.0] * 3
assert parallel.largest(rank, torch.device("cpu")) == 1
if rank == 1:
    time.sleep(60)
    raise SystemExit
for call in (
    lambda: parallel.all_reduce(torch.ones(3)),
    lambda: parallel.gather_columns(torch.ones(3, 2)),
    lambda: parallel.largest(3, torch.device("cpu")),
):
    began = time.monotonic()
    try:
        call()
    except PeerTimeoutError as error:
        print("lost", error.phase, error.rank, time.monotonic() - began < 10)
"""


def test_a_rank_that_does_not_come_is_an_error_in_time(tmp_path):
    """torch's own timeout of a group, half an hour over gloo, is not what was asked for."""
    phases = ("all_reduce", "all_gather", "agreement")
    told = first_rank_says(LOST, tmp_path / "store")
    assert told == [f"lost {phase} 0 True" for phase in phases]
