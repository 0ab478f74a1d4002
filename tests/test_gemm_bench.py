"""The GEMM bench's figures and its result document, without a GPU."""

from __future__ import annotations

import datetime

import pytest
import torch
from click.testing import CliRunner

from moe_comm.kernels.expert_gemm_config import choose_tiles
from moe_comm.launch import bench_gemm, results
from moe_comm.launch.bench_gemm_case import Case
from moe_comm.launch.bench_gemm_measure import Limits, row
from moe_comm.launch.bench_gemm_tune import candidates


def small_case():
    offsets = torch.tensor([0, 3, 3, 4], dtype=torch.int32)
    rows = torch.zeros(2, 5, 3584, dtype=torch.bfloat16)
    index = torch.zeros(8, dtype=torch.int32)
    return Case(experts=3, count=4, seed=0, rows=rows, row_index=index, offsets=offsets)


def test_figures_of_a_row():
    limits = Limits(read=4e6, dense=8e8)
    one = row(small_case(), limits, [100.0, 100.0], backend="triton", part="w2", wrong=0)
    # Two of three experts have rows; w2 of one is 3584 * 3072 codes and a scale for 32 of them.
    weight = 2 * (3584 * 3072 // 2 + 3584 * 3072 // 32)
    moved = weight + 4 * 2 * (3584 + 3072)
    assert one.params["weight_gbps"] == pytest.approx(weight / 100e-6 / 1e9)
    assert one.limit_us == pytest.approx(moved / 4e6)
    assert one.params["of_limit"] == pytest.approx(moved / 4e6 / 100)
    assert one.params["tflops"] == pytest.approx(2 * 4 * 3584 * 3072 / 100e-6 / 1e12)
    gather = row(small_case(), limits, [5.0], backend="humming", part="gather", wrong=None)
    assert gather.limit_us is None


def test_document_satisfies_the_schema(monkeypatch):
    monkeypatch.setattr(results, "device_facts", lambda rank, device: {"rank": rank, "name": "x"})
    limits = Limits(read=4e6, dense=8e8)
    rows = [row(small_case(), limits, [9.0], backend="bf16", part="all", wrong=0)]
    started = datetime.datetime.now(datetime.UTC)
    found = bench_gemm.document(rows, limits, started, 1)
    assert found["rows"][0]["ep_size"] == 2
    assert found["config"]["read_gbps"] == 4000


def test_candidates_and_usage():
    assert [g.block_m for g in candidates(5)] == [8, 16]
    assert [g.block_m for g in candidates(146)] == [128, 128, 64, 128]
    for rows in (1, 8, 18, 37, 60, 146, 1170):
        # The default is the first thing that a search tries.
        first, default = candidates(rows)[0], choose_tiles(rows)
        assert (first.block_m, first.swap) == (default.block_m, default.swap)
        assert first.tail == default.tail
        assert (first.gated[0], first.down[0]) == (default.gated, default.down)
    for cases in ("448", "5x10", "0x4"):
        with pytest.raises(bench_gemm.click.BadParameter):
            bench_gemm._shape(cases)
    if not torch.cuda.is_available():
        result = CliRunner().invoke(bench_gemm.command, ["--out", "never.json"])
        assert result.exit_code == 3
