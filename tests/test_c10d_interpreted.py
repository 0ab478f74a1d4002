"""c10d's Triton routing steps under the interpreter, inside whole dispatches over gloo, and their
worked examples. They move indices and bytes only, so what holds here holds on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comm_cases import Case, assert_same_bits, check_case
from rank_pool import RankContext, RankPool
from test_c10d_gathered import CALLS, FULL
from test_c10d_modes import OPTIONS, TOKENS, case_of

from moe_comm.backends.c10d_repeats import RepeatedDispatch

NAMES = [
    "padding-device-count", "payloads", "redundant-experts", "rank-without-experts", "hidden-odd",
    "all-masked", "duplicates", "few-rows-kept", "handle-again", "float64",
]  # fmt: skip


@pytest.fixture(scope="module")
def interpreted():
    with RankPool(4, variables={"TRITON_INTERPRET": "1"}) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def two_interpreted():
    with RankPool(2, variables={"TRITON_INTERPRET": "1"}) as ranks:
        yield ranks


def with_kernels(context: RankContext, cases: list[Case], backend: str | None) -> None:
    for case in cases:
        check_case(context, case, backend, kernels=True)


@pytest.mark.parametrize(
    ("mode", "backend"),
    [
        ("exact", None),
        ("dense", None),
        pytest.param("exact", "vendor", marks=pytest.mark.slow),
    ],
)
def test_cases_by_kernels(interpreted, mode, backend):
    """Over messages, where records are packed, and over collectives, where they are gathered."""
    first = case_of(
        mode, 4, routing="zipf:1+masked:0.2", config={"dispatch_wire": "fp8", "hidden": 48}
    )
    options = [
        {
            "num_tokens": TOKENS[4][:1],
            **OPTIONS[name],
            "config": {"hidden": 48, **OPTIONS[name].get("config", {})},
        }
        for name in NAMES
    ]
    full = case_of(
        mode, 4, num_tokens=((16,) * 4,) * 4,
        config={"num_experts": 6, "num_topk": 6, "hidden": 16},
    )  # fmt: skip
    cases = [first, full, *(case_of(mode, 4, **option) for option in options)]
    interpreted.run(with_kernels, cases, backend, timeout_s=200.0)


def worked_examples(context: RankContext) -> list[Any]:
    """The numbers of the kernels' docstrings."""
    from moe_comm.kernels.route_tokens import locate, plan

    # One expert with copies (0, 5) and (3, 1); source 1, token 2.
    table = torch.tensor([[[0, 5], [3, 1]]], dtype=torch.int32)
    status = torch.zeros(1, dtype=torch.int32)
    ids = torch.tensor([[0], [-1], [0], [9]])
    rank, slot, kept = locate(
        ids, table, torch.tensor([2], dtype=torch.int32), source=1, num_tokens=4, alive=None,
        status=status,
    )  # fmt: skip
    found = [rank.flatten().tolist(), slot.flatten().tolist(), kept.flatten().tolist(), int(status)]
    ranks = torch.tensor([[0, 1], [1, 1], [0, 0]], dtype=torch.int32)
    positions, headers = plan(
        ranks, num_ranks=2, me=0, num_tokens=3, phase=1, call=7, bucket=4, row_bytes=8,
        record_bytes=12, share=128, width=7,
    )  # fmt: skip
    return [*found, positions.tolist(), headers.tolist()]


def test_worked_examples(interpreted):
    for rank, slot, kept, status, positions, headers in interpreted.run(worked_examples):
        assert rank == [3, -1, 3, -1]
        assert slot == [1, -1, 1, -1]
        assert kept == [0, -1, 0, -1]
        assert status == 1
        assert positions[1] == [0, 1, -1]
        assert positions[0] == [-1, -1, -1]
        assert headers == [[1, 7, 3, 0, 4, 8, 12], [1, 7, 3, 2, 4, 8, 12]]


def indexed(context: RankContext, num_rows: int, capacity: int) -> None:
    """IndexLaunches against the layout, call after call on the same memory; on one rank."""
    from moe_comm.backends.c10d_index import IndexLaunches, index_bytes
    from moe_comm.layout import expert_index

    if context.rank:
        return
    topk, experts = 3, 5
    status = torch.zeros(1, dtype=torch.int32)
    memory = torch.zeros(index_bytes(num_rows, topk, experts) // 4, dtype=torch.int32)
    index = IndexLaunches(num_rows, topk, experts, capacity, memory=memory, status=status)
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        local_idx = torch.randint(-2, experts, (num_rows, topk), generator=generator)
        local_idx = local_idx.clamp_min(-1).to(torch.int32)
        offsets, row_index, position = index(local_idx)
        want = expert_index(local_idx, num_local_experts=experts, capacity=capacity)
        assert_same_bits("offsets", offsets, want.expert_offsets)
        assert_same_bits("row_index", row_index, want.row_index)
        assert_same_bits("position", position, want.choice_position)
        assert int(status) == 2 * (int(want.num_dropped) > 0)
        status.zero_()


@pytest.mark.parametrize(
    ("num_rows", "capacity"),
    [(40, 120), (40, 20), (2900, 99), pytest.param(2900, 8700, marks=pytest.mark.slow)],
)
def test_index_launches(interpreted, num_rows, capacity):
    """In one launch, and beyond 8192 choices in three; with rows dropped, and without."""
    interpreted.run(indexed, num_rows, capacity, timeout_s=100.0)


def summed(context: RankContext, num_terms: int, width: int) -> None:
    """The kernels' sums against torch's, in fp32, on one rank; the interpreter's fma rounds twice,
    so products are small whole numbers."""
    from moe_comm.backends import device_math, sum_launches
    from moe_comm.wire import WIRES

    if context.rank:
        return
    generator = torch.Generator().manual_seed(num_terms)
    y = torch.randint(-99, 99, (50, width), generator=generator).float()
    position = torch.randint(-3, 50, (20, 6), generator=generator).clamp_min(-1).to(torch.int32)
    weights = torch.randint(1, 9, (20, 6), generator=generator).float()
    for applied in (False, True):
        want, got = torch.zeros(20, width), torch.full((20, width), torch.nan)
        device_math.partial_sums(
            y, weights, position, weights_applied=applied, fill_empty=True, out=want
        )
        for rows in (range(7), range(7, 8), range(8, 20)):
            sum_launches.partial_sums(
                y, position, weights, weights_applied=applied, out=got, rows=rows
            )
        assert_same_bits("partial sums", got, want)
    terms = torch.randn(num_terms, 23, width, generator=generator)
    who = torch.randint(-1, num_terms, (20, 6), generator=generator).to(torch.int32)
    for bias in (None, torch.randn(20, width, generator=generator)):
        want, got = torch.empty(20, width), torch.full((20, width), torch.nan)
        biases = [] if bias is None else [bias]
        device_math.fold(terms, None, WIRES["none"], who, biases=biases, out=want)
        sum_launches.fold(terms, who, bias=bias, out=got)
        assert_same_bits("fold", got, want)


@pytest.mark.parametrize(("num_terms", "width"), [(1, 40), (2, 1030), (5, 8), (9, 4100)])
def test_sums(two_interpreted, num_terms, width):
    two_interpreted.run(summed, num_terms, width, timeout_s=100.0)


def repeated(context: RankContext, case: Case) -> int:
    """How many of the case's calls went the shortest way."""
    count = 0
    repeat = RepeatedDispatch._repeat

    def counted(*args: Any) -> Any:
        nonlocal count
        count += 1
        return repeat(*args)

    RepeatedDispatch._repeat = counted
    try:
        check_case(context, case, "vendor", kernels=True)
    finally:
        RepeatedDispatch._repeat = repeat
    return count


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        # From the call after the first that was expected to be full.
        ({"num_tokens": ((16, 16),) * 6}, 3),
        # Three tokens are not like sixteen: one rank goes the long way, and the other need not.
        ({"num_tokens": CALLS}, (3, 2)),
        ({"num_tokens": ((8, 8),) * 4, "bucket": 8}, 1),
        # None of these four are repeated.
        ({"num_tokens": ((16, 16),) * 4, "split": True}, 0),
        ({"num_tokens": ((16, 16),) * 4, "payloads": True}, 0),
        ({"num_tokens": ((16, 16),) * 4, "num_tokens_as": "tensor"}, 0),
        ({"num_tokens": ((16, 16),) * 4, "config": {**FULL, "dispatch_wire": "fp8"}}, 0),
    ],
)
def test_calls_like_the_one_before(two_interpreted, fields, wanted):
    case = case_of("exact", 2, 2, **{"config": FULL, "routing": "uniform", **fields})
    each = list(wanted) if isinstance(wanted, tuple) else [wanted] * 2
    assert two_interpreted.run(repeated, case, timeout_s=100.0) == each
