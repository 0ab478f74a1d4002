"""The slab's kernels on the CPU, under Triton's interpreter: indices, masks, layout, row copies."""

from __future__ import annotations

import pytest
import torch
from interpreter import inside, outside

CPU = torch.device("cpu")


@outside
def test_under_the_interpreter(interpreted) -> None:
    interpreted()


def _world(num_ranks=3, mode="low-latency", chunk=1 << 20, **shape):
    from slab_world import VirtualWorld

    from moe_comm import EPConfig
    from moe_comm.backends.slab_modes import SlabTuning

    config = EPConfig(
        **{"num_experts": 10, "num_topk": 4, "hidden": 48, "max_tokens_per_rank": 9} | shape
    )
    tuning = SlabTuning(mode=mode, combine_lag=chunk)
    return VirtualWorld(config, num_ranks, CPU, tuning)


@inside
@pytest.mark.parametrize("mode", ["low-latency", "high-throughput"])
@pytest.mark.parametrize(
    ("num_ranks", "tokens"), [(1, (5,)), (2, (1, 9)), (3, (9, 0, 4)), (3, (0, 0, 0))]
)
def test_round_trip(mode, num_ranks, tokens) -> None:
    world = _world(num_ranks, mode, chunk=4)
    generator = torch.Generator().manual_seed(num_ranks)
    # Twice: the second call's counters have wrapped past 2^31.
    for _ in range(2):
        world.round_trip(tokens, generator)


@inside
@pytest.mark.parametrize("mode", ["low-latency", "high-throughput"])
@pytest.mark.parametrize("wire", ["fp8", "mxfp8"])
def test_quantized_wires(mode, wire) -> None:
    world = _world(2, mode, dispatch_wire=wire, combine_wire=wire, hidden=160)
    world.round_trip((9, 3), torch.Generator().manual_seed(5))


@inside
@pytest.mark.parametrize(
    "options", [{"layout": "rows"}, {"weights_applied": True}, {"with_bias": True}]
)
def test_combine_options(options) -> None:
    _world().round_trip((9, 2, 5), torch.Generator().manual_seed(7), **options)


@inside
def test_bucket_below_the_capacity_and_second_slot() -> None:
    _world().round_trip((3, 2, 4), torch.Generator().manual_seed(8), bucket=4, slot=1)


@inside
def test_placement_with_copies_and_an_empty_rank() -> None:
    from moe_comm import ExpertPlacement

    placement = ExpertPlacement(num_experts=10, slots=(tuple(range(10)), (), (3, 3, 1)))
    world = _world(placement=placement)
    world.round_trip((9, 8, 7), torch.Generator().manual_seed(9))


@inside
@pytest.mark.parametrize("capacity", [1, 20])
def test_overflow_drops_the_last_rows_and_says_so(capacity) -> None:
    from moe_comm.status import StatusBit

    world = _world(max_expert_rows=capacity)
    inputs = world.inputs((9, 9, 9), torch.Generator().manual_seed(10), masked=0.0)
    want = world.reference.dispatch(inputs)
    world.check_dispatched(world.dispatch(inputs), want)
    for engine in world.engines:
        assert engine.read_status().bits == StatusBit.ROWS_OVERFLOW
        assert engine.read_status().bits == StatusBit(0)


@inside
def test_ids_out_of_range_count_as_masked() -> None:
    from moe_comm.backends.reference import RankInput
    from moe_comm.status import StatusBit

    world = _world(2)
    inputs = world.inputs((4, 4), torch.Generator().manual_seed(11))
    bad = inputs[0].topk_idx.clone()
    bad[1, 2], bad[2, 0] = 10, -2
    inputs[0] = RankInput(x=inputs[0].x, topk_idx=bad, topk_weights=inputs[0].topk_weights)
    want = world.reference.dispatch(inputs)
    world.check_dispatched(world.dispatch(inputs), want)
    assert [e.read_status().bits for e in world.engines] == [StatusBit.INVALID_ID, StatusBit(0)]


@inside
def test_payloads_travel() -> None:
    world = _world(2, max_payload_bytes=48)
    generator = torch.Generator().manual_seed(12)
    inputs = world.inputs((9, 4), generator)
    payloads = [
        {"a": torch.randn(n, 3, generator=generator), "b": torch.arange(n, dtype=torch.int64)}
        for n in (9, 4)
    ]
    from dataclasses import replace

    inputs = [replace(given, payloads=p) for given, p in zip(inputs, payloads, strict=True)]
    want = world.reference.dispatch(inputs)
    world.check_dispatched(world.dispatch(inputs, payloads=payloads), want)


@inside
@pytest.mark.parametrize("tokens", [(3, 0, 1, 2, 3, 3, 0, 2, 1), (0,) * 9])
def test_more_ranks_than_loops_are_unrolled_for(tokens) -> None:
    """Nine ranks, of which the last sources of some experts, and duplicates, decide positions."""
    world = _world(9, num_experts=20, max_tokens_per_rank=3, hidden=16)
    world.round_trip(tokens, torch.Generator().manual_seed(15))


@inside
def test_ranked_choices_of_one_expert() -> None:
    """Every choice on one expert: order within it is all there is."""
    from dataclasses import replace

    world = _world(3)
    inputs = world.inputs((9, 4, 9), torch.Generator().manual_seed(16))
    inputs = [replace(given, topk_idx=torch.full_like(given.topk_idx, 5)) for given in inputs]
    want = world.reference.dispatch(inputs)
    world.check_dispatched(world.dispatch(inputs), want)


@inside
def test_a_rank_that_did_not_send_is_named() -> None:
    from moe_comm.status import StatusBit

    world = _world(3)
    inputs = world.inputs((4, 4, 4), torch.Generator().manual_seed(13))
    world.engines[1].status.fill_(int(StatusBit.TIMEOUT))  # its sends are left out
    got = world.dispatch(inputs)
    status = world.engines[0].read_status()
    assert status.bits == StatusBit.TIMEOUT
    assert (status.phase, status.peer) == ("dispatch", 1)
    assert status.wanted is not None
    assert status.seen is not None
    # Each program that puts ids would have released once.
    assert 0 < (status.wanted - status.seen) % 2**32 < 10
    assert int(got[0].expert_offsets[-1]) == 0
    assert bool((got[0].row_index == -1).all())
    rows = [torch.zeros(d.row_index.shape[0], 48, dtype=torch.bfloat16) for d in got]
    assert bool(world.combine(rows, got)[0].isnan().all())


@inside
def test_a_masked_rank_contributes_nothing() -> None:
    world = _world(3)
    generator = torch.Generator().manual_seed(14)
    inputs = world.inputs((6, 0, 5), generator)
    want = world.reference.dispatch(world.mask_rank(1, inputs))
    got = world.dispatch(inputs)
    for rank in (0, 2):
        assert torch.equal(got[rank].expert_offsets, want[rank].expert_offsets)
        assert torch.equal(got[rank].row_index, want[rank].row_index)
    rows = [torch.randn(d.row_index.shape[0], 48, generator=generator).bfloat16() for d in want]
    combined = world.reference.combine(rows, [d.handle for d in want], masked_ranks=[1])
    outs = world.combine(rows, got)
    for rank in (0, 2):
        torch.testing.assert_close(outs[rank], combined[rank], rtol=2**-6, atol=2**-6)


@inside
@pytest.mark.parametrize("one_launch", [True, False])
@pytest.mark.parametrize("shape", [(5, 4, 3, 20), (70, 16, 40, 30), (300, 4, 33, 1200)])
def test_expert_index_equals_the_reference(one_launch, shape) -> None:
    from moe_comm.kernels.expert_index import expert_index
    from moe_comm.layout import expert_index as reference

    rows, topk, experts, capacity = shape
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(-1, experts, (rows, topk), generator=generator, dtype=torch.int32)
    want = reference(ids, num_local_experts=experts, capacity=capacity)
    status = torch.zeros(8, dtype=torch.int32)
    offsets, row_index, position = expert_index(
        ids, num_local_experts=experts, capacity=capacity, status=status, one_launch=one_launch
    )
    assert torch.equal(offsets, want.expert_offsets)
    assert torch.equal(row_index, want.row_index)
    assert torch.equal(position, want.choice_position)
    assert bool(status[0]) == bool(want.num_dropped)


@inside
def test_status_bits_agree_with_the_library() -> None:
    from moe_comm.kernels import signal
    from moe_comm.status import StatusBit

    for name in ("INVALID_ID", "ROWS_OVERFLOW", "TIMEOUT", "PHASE"):
        assert getattr(signal, name).value == int(StatusBit[name])
