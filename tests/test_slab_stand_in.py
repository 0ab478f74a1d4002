"""One rank of many on two devices: what its calls bring, that a wrong row is seen, that what is
compiled ahead is what is launched, and the command's options. Times need two GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from interpreter import inside, outside

from moe_comm import EPConfig
from moe_comm.backends import slab_launch
from moe_comm.backends.slab_dispatch_kernel import DispatchKernel
from moe_comm.backends.slab_modes import SlabTuning
from moe_comm.launch import slab_stand_in, slab_sweep_compile, stand_in_measure
from moe_comm.launch.matrix_pair import PairData
from moe_comm.launch.rank_data import RankData
from moe_comm.launch.results import read_json, write_json
from moe_comm.launch.routing import parse_routing
from moe_comm.launch.slab_stand_in import changes_of, command
from moe_comm.launch.stand_in_measure import Case
from moe_comm.launch.stand_in_world import Meeting, Problem, StandInWorld

CPU = torch.device("cpu")
UNIFORM = parse_routing("uniform", num_experts=16, num_topk=4)


class Small(Case):
    """A case of few experts and short rows."""

    @property
    def config(self) -> EPConfig:
        return EPConfig(
            num_experts=16, num_topk=4, hidden=64, max_tokens_per_rank=self.num_tokens,
            num_slots=self.calls, dispatch_wire=self.wires[0], combine_wire=self.wires[1],
        )  # fmt: skip


def case(num_ranks: int, mode: str = "auto", wire: str = "bf16", tokens: int = 3) -> Case:
    return Small(
        preset="kimi-k3", num_ranks=num_ranks, num_tokens=tokens, wires=(wire, "bf16"),
        routing=UNIFORM, tuning=SlabTuning(mode=mode), calls=2,
    )  # fmt: skip


def world_of(one: Case) -> StandInWorld:
    data = RankData.create_all(
        one.config, num_tokens=[one.num_tokens] * one.num_ranks, routing=UNIFORM
    )
    return StandInWorld(Problem(config=one.config, data=data), CPU, CPU, one.tuning)


def calls_of(world: StandInWorld) -> None:
    world.others_send()
    world.dispatch()
    world.others_receive_and_return()
    world.combine()
    world.others_end()


@outside
def test_stand_ins_under_the_interpreter(interpreted) -> None:
    interpreted()


@inside
@pytest.mark.parametrize(
    ("num_ranks", "mode", "wire"),
    [(2, "auto", "fp8"), (3, "auto", "bf16"), (3, "high-throughput", "bf16")],
)
def test_every_rank_gets_what_it_must(num_ranks, mode, wire) -> None:
    world = world_of(case(num_ranks, mode, wire))
    calls_of(world)
    found = world.check(range(num_ranks))
    # Rounding to bf16 is another one under the interpreter, so sums and scales differ there.
    wrong = [text for one in found if one.phase == "dispatch" for text in one.first]
    assert not [text for text in wrong if wire == "bf16" or "topk" in text], wrong
    for port in world.ports:
        assert bool(port.out.isfinite().all())
    world.poison()
    row = world.ports[0].last.rows
    here = (world.ports[0].last.topk_idx >= 0).any(-1)
    assert found[0].phase == "dispatch"
    assert world.check([0])[0].wrong >= int(here.sum()) * row.shape[-1] // 2


@inside
def test_rows_of_a_case_without_times(capsys) -> None:
    """On a CPU there is nothing to time; what is wrong is counted over both worlds."""
    one = case(2)
    rows = stand_in_measure.measure(one, stand_in_measure.Kept(0), (CPU, CPU), None, 3)
    assert [row.phase for row in rows] == ["dispatch", "combine"]
    assert all(row.samples == 0 and row.ep_size == 2 for row in rows)
    assert "dispatch" not in capsys.readouterr().err
    assert rows[0].remote_bytes == rows[1].remote_bytes // 128 * (128 + 8 * 4)


@pytest.mark.multi_gpu(2)
@pytest.mark.parametrize("mode", ["low-latency", "high-throughput"])
def test_times_on_two_gpus(mode) -> None:
    devices = [torch.device("cuda", index) for index in range(2)]
    one, kept = case(4, mode, tokens=8), stand_in_measure.Kept(0)
    rows = stand_in_measure.measure(one, kept, devices, Meeting(devices, 10.0), 3)
    for row in rows:
        # Of both GPUs.
        assert (row.samples, row.wrong, row.cuda_graph) == (6, 0, True)
        assert 0 < row.slowest_rank_p50_us < 1000
        assert row.limit_us


@outside
@pytest.mark.parametrize("one", [case(2), case(5), case(2, "high-throughput"), case(2, wire="fp8")])
def test_what_is_compiled_ahead_is_what_is_launched(monkeypatch, one) -> None:
    """Else every case compiles while GPUs wait. Constants and types decide which kernel it is."""
    launched: set[tuple[Any, ...]] = set()

    def note(kernel, programs, places, form, given) -> None:
        del programs
        kinds = [type(arg) if isinstance(arg, int) else arg.dtype for arg in given]
        kinds += [arg.dtype for arg in places.args if isinstance(arg, torch.Tensor)]
        launched.add((kernel.__name__, *sorted(form.options.items()), *kinds))

    monkeypatch.setattr(slab_launch, "_first", note)
    # As compiled for a GPU.
    real = slab_launch.Form.__init__

    def form(self, options, **rest) -> None:
        real(self, options | ({"INTERPRET": False} if "INTERPRET" in options else {}), **rest)

    monkeypatch.setattr(slab_launch.Form, "__init__", form)
    monkeypatch.setattr(DispatchKernel, "_index_by_launches", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))

    def compile_here(settings, config, *, num_ranks, **rest) -> None:
        del rest
        for setting in settings:
            slab_sweep_compile.make_calls(setting, config, num_ranks)

    monkeypatch.setattr(slab_stand_in, "compile_ahead", compile_here)
    slab_stand_in._ahead([one], CPU, seconds=60)
    ahead, launched = launched, set()
    world = world_of(one)
    for port in world.ports:
        port.comm.engine._interpret = False
        port.comm.engine._common["INTERPRET"] = False
    calls_of(world)
    assert {entry[0] for entry in ahead} >= {"_dispatch_kernel", "_combine_kernel"}
    assert launched <= ahead


def test_knobs() -> None:
    assert changes_of("ranked_programs=20,40") == [("ranked_programs", 20), ("ranked_programs", 40)]
    for text, hint in (("ranked_program=2", "did you mean 'ranked_programs'"), ("mode=1", "mode"),
                       ("put_warps", "NAME=NUMBER"), ("put_warps=x", "NAME=NUMBER")):  # fmt: skip
        with pytest.raises(click.BadParameter, match=hint):
            changes_of(text)
    given = {
        "presets": ("kimi-k3",), "ranks": (2, 8), "num_tokens": (1,), "wires": ("bf16",),
        "routing": "uniform", "modes": ("auto",), "calls": 8,
        "knobs": [changes_of("combine_block=2048,4096"), changes_of("combine_warps=8,16")],
    }  # fmt: skip
    cases = list(slab_stand_in._cases(given))
    assert len(cases) == len({one.identity for one in cases}) == 8
    assert {tuple(one.setting.changed.values()) for one in cases} == {
        (2048, 8), (2048, 16), (4096, 8), (4096, 16),
    }  # fmt: skip
    assert [one.num_ranks for one in cases] == [2] * 4 + [8] * 4


def test_command_without_gpus_says_so(tmp_path, capsys) -> None:
    if torch.cuda.is_available() and torch.cuda.device_count() > 1:
        pytest.skip("two GPUs are here")
    with pytest.raises(click.ClickException, match="two GPUs that reach each other") as error:
        command.main(["--out", str(tmp_path / "x.json")], standalone_mode=False)
    assert error.value.exit_code == 3
    assert not (tmp_path / "x.json").exists()


def test_a_file_is_gone_on_with_or_refused(tmp_path) -> None:
    path = tmp_path / "x.json"
    fresh = slab_stand_in._opened(path, case(2), 0, [CPU, CPU])
    write_json(str(path), json.loads(json.dumps(fresh)))
    assert slab_stand_in._opened(path, case(2), 0, [CPU, CPU])["started"] == fresh["started"]
    with pytest.raises(click.ClickException, match="seed 1"):
        slab_stand_in._opened(path, case(2), 1, [CPU, CPU])
    write_json(str(path), read_json(path) | {"command": "run"})
    with pytest.raises(click.ClickException, match="slab_stand_in"):
        slab_stand_in._opened(path, case(2), 0, [CPU, CPU])


def test_shipped_files_are_read_by_the_matrix() -> None:
    """What the pair measured of one rank among eight is what predictions go by."""
    root = Path(__file__).resolve().parents[1]
    pair = PairData.load(root / "results", device="NVIDIA H200", graphs=True)
    ranks = {count for of_shape in pair.stand_ins["combine", ""].values() for count in of_shape}
    assert {2, 8} <= ranks
