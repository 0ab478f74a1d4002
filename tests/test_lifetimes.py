"""What a communicator leaves behind: threads, sockets, process groups and messages, however it
ended; and process groups where ranks are in different numbers of others."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import deepep_double as double
import pytest
import torch
import torch.distributed as dist
from comm_cases import SHAPE
from rank_pool import RankContext, RankPool, run_ranks
from torch.distributed import distributed_c10d as c10d

from moe_comm import BackendUnavailableError, EPConfig
from moe_comm.backends import deepep
from moe_comm.backends.c10d_transport import Kind, Phase
from moe_comm.launch.rank_data import RankData


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(double.write_package(tmp_path_factory.mktemp("v1"), double.V1))


def held() -> dict[str, int]:
    """What this process holds."""
    gc.collect()
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
        "groups": len(c10d._world.pg_map),
        "names": len(c10d._world.pg_group_ranks),
    }


def assert_nothing_more(before: dict[str, int]) -> None:
    """Threads that were given up end a little later."""
    end = time.monotonic() + 10.0
    while any(held()[name] > before[name] for name in before) and time.monotonic() < end:
        time.sleep(0.05)
    after = held()
    assert all(after[name] <= before[name] for name in before), (before, after)


def one_call(context: RankContext, comm: Any, *, end: str = "combine") -> None:
    data = RankData.create(comm.config, rank=context.rank, num_tokens=[5] * context.num_ranks)
    if end == "in flight":
        comm.dispatch(data.x, data.topk_idx, data.topk_weights, async_op=True)
        return
    d = comm.dispatch(data.x, data.topk_idx, data.topk_weights)
    comm.combine(
        torch.zeros(d.row_index.shape[0], d.rows.shape[-1], dtype=torch.bfloat16), d.handle
    )


def lives(context: RankContext, folder: str, backend: str, end: str) -> None:
    """Three communicators one after the other, after a first that sets up what stays."""
    reduction = "node" if backend == "c10d:hierarchical" else "rank"
    config = EPConfig(**{**SHAPE, "reduction": reduction})
    before: dict[str, int] = {}
    with double.installed(folder if backend.startswith("deepep") else None):
        for number in range(4):
            with context.communicator(config, backend) as comm:
                one_call(context, comm, end=end)
            if number == 0:
                before = held()
        assert_nothing_more(before)


@pytest.mark.parametrize(
    ("backend", "end"),
    [
        ("c10d:exact", "combine"),
        ("c10d:dense", "combine"),
        ("c10d:hierarchical", "combine"),
        ("deepep:v1-ht", "combine"),
        ("deepep:v1-ll", "combine"),
        # Messages that nobody waited for would stop their connections: the next communicator's
        # construction would not end.
        ("c10d:exact", "in flight"),
        ("c10d:dense", "in flight"),
        ("c10d:hierarchical", "in flight"),
    ],
)
def test_a_communicator_leaves_nothing_behind(folder, backend, end):
    run_ranks(2, lives, folder, backend, end)


@contextlib.contextmanager
def failing(rank: int, how: str) -> Iterator[threading.Event]:
    """Rank 1's constructor raises, or waits for the event, once the process group is made."""
    real, go_on = deepep._transport, threading.Event()

    def construct(*args: Any) -> Any:
        if rank == 1 and how == "raises":
            raise RuntimeError("out of doors")
        if rank == 1:
            go_on.wait(20.0)
        return real(*args)

    deepep._transport = construct
    try:
        yield go_on
    finally:
        deepep._transport = real


def fails(context: RankContext, folder: str, how: str) -> None:
    config = EPConfig(**{**SHAPE, "timeout_s": 20.0 if how == "raises" else 0.5})
    before = held()
    with double.installed(folder), failing(context.rank, how) as go_on:
        for _ in range(2):
            go_on.clear()
            with pytest.raises(BackendUnavailableError, match=r"deepep: .*\(rank [01]\)"):
                context.communicator(config, "deepep:v1-ht")
            go_on.set()
        assert_nothing_more(before)
    # And the next one is well.
    with double.installed(folder):
        with context.communicator(EPConfig(**SHAPE), "deepep:v1-ht") as comm:
            one_call(context, comm)
        assert_nothing_more(before)


@pytest.mark.parametrize("how", ["raises", "is late"])
def test_a_construction_that_failed_leaves_nothing_behind(folder, how):
    run_ranks(2, fails, folder, how)


def among_others(context: RankContext, folder: str) -> float:
    """Ranks 0 and 1 are in one process group more than rank 2, as in a serving stack."""
    other = dist.new_group([0, 1])
    config = EPConfig(**SHAPE)
    start = time.monotonic()
    with double.installed(folder), context.communicator(config, "deepep:v1-ll") as comm:
        one_call(context, comm)
    before = held()
    comm = context.communicator(config, "c10d:exact")
    if context.rank:
        comm.mask_rank(0)
        d = comm.dispatch(torch.ones(2, config.hidden).bfloat16(),
                          torch.full((2, config.num_topk), config.num_experts - 1),
                          torch.ones(2, config.num_topk))  # fmt: skip
        assert d.num_tokens_per_rank.tolist() == [0, 2, 2]
        d.handle.release()
    comm.destroy()
    assert_nothing_more(before)
    took = time.monotonic() - start
    if context.rank < 2:
        dist.destroy_process_group(other)
    return took


def test_ranks_may_be_in_different_numbers_of_process_groups(folder):
    assert max(run_ranks(3, among_others, folder)) < 15.0


def ends_alone(context: RankContext) -> float:
    """Seconds until a communicator has ended that nobody sends rank 0's rows."""
    comm = context.communicator(EPConfig(**{**SHAPE, "timeout_s": 1.0}), "c10d:dense")
    if context.rank == 0:
        rows = {1: torch.zeros(64, dtype=torch.uint8)}
        comm._transport.all_to_all(Phase.DISPATCH, {}, rows, Kind.ROWS)
    else:
        # As long as its connection stays, the wait must end by itself.
        time.sleep(2.5)
    start = time.monotonic()
    comm.destroy()
    return time.monotonic() - start


def ends_torch_first(context: RankContext, folder: str) -> tuple[float, float]:
    with double.installed(folder):
        one = context.communicator(EPConfig(**SHAPE), "deepep:v1-ht")
        other = context.communicator(EPConfig(**SHAPE), "c10d:exact")
        waited = ends_alone(context)
        # The library's own would wait for the other rank, which may be gone.
        one.transport._buffer.destroy = lambda: None
        start = time.monotonic()
        dist.destroy_process_group()
        one.destroy()
        other.destroy()
    return waited, time.monotonic() - start


def test_a_communicator_ends_in_time_whatever_ended_before(folder):
    with RankPool(2) as ranks:
        (waited, first), (nothing, second) = ranks.run(ends_torch_first, folder)
    assert 0.5 < waited < 5.0
    assert nothing < 0.5
    assert max(first, second) < 5.0
