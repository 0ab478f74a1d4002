"""The slab's sweep: its settings, what it times (with a communicator over gloo and the host's
clock), how it goes on, what it compiles ahead, and what it reads out of a file. Its graphs need
CUDA."""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from rank_pool import RankContext, run_ranks

from moe_comm import EPConfig
from moe_comm.backends.slab_modes import SlabTuning
from moe_comm.launch import slab_sweep, slab_sweep_ports
from moe_comm.launch.options import BadInput
from moe_comm.launch.results import read_json, write_json
from moe_comm.launch.routing import parse_routing
from moe_comm.launch.slab_sweep_compile import compile_ahead, distinct
from moe_comm.launch.slab_sweep_measure import Sweep
from moe_comm.launch.slab_sweep_problem import IN_A_ROW, PAIRS, Plan
from moe_comm.launch.slab_sweep_settings import (
    CALLS,
    FP8,
    HALVES,
    HIGH,
    LOW,
    OVERLAP,
    PROGRAMS,
    SECTIONS,
    Setting,
    settings_of,
)
from moe_comm.launch.slab_sweep_table import crossover, recommend, whole_calls

TINY = {"num_experts": 12, "num_topk": 4, "hidden": 24}
SHAPES = (CALLS, HALVES, OVERLAP)


def setting(**options: Any) -> Setting:
    tuning = SlabTuning(mode=options.pop("mode", LOW), **options.pop("knobs", {}))
    return Setting(**{"section": "a", "num_tokens": 5, "tuning": tuning, **options})


# Settings.


def test_every_section_has_what_it_was_asked_for() -> None:
    of = {name: settings_of([name]) for name in SECTIONS}
    sizes = (1, 8, 32, 128, 256, 512, 1024, 2048, 4096)
    cases = {(s.num_tokens, s.tuning.mode, s.wires) for s in of["crossover"]}
    assert cases == set(itertools.product(sizes, (LOW, HIGH), (("bf16", "bf16"), FP8)))
    assert all(not s.changed for s in of["crossover"])
    for num_tokens in (128, 4096):
        found = [s.knobs for s in of["programs"] if s.num_tokens == num_tokens]
        rows = "ranked_programs" if num_tokens == 128 else "counted_programs"
        assert {k[rows] for k in found} >= set(PROGRAMS)
        assert {k["combine_programs"] for k in found} == {0, 33, 66, 132}
    grid = {(k["combine_lag"], k["combine_block"], k["combine_warps"], k["combine_unroll"])
            for k in (s.knobs for s in of["blocks"])}  # fmt: skip
    shapes = ((0, 0), (2048, 8), (4096, 8), (512, 2))
    assert grid == {
        (lag, *shape, unroll)
        for lag in (0, 512, 2048) for shape in shapes for unroll in (0, 4, 16)
    }  # fmt: skip
    small = {(s.num_tokens, s.knobs["index_queries"]) for s in of["small"]}
    assert small == set(itertools.product((1, 32, 128), (0, 8, 16, 32)))
    assert {s.kind for s in of["overlap"]} == {OVERLAP}
    assert {s.side_priority for s in of["variants"]} == {None, 0}
    assert {s.kind for s in of["variants"]} == {CALLS, HALVES}


def test_the_likeliest_come_first_and_nothing_twice() -> None:
    found = settings_of(["blocks", "crossover", "blocks"])
    assert found[0].changed == {}
    # Block and warps are one choice.
    changes = [
        len({"shape" if name in ("combine_block", "combine_warps") else name for name in s.changed})
        for s in found if s.section == "blocks"
    ]  # fmt: skip
    assert changes == sorted(changes)
    assert set(changes) == {0, 1, 2, 3}
    assert len({s.identity for s in found}) == len(found)
    # The default at 4096 was asked for by chunks first.
    default = setting(num_tokens=4096, mode=HIGH)
    assert [s.section for s in found if s.identity == default.identity] == ["blocks"]
    with pytest.raises(ValueError, match="expected some of variants, crossover"):
        settings_of(["crossovers"])


def test_identity_is_what_is_timed() -> None:
    one = setting()
    assert setting(section="b").identity == one.identity
    others = [
        setting(num_tokens=6), setting(mode=HIGH), setting(wires=FP8), setting(kind=HALVES),
        setting(side_priority=0), setting(side_priority=-1), setting(knobs={"combine_lag": 7}),
    ]  # fmt: skip
    assert len({s.identity for s in [one, *others]}) == 8
    assert str(others[-1]) == "a T=5 low-latency bf16/bf16 combine_lag=7"


# Measuring, with a communicator that runs here.


def host_clock(body: Callable[..., None]) -> Callable[[], list[float]]:
    """A Recorder without a GPU."""
    body(lambda: None)

    def replay() -> list[float]:
        marks: list[float] = []
        body(lambda: marks.append(time.perf_counter()))
        return [(end - start) * 1e6 for start, end in itertools.pairwise(marks)]

    return replay


def swept(
    context: RankContext, path: str, kinds: tuple[str, ...], fault: str, seconds: float
) -> tuple[int, list[str], int]:
    """Exit code, settings opened, and rows there at the start."""
    from moe_comm import Group, create_communicator
    from moe_comm.launch.worker import Ranks

    slab_sweep_ports.MODEL_WIDTH = slab_sweep_ports.SHARED_WIDTH = 32
    config = EPConfig(**TINY, num_slots=3, timeout_s=5.0)
    routing = parse_routing("uniform", num_experts=12, num_topk=4)
    plan = Plan(config=config, routing=routing, calls=3, replays=4, source="code")
    ranks = Ranks(Group(), timeout_s=5.0)
    opened = []

    def open_dense(config: EPConfig, ranks: Ranks, one: Setting) -> Any:
        opened.append(one.kind)
        comm = create_communicator(config, ranks.group, "c10d:dense")
        if fault == "open" and ranks.rank == 1 and one.kind == CALLS:
            raise OSError("no such memory")
        if fault == "late" and ranks.rank == 1:
            combine, calls = comm.combine, iter(range(1000))

            def wrong(*args: Any, **options: Any) -> Any:
                out = combine(*args, **options)
                # Long after the eager call that is checked first.
                if next(calls) > 9:
                    out[2, 7] += 1
                return out

            comm.combine = wrong
        return comm

    file = slab_sweep.ResultFile(ranks, plan, path)
    before = len(file.document["rows"])
    sweep = Sweep(plan=plan, ranks=ranks, open=open_dense, record=host_clock)
    left = [one for one in (setting(kind=kind) for kind in kinds) if one.identity not in file.done]
    code = slab_sweep.run_settings(sweep, file, left, seconds=seconds, began=time.monotonic())
    return code, opened, before


def test_each_setting_is_checked_timed_and_written(tmp_path) -> None:
    path = str(tmp_path / "sweep.json")
    assert run_ranks(2, swept, path, SHAPES, "", 60.0) == [(0, list(SHAPES), 0)] * 2
    document = read_json(path)
    rows = document["rows"]
    assert "params.hidden_share" in document["definitions"]
    parts = [f"{phase}_{part}" for phase in ("dispatch", "combine")
             for part in ("send", "copies", "receive")]  # fmt: skip
    both = ["dispatch", "combine"]
    assert [row["phase"] for row in rows] == [*both, *parts, *both, "gemm", *both]
    assert [row["wrong"] for row in rows] == [0] * 10 + [None, 0, 0]
    # Four replays on two ranks.
    assert all(row["samples"] == 8 and row["p50_us"] > 0 for row in rows)
    changed = rows[0]["params"]["changed"]
    assert rows[0]["programs"] == changed.get("ranked_programs")
    assert rows[0]["params"]["to_peer_bytes"] == 5 * 24 * 2
    # Every token reaches the other rank but by chance; a row has values, ids and weights.
    assert rows[0]["minimum_bytes"] < rows[0]["remote_bytes"] <= 5 * (48 + 4 * 8)
    split = rows[-1]["params"]
    assert split["beside"] == "split"
    (alone,) = (r for r in rows if r["phase"] == "combine"
                and r["params"].get("beside") == "nothing")  # fmt: skip
    assert split["call_us"] == alone["slowest_rank_p50_us"]
    saved = split["call_us"] + split["gemm_us"] - rows[-1]["slowest_rank_p50_us"]
    assert split["hidden_share"] == pytest.approx(saved / split["call_us"], abs=1e-3)


def test_a_run_ends_in_time_and_the_next_goes_on(tmp_path) -> None:
    path = str(tmp_path / "sweep.json")
    assert run_ranks(2, swept, path, SHAPES, "", 0.0) == [(0, [CALLS], 0)] * 2
    assert run_ranks(2, swept, path, SHAPES, "", 60.0) == [(0, [HALVES, OVERLAP], 2)] * 2
    rows = read_json(path)["rows"]
    assert [row["params"]["kind"] for row in rows] == [CALLS] * 2 + [HALVES] * 6 + [OVERLAP] * 5


def test_what_goes_wrong_in_a_timed_call_is_found(tmp_path) -> None:
    path = str(tmp_path / "sweep.json")
    assert [code for code, *_ in run_ranks(2, swept, path, (CALLS,), "late", 60.0)] == [1, 1]
    rows = read_json(path)["rows"]
    assert [(row["phase"], row["wrong"]) for row in rows] == [("dispatch", 0), ("combine", 1)]
    assert whole_calls(rows).keys() == {("dispatch", "bf16", 5, 240, LOW)}


def test_what_one_rank_cannot_do_is_a_row_and_the_next_run_tries_again(tmp_path) -> None:
    path = str(tmp_path / "sweep.json")
    kinds = (CALLS, HALVES)
    assert run_ranks(2, swept, path, kinds, "open", 60.0) == [(0, list(kinds), 0)] * 2
    first, *rest = read_json(path)["rows"]
    assert first["params"]["error"] == "rank 1: open: OSError: no such memory"
    assert first["p50_us"] is None
    assert [row["wrong"] for row in rest] == [0] * 6
    assert "no such memory" in recommend([first, *rest])
    assert run_ranks(2, swept, path, kinds, "", 60.0) == [(0, [CALLS], 6)] * 2


def test_files_of_something_else_are_refused(tmp_path) -> None:
    path = tmp_path / "sweep.json"
    run_ranks(2, swept, str(path), (CALLS,), "", 60.0)
    old = read_json(path)
    plan = Plan(
        config=EPConfig(**TINY), routing=parse_routing("uniform", num_experts=12, num_topk=4),
        calls=3, source="code",
    )  # fmt: skip
    assert slab_sweep.kept_rows(old, old, plan) == old["rows"]
    for name, value in (("source", "other"), ("calls", 8)):
        with pytest.raises(BadInput, match="expected a file of the same"):
            slab_sweep.kept_rows(old, old, dataclasses.replace(plan, **{name: value}))
    old["command"] = "run"
    write_json(str(path), old)
    with pytest.raises(BadInput, match="expected a file of slab_sweep"):
        slab_sweep._read(str(path))


def swept_on_gpus(context: RankContext, path: str) -> tuple[int, int]:
    """Exit code, and settings there were."""
    from moe_comm import Group
    from moe_comm.launch.slab_sweep_compile import count_compiles
    from moe_comm.launch.worker import Ranks

    slab_sweep_ports.MODEL_WIDTH = slab_sweep_ports.SHARED_WIDTH = 64
    shape = {**TINY, "hidden": 64}
    config = EPConfig(**shape, num_slots=3, timeout_s=10.0)
    routing = parse_routing("uniform", num_experts=12, num_topk=4)
    plan = Plan(config=config, routing=routing, calls=3, replays=4, source="code")
    ranks = Ranks(Group(), timeout_s=10.0)
    settings = [setting(mode=mode, kind=kind) for mode in (LOW, HIGH) for kind in SHAPES]
    settings += [setting(mode=HIGH, side_priority=0), setting(wires=FP8)]
    file = slab_sweep.ResultFile(ranks, plan, path)
    sweep = Sweep(plan=plan, ranks=ranks, compiled=count_compiles())
    began = time.monotonic()
    code = slab_sweep.run_settings(sweep, file, settings, seconds=80.0, began=began)
    return code, len(settings)


@pytest.mark.multi_gpu(2)
def test_captured_calls_of_every_kind_are_right(tmp_path) -> None:
    path = str(tmp_path / "sweep.json")
    outcomes = run_ranks(2, swept_on_gpus, path, device_type="cuda")
    rows = read_json(path)["rows"]
    assert [row["params"]["error"] for row in rows if "error" in row["params"]] == []
    assert outcomes == [(0, 8)] * 2
    # Whole calls by both definitions where nothing is changed, halves, and beside a GEMM on one
    # stream and on two.
    assert len(rows) == 2 * (4 + 6 + 3 + 6) + 2 + 4
    assert {row["wrong"] for row in rows if row["phase"] != "gemm"} == {0}
    assert {row["params"].get("timing") for row in rows} == {IN_A_ROW, PAIRS}


# Compiling ahead.


@pytest.mark.slow
@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled under the interpreter"
)
def test_kernels_are_compiled_ahead_once(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    config = EPConfig(**TINY, num_slots=2)
    settings = [setting(), setting(mode=HIGH), setting(side_priority=0),
                setting(knobs={"combine_programs": 3})]  # fmt: skip
    assert distinct(settings) == settings[:2]
    kernels = []
    for _ in range(2):
        said: list[str] = []
        compile_ahead(
            settings, config, num_ranks=2, capability=(9, 0), workers=1, seconds=60.0,
            say=said.append,
        )  # fmt: skip
        (words,) = said
        assert "of 2 of 2 settings ahead, 1 processes" in words
        kernels.append(int(words.split()[1]))
    assert kernels[0] > 4
    assert kernels[1] == 0
    assert len(list(tmp_path.glob("*/_combine_kernel.cubin"))) >= 3
    assert list(tmp_path.glob("*/_dispatch_kernel.cubin"))


# Reading.


def timed(one: Setting, phase: str, us: float, *, wire: str = "bf16", **params: Any) -> dict:
    """A row of a file."""
    row_bytes = {"bf16": 7168, "fp8": 3696}[wire]
    return {
        "phase": phase, "wire": wire, "num_tokens": one.num_tokens, "mode": one.tuning.mode,
        "wrong": 0, "slowest_rank_p50_us": us, "limit_us": 5.0,
        "params": {"timing": IN_A_ROW, "kind": one.kind, "changed": one.changed,
                   "to_peer_bytes": one.num_tokens * row_bytes, **params},
    }  # fmt: skip


def test_the_crossover_is_where_the_least_is_lost() -> None:
    assert crossover([(100, 1.0, 2.0), (400, 4.0, 3.0), (900, 9.0, 6.0)]) == (200, 1.0)
    assert crossover([(100, 2.0, 1.0)]) == (0, 1.0)
    assert crossover([(100, 1.0, 2.0), (400, 1.0, 2.0)]) == (None, 1.0)
    # Two wires that disagree: half as much is lost by taking stores at 300.
    threshold, factor = crossover([(100, 1.0, 2.0), (290, 3.0, 2.5), (310, 2.0, 2.8),
                                   (900, 9.0, 6.0)])  # fmt: skip
    assert (threshold, factor) == (528, 1.2)


def test_tables_say_what_the_rows_say() -> None:
    rows = []
    for num_tokens, low, high in ((1024, 30.0, 40.0), (2048, 60.0, 50.0)):
        for mode, us in ((LOW, low), (HIGH, high)):
            one = setting(num_tokens=num_tokens, mode=mode)
            rows += [timed(one, "dispatch", us), timed(one, "combine", us + 1)]
    for knobs, us in (({"combine_unroll": 4}, 44.0), ({"aside_programs": 66}, 90.0)):
        one = setting(num_tokens=2048, mode=HIGH, knobs=knobs)
        rows += [timed(one, "dispatch", us), timed(one, "combine", us)]
    default = setting(num_tokens=2048, mode=HIGH)
    rows.append(timed(default, "dispatch", 55.5, timing=PAIRS))
    rows.append({**timed(default, "dispatch", 0.1), "wrong": 3})
    halves = setting(num_tokens=2048, mode=HIGH, kind=HALVES)
    rows.append(timed(halves, "combine_send", 33.0))
    rows.append(timed(dataclasses.replace(halves, kind=OVERLAP), "dispatch", 70.0, beside="split",
                      call_us=50.0, gemm_us=40.0, hidden_share=0.4))  # fmt: skip
    times = whole_calls(rows)
    case = ("combine", "bf16", 2048, 2048 * 7168, HIGH)
    # A combine does not hang on dispatch's knobs: two times of the default, whose median counts.
    assert times[case] == {(): 70.5, (("combine_unroll", 4),): 44.0}
    text = recommend(rows)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert (
        "# dispatch: high throughput from 10380372 bytes on (copy_from_bytes): at worst 0.0% "
        "slower than the better mode of a size. us"
    ) in lines
    assert "bf16 1024 7340032 30.00 40.00 low latency" in lines
    name = "bf16 T=2048 high-throughput"
    assert f"combine {name} 2 70.50 44.00 37.6% combine_unroll=4" in lines
    assert "# time against aside_programs. us" in lines
    assert f"dispatch {name} 90.00 47.00" in lines
    assert f"dispatch {name} 47.00 55.50 5.00" in lines
    assert f"{name} combine_send 33.00 defaults" in lines
    assert f"dispatch {name} split 50.00 40.00 70.00 0.40" in lines
    assert "dispatch T=2048 high-throughput 3 defaults" in lines
    assert recommend([]) == "no times yet"


def test_the_command_without_a_gpu(tmp_path) -> None:
    def run(*arguments: str, **variables: str) -> Result:
        return CliRunner().invoke(slab_sweep.command, arguments, env=variables)

    listed = run("--list", "--sections", "overlap,small")
    assert listed.exit_code == 0
    assert len(listed.output.splitlines()) == len(settings_of(["overlap", "small"]))
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    for arguments, code, words in (
        (("--sections", "none"), 2, "expected one of variants"),
        (("--recommend", str(broken)), 2, "missing"),
        (("--out", str(tmp_path / "no" / "x.json")), 2, "a directory that can be written"),
        (("--out", str(tmp_path / "x.json")), 2, "start it with torchrun"),
    ):
        done = run(*arguments)
        assert done.exit_code == code
        assert words in done.output
    if not torch.cuda.is_available():
        done = run("--out", str(tmp_path / "x.json"), RANK="0", WORLD_SIZE="1")
        assert done.exit_code == 3
        assert "none here" in done.output
    assert not Path(tmp_path / "x.json").exists()
