"""What every communicator does, whatever moves the rows: slots, chunks, hooks, tables, helpers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comm_cases import SHAPE, assert_same_bits, expert_rows
from rank_pool import RankContext, run_ranks

from moe_comm import EPConfig, ExpertPlacement, SlotError
from moe_comm.backends.reference import RankInput, ReferenceWorld
from moe_comm.handle import Dispatched
from moe_comm.launch.rank_data import RankData
from moe_comm.metrics import CallEvent

BACKENDS = ["c10d:exact", "c10d:dense", "reference"]


def y_of(comm: Any, d: Dispatched) -> torch.Tensor:
    """The experts' rows of this rank."""
    config = comm.config.replace(placement=comm.placement)
    return expert_rows(d, config, comm.rank, comm.num_ranks, torch.bfloat16)


def in_chunks(context: RankContext, backend: str, slots: int) -> None:
    """forward in chunks of 5 equals one dispatch and combine of everything."""
    config = EPConfig(**{**SHAPE, "num_slots": slots})
    tokens = [13, 2]
    data = RankData.create(config, rank=context.rank, num_tokens=tokens, seed=6)
    given = (data.x, data.topk_idx, data.topk_weights)
    with context.communicator(config, backend) as whole:
        d = whole.dispatch(*given)
        want = whole.combine(y_of(whole, d), d.handle)
    with context.communicator(config.replace(chunk_tokens=5), backend) as comm:
        calls = []

        def experts(d: Dispatched) -> torch.Tensor:
            calls.append(d.rows.shape[1])
            return y_of(comm, d)

        out = comm.forward(*given, experts)
        assert_same_bits("out", out, want)
        # 16 tokens of the bucket, whatever this rank has.
        assert calls == [5, 5, 5, 1]
        calls.clear()
        again = comm.forward(*given, experts, num_tokens=min(2, data.num_tokens), bucket=13)
        assert_same_bits("first two", again[:2], want[:2])
        assert not again[2:].any()
        assert calls == [5, 5, 3]
        with pytest.raises(ValueError, match="bucket: expected 0 to 16"):
            comm.forward(*given, experts, bucket=17)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("slots", [1, 2])
def test_forward_in_chunks(backend, slots):
    run_ranks(2, in_chunks, backend, slots)


def keeps_slots(context: RankContext, backend: str) -> None:
    """Two micro-batches overlap; rows stay until their slot is taken again."""
    config = EPConfig(**SHAPE)
    batches = [
        RankData.create(config, rank=context.rank, num_tokens=[9, 4], seed=seed)
        for seed in range(3)
    ]
    with context.communicator(config, backend) as comm:
        pending = [
            comm.dispatch(b.x, b.topk_idx, b.topk_weights, async_op=True) for b in batches[:2]
        ]
        arrived = [p.wait() for p in pending]
        assert pending[0].wait() is arrived[0]
        assert [d.handle.slot for d in arrived] == [0, 1]
        with pytest.raises(SlotError, match="all 2 slots"):
            comm.dispatch(batches[2].x, batches[2].topk_idx, batches[2].topk_weights)
        outs = [comm.combine(y_of(comm, d), d.handle) for d in reversed(arrived)][::-1]
        for batch, out in zip(batches[:2], outs, strict=True):
            d = comm.dispatch(batch.x, batch.topk_idx, batch.topk_weights)
            assert_same_bits("out", comm.combine(y_of(comm, d), d.handle), out)
        events: list[CallEvent] = []
        comm.add_hook(events.append)
        d = comm.dispatch(batches[2].x, batches[2].topk_idx, batches[2].topk_weights)
        comm.combine(y_of(comm, d), d.handle)
        assert [(e.phase, e.call, e.bucket) for e in events] == [
            ("dispatch", 4, 16), ("combine", 4, 16)
        ]  # fmt: skip
        counts = comm.metrics()
        assert (counts["dispatches"], counts["combines"]) == (5, 5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_slots_and_hooks(backend):
    run_ranks(2, keeps_slots, backend)


def moves_experts(context: RankContext, backend: str) -> None:
    """A new table in place: results are the reference's with the new table."""
    load = [float(e % 5) for e in range(40)]
    first = ExpertPlacement.from_load(load, 3, num_redundant=5)
    second = ExpertPlacement.from_load(load[::-1], 3, num_redundant=5)
    config = EPConfig(**SHAPE, placement=first)
    tokens = [6, 0, 11]
    data = RankData.create_all(config, num_tokens=tokens, seed=8)
    inputs = [RankInput(x=g.x, topk_idx=g.topk_idx, topk_weights=g.topk_weights) for g in data]
    mine = data[context.rank]
    with context.communicator(config, backend) as comm:
        for table in (first, second):
            comm.update_placement(table)
            world = ReferenceWorld(config.replace(placement=table), 3)
            want = world.dispatch(inputs)
            y = [
                expert_rows(w, world.config, rank, 3, torch.bfloat16) for rank, w in enumerate(want)
            ]
            d = comm.dispatch(mine.x, mine.topk_idx, mine.topk_weights)
            assert_same_bits("row_index", d.row_index, want[comm.rank].row_index)
            with pytest.raises(SlotError, match="no outstanding dispatch"):
                comm.update_placement(table)
            out = comm.combine(y_of(comm, d), d.handle)
            handles = [w.handle for w in want]
            assert_same_bits("out", out, world.combine(y, handles, sources=[comm.rank])[0])
        with pytest.raises(ValueError, match="slots a rank"):
            comm.update_placement(ExpertPlacement.contiguous(40, 3))
        with pytest.raises(ValueError, match="expected 3 ranks, got 2"):
            comm.update_placement(ExpertPlacement.contiguous(40, 2))


@pytest.mark.parametrize("backend", BACKENDS)
def test_update_placement(backend):
    run_ranks(3, moves_experts, backend)


def copies_out(context: RankContext) -> None:
    """Dispatched's helpers: the expert-major copy with any alignment, counts, sources."""
    config = EPConfig(**{**SHAPE, "dispatch_wire": "fp8"})
    data = RankData.create(config, rank=context.rank, num_tokens=[9, 3], seed=2)
    with context.communicator(config, "c10d") as comm:
        d = comm.dispatch(data.x, data.topk_idx, data.topk_weights)
        flat = d.dequantized_rows().flatten(0, 1)
        counts = d.counts()
        assert counts == d.num_tokens_per_expert.tolist()
        assert len(counts) == d.num_local_experts == comm.num_local_experts
        for alignment in (1, 8, 128):
            rows, offsets = d.expert_rows(alignment)
            used = torch.zeros(rows.shape[0], dtype=torch.bool)
            n = 0
            for expert, count in enumerate(counts):
                start = int(offsets[expert])
                assert start % alignment == 0
                for i in range(count):
                    assert torch.equal(rows[start + i], flat[int(d.row_index[n])])
                    source, token = d.source_of(n)
                    assert source * 16 + token == int(d.row_index[n])
                    used[start + i] = True
                    n += 1
            assert not rows[~used].any()
            assert rows.shape[0] == d.row_index.shape[0] + len(counts) * (alignment - 1)
        with pytest.raises(ValueError, match="alignment"):
            d.expert_rows(0)
        d.handle.release()
        d.handle.release()


def test_expert_major_copy():
    run_ranks(2, copies_out)


def repeats_itself(context: RankContext, backend: str) -> None:
    """The same inputs give the same bits, with other work in between."""
    config = EPConfig(**{**SHAPE, "combine_wire": "mxfp8"})
    data = RankData.create(config, rank=context.rank, num_tokens=[16, 16, 16, 16], seed=3)
    other = RankData.create(config, rank=context.rank, num_tokens=[1, 5, 9, 16], seed=4)
    outs = []
    with context.communicator(config, backend) as comm:
        for batch in (data, other, data, other, data):
            d = comm.dispatch(batch.x, batch.topk_idx, batch.topk_weights)
            out = comm.combine(y_of(comm, d), d.handle)
            if batch is data:
                outs.append(out)
    for out in outs[1:]:
        assert_same_bits("out", out, outs[0])


@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_runs_are_alike(backend):
    run_ranks(4, repeats_itself, backend)
