"""The matrix's predictions: the pair's data as curves, and the formulas."""

from __future__ import annotations

import dataclasses

import pytest
from matrix_cases import K3, RATE, document, pair_of, pair_rows, row

from moe_comm import EPConfig
from moe_comm.launch import matrix_copies
from moe_comm.launch.matrix_cells import fan_out_of
from moe_comm.launch.matrix_pair import PairData, line_through, rate_of
from moe_comm.launch.matrix_predict import Predictor, traffic_of
from moe_comm.launch.results import write_json
from moe_comm.traffic import expected_distinct


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
        # Four ranks were measured at one size, and not by copies.
        four = Predictor(pair=here.pair, num_ranks=4)
        for tokens in (128, 4096):
            assert "stand-in" not in four.cell("slab", "dispatch", K3, tokens, "uniform").note

    def test_two_ranks_that_stood_in_at_one_size_say_nothing_of_others(self, tmp_path):
        told = [
            row("dispatch", tokens, time, ep_size=ranks, mode="high-throughput",
                params={"changed": {}})
            for ranks, tokens, time in ((2, 4096, 900.0), (8, 128, 50.0), (8, 4096, 950.0))
        ]  # fmt: skip
        file = document(told) | {"command": "slab_stand_in"}
        write_json(str(tmp_path / "2026-01-02_x_stand-in.json"), file)
        copied = [row("dispatch", t, 20 + 0.03 * t, mode="high-throughput") for t in (128, 4096)]
        here = Predictor(pair=pair_of(tmp_path, pair_rows() + copied), num_ranks=8)
        found = here.cell("slab:high-throughput", "dispatch", K3, 128, "uniform")
        assert found.us == pytest.approx(20 + 0.03 * 128 + 6 * 128 * 7296 / RATE, rel=1e-3)
        assert "stand-in" not in found.note

    def test_later_stand_ins_replace_a_curve_as_a_whole(self, tmp_path):
        def told(time: float, *sizes: int) -> dict:
            rows = [
                row("combine", tokens, time if ranks == 8 else 5.0, ep_size=ranks,
                    params={"changed": {}})
                for tokens in sizes for ranks in (2, 8)
            ]  # fmt: skip
            return document(rows) | {"command": "slab_stand_in"}

        for name, file in (("01a_x_stand-in", told(900.0, 128, 256, 512)),
                           ("02a_x_stand-in-modes", told(300.0, 128)),
                           ("02a_x_stand-in", told(300.0, 512))):  # fmt: skip
            write_json(str(tmp_path / f"2026-02-{name}.json"), file)
        pair = pair_of(tmp_path, pair_rows())
        curves = pair.stand_ins["combine", ""]
        assert [of[8] for of in curves.values()] == [{128: 300.0, 512: 300.0}]
        # The pair's 12 + 0.04 T, less 5, plus 300: e is below 0 where the link's time is more.
        here = Predictor(pair=pair, num_ranks=8)
        for tokens in (128, 512):
            found = here.cell("slab", "combine", K3, tokens, "uniform")
            assert found.us == pytest.approx(300.0 + 12 + 0.04 * tokens - 5.0)

    def test_stores_among_many_where_the_pair_takes_copies(self, tmp_path):
        """tau is then of the mode that eight ranks take, not of the pair's copies."""
        forced = [row("dispatch", tokens, 20 + 0.03 * tokens) for tokens in (512, 4096)]
        pair = pair_of(tmp_path, pair_rows() + forced)
        found = Predictor(pair=pair, num_ranks=8).cell("slab", "dispatch", K3, 4096, "uniform")
        beyond = expected_distinct(8, 896, 16) * 7 / 8 - expected_distinct(2, 896, 16) / 2
        assert found.us == pytest.approx(20 + 0.03 * 4096 + beyond * 4096 * 7296 / RATE, rel=1e-3)
        two = Predictor(pair=pair, num_ranks=2).cell("slab", "dispatch", K3, 4096, "uniform")
        assert two.us == pytest.approx(10 + 0.02 * 4096)

    def test_traces_are_drawn_as_the_run_will(self, tmp_path):
        here = Predictor(pair=pair_of(tmp_path, pair_rows()), num_ranks=4)
        text = "trace:routing_trace.npz:skewed:0"
        rows = traffic_of(K3, 4, 32, text, 0)
        found = here.cell("slab", "dispatch", K3, 32, text)
        assert found.remote_bytes == int(rows.remote_rows.max()) * 7296
        back = here.cell("slab", "combine", K3, 32, text)
        assert back.remote_bytes == int(rows.returned_rows.max()) * 7168

    def test_whole_blocks_where_the_slab_copies(self, tmp_path):
        here = Predictor(pair=pair_of(tmp_path, pair_rows()), num_ranks=4)
        found = here.cell("slab", "dispatch", K3, 4096, "uniform")
        assert found.remote_bytes == 3 * 4096 * 7296
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
