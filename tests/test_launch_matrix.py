"""The matrix: its tasks, a file that grows and is gone on with, bounds in time, and a tiny run on
two CPU processes. Its GPU parts need several GPUs."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest
from matrix_cases import K3, document, pair_of, pair_rows, row

from moe_comm import EPConfig
from moe_comm.launch import matrix_copies
from moe_comm.launch.matrix_cells import cells_of
from moe_comm.launch.matrix_pair import PairData
from moe_comm.launch.matrix_predict import Predictor
from moe_comm.launch.matrix_run import run_process, run_task
from moe_comm.launch.matrix_store import Store
from moe_comm.launch.matrix_tasks import OUT, SECTIONS, Grid, Task, tasks_of
from moe_comm.launch.matrix_unused import unused_rows, verdict
from moe_comm.launch.results import read_json, write_json
from moe_comm.traffic import expected_distinct

GRID = Grid(
    num_ranks=8,
    device_type="cuda",
    presets=("kimi-k3", "deepseek-v3"),
    num_tokens=(1, 128),
    wires=("bf16", "fp8"),
    backends=(("slab", "per-expert"), ("deepep",)),
)


class TestTasks:
    def test_every_section_has_tasks_of_its_own(self):
        tasks = [task for section in SECTIONS for task in tasks_of(section, GRID)]
        assert len({task.name for task in tasks}) == len(tasks)
        assert all(sum(OUT in part for part in task.command) == 1 for task in tasks)

    def test_the_run(self):
        tasks = tasks_of("run", GRID)
        assert [task.name for task in tasks] == [
            "run kimi-k3 bf16 slab,per-expert", "run kimi-k3 bf16 deepep", "run kimi-k3 fp8 slab",
            "run kimi-k3 fp8 deepep", "run deepseek-v3 bf16 slab,per-expert",
            "run deepseek-v3 bf16 deepep", "run deepseek-v3 fp8 slab", "run deepseek-v3 fp8 deepep",
        ]  # fmt: skip
        assert tasks[0].routings == (
            "uniform", "trace:routing_trace.npz:balanced:0", "trace:routing_trace.npz:skewed:0",
        )  # fmt: skip
        assert tasks[-1].routings == ("uniform", "zipf:1")
        assert "--no-limit" in tasks[1].command
        assert "--no-limit" not in tasks[0].command

    def test_cells_are_those_of_the_rows(self, tmp_path):
        here = Predictor(pair=pair_of(tmp_path, pair_rows()), num_ranks=8)
        cells = list(cells_of(tasks_of("run", GRID)[2], here))
        assert len(cells) == 3 * 3 * 2
        assert {one.wire for one, _ in cells} == {"fp8", "bf16", "fp8/bf16"}
        assert [one for one, _ in cells_of(tasks_of("soak", GRID)[0], here)] == []
        count = len(matrix_copies.loads_of(8)) * len(matrix_copies.SIZES)
        assert len(list(cells_of(tasks_of("copies", GRID)[0], here))) == count == (56 + 8 + 1) * 4


class TestStore:
    def store(self, tmp_path: Path) -> Store:
        return Store.open(tmp_path / "m.json", document([], ranks=8) | {"command": "matrix"})

    def test_a_prediction_is_replaced_by_its_row(self, tmp_path):
        store, task = self.store(tmp_path), tasks_of("run", GRID)[0]
        here = Predictor(pair=pair_of(tmp_path, pair_rows()), num_ranks=8)
        store.predict(task, cells_of(task, here), ["pair.json"])
        before = len(store.rows)
        predicted = here.cell("slab", "dispatch", K3, 128, "uniform").us
        assert not store.is_done(task)
        store.measured(task, document([row("dispatch", 128, 50.0, ep_size=8)], ranks=8))
        assert len(store.rows) == before
        (found,) = [one for one in store.rows if one["samples"]]
        assert found["params"]["predicted_us"] == pytest.approx(predicted, abs=1e-3)
        assert found["params"]["relative_error"] == pytest.approx(
            abs(50 - predicted) / 50, abs=1e-4
        )
        assert found["params"]["predicted_at"] <= found["params"]["measured_at"]
        again = self.store(tmp_path)
        assert again.is_done(task)
        assert again.document == store.document
        # What was predicted before is not predicted anew.
        again.predict(task, cells_of(task, here), [])
        assert len(again.rows) == before

    def test_reasons_are_kept_and_forgotten(self, tmp_path):
        store = self.store(tmp_path)
        soak, run = tasks_of("soak", GRID)[0], tasks_of("run", GRID)[1]
        here = Predictor(pair=PairData(), num_ranks=8)
        store.predict(run, cells_of(run, here), [])
        store.failed(run, "no such library")
        store.failed(soak, "no torchrun")
        assert store.is_done(run)
        assert store.is_done(soak)
        assert [one["params"].get("reason") for one in store.rows].count("no such library") == 1
        again = self.store(tmp_path)
        again.forget_failures()
        assert not again.is_done(run)
        assert not again.is_done(soak)
        assert len(again.rows) == len(store.rows) - 1

    def test_another_file_is_refused(self, tmp_path):
        write_json(str(tmp_path / "m.json"), document([], ranks=8))
        with pytest.raises(ValueError, match="expected command 'matrix' to go on, got 'run'"):
            self.store(tmp_path)
        write_json(str(tmp_path / "m.json"), document([], ranks=2) | {"command": "matrix"})
        with pytest.raises(ValueError, match="expected ranks 8"):
            self.store(tmp_path)

    def test_a_call_that_runs_out_of_time_leaves_the_task(self, tmp_path):
        store = self.store(tmp_path)
        sleeper = Task(name="s", section="run", command=("-c", "import time; time.sleep(60)", OUT),
                       seconds=30.0)  # fmt: skip
        began = time.monotonic()
        assert not run_task(sleeper, store, left=6.0)
        assert time.monotonic() - began < 20
        assert not store.is_done(sleeper)
        assert run_task(dataclasses.replace(sleeper, seconds=1.0), store, left=60.0)
        assert store.rows[0]["params"]["reason"].startswith("over 1 s")

    def test_a_process_tells_its_error(self):
        lines = ["import sys", "sys.stderr.write('Error: no\\nbye\\n')", "exit(3)"]
        assert run_process(["-c", "; ".join(lines)], 20.0) == (3, "Error: no")


def test_unused_rows_of_eight_ranks():
    rows = list(unused_rows("kimi-k3", ("uniform",), (256,), 8, 0))
    (one,) = rows
    assert one.params["rows"] == 2048
    assert one.params["unused_share"] == pytest.approx(
        1 - expected_distinct(8, 896, 16) / 8, abs=0.01
    )
    assert one.params["reached_least"] <= 2048 * (1 - one.params["unused_share"])
    assert one.params["compacted_bytes"] < one.params["slab_bytes"] == 2048 * 7168
    timed = [
        dataclasses.asdict(row("dispatch", 512, time, mode=mode, params={"section": "unused"}))
        for mode, time in (("low-latency", 20.0), ("high-throughput", 15.0))
    ]
    assert verdict(timed) == [
        "dispatch, 512 tokens: whole blocks (slab:high-throughput) wins: "
        "slab:high-throughput 15.0 us, slab:low-latency 20.0 us"
    ]


def test_loads_of_copies():
    assert [load.name for load in matrix_copies.loads_of(2)] == ["alone", "alone", "all-at-once"]
    loads = matrix_copies.loads_of(4)
    assert len({load.pairs for load in loads}) == len(loads) == 12 + 4 + 1
    one = matrix_copies.row_of(loads[12], 1000, [2.0, 4.0, 3.0], 0, 4)
    assert (one.mode, one.params["from"], one.params["to"]) == ("fan-out", "0", "all")
    assert (one.remote_bytes, one.slowest_rank_p50_us, one.remote_gbps) == (3000, 3.0, 1.0)


def call(tmp_path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable, "-m", "moe_comm.launch.matrix", "--device", "cpu", "--nproc", "2",
        "--presets", "k3-tiny", "--wires", "bf16", "--routings", "uniform", "--pair-data",
        str(tmp_path), "--out", str(tmp_path / "out" / "m.json"), *options,
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_a_tiny_matrix_on_two_processes(tmp_path):
    tiny = EPConfig.preset("k3-tiny")
    times = {"config": tiny, "backend": "c10d", "mode": "dense", "cuda_graph": False}
    pair = [
        row(phase, n, 1000.0 + n, **times) for phase in ("dispatch", "combine") for n in (1, 64)
    ]
    write_json(str(tmp_path / "2026-01-01_cpux2_run.json"), document(pair, name="some", kind="cpu"))
    (tmp_path / "out").mkdir()
    options = ("--sections", "copies,run,layer", "--num-tokens", "2,4", "--iters", "2",
               "--backends", "c10d:dense;deepep")  # fmt: skip
    early = call(tmp_path, *options, "--seconds", "3")
    assert early.returncode == 124, early.stderr
    assert "left: copies, run, layer" in early.stdout
    done = call(tmp_path, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read_json(tmp_path / "out" / "m.json")["rows"]
    run = [one for one in rows if one["params"]["section"] == "run" and one["samples"]]
    assert [(one["phase"], one["num_tokens"]) for one in run] == [
        (phase, n) for n in (2, 4) for phase in ("dispatch", "combine", "round_trip")
    ]
    for one in run:
        n, params = one["num_tokens"], one["params"]
        want = (1000.0 + n) * (2 if one["phase"] == "round_trip" else 1)
        assert params["predicted_us"] == pytest.approx(want)
        error = abs(one["slowest_rank_p50_us"] - want) / one["slowest_rank_p50_us"]
        assert params["relative_error"] == pytest.approx(error, abs=1e-3)
        assert one["wrong"] == 0
    assert "predictions: " in done.stdout
    reasons = [one["params"]["reason"] for one in rows if "reason" in one["params"]]
    assert any("matrix_copies: needs 2 GPUs" in reason for reason in reasons)
    assert any("deep_ep" in reason or "deepep" in reason for reason in reasons)
    # The same call again has nothing left to do.
    began = time.monotonic()
    assert call(tmp_path, *options).returncode == 0
    assert time.monotonic() - began < 60
    assert read_json(tmp_path / "out" / "m.json")["rows"] == rows


@pytest.mark.slow
def test_faults_soak_and_unused_on_two_processes(tmp_path):
    (tmp_path / "out").mkdir()
    done = call(tmp_path, "--sections", "unused,faults,soak", "--num-tokens", "4", "--iters", "2",
                "--soak-seconds", "1")  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read_json(tmp_path / "out" / "m.json")["rows"]
    assert {one["phase"] for one in rows} >= {"slab_rows", "fault", "soak", "dispatch"}
    assert all(not one["wrong"] for one in rows)
    assert sum(one["params"].get("pairs", 0) for one in rows) > 10


def test_predictions_alone_need_no_gpus(tmp_path):
    write_json(str(tmp_path / "2026-01-01_h200x2_run.json"), document(pair_rows()))
    (tmp_path / "out").mkdir()
    done = call(tmp_path, "--predict-only", "NVIDIA H200", "--nproc", "4", "--presets", "kimi-k3",
                "--num-tokens", "1,128", "--sections", "copies,run")  # fmt: skip
    assert done.returncode == 0, done.stderr
    document_ = read_json(tmp_path / "out" / "m.json")
    assert [device["name"] for device in document_["devices"]] == ["NVIDIA H200"] * 4
    slab = [one for one in document_["rows"] if one["backend"] == "slab"]
    assert slab
    assert all(math.isfinite(one["params"]["predicted_us"]) and not one["samples"] for one in slab)
