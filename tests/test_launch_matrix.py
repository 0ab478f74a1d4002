"""The matrix: predictions by their formulas, a file that grows and is gone on with, bounds in time,
and a tiny run on two CPU processes. Its GPU parts need several GPUs."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moe_comm import EPConfig
from moe_comm.launch import matrix_copies
from moe_comm.launch.matrix_cells import cells_of, fan_out_of
from moe_comm.launch.matrix_pair import PairData, line_through, rate_of
from moe_comm.launch.matrix_predict import Predictor, traffic_of
from moe_comm.launch.matrix_run import run_process, run_task
from moe_comm.launch.matrix_store import Store
from moe_comm.launch.matrix_tasks import OUT, SECTIONS, Grid, Task, tasks_of
from moe_comm.launch.matrix_unused import unused_rows, verdict
from moe_comm.launch.results import Row, read_json, write_json
from moe_comm.traffic import expected_distinct

GRID = Grid(
    num_ranks=8,
    device_type="cuda",
    presets=("kimi-k3", "deepseek-v3"),
    num_tokens=(1, 128),
    wires=("bf16", "fp8"),
    backends=(("slab", "per-expert"), ("deepep",)),
)
K3 = EPConfig.preset("kimi-k3")
# A pair: dispatch takes 10 us and 0.02 a token, combine 12 and 0.04, copies 5 us and 400 GB/s.
RATE = 400e3


def row(phase: str, tokens: int, time: float, **changes) -> Row:
    config = changes.pop("config", K3)
    plain = Row(
        backend="slab", mode="low-latency", phase=phase, layout="expert", num_tokens=tokens,
        hidden=config.hidden, num_topk=config.num_topk, num_experts=config.num_experts, ep_size=2,
        wire="bf16", routing="uniform", cuda_graph=True, samples=3, p50_us=time,
        slowest_rank_p50_us=time, remote_bytes=tokens * 7296, limit_kind="peer copy",
        limit_us=5 + tokens * 7296 / RATE, wrong=0,
    )  # fmt: skip
    return dataclasses.replace(plain, **changes)


def document(rows, ranks=2, name="NVIDIA H200", kind="cuda"):
    return {
        "schema_version": 1, "command": "run", "argv": [], "started": "2026-01-01T00:00:00+00:00",
        "git": {"commit": "0" * 40, "dirty": False}, "versions": {},
        "devices": [{"rank": r, "type": kind, "name": name} for r in range(ranks)],
        "topology": {"num_ranks": ranks}, "config": {}, "seed": 0, "definitions": {},
        "rows": [dataclasses.asdict(one) for one in rows],
    }  # fmt: skip


def pair_rows():
    return [
        row(phase, tokens, base + slope * tokens,
            mode="high-throughput" if tokens == 4096 else "low-latency")
        for phase, base, slope in (("dispatch", 10.0, 0.02), ("combine", 12.0, 0.04))
        for tokens in (1, 128, 4096)
    ]  # fmt: skip


def pair_of(tmp_path: Path, rows, **options) -> PairData:
    write_json(str(tmp_path / "2026-01-01_x_run.json"), document(rows, **options))
    return PairData.load(tmp_path, device="NVIDIA H200", graphs=True)


class TestPairData:
    def test_only_what_the_pair_measured_counts(self, tmp_path):
        pair = pair_of(
            tmp_path,
            [
                row("dispatch", 1, 10.0),
                row("dispatch", 2, 99.0, ep_size=4),
                row("dispatch", 3, 99.0, params={"virtual": True}),
                row("dispatch", 4, 99.0, params={"emulated": 8}),
                row("dispatch", 5, 99.0, wrong=1),
                row("dispatch", 6, 99.0, slowest_rank_p50_us=None, p50_us=None, samples=0),
                row("dispatch", 7, 99.0, cuda_graph=False),
                row("dispatch", 8, 20.0, routing="trace:a"),
                row("dispatch", 8, 30.0),
                row("round_trip", 8, 70.0, backend="c10d", mode="exact", cuda_graph=False),
                row("round_trip", 8, 60.0, backend="c10d", mode="dense"),
            ],
        )
        (shape,) = pair.shapes("slab", "dispatch")
        assert pair.points("slab", "dispatch", shape, "uniform") == [(1, 10.0), (8, 30.0)]
        assert pair.points("slab", "dispatch", shape, "trace:a") == [(1, 10.0), (8, 20.0)]
        assert pair.points("slab", "dispatch", shape, "zipf:1") == [(1, 10.0), (8, 25.0)]
        assert pair.points("c10d", "round_trip", shape, "") == [(8, 70.0)]
        assert pair.points("c10d:dense", "round_trip", shape, "") == [(8, 60.0)]

    def test_a_forced_mode_does_not_speak_for_the_slab(self, tmp_path):
        pair = pair_of(
            tmp_path,
            [
                row("dispatch", 4096, 88.0, mode="high-throughput"),
                row("dispatch", 4096, 99.0, mode="low-latency"),
                row("dispatch", 4096, 62.0, mode="low-latency", wire="fp8"),
                row("combine", 4096, 153.0, mode="low-latency"),
            ],
        )
        times = {(name, phase, shape.wire): curve[4096]["uniform"]
                 for (name, phase), curves in pair.curves.items()
                 for shape, curve in curves.items()}  # fmt: skip
        assert times["slab", "dispatch", "bf16"] == 88.0
        assert times["slab:low-latency", "dispatch", "bf16"] == 99.0
        assert times["slab", "dispatch", "fp8"] == 62.0
        assert times["slab", "combine", "bf16"] == 153.0

    def test_copies_by_themselves_go_before_limits(self, tmp_path):
        copies = [row("copy", 0, t, mode="alone", limit_kind=None, params={"bytes": n})
                  for n, t in ((10**6, 5.0), (10**8, 250.0))]  # fmt: skip
        pair = pair_of(tmp_path, [*pair_rows(), *copies])
        assert pair.copy_points() == [(1e6, 5.0), (1e8, 250.0)]

    def test_other_commands_and_devices_are_left_out(self, tmp_path):
        write_json(str(tmp_path / "2026-01-02_x.json"), document(pair_rows()) | {"command": "tune"})
        assert pair_of(tmp_path, pair_rows(), name="NVIDIA H100").files == []
        assert pair_of(tmp_path, pair_rows()).files == ["2026-01-01_x_run.json"]

    def test_lines(self):
        points = [(1.0, 10.0), (3.0, 20.0), (5.0, 60.0)]
        assert [line_through(points, x) for x in (0, 1, 2, 4, 7)] == [5.0, 10.0, 15.0, 40.0, 100.0]
        assert line_through(points, -9) == 0.0
        assert line_through([(4.0, 7.0)], 99) == 7.0
        assert rate_of(points) == 2 / 40
        assert rate_of(points[:1]) is None

    def test_copies_of_about_one_size_are_one_point(self, tmp_path):
        rows = [row("dispatch", 4096, 1.0, remote_bytes=n, limit_us=t)
                for n, t in ((1000, 5.0), (100_000, 9.0), (100_001, 11.0))]  # fmt: skip
        assert pair_of(tmp_path, rows).copy_points() == [(1000.0, 5.0), (100_000.5, 10.0)]


class TestPredictions:
    def test_a_pair_is_predicted_by_itself(self, tmp_path):
        here = Predictor(pair=pair_of(tmp_path, pair_rows()), num_ranks=2)
        found = here.cell("slab", "dispatch", K3, 64, "uniform")
        assert found.us == pytest.approx(10 + 0.02 * 64)
        there = expected_distinct(2, 896, 16) / 2 * 64
        assert found.remote_bytes == pytest.approx(there * (7168 + 128), rel=1e-6)

    @pytest.mark.parametrize("fan_out", [1.0, 0.5])
    def test_eight_ranks(self, tmp_path, fan_out):
        here = Predictor(pair=pair_of(tmp_path, pair_rows()), num_ranks=8, fan_out=fan_out)
        rows8 = expected_distinct(8, 896, 16) * 7 / 8
        rows2 = expected_distinct(2, 896, 16) / 2
        there = 10 + 0.02 * 128 + (rows8 - rows2) * 128 * 7296 / (RATE * fan_out)
        back = 12 + 0.04 * 128 + (rows8 - rows2) * 128 * 7168 / (RATE * fan_out)
        both = [here.cell("slab", p, K3, 128, "uniform").us for p in ("dispatch", "combine")]
        assert both == pytest.approx([there, back], rel=1e-3)
        assert here.cell("slab", "round_trip", K3, 128, "uniform").us == pytest.approx(sum(both))

    def test_one_rank_among_eight_is_as_the_stand_ins_were(self, tmp_path):
        """e is what they took beyond two ranks' time and the link's: by phase, in lines from 0 on,
        and with the bytes of a row."""
        rows8 = expected_distinct(8, 896, 16) * 7 / 8 - expected_distinct(2, 896, 16) / 2

        def link(phase: str, tokens: int, hidden: int = 3584) -> float:
            return rows8 * tokens * (2 * hidden + (128 if phase == "dispatch" else 0)) / RATE

        told = [
            row(phase, tokens, 5 + (link(phase, tokens) + excess if ranks == 8 else 0),
                ep_size=ranks, params={"changed": {}})
            for phase, both in (("dispatch", (2.0, 8.0)), ("combine", (10.0, 30.0)))
            for tokens, excess in zip((128, 512), both, strict=True)
            for ranks in (2, 8)
        ]  # fmt: skip
        told += [
            row("dispatch", 128, 99.0, ep_size=8, params={"changed": {"ranked_programs": 1}}),
            row("dispatch", 128, 99.0, ep_size=8, params={"changed": {}}, wrong=1),
            row("dispatch", 128, 99.0, ep_size=4, params={"changed": {}}),
        ]
        file = document(told) | {"command": "slab_stand_in"}
        write_json(str(tmp_path / "2026-01-02_x_stand-in.json"), file)
        here = Predictor(pair=pair_of(tmp_path, pair_rows()), num_ranks=8)
        for phase, base, slope, excesses in (
            ("dispatch", 10, 0.02, {1: 2 / 128, 128: 2.0, 320: 5.0, 1024: 16.0}),
            ("combine", 12, 0.04, {64: 5.0, 128: 10.0, 320: 20.0, 896: 50.0}),
        ):
            for tokens, excess in excesses.items():
                found = here.cell("slab", phase, K3, tokens, "uniform")
                want = base + slope * tokens + link(phase, tokens) + excess
                assert found.us == pytest.approx(want, rel=1e-3), (phase, tokens)
                assert "stand-ins of 8 ranks" in found.note
        wide = here.cell("slab", "combine", EPConfig.preset("kimi-k3-wide"), 128, "uniform")
        want = 12 + 0.04 * (1 + 127 * 2) + link("combine", 128, 7168) + 2 * 10
        assert wide.us == pytest.approx(want, rel=1e-3)
        # No stand-in went by copies, and four ranks were measured at one size.
        assert "stand-in" not in here.cell("slab", "dispatch", K3, 4096, "uniform").note
        four = Predictor(pair=here.pair, num_ranks=4).cell("slab", "dispatch", K3, 128, "uniform")
        assert "stand-in" not in four.note

    def test_traces_are_drawn_as_the_run_will(self, tmp_path):
        here = Predictor(pair=pair_of(tmp_path, pair_rows()), num_ranks=4)
        text = "trace:routing_trace.npz:skewed:0"
        rows = traffic_of(K3, 4, 32, text, 0)
        found = here.cell("slab", "dispatch", K3, 32, text)
        assert found.remote_bytes == int(rows.remote_rows.max()) * 7296
        back = here.cell("slab", "combine", K3, 32, text)
        assert back.remote_bytes == int(rows.returned_rows.max()) * 7168

    def test_whole_blocks_where_the_slab_copies(self, tmp_path):
        here = Predictor(pair=pair_of(tmp_path, pair_rows()), num_ranks=8)
        found = here.cell("slab", "dispatch", K3, 4096, "uniform")
        assert found.remote_bytes == 7 * 4096 * 7296
        found = here.cell("slab", "dispatch", K3, 8192, "uniform")
        assert "beyond the pair's 4096 tokens" in found.note

    def test_another_shape_is_scaled_by_its_bytes(self, tmp_path):
        here = Predictor(pair=pair_of(tmp_path, pair_rows()), num_ranks=2)
        wide = EPConfig.preset("deepseek-v3", dispatch_wire="fp8")
        found = here.cell("slab", "dispatch", wide, 128, "uniform")
        ratio = (7168 + 56 * 4) / 7168
        assert found.us == pytest.approx(10.02 + 0.02 * 127 * ratio)
        assert found.note == "from 896/16/3584 bf16"
        # Expert rows: 8 of 7168 as 16 of 3584.
        assert here.cell("slab", "combine", wide, 128, "uniform").us == pytest.approx(
            12 + 0.04 * 128
        )

    def test_what_cannot_be_told_says_why(self, tmp_path):
        pair = pair_of(tmp_path, [row("dispatch", 1, 10.0), row("dispatch", 128, 20.0)])
        here = Predictor(pair=pair, num_ranks=8)
        assert (
            "no data of the pair for deepep"
            in here.cell("deepep", "dispatch", K3, 1, "uniform").reason
        )
        assert here.cell("slab", "round_trip", K3, 1, "uniform").reason.endswith("slab combine")
        assert "moe_layer" in here.cell("slab", "moe_layer", K3, 1, "uniform").reason
        one = Predictor(pair=PairData(curves={("slab", "dispatch"): {
            next(iter(pair.curves["slab", "dispatch"])): {1: {"uniform": 1.0}}}},
            limits=pair.limits), num_ranks=8)  # fmt: skip
        assert "one size alone" in one.cell("slab", "dispatch", K3, 1, "uniform").reason

    def test_copies_and_fan_out(self, tmp_path):
        here = Predictor(pair=pair_of(tmp_path, pair_rows()), num_ranks=8)
        assert here.copy(16_000_000, 1).us == pytest.approx(5 + 16e6 / RATE, rel=1e-3)
        assert here.copy(16_000_000, 7).us == pytest.approx(5 + 7 * 16e6 / RATE, rel=1e-3)
        load = matrix_copies.loads_of(8)
        rows = [
            matrix_copies.row_of(one, 256_000_000, [time], 0, 8)
            for one, time in ((load[0], 800.0), (load[-1], 7000.0))
        ]
        assert fan_out_of([dataclasses.asdict(one) for one in rows]) == pytest.approx(0.8)
        assert fan_out_of([]) == 1.0

    def test_the_layer(self, tmp_path):
        layer = [row("moe_layer", tokens, 500.0 + tokens) for tokens in (1, 128, 4096)]
        pair = pair_of(tmp_path, pair_rows() + layer)
        here, two = (Predictor(pair=pair, num_ranks=ranks) for ranks in (8, 2))
        trip8, trip2 = (p.cell("slab", "round_trip", K3, 128, "uniform").us for p in (here, two))
        active8, active2 = (896 / r * (1 - (1 - 16 / 896) ** (r * 128)) for r in (8, 2))
        share = 128 * 16 / active2 / 64
        experts = (628.0 - trip2) * ((1 - share) * active8 / active2 + share)
        found = here.cell("slab", "moe_layer", K3, 128, "uniform")
        assert found.us == pytest.approx(experts + trip8)
        assert two.cell("slab", "moe_layer", K3, 128, "uniform").us == pytest.approx(628.0)


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
