"""The rows of a task before it runs, each with its prediction."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moe_comm.config import EPConfig
from moe_comm.launch.matrix_copies import SIZES, loads_of, row_of
from moe_comm.launch.matrix_predict import Prediction, Predictor
from moe_comm.launch.matrix_tasks import Task
from moe_comm.launch.results import Row

# Copies of this size have left latency behind.
_LARGE = 256_000_000
_DEEPEP_MODES = ("deepep:v1-ht", "deepep:v1-ll", "deepep:v2")


def cells_of(task: Task, predictor: Predictor) -> Iterator[tuple[Row, Prediction]]:
    """Every row that can be told beforehand, without figures; none of faults and of the soak, whose
    rows hold no times."""
    if task.section == "copies":
        for load in loads_of(predictor.num_ranks):
            for size in SIZES:
                row = row_of(load, size, [], None, predictor.num_ranks)
                yield row, predictor.copy(size, row.params["peers"])
        return
    if not task.preset:
        return
    config = EPConfig.preset(task.preset, dispatch_wire=task.wire)
    for name in _names(task, predictor):
        for tokens in task.num_tokens:
            for routing in task.routings:
                for phase in task.phases:
                    row = _row(name, phase, config, tokens, routing, predictor.num_ranks)
                    yield row, predictor.cell(name, phase, config, tokens, routing)


def _names(task: Task, predictor: Predictor) -> list[str]:
    """Backends as their rows will call themselves; of deepep those modes that the pair ran."""
    names = []
    for name in task.backends:
        modes = [m for m in _DEEPEP_MODES if predictor.pair.shapes(m, task.phases[0])]
        names += modes if name == "deepep" and modes else [name]
    return names


def _row(name: str, phase: str, config: EPConfig, tokens: int, routing: str, num_ranks: int) -> Row:
    backend, _, mode = name.partition(":")
    wires = {"dispatch": config.dispatch_wire, "combine": config.combine_wire}
    both = "/".join(dict.fromkeys(wires.values()))
    return Row(
        backend=backend, mode=mode, phase=phase, layout="expert", num_tokens=tokens,
        hidden=config.hidden, num_topk=config.num_topk, num_experts=config.num_experts,
        ep_size=num_ranks, wire=wires.get(phase, both), routing=routing,
    )  # fmt: skip


def fan_out_of(rows: Sequence[Mapping[str, Any]]) -> float:
    """Rate of copies from every GPU to all others over that of one copy alone; 1 where the file
    has no copies yet."""
    rates: dict[str, list[float]] = {}
    for row in rows:
        if row["phase"] == "copy" and row["samples"] and row["params"]["bytes"] == _LARGE:
            rates.setdefault(row["mode"], []).append(row["remote_gbps"])
    if not rates.get("alone") or not rates.get("all-at-once"):
        return 1.0
    return min(rates["all-at-once"]) / statistics.median(rates["alone"])
