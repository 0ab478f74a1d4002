"""The V1 adapters on CPU ranks over doubles of deep_ep.Buffer, against the reference.

No real DeepEP runs here: the doubles check what its sources check and move the rows over gloo.
"""

from __future__ import annotations

from typing import Any

import deepep_double as double
import pytest
import torch
from comm_cases import SHAPE, Case, answer, assert_arrived, check_case, rank_inputs
from rank_pool import RankContext, run_ranks

from moe_comm import EPConfig
from moe_comm.errors import InvalidRoutingError, MoeCommError, PeerTimeoutError


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """A module path with a V1 double on it."""
    return str(double.write_package(tmp_path_factory.mktemp("v1"), double.V1))


def checks(context: RankContext, folder: str, cases: list[Case]) -> None:
    with double.installed(folder):
        for case in cases:
            check_case(context, case)


def cases_of(mode: str, ranks: int) -> list[Case]:
    """What any mode must get right, bit for bit."""
    tokens = {2: (16, 5), 3: (7, 0, 16), 4: (16, 3, 0, 9)}[ranks]
    base = Case(backend=f"deepep:{mode}", num_tokens=(tokens, tuple(reversed(tokens))))
    return [
        base,
        base.replace(config={"dispatch_wire": "fp8", "max_payload_bytes": 64}, payloads=True),
        base.replace(config={"dispatch_wire": "mxfp8"}, quantized=True, routing="hot:6"),
        base.replace(
            routing="uniform+masked:0.3", split=True, num_tokens_as="tensor", out=True, bucket=16
        ),
        base.replace(layout="rows", weights_applied=True, seed=4),
        base.replace(repeat=True, load=3, seed=5),
        base.replace(config={"max_expert_rows": 30}, overflow=True, seed=6),
    ]  # fmt: skip


def test_high_throughput_is_exact_at_two_ranks(folder):
    cases = cases_of("v1-ht", 2)
    run_ranks(2, checks, folder, cases)


@pytest.mark.parametrize("ranks", [2, 3])
def test_low_latency_adds_in_the_contracts_order(folder, ranks):
    cases = cases_of("v1-ll", ranks)
    run_ranks(ranks, checks, folder, cases)


def k3_case(context: RankContext, folder: str, mode: str) -> dict[str, int]:
    with double.installed(folder):
        case = Case(
            backend=f"deepep:{mode}",
            config={"num_experts": 896, "num_topk": 16, "hidden": 3584, "max_tokens_per_rank": 4},
            num_tokens=((4, 3),),
        )
        with context.communicator(case.ep_config(), case.backend) as comm:
            sizes = {"row": comm.transport.row_bytes, "back": 2 * comm.transport.hidden}
        check_case(context, case)
        return sizes


@pytest.mark.parametrize(
    ("mode", "sizes"),
    [("v1-ht", {"row": 7328, "back": 7168}), ("v1-ll", {"row": 8192, "back": 8192})],
)
def test_896_experts_and_top_16_on_two_ranks(folder, mode, sizes):
    assert run_ranks(2, k3_case, folder, mode) == [sizes, sizes]


def close(context: RankContext, folder: str, case: Case) -> float:
    """Dispatch bit for bit, combine within the stated tolerance; the share of equal elements."""
    config, rank = case.ep_config(), context.rank
    with double.installed(folder), context.communicator(config, case.backend) as comm:
        assert not comm.adds_exactly(num_biases=case.num_biases)
        inputs = rank_inputs(case, config, 0)
        want = answer(case, config, inputs, 0, comm.group.node_of_rank, rank)
        mine = inputs[rank]
        d = comm.dispatch(mine.x, mine.topk_idx, mine.topk_weights, bucket=case.bucket)
        assert_arrived(d, want.arrived[rank])
        biases = tuple(want.biases[rank])
        out = comm.combine(want.y[rank], d.handle, bias=biases or None)
        # Magnitudes of the terms: the same combine of their magnitudes, generously.
        size = terms_size(case, config, inputs, want, rank) + sum(b.abs().float() for b in biases)
        error = (out.float() - want.out.float()).abs()
        assert bool((error <= comm.sum_tolerance(size)).all())
        return float((out == want.out).float().mean())


def terms_size(case: Case, config: EPConfig, inputs: Any, want: Any, rank: int) -> torch.Tensor:
    """Sum over ranks of |partial|, from the reference alone: each rank's rows by themselves."""
    from moe_comm.backends.reference import ReferenceWorld

    total = torch.zeros(inputs[rank].topk_idx.shape[0], config.hidden)
    for alone in range(case.num_ranks):
        world = ReferenceWorld(config, case.num_ranks)
        arrived = world.dispatch(inputs, bucket=case.bucket)
        y = [rows if r == alone else torch.zeros_like(rows) for r, rows in enumerate(want.y)]
        out = world.combine(y, [d.handle for d in arrived], sources=[rank])
        total += out[0].abs().float()
    return total


@pytest.mark.parametrize("num_biases", [0, 1, 3])
def test_high_throughput_adds_in_rank_order_beyond_two_ranks(folder, num_biases):
    case = Case(
        backend="deepep:v1-ht", num_tokens=((16, 3, 0, 9),), num_biases=num_biases, seed=num_biases
    )
    equal = run_ranks(4, close, folder, case)
    assert min(equal) > 0.8


def test_low_latency_adds_biases_after_a_rounding(folder):
    case = Case(backend="deepep:v1-ll", num_tokens=((16, 5),), num_biases=2)
    assert min(run_ranks(2, close, folder, case)) > 0.5


def passes(context: RankContext, folder: str, narrow: dict[str, int], case: Case) -> float:
    """With limits as if there were more ranks and tokens than fit a pass."""
    from moe_comm.backends import deepep_facts as facts

    kept = {name: getattr(facts, name) for name in narrow}
    for name, value in narrow.items():
        setattr(facts, name, value)
    try:
        if narrow.get("LL_MAX_TOPK"):
            return close(context, folder, case)
        with double.installed(folder):
            check_case(context, case)
        return 1.0
    finally:
        for name, value in kept.items():
            setattr(facts, name, value)


def test_more_ranks_than_columns_of_a_pass(folder):
    case = Case(backend="deepep:v1-ll", num_tokens=((16, 3, 0),), routing="uniform+masked:0.2")
    assert min(run_ranks(3, passes, folder, {"LL_MAX_TOPK": 2}, case)) > 0.5


def test_more_tokens_than_a_pass(folder):
    # Ranks with fewer tokens take part in every pass.
    case = Case(backend="deepep:v1-ll", num_tokens=((16, 3, 0), (0, 0, 1)), repeat=True)
    assert run_ranks(3, passes, folder, {"LL_MAX_TOKENS": 4}, case) == [1.0] * 3


def few_choices(context: RankContext, folder: str, case: Case) -> None:
    with double.installed(folder):
        with context.communicator(case.ep_config(), case.backend) as comm:
            assert comm.transport.num_headers == 2
        check_case(context, case)


def test_more_ranks_than_choices(folder):
    case = Case(backend="deepep:v1-ll", config={"num_topk": 2}, num_tokens=((16, 0, 3),))
    run_ranks(3, few_choices, folder, case)


def refuses(context: RankContext, folder: str) -> None:
    config = EPConfig(**SHAPE)
    with double.installed(folder):
        for mode in ("v1-ht", "v1-ll"):
            with context.communicator(config, f"deepep:{mode}") as comm:
                x = torch.zeros(2, config.hidden, dtype=torch.bfloat16)
                idx, weights = torch.zeros(2, 6, dtype=torch.int64), torch.ones(2, 6)
                big = {"big": torch.zeros(2, 5000)}
                with pytest.raises(ValueError, match="max_payload_bytes"):
                    comm.dispatch(x, idx, weights, payloads=big)
                # The slot came back, and nothing was sent.
                comm.dispatch(x, idx + 99, weights).handle.release()
                with pytest.raises(InvalidRoutingError, match="outside"):
                    comm.check()
                empty = comm.dispatch(x[:0], idx[:0], weights[:0], bucket=0)
                assert empty.rows.shape == (2, 0, config.hidden)
                y = torch.zeros(0, config.hidden, dtype=torch.bfloat16)
                assert comm.combine(y, empty.handle).shape == (0, config.hidden)


def test_refusals_and_empty_buckets(folder):
    run_ranks(2, refuses, folder)


def breaks(context: RankContext, folder: str) -> None:
    config = EPConfig(**SHAPE)
    with double.installed(folder):
        comm = context.communicator(config, "deepep:v1-ht")
        x = torch.zeros(2, config.hidden, dtype=torch.bfloat16)
        idx, weights = torch.zeros(2, 6, dtype=torch.int64), torch.ones(2, 6)
        closed = []
        comm.transport.close = lambda: closed.append(1)

        def fails(text: str) -> Any:
            def call(*args: Any, **kwargs: Any) -> None:
                raise RuntimeError(text)

            return call

        comm.transport._buffer.dispatch = fails("DeepEP error: CPU recv timeout")
        with pytest.raises(PeerTimeoutError, match=r"dispatch on rank .*CPU recv timeout"):
            comm.dispatch(x, idx, weights)
        comm.transport._buffer.dispatch = fails("Failed: CUDA error")
        with pytest.raises(MoeCommError, match=r"dispatch on rank .*deep_ep: RuntimeError: Failed"):
            comm.dispatch(x, idx, weights)
        assert comm.metrics()["timeouts"] == 1
        comm.destroy()
        # The library's destroy would wait for ranks that are elsewhere.
        assert not closed


def test_the_librarys_errors_come_under_our_names(folder):
    run_ranks(2, breaks, folder)


@pytest.mark.slow
def test_896_experts_and_top_16_on_eight_ranks(folder):
    shape = {"num_experts": 896, "num_topk": 16, "hidden": 512, "max_tokens_per_rank": 8}
    case = Case(config=shape, num_tokens=((8, 3, 0, 1, 8, 8, 2, 5),))
    # Eight columns: one pass, in the contract's order.
    run_ranks(8, checks, folder, [case.replace(backend="deepep:v1-ll")])
    equal = run_ranks(8, close, folder, case.replace(backend="deepep:v1-ht"))
    assert min(equal[rank] for rank in (0, 4, 5)) > 0.8
