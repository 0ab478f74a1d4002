"""Many choices of a low-latency dispatch: the receiver counts them in the same launch
(moe_comm.kernels.chunked_index). Under Triton's interpreter; cases run as test_slab_interpreted's
do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from interpreter import inside, outside

CPU = torch.device("cpu")


@outside
def test_counted_choices_under_the_interpreter(interpreted) -> None:
    interpreted()


def _world(num_ranks=3, counted=1 << 20, **shape):
    from slab_world import VirtualWorld

    from moe_comm import EPConfig
    from moe_comm.backends.slab_modes import SlabTuning

    config = EPConfig(
        **{"num_experts": 10, "num_topk": 4, "hidden": 32, "max_tokens_per_rank": 9} | shape
    )
    tuning = SlabTuning(mode="low-latency", ranked_choices=0, counted_choices=counted)
    return VirtualWorld(config, num_ranks, CPU, tuning)


@inside
@pytest.mark.parametrize(
    ("num_ranks", "tokens", "shape"),
    [
        (1, (5,), {}),
        (2, (1, 9), {"dispatch_wire": "fp8", "hidden": 160}),
        (3, (9, 0, 4), {}),
        (3, (0, 0, 0), {}),
        # Chunks of eight rows, one of them with rows of two sources, and the last of them in part.
        (2, (12, 9), {"max_tokens_per_rank": 12, "num_topk": 32, "num_experts": 34}),
        # Rows of fewer choices than cells, more experts than one program scans.
        (2, (20, 7), {"max_tokens_per_rank": 20, "hidden": 8, "num_topk": 7, "num_experts": 41}),
        (9, (3, 0, 1, 2, 3, 3, 0, 2, 1), {"max_tokens_per_rank": 3, "num_experts": 20}),
    ],
)
def test_round_trip(num_ranks, tokens, shape) -> None:
    world = _world(num_ranks, **shape)
    generator = torch.Generator().manual_seed(num_ranks)
    # Twice: the second call's counters have wrapped past 2^31.
    for _ in range(2):
        world.round_trip(tokens, generator)


@inside
def test_chunks_beyond_those_that_are_scanned_at_a_time(monkeypatch) -> None:
    from moe_comm.kernels import chunked_index

    monkeypatch.setattr(chunked_index, "SCANNED_CHUNKS", 2)
    world = _world(2, max_tokens_per_rank=24, num_topk=32, num_experts=40, hidden=8)
    inputs = world.inputs((24, 19), torch.Generator().manual_seed(8))
    world.check_dispatched(world.dispatch(inputs), world.reference.dispatch(inputs))


@inside
def test_more_choices_are_indexed_by_launches_of_their_own() -> None:
    world = _world(counted=35)
    assert world.engines[0].tuning.counted_choices < 9 * world.config.num_topk
    generator = torch.Generator().manual_seed(15)
    for tokens, bucket in (((9, 0, 4), 9), ((8, 3, 8), 8)):
        world.round_trip(tokens, generator, bucket=bucket)


@inside
def test_second_slot_and_another_bucket() -> None:
    """What programs of an index tell each other is a slot's own: the slots' counts are equal."""
    world = _world()
    generator = torch.Generator().manual_seed(9)
    for tokens, bucket, slot in (
        ((9, 2, 4), 9, 0), ((3, 2, 4), 4, 1), ((9, 9, 9), 9, 1), ((4, 0, 4), 4, 0),
    ):  # fmt: skip
        world.round_trip(tokens, generator, bucket=bucket, slot=slot)


@inside
def test_every_choice_of_one_expert() -> None:
    world = _world(3, num_topk=32, num_experts=34)
    inputs = world.inputs((9, 4, 8), torch.Generator().manual_seed(10))
    inputs = [replace(given, topk_idx=torch.full_like(given.topk_idx, 5)) for given in inputs]
    world.check_dispatched(world.dispatch(inputs), world.reference.dispatch(inputs))


@inside
def test_placement_with_copies_and_an_empty_rank() -> None:
    from moe_comm import ExpertPlacement

    placement = ExpertPlacement(num_experts=10, slots=(tuple(range(10)), (), (3, 3, 1)))
    _world(placement=placement).round_trip((9, 8, 7), torch.Generator().manual_seed(11))


@inside
@pytest.mark.parametrize("capacity", [1, 20])
def test_overflow_drops_the_last_rows_and_says_so(capacity) -> None:
    from moe_comm.status import StatusBit

    world = _world(max_expert_rows=capacity)
    inputs = world.inputs((9, 9, 9), torch.Generator().manual_seed(12), masked=0.0)
    world.check_dispatched(world.dispatch(inputs), world.reference.dispatch(inputs))
    for engine in world.engines:
        assert engine.read_status().bits == StatusBit.ROWS_OVERFLOW


@inside
@pytest.mark.parametrize("masked", [0.0, 1.0])
def test_a_rank_that_did_not_send_is_named(masked) -> None:
    """And nothing of its earlier call, or of this rank's, is taken for this one's, not even that
    choices are not here."""
    from moe_comm.status import StatusBit

    world = _world(3)
    generator = torch.Generator().manual_seed(13)
    world.round_trip((9, 9, 9), generator, masked=masked)
    world.engines[1].status.fill_(int(StatusBit.TIMEOUT))  # its sends are left out
    got = world.dispatch(world.inputs((9, 9, 9), generator, masked=0.0))
    status = world.engines[0].read_status()
    assert status.bits == StatusBit.TIMEOUT
    assert (status.phase, status.peer) == ("dispatch", 1)
    for rank in (0, 2):
        assert not got[rank].expert_offsets.any()
        assert bool((got[rank].row_index == -1).all())
        assert bool((got[rank].topk_idx == -1).all())


@inside
def test_a_masked_rank_contributes_nothing() -> None:
    world = _world(3)
    inputs = world.inputs((9, 9, 5), torch.Generator().manual_seed(14))
    want = world.reference.dispatch(world.mask_rank(1, inputs))
    got = world.dispatch(inputs)
    for rank in (0, 2):
        assert torch.equal(got[rank].expert_offsets, want[rank].expert_offsets)
        assert torch.equal(got[rank].row_index, want[rank].row_index)
