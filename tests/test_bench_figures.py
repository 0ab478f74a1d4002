"""Percentiles, byte matrices and comparisons: the arithmetic behind a table's figures."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from moe_comm import EPConfig, ExpertPlacement
from moe_comm.launch.bench import Bench, byte_matrix, memory_bytes
from moe_comm.launch.rank_data import RankData
from moe_comm.launch.subjects import Case
from moe_comm.launch.timing import Statistics, percentile, record_row, time_calls, time_host
from moe_comm.launch.verify import Findings
from moe_comm.traffic import RoutingTraffic


def test_percentiles_interpolate():
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([1.0, 2.0], 50) == 1.5
    assert percentile([0.0, 10.0], 99) == pytest.approx(9.9)
    assert percentile([7.0], 99) == 7.0
    with pytest.raises(ValueError, match="at least one"):
        percentile([], 50)


def test_statistics_pool_the_samples_and_keep_the_slowest_rank():
    found = Statistics.of([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]])
    assert found.samples == 6
    assert found.p50_us == 6.5
    assert found.slowest_rank_p50_us == 20.0


class Calls:
    """Stands in for the ranks and for a subject: notes the order of what is called."""

    device = torch.device("cpu")

    def __init__(self):
        self.seen = []

    def barrier(self, *, what):
        self.seen.append("barrier")

    def dispatch(self):
        self.seen.append("dispatch")
        return "arrived"

    def combine(self, arrived):
        assert arrived == "arrived"
        self.seen.append("combine")
        return torch.empty(0)


def test_each_half_is_timed_after_a_barrier_and_warmup_is_left_out():
    calls = Calls()
    samples = time_host(calls, calls, iters=2, warmup=1)
    assert {phase: len(values) for phase, values in samples.items()} == {
        "dispatch": 2,
        "combine": 2,
        "round_trip": 2,
    }
    assert all(value > 0 for values in samples.values() for value in values)
    halves = ["barrier", "dispatch", "barrier", "combine"]
    assert calls.seen == [*halves, "barrier", "dispatch", "combine"] * 3
    assert len(time_calls(lambda: None, calls, iters=4, warmup=1, graph=False)) == 4


class Mark:
    """Stands in for an event: notes when it is recorded."""

    def __init__(self, seen):
        self.seen = seen

    def record(self):
        self.seen.append("mark")


def test_captured_calls_run_in_rows_between_marks():
    calls = Calls()
    record_row(calls, [Mark(calls.seen) for _ in range(3)], 3)
    assert calls.seen == ["mark", *["dispatch"] * 3, "mark", *["combine"] * 3, "mark"]


@pytest.mark.parametrize(
    ("device", "options", "calls"),
    [
        ("cuda", {}, 8),
        ("cuda", {"calls": 3}, 3),
        ("cuda", {"calls": 64, "tokens": 1 << 17}, 64),
        ("cuda", {"tokens": 1 << 17}, 2),
        ("cuda", {"graph": False}, 1),
        ("cuda", {"flush_l2": True}, 1),
        ("cpu", {}, 1),
    ],
)
def test_rows_are_as_long_as_slots_and_memory_allow(device, options, calls):
    plan = {"graph": None, "flush_l2": False, "calls": None} | options
    config = EPConfig.preset("kimi-k3", max_tokens_per_rank=plan.pop("tokens", 128))
    bench = SimpleNamespace(
        plan=SimpleNamespace(**plan),
        ranks=SimpleNamespace(device=torch.device(device), num_ranks=2),
    )
    assert Bench.calls_of(bench, config) == calls


def case():
    config = EPConfig(num_experts=6, num_topk=2, hidden=8, max_tokens_per_rank=2)
    # Ranks hold experts 0-1, 2-3, 4-5.
    ids = [[[0, 2], [0, 1]], [[2, 4], [4, 5]], [[4, 5], [-1, 0]]]
    data = [
        RankData(
            rank=rank,
            x=torch.zeros(2, 8, dtype=torch.bfloat16),
            topk_idx=torch.tensor(ids[rank]),
            topk_weights=torch.ones(2, 2),
        )
        for rank in range(3)
    ]
    traffic = RoutingTraffic.of([d.topk_idx for d in data], ExpertPlacement.contiguous(6, 3))
    return Case(config=config, data=data, traffic=traffic, routing="by hand", layout="expert")


def test_byte_matrix_spreads_what_was_sent_as_the_rows_go():
    traffic = case().traffic
    assert traffic.rows.tolist() == [[2, 1, 0], [0, 1, 2], [1, 0, 1]]
    assert byte_matrix(traffic, "dispatch", [10, 20, 30]) == [[0, 10, 0], [0, 0, 20], [30, 0, 0]]
    assert byte_matrix(traffic, "combine", [9, 8, 7]) == [[0, 0, 9], [8, 0, 0], [0, 7, 0]]


def test_memory_bytes_count_rows_in_and_out_of_the_busiest_rank():
    # dispatch: 2 tokens read, and rank 0 or 2 writes 3 received rows; 16 bytes a row.
    assert memory_bytes(case(), "dispatch") == (2 + 3) * 16
    # combine on rank 2: 5 expert rows read, 3 partial sums written, 2 rows back; 2 tokens written.
    assert memory_bytes(case(), "combine") == (5 + 3 + 2 + 2) * 16


def test_comparison_is_by_bits_and_names_the_first():
    found = Findings(rank=3, phase="dispatch")
    nan, want = torch.tensor([[float("nan"), 0.0]]), torch.tensor([[float("nan"), 0.0]])
    found.compare("rows", nan, want, axes=("token", "column"))
    assert found.wrong == 0
    found.compare("rows", torch.tensor([[1.0, -0.0]]), torch.tensor([[1.0, 0.0]]), axes=("t", "c"))
    assert found.wrong == 1
    assert found.first == ["rank 3: dispatch: rows: t 0, c 1: expected 0, got -0"]
    masked = torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [5.0]])
    found.compare("rows", *masked, axes=("t", "c"), where=torch.tensor([True, False]))
    assert found.wrong == 1
    found.compare("rows", torch.zeros(2), torch.zeros(3), axes=("t",))
    assert found.wrong == 2
    assert "expected [3] torch.float32, got [2] torch.float32" in found.first[-1]


def test_a_tolerance_does_not_hide_nan():
    found = Findings(rank=0, phase="combine")
    exact, near = torch.tensor([1.0, 1.0, 1.0]), torch.tensor([1.001, 1.1, float("nan")])
    found.compare_close("out", near, exact, torch.full((3,), 0.01), axes=("column",))
    assert found.wrong == 2
    assert "column 1" in found.first[0]
