"""The slab at its edges, under Triton's interpreter: odd sizes, wide ids, released slots, refused
calls, tables that change. Cases run as test_slab_interpreted's do."""

from __future__ import annotations

import pytest
import torch
from interpreter import inside, outside
from test_slab_interpreted import CPU, _world


@outside
def test_edges_under_the_interpreter(interpreted) -> None:
    interpreted()


@inside
@pytest.mark.parametrize("wire", ["fp8", "mxfp8"])
def test_high_throughput_combine_where_rows_and_bucket_are_odd(wire) -> None:
    world = _world(2, "high-throughput", chunk=4, combine_wire=wire, hidden=161)
    world.round_trip((9, 3), torch.Generator().manual_seed(15))


@inside
@pytest.mark.parametrize("wire", ["bf16", "fp8", "mxfp8"])
def test_a_nan_of_all_ones_is_returned_as_a_nan(wire) -> None:
    """All ones mark memory that no partial sum has come to."""
    world = _world(2, chunk=4, hidden=64, combine_wire=wire)
    got = world.dispatch(world.inputs((9, 3), torch.Generator().manual_seed(17), masked=0.0))
    rows = [torch.ones(2, d.handle.bucket, 64, dtype=torch.bfloat16) for d in got]
    for y in rows:
        y[:, 1].view(torch.int16).fill_(-1)
    for out in world.combine(rows, got, layout="rows"):
        assert bool(out[1].isnan().all())
        assert not bool(out[[0, 2]].isnan().any())
    assert all(not engine.status.any() for engine in world.engines)
    world.check_returned_rows_are_empty()


@inside
def test_words_of_an_earlier_call_are_not_taken_for_this_ones() -> None:
    """Where choices are ranked at their source, words lie elsewhere for another bucket: whatever
    was there before, a rank waits for what a late one has not put yet, and takes nothing of it."""
    from moe_comm.calls import check_dispatch
    from moe_comm.status import StatusBit

    world = _world(2)
    generator = torch.Generator().manual_seed(18)
    for tokens, bucket in (((9, 3), 9), ((4, 2), 4), ((9, 9), 9), ((5, 5), 5), ((9, 1), 9)):
        world.round_trip(tokens, generator, bucket=bucket)
    inputs = world.inputs((9, 9), generator, masked=0.0)
    calls = [
        check_dispatch(
            world.config, CPU, given.x, given.topk_idx, given.topk_weights, num_tokens=None,
            bucket=None, payloads=None, handle=None,
        )
        for given in inputs
    ]  # fmt: skip
    for call in calls:
        call.slot, call.call = 0, 0
    got = world.engines[0].dispatch(calls[0], send=True, receive=True)
    assert world.engines[0].read_status().bits == StatusBit.TIMEOUT
    assert bool((got.topk_idx == -1).all())
    assert not got.expert_offsets.any()
    assert bool((got.row_index == -1).all())


@inside
def test_ids_beyond_32_bits_count_as_masked() -> None:
    from moe_comm.backends.reference import RankInput
    from moe_comm.status import StatusBit

    world = _world(2)
    inputs = world.inputs((4, 4), torch.Generator().manual_seed(17))
    for rank, wide in enumerate((2**32 + 1, 2**32 - 1)):
        bad = inputs[rank].topk_idx.clone()
        bad[1, 2] = wide
        inputs[rank] = RankInput(
            x=inputs[rank].x, topk_idx=bad, topk_weights=inputs[rank].topk_weights
        )
    want = world.reference.dispatch(inputs)
    world.check_dispatched(world.dispatch(inputs), want)
    assert [e.read_status().bits for e in world.engines] == [StatusBit.INVALID_ID] * 2


@inside
@pytest.mark.parametrize("limit", [20, 17])
def test_payloads_in_a_second_slot_of_odd_size(limit) -> None:
    from dataclasses import replace

    world = _world(3, max_payload_bytes=limit)
    inputs = world.inputs((9, 4, 1), torch.Generator().manual_seed(18))
    payloads = [{"a": torch.arange(n, dtype=torch.int64)} for n in (9, 4, 1)]
    inputs = [replace(given, payloads=p) for given, p in zip(inputs, payloads, strict=True)]
    want = world.reference.dispatch(inputs)
    for slot in (0, 1):
        world.check_dispatched(world.dispatch(inputs, payloads=payloads, slot=slot), want)


@inside
@pytest.mark.parametrize("mode", ["low-latency", "high-throughput"])
def test_an_empty_bucket(mode) -> None:
    _world(2, mode).round_trip((0, 0), torch.Generator().manual_seed(19), bucket=0)


def _communicator(**shape):
    from types import SimpleNamespace

    from moe_comm import EPConfig
    from moe_comm.backends.slab import SlabCommunicator, region_sizes
    from moe_comm.symmetric import VirtualSymmetricMemory

    config = EPConfig(num_experts=3, num_topk=2, hidden=8, max_tokens_per_rank=4, **shape)
    memory = VirtualSymmetricMemory.create(1, region_sizes(config, 1), CPU)[0]
    group = SimpleNamespace(rank=0, num_ranks=1, device=CPU)
    return SlabCommunicator(config, group, memory=memory)


@inside
def test_no_routing_is_repeated_after_another_placement() -> None:
    from moe_comm import ExpertPlacement, SlotError

    comm = _communicator()
    x = torch.ones(4, 8, dtype=torch.bfloat16)
    ids = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 0]])
    d = comm.dispatch(x, ids, torch.ones(4, 2))
    d.handle.release()
    again = comm.dispatch(x, handle=d.handle)
    assert torch.equal(again.row_index, d.row_index)
    again.handle.release()
    comm.update_placement(ExpertPlacement(num_experts=3, slots=((2, 1, 0),)))
    with pytest.raises(SlotError, match="the placement or the masked ranks have changed"):
        comm.dispatch(x, handle=again.handle)


@inside
def test_a_refused_combine_leaves_the_handle_good() -> None:
    """A slot that was freed without word of it would be dispatched into with the same count
    again, which every wait has seen already."""
    comm = _communicator(combine_wire="none")
    x = torch.ones(4, 8, dtype=torch.bfloat16)
    d = comm.dispatch(x, torch.zeros(4, 2, dtype=torch.int64), torch.ones(4, 2))
    y = torch.ones(d.row_index.shape[0], 8, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"y: expected bfloat16, float16 or float32.*float64"):
        comm.combine(y, d.handle)
    assert torch.equal(comm.combine(y.float(), d.handle), torch.full((4, 8), 2.0))


@inside
def test_a_handle_is_released_by_its_own_communicator_only() -> None:
    comm, other = _communicator(), _communicator()
    x = torch.ones(1, 8, dtype=torch.bfloat16)
    d = comm.dispatch(x, torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 2))
    with pytest.raises(ValueError, match="handle of this communicator"):
        other.release(d.handle)
    assert not d.handle.released


@inside
def test_survivors_of_a_half_heard_rank_go_on_together() -> None:
    """Rank 0 heard the lost rank and went on to combine, rank 2 did not. Unless they agree on
    counters, rank 2 takes that combine's release for the next one's."""
    from moe_comm.calls import check_combine, check_dispatch
    from moe_comm.status import StatusBit

    world = _world(3)
    generator = torch.Generator().manual_seed(22)
    inputs = world.inputs((4, 4, 4), generator)
    before = world.engines[2].flags[:, 1].clone()
    calls = []
    for given in inputs:
        call = check_dispatch(
            world.config, CPU, given.x, given.topk_idx, given.topk_weights, num_tokens=None,
            bucket=None, payloads=None, handle=None,
        )  # fmt: skip
        call.slot = call.call = 0
        calls.append(call)

    def combining(d):
        y = torch.zeros(d.row_index.shape[0], 48, dtype=torch.bfloat16)
        return check_combine(
            world.config, CPU, 3, y, d.handle, layout="expert", weights_applied=False, bias=None,
            out=None, num_expert_rows=y.shape[0],
        )  # fmt: skip

    pairs = list(zip(world.engines, calls, strict=True))
    for engine, call in pairs:
        engine.dispatch(call, send=True, receive=False)
    world.engines[2].flags[:, 1] = before
    for engine, call in (pairs[0], pairs[2]):
        d = engine.dispatch(call, send=False, receive=True)
        engine.combine(combining(d), send=True, receive=False)
    survivors = [world.engines[0], world.engines[2]]
    for engine in survivors:
        engine.mask_rank(1)
    counters = [engine.read_counters() for engine in survivors]
    assert counters[0] != counters[1]
    for engine in survivors:
        engine.agree_on_counters(counters)
    for engine, call in (pairs[0], pairs[2]):
        engine.dispatch(call, send=True, receive=False)
    arrived = [e.dispatch(c, send=False, receive=True) for e, c in (pairs[0], pairs[2])]
    assert [engine.read_status().bits for engine in survivors] == [StatusBit(0)] * 2
    back = [combining(d) for d in arrived]
    survivors[1].combine(back[1], send=True, receive=True)
    # Rank 0 has not combined yet, and that is seen.
    assert survivors[1].read_status().bits == StatusBit.TIMEOUT
    assert survivors[1].read_status().peer == 0


PARTIALS = ("combine_rows", "combine_scales")


def _late_rows(world, seed, late, names=PARTIALS):
    """Combine up to where rank 0 waits, of which the rows of ranks `late` are taken away, or parts
    of them. Returns what gives them back, what rank 0 must get, its dispatch, and what makes it
    wait."""
    from moe_comm.calls import check_combine

    generator = torch.Generator().manual_seed(seed)
    inputs = world.inputs((3, 1, 0, 2), generator, masked=0.4)
    got = world.dispatch(inputs)
    rows = [
        torch.randn(d.row_index.shape[0], world.config.hidden, generator=generator).bfloat16()
        for d in got
    ]
    want = world.combine(rows, got)[0]
    got = world.dispatch(inputs)
    calls = [
        check_combine(
            world.config, CPU, world.num_ranks, y, d.handle, layout="expert",
            weights_applied=False, bias=None, out=None, num_expert_rows=y.shape[0],
        )
        for y, d in zip(rows, got, strict=True)
    ]  # fmt: skip
    for engine, call in zip(world.engines, calls, strict=True):
        engine.combine(call, send=True, receive=False)
    memory = world.memories[0]
    kept = []
    for name in names:
        of_source = memory.regions.sizes[name] // (world.config.num_slots * world.num_ranks)
        whole = memory.view(name, (world.num_ranks, of_source), torch.uint8)
        kept.append((whole, whole[late]))
        whole[late] = 0xFF

    def give_back() -> None:
        for whole, rows_of_late in kept:
            whole[late] = rows_of_late

    def receive() -> torch.Tensor:
        return world.engines[0].combine(calls[0], send=False, receive=True)

    return give_back, want, got[0], receive


@inside
@pytest.mark.parametrize("wire", ["bf16", "fp8"])
def test_partial_sums_that_come_late_are_waited_for(wire, monkeypatch) -> None:
    """Among many ranks those of several are read at a time: what is late is asked for again."""
    from moe_comm.kernels import returned_rows

    world = _world(4, num_experts=8, hidden=64, combine_wire=wire, max_tokens_per_rank=3)
    give_back, want, _, receive = _late_rows(world, 31, late=[1, 3])
    waited = []

    def come(spins, start, *rest):
        del spins, rest
        if not waited:
            give_back()
        waited.append(start)
        return start * 0 > 0, start

    monkeypatch.setattr(returned_rows, "lose_patience", come)
    assert torch.equal(receive(), want)
    assert waited
    memory = world.memories[0]
    for name in PARTIALS:
        size = memory.regions.sizes[name]
        assert bool((memory.view(name, (size,), torch.uint8) == 0xFF).all()), name


@inside
@pytest.mark.parametrize(
    ("wire", "names"), [("bf16", PARTIALS), ("fp8", PARTIALS), ("fp8", ["combine_scales"])]
)
def test_a_partial_sum_that_never_comes_costs_its_tokens_alone(wire, names) -> None:
    from moe_comm.status import StatusBit

    world = _world(4, num_experts=8, hidden=64, combine_wire=wire, max_tokens_per_rank=3)
    _, want, dispatched, receive = _late_rows(world, 32, late=[3], names=names)
    out = receive()
    lost = (dispatched.handle.choice_rank == 3).any(-1)
    assert bool(lost.any())
    assert not bool(lost.all())
    assert bool(out[lost].isnan().all())
    assert torch.equal(out[~lost], want[~lost])
    status = world.engines[0].read_status()
    assert status.bits & StatusBit.TIMEOUT
    assert status.peer == 3
