"""The slab and streams, on GPUs: calls on other streams, halves apart, graphs that give slots back,
copies that run beside the next call."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from rank_pool import RankContext
from slab_world import VirtualWorld
from test_slab_gpu import MODES, on_pair, world

from moe_comm import EPConfig
from moe_comm.calls import check_dispatch

gpu = pytest.mark.gpu
pair = [pytest.mark.gpu, pytest.mark.multi_gpu(2)]
# About a tenth of a second at 1.7 GHz.
LONG = 170_000_000


def calls_of(here: VirtualWorld, tokens: tuple[int, ...], slot: int, seed: int) -> tuple[Any, Any]:
    """(call of each rank, what the reference makes of them)."""
    inputs = here.inputs(tokens, torch.Generator().manual_seed(seed))
    calls = []
    for given in inputs:
        call = check_dispatch(
            here.config, here.device, given.x, given.topk_idx, given.topk_weights,
            num_tokens=None, bucket=None, payloads=None, handle=None,
        )  # fmt: skip
        call.slot, call.call = slot, slot
        calls.append(call)
    return calls, here.reference.dispatch(inputs)


@gpu
@pytest.mark.parametrize("mode", MODES)
def test_a_call_on_another_stream_comes_after_the_last(mode) -> None:
    """Slots share counters, flags and the memory of the index."""
    here = world(2, mode, max_tokens_per_rank=1024, hidden=64)
    first, want_first = calls_of(here, (1024, 900), 0, 1)
    second, want_second = calls_of(here, (1000, 1024), 1, 2)
    here.round_trip((1024, 900), torch.Generator().manual_seed(3))
    torch.cuda.synchronize()
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    got: list[list[Any]] = []
    for stream, calls in ((one, first), (other, second)):
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            if stream is one:
                torch.cuda._sleep(2 * LONG)
            pairs = list(zip(here.engines, calls, strict=True))
            for engine, call in pairs:
                engine.dispatch(call, send=True, receive=False)
            got.append([engine.dispatch(call, send=False, receive=True) for engine, call in pairs])
    done = other.record_event()
    time.sleep(0.03)
    assert not done.query()
    torch.cuda.synchronize()
    here.check_dispatched(got[0], want_first)
    here.check_dispatched(got[1], want_second)


@gpu
def test_rows_that_are_still_copied_keep_their_memory() -> None:
    """x is freed once both halves are enqueued, the second one on another stream, while the copies
    have not begun."""
    here = world(2, "high-throughput", max_tokens_per_rank=512, hidden=1024)
    here.round_trip((512, 512), torch.Generator().manual_seed(1))
    calls, want = calls_of(here, (512, 512), 0, 2)
    sender, waiter = torch.cuda.current_stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    for engine in here.engines:
        with torch.cuda.stream(engine._side):
            torch.cuda._sleep(LONG)
    for engine, call in zip(here.engines, calls, strict=True):
        engine.dispatch(call, send=True, receive=False)
    waiter.wait_stream(sender)
    with torch.cuda.stream(waiter):
        got = [
            engine.dispatch(call, send=False, receive=True)
            for engine, call in zip(here.engines, calls, strict=True)
        ]
    for call in calls:
        call.x = call.topk_idx.new_empty(0, 1024, dtype=torch.bfloat16)
    new = [torch.full_like(given, torch.nan) for given in [*got[0].rows, *got[1].rows]]
    torch.cuda.synchronize()
    here.check_dispatched(got, want)
    assert all(bool(tensor.isnan().all()) for tensor in new)


class TestPair:
    pytestmark = pair

    def test_a_graph_that_gives_its_slot_back(self) -> None:
        on_pair(given_back)

    def test_copies_beside_calls_by_stores(self) -> None:
        on_pair(mixed, 200)

    def test_a_failure_is_raised_by_the_next_call(self) -> None:
        on_pair(failing)


def given_back(context: RankContext) -> None:
    """Dispatch, slow reader, release, in a graph; no slot was released before it was captured. On
    one rank the reader is slow: the other's next rows must not overtake it."""
    config = EPConfig(num_experts=8, num_topk=2, hidden=4096, max_tokens_per_rank=512)
    with context.communicator(config, "slab:high-throughput") as comm:
        device = comm.device
        x = torch.zeros(512, 4096, device=device, dtype=torch.bfloat16)
        # Expert 0 lies on rank 0, expert 7 on rank 1: every row reaches both.
        idx = torch.tensor([[0, 7]], device=device).expand(512, 2).contiguous()
        weights = torch.ones(512, 2, device=device)
        seen = torch.zeros(2, 512, 4096, device=device, dtype=torch.bfloat16)

        def once() -> None:
            d = comm.dispatch(x, idx, weights)
            if context.rank == 0:
                torch.cuda._sleep(LONG // 50)
            seen.copy_(d.rows)
            d.handle.release()

        d = comm.dispatch(x, idx, weights)
        comm.combine(x.new_zeros(d.row_index.shape[0], 4096), d.handle)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            once()
        wrong = torch.zeros((), dtype=torch.int64, device=device)
        for step in range(1, 60):
            x.fill_(step)
            graph.replay()
            wrong += (seen != step).sum()
        comm.check()
        assert int(wrong) == 0
        graph.reset()


def mixed(context: RankContext, rounds: int) -> None:
    """Two micro-batches under way at a time, one by copies, one by stores, both ways, halves apart.
    With one choice of weight 1 and identity experts the combined row is the row itself."""
    from moe_comm import Group
    from moe_comm.backends.slab import SlabCommunicator
    from moe_comm.backends.slab_modes import SlabTuning

    config = EPConfig(num_experts=16, num_topk=1, hidden=1024, max_tokens_per_rank=512)
    limit = 256 * 1024 * 2
    tuning = SlabTuning(copy_from_bytes=limit, combine_lag=128)
    group = Group(device=torch.device("cuda", context.rank))
    with SlabCommunicator(config, group, tuning=tuning) as comm:
        assert (comm.mode_for(512), comm.mode_for(16)) == ("high-throughput", "low-latency")
        generator = torch.Generator(comm.device).manual_seed(context.rank)
        wrong = torch.zeros((), dtype=torch.int64, device=comm.device)
        ones = torch.ones(512, 1, device=comm.device)
        buckets = (512, 16)
        for step in range(rounds):
            order = buckets if step % 2 else buckets[::-1]
            given, pending = [], []
            for bucket in order:
                rows = bucket - step % 3
                x = torch.randn(rows, 1024, generator=generator, device=comm.device).bfloat16()
                idx = torch.randint(16, (rows, 1), generator=generator, device=comm.device)
                given.append(x)
                pending.append(comm.dispatch(x, idx, ones[:rows], bucket=bucket, async_op=True))
            arrived = [p.wait() for p in pending]
            sums = []
            for d in arrived:
                y = d.rows.flatten(0, 1)[d.row_index.clamp_min(0).long()]
                sums.append(comm.combine(y, d.handle, async_op=True))
            for x, out in zip(given, sums, strict=True):
                wrong += (out.wait() != x).sum()
        comm.check()
        assert int(wrong) == 0


def failing(context: RankContext) -> None:
    """Rank 1 does not come; rank 0's next call raises without check(), and without waiting for the
    device; in a capture likewise."""
    from moe_comm import PeerTimeoutError

    config = EPConfig.preset("k3-tiny", max_tokens_per_rank=8, timeout_s=1.0)
    with context.communicator(config, "slab") as comm:
        x = torch.zeros(8, 64, device=comm.device, dtype=torch.bfloat16)
        idx = torch.zeros(8, 16, dtype=torch.int64, device=comm.device)
        weights = torch.ones(8, 16, device=comm.device)
        if context.rank == 0:
            d = comm.dispatch(x, idx, weights)
            torch.cuda.synchronize()
            torch.cuda._sleep(5 * LONG)
            began = time.monotonic()
            with pytest.raises(PeerTimeoutError, match="rank 1") as caught:
                comm.combine(x[:1], d.handle)
            assert time.monotonic() - began < 0.2
            assert (caught.value.phase, caught.value.peer) == ("dispatch", 1)
            torch.cuda.synchronize()
            with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(PeerTimeoutError):
                comm.dispatch(x, idx, weights)
        else:
            time.sleep(3.0)
