"""The benchmark matrix of one host: predicted, then run, checked and written to one result file.

    launch/matrix.sh results/2026-11-29_nvidia-h200x8_matrix.json
    python -m moe_comm.launch.matrix --out FILE --sections copies,run --seconds 540

Sections, in this order: copies (the peer copy matrix), run (dispatch, combine and round trip of
every backend), layer (the whole MoE layer), unused (the static slab against compacted variants),
faults (killed and stalled ranks), soak (random calls, each checked). Before a section runs, its
predictions are written to the file (matrix_predict has the formulas). Every task is a process of
its own with a bound in time; what is in the file already is not run again, so that calls with
--seconds add up to the whole. Exit codes: 0 all done and right, 1 wrong data, 2 usage, 3 this
environment cannot, 124 time is up and tasks are left: call again.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import click
import torch

from moe_comm.config import PRESETS, EPConfig
from moe_comm.launch import results, spawn
from moe_comm.launch.matrix_cells import cells_of, fan_out_of
from moe_comm.launch.matrix_pair import PairData, device_name
from moe_comm.launch.matrix_predict import Predictor
from moe_comm.launch.matrix_run import run_task
from moe_comm.launch.matrix_store import Store
from moe_comm.launch.matrix_tasks import SECTIONS, Grid, Task, tasks_of
from moe_comm.launch.matrix_unused import computed_task, unused_rows, verdict
from moe_comm.launch.options import (
    BadInput,
    check_outputs,
    device_type_of,
    known,
    many,
    rank_count_of,
    token_count,
)
from moe_comm.wire import WIRES

_CUDA_BACKENDS = "slab,c10d:dense,per-expert;deepep"
_CPU_BACKENDS = "c10d:dense,per-expert"


@click.command(context_settings={"show_default": True})
@click.option("--out", metavar="FILE", required=True, help="the result file, gone on with")
@click.option("--sections", default=",".join(SECTIONS), callback=many(known(list(SECTIONS))))
@click.option("--seconds", type=float, default=540.0, help="bound of this call")
@click.option("--task-seconds", type=float, default=240.0, help="bound of one task")
@click.option("--device", default="auto", help="auto, cpu or cuda")
@click.option("--nproc", type=click.IntRange(min=2), help="ranks  [default: all GPUs, 2 on a CPU]")
@click.option("--presets", default="kimi-k3,kimi-k3-wide,deepseek-v3",
              callback=many(known(list(PRESETS))))  # fmt: skip
@click.option("--num-tokens", default="1,8,32,128,512,4096", callback=many(token_count))
@click.option("--wires", default="bf16,fp8", callback=many(known(list(WIRES))))
@click.option("--backends", help=f"semicolons part calls  [default: {_CUDA_BACKENDS}]")
@click.option("--routings", callback=many(str), help="[default: uniform and both traces; uniform "
              "and zipf:1 where no trace fits]")  # fmt: skip
@click.option("--iters", type=click.IntRange(min=1))
@click.option("--soak-seconds", type=float, default=300.0)
@click.option("--seed", type=click.IntRange(min=0), default=0)
@click.option("--pair-data", default="results", help="directory of the pair's result files")
@click.option(
    "--predict-only",
    metavar="DEVICE",
    help="only write the predictions for --nproc such "
    "GPUs (NVIDIA H200), wherever this runs; a later call there goes on with the file",
)
@click.option("--retry", is_flag=True, help="try tasks again that gave nothing")
def command(**given: Any) -> int:
    """Predict, run, check and write the whole matrix of this host."""
    only = given["predict_only"]
    device_type = "cuda" if only else device_type_of(given["device"])
    if only and given["nproc"] is None:
        raise BadInput("--predict-only: expected --nproc, the ranks to predict for")
    check_outputs(given["out"])
    grid = _grid(given, device_type)
    devices = (
        [{"rank": rank, "type": "cuda", "name": only} for rank in range(grid.num_ranks)]
        if only
        else _devices(grid)
    )
    try:
        store = Store.open(Path(given["out"]), _fresh(grid, devices))
    except ValueError as error:
        raise BadInput(str(error)) from error
    if given["retry"]:
        store.forget_failures()
    name = device_name(store.document["devices"][0])
    pair = PairData.load(Path(given["pair_data"]), device=name, graphs=device_type == "cuda")
    if only:
        for section in given["sections"]:
            _predict(section, grid, store, pair)
        print(f"{len(store.rows)} rows predicted from {', '.join(pair.files) or 'no file'}")
        return 0
    deadline = time.monotonic() + given["seconds"]
    left = [section for section in SECTIONS if section in given["sections"]]
    # A section's predictions may use what the ones before it measured.
    while left and _section(left[0], grid, store, pair, deadline):
        del left[0]
    _report(store, left)
    if left:
        return spawn.LOST
    return 1 if any(_is_bad(row) for row in store.rows) else 0


def _grid(given: dict[str, Any], device_type: str) -> Grid:
    text = given["backends"] or (_CUDA_BACKENDS if device_type == "cuda" else _CPU_BACKENDS)
    return Grid(
        num_ranks=given["nproc"]
        if given["predict_only"]
        else rank_count_of(given["nproc"], device_type),
        device_type=device_type,
        presets=given["presets"],
        num_tokens=given["num_tokens"],
        wires=given["wires"],
        backends=tuple(tuple(call.split(",")) for call in text.split(";")),
        routings=given["routings"],
        iters=given["iters"],
        seed=given["seed"],
        soak_seconds=given["soak_seconds"],
        seconds=given["task_seconds"],
    )


def _devices(grid: Grid) -> list[dict[str, Any]]:
    on_gpu = grid.device_type == "cuda"
    return [
        results.device_facts(rank, torch.device("cuda", rank) if on_gpu else torch.device("cpu"))
        for rank in range(grid.num_ranks)
    ]


def _fresh(grid: Grid, devices: list[dict[str, Any]]) -> dict[str, Any]:
    """The document before any row."""
    topology = {
        "num_ranks": grid.num_ranks,
        "num_nodes": 1,
        "device_type": grid.device_type,
        "transport": "nccl" if grid.device_type == "cuda" else "gloo",
    }
    return results.new_document(
        command="matrix", argv=sys.argv[1:], devices=devices, topology=topology,
        config=EPConfig.preset(grid.presets[0]), seed=grid.seed, definitions={},
    )  # fmt: skip


def _predict(section: str, grid: Grid, store: Store, pair: PairData) -> list[Task]:
    """Write a section's predictions; its tasks."""
    tasks = tasks_of(section, grid)
    predictor = Predictor(
        pair=pair, num_ranks=grid.num_ranks, fan_out=fan_out_of(store.rows), seed=grid.seed
    )
    for task in tasks:
        store.predict(task, cells_of(task, predictor), pair.files)
    return tasks


def _section(section: str, grid: Grid, store: Store, pair: PairData, deadline: float) -> bool:
    """Predict and run a section; whether all of it is done."""
    tasks = _predict(section, grid, store, pair)
    if section == "unused":
        preset = grid.presets[0]
        computed = computed_task(preset)
        rows = unused_rows(
            preset, grid.routings_for(preset), grid.num_tokens, grid.num_ranks, grid.seed
        )
        if not store.is_done(computed):
            store.computed(computed, list(rows))
    for task in tasks:
        if store.is_done(task):
            continue
        left = deadline - time.monotonic()
        if left < min(task.least, task.seconds) or not run_task(task, store, left):
            return False
    return True


def _is_bad(row: dict[str, Any]) -> bool:
    return bool(row["wrong"] or row["params"].get("hangs") or row["params"].get("errors"))


def _report(store: Store, left: list[str]) -> None:
    """What came out, in words."""
    for line in verdict(store.rows):
        print(line)
    errors = [e for row in store.rows if (e := row["params"].get("relative_error")) is not None]
    if errors:
        near = sum(error <= 0.2 for error in errors)
        print(f"predictions: {near} of {len(errors)} within 20%")
    reasons = {row["params"]["task"]: row["params"]["reason"] for row in store.rows
               if "reason" in row["params"]}  # fmt: skip
    for task, reason in reasons.items():
        print(f"not run: {task}: {reason}")
    measured = [row for row in store.rows if "measured_at" in row["params"]]
    bad = sum(_is_bad(row) for row in measured)
    print(f"{len(measured)} rows measured, {bad} wrong; left: {', '.join(left) or 'nothing'}")


def main() -> None:
    """Entry point."""
    spawn.run_command(command)


if __name__ == "__main__":
    main()
