"""Gathered records: over collectives alone, as with a vendor's plug-in, instead of one message a
peer. Mode exact's two ways, dispatches that are expected to be full, and facts that differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comm_cases import SHAPE, Case, assert_same_bits, check_case, expert_rows, other_group
from rank_pool import RankContext, run_ranks
from test_c10d_modes import OPTIONS, WIRES, case_of

from moe_comm import ConfigMismatchError, EPConfig, PhaseError
from moe_comm.backends import c10d_blocks, c10d_exact
from moe_comm.backends.reference import RankInput, ReferenceWorld
from moe_comm.launch.rank_data import RankData

# Ranks and choices for which all rows go to all ranks.
FULL = {"num_experts": 24, "num_topk": 24, "hidden": 40}


def over_collectives(context: RankContext, cases: list[Case], packed: bool) -> None:
    """`packed`: with records that are too large to be gathered."""
    limit = c10d_exact._GATHERED_BYTES
    c10d_exact._GATHERED_BYTES = 0 if packed else limit
    try:
        for case in cases:
            check_case(context, case, "vendor")
    finally:
        c10d_exact._GATHERED_BYTES = limit


@pytest.mark.parametrize("packed", [False, True])
def test_exact_options(packed):
    options = [case_of("exact", 4, **options) for options in OPTIONS.values()]
    run_ranks(4, over_collectives, options, packed)


@pytest.mark.parametrize("mode", ["exact", "dense"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_wires(mode, num_ranks):
    cases = [
        case_of(
            mode, num_ranks, routing="zipf:1+masked:0.2",
            config={"dispatch_wire": wire, "combine_wire": wire},
        )
        for wire in WIRES
    ]  # fmt: skip
    run_ranks(num_ranks, over_collectives, cases, False)


# T of each rank, call by call: full ones in a row, and what ends them.
CALLS = ((16, 16), (16, 16), (16, 16), (16, 16), (16, 3), (16, 16), (5, 0), *((16, 16),) * 3)


def counted_calls(context: RankContext, case: Case) -> tuple[list[bool], int]:
    """Whether each call was expected to be full; and the bytes that this rank sent."""
    expected: list[bool] = []
    send = c10d_exact.ExactCommunicator._send_new

    def noted(comm: Any, call: Any, *args: Any, **options: Any) -> Any:
        recent = comm._recent.get(call.bucket)
        if recent is not None:
            recent.settle()
        expected.append(recent is not None and recent.expects)
        return send(comm, call, *args, **options)

    c10d_exact.ExactCommunicator._send_new = noted
    try:
        metrics = check_case(context, case, "vendor")
    finally:
        c10d_exact.ExactCommunicator._send_new = send
    return expected, metrics["sent_bytes"]


@pytest.mark.parametrize("split", [False, True])
def test_dispatches_that_are_expected_to_be_full(split):
    """From the third full one in a row on; one that is not full ends it, and is right all the
    same."""
    case = case_of("exact", 2, 2, config=FULL, num_tokens=CALLS, split=split, routing="uniform")
    counted = run_ranks(2, counted_calls, case)
    block = c10d_blocks.HEAD_BYTES + 16 * 24 * 8
    # In front of rows records take up a multiple of 256 bytes, with 16 to spare.
    before_rows = -(-(block + 16) // 256) * 256
    for rank, (expected, sent) in enumerate(counted):
        assert expected == [False, False, True, True, True, *(False,) * 4, True]
        # The fifth sends the whole bucket, and brings it back.
        calls = list(zip(expected, CALLS, strict=True))
        blocks = sum(before_rows if full else block for full in expected)
        there = sum(16 if full else tokens[rank] for full, tokens in calls)
        back = sum(16 if full else tokens[1 - rank] for full, tokens in calls)
        assert sent == blocks + (there + back) * 2 * FULL["hidden"]


def test_a_call_with_less_than_the_bucket_is_never_full():
    tokens = ((15, 15),) * 5
    case = case_of("exact", 2, 2, config=FULL, num_tokens=tokens)
    for expected, _ in run_ranks(2, counted_calls, case):
        assert expected == [False] * 5


def test_tokens_that_do_not_reach_all_ranks_are_never_full():
    case = case_of("exact", 2, 2, num_tokens=((16, 16),) * 5, routing="hot:6")
    for expected, _ in run_ranks(2, counted_calls, case):
        assert expected == [False] * 5


def clamped(context: RankContext, mode: str) -> list[int]:
    """T on the device, out of range: T of each rank as it arrives."""
    config = EPConfig(**SHAPE)
    with context.communicator(config, f"c10d:{mode}", pg=other_group("vendor")) as comm:
        data = RankData.create(config, rank=context.rank, num_tokens=[7, 7])
        count = torch.tensor(900 if context.rank else -3)
        d = comm.dispatch(data.x, data.topk_idx, data.topk_weights, num_tokens=count)
        d.handle.release()
        tokens: list[int] = d.num_tokens_per_rank.tolist()
        return tokens


@pytest.mark.parametrize("mode", ["exact", "dense"])
def test_a_device_count_is_clamped(mode):
    assert run_ranks(2, clamped, mode) == [[0, 7], [0, 7]]


def facts_differ(context: RankContext, name: str) -> None:
    """Ranks dispatch with rows of another dtype, or are in different calls."""
    config = EPConfig(**{**SHAPE, "dispatch_wire": "none", "combine_wire": "none"})
    with context.communicator(config, "c10d:exact", pg=other_group("vendor")) as comm:
        data = RankData.create(config, rank=context.rank, num_tokens=[7, 7])
        rows = data.x
        if context.rank == 0:
            if name == "dtype":
                rows = rows.float()
            else:
                comm._next_call += 1
        kind: type[Exception] = ConfigMismatchError if name == "dtype" else PhaseError
        text = "bytes of a row" if name == "dtype" else "dispatch"
        with pytest.raises(kind, match=text):
            comm.dispatch(rows, data.topk_idx, data.topk_weights)
        if name == "call" and context.rank == 1:
            comm._next_call += 1
        # And all is well again.
        d = comm.dispatch(data.x, data.topk_idx, data.topk_weights)
        d.handle.release()


@pytest.mark.parametrize("name", ["dtype", "call"])
def test_facts_that_differ(name):
    run_ranks(2, facts_differ, name)


def other_bucket(context: RankContext) -> None:
    """Dispatches are expected to be full when one rank changes the bucket: their messages differ
    in size, so nothing arrives, and what they wait for in vain says why."""
    config = EPConfig(**{**SHAPE, **FULL, "timeout_s": 3.0})
    with context.communicator(config, "c10d:exact", pg=other_group("vendor")) as comm:
        for call in range(4):
            last = call == 3
            tokens = 8 if last and context.rank == 1 else 16
            data = RankData.create(config, rank=context.rank, num_tokens=[tokens] * 2, seed=call)
            given = (data.x, data.topk_idx, data.topk_weights)
            if last:
                with pytest.raises(ConfigMismatchError, match="the bucket: this rank has"):
                    comm.dispatch(*given, bucket=tokens)
                return
            d = comm.dispatch(*given, bucket=tokens)
            comm.combine(expert_rows(d, config, comm.rank, 2, torch.bfloat16), d.handle)


def test_buckets_that_differ_in_a_full_dispatch():
    run_ranks(2, other_bucket)


def without_the_last(context: RankContext, mode: str) -> None:
    """All but the last rank go on without it, full dispatches included."""
    config = EPConfig(**{**SHAPE, **FULL})
    ranks, lost = context.num_ranks, context.num_ranks - 1
    comm = context.communicator(config, f"c10d:{mode}", pg=other_group("vendor"))
    if context.rank == lost:
        return
    comm.mask_rank(lost)
    held = torch.zeros(config.num_experts + 1, dtype=torch.bool)
    held[config.placement_for(ranks).local_expert_ids(lost)] = True
    for call in range(4):
        inputs = []
        for given in RankData.create_all(config, num_tokens=[16] * ranks, seed=call):
            idx = torch.where(held[given.topk_idx.long()], -1, given.topk_idx)
            tokens = 0 if given.rank == lost else 16
            inputs.append(
                RankInput(
                    x=given.x, topk_idx=idx, topk_weights=given.topk_weights, num_tokens=tokens
                )
            )
        world = ReferenceWorld(config, ranks, node_of_rank=comm.group.node_of_rank)
        want = world.dispatch(inputs)
        y = [expert_rows(w, config, rank, ranks, torch.bfloat16) for rank, w in enumerate(want)]
        out = world.combine(y, [w.handle for w in want])
        mine = RankData.create(config, rank=context.rank, num_tokens=[16] * ranks, seed=call)
        d = comm.dispatch(mine.x, mine.topk_idx, mine.topk_weights)
        assert_same_bits("topk_idx", d.topk_idx, want[context.rank].topk_idx)
        assert_same_bits("tokens", d.num_tokens_per_rank, want[context.rank].num_tokens_per_rank)
        got = comm.combine(y[context.rank], d.handle)
        assert_same_bits("out", got, out[context.rank])
    comm.check()


@pytest.mark.parametrize("mode", ["exact", "dense"])
def test_a_masked_rank(mode):
    run_ranks(3, without_the_last, mode)
