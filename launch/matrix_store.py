"""The matrix's file: predictions first, each replaced by the measured row that it was made for.

A result file of the usual schema. Of every row params has `section`, `task`, `cell`; a prediction
adds `predicted_us` (and `predicted_remote_bytes`) or `no_prediction` (why), and `predicted_at`; a
measured row `measured_at`, and beside a prediction `relative_error` = |measured - predicted| /
measured. A row that was not measured has samples 0; the first of a task that was tried in vain has
a `reason`.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_comm.launch import results
from moe_comm.launch.matrix_predict import Prediction
from moe_comm.launch.matrix_tasks import Task, cell_of

DEFINITIONS = {
    "params.predicted_us": "slowest_rank_p50_us as predicted before the task ran, by the formulas "
    "of launch/matrix_predict.py from the files named below and the copies of this file",
    "params.relative_error": "|slowest_rank_p50_us - predicted_us| / slowest_rank_p50_us",
    "slab_rows": "computed, not timed: rows of the busiest rank's slab that no token reaches",
}


def now() -> str:
    """UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


class Store:
    """The document and its file; every change is written at once."""

    def __init__(self, path: Path, document: dict[str, Any]) -> None:
        self.path, self.document = path, document
        document["definitions"] |= DEFINITIONS

    @classmethod
    def open(cls, path: Path, fresh: dict[str, Any]) -> Store:
        """Go on with a file, or begin one with `fresh`.

        Raises ValueError where the file is another command's, or of other ranks or devices.
        """
        if not path.exists():
            return cls(path, fresh)
        document = results.read_json(path)
        for name, got, want in (
            ("command", document["command"], fresh["command"]),
            ("ranks", document["topology"]["num_ranks"], fresh["topology"]["num_ranks"]),
            ("devices", _names(document), _names(fresh)),
        ):
            if got != want:
                raise ValueError(f"{path.name}: expected {name} {want!r} to go on, got {got!r}")
        return cls(path, document)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The document's rows."""
        rows: list[dict[str, Any]] = self.document["rows"]
        return rows

    def is_done(self, task: Task) -> bool:
        """Measured, or tried and found not to run here."""
        return any(
            row["params"].get("measured_at") or row["params"].get("reason")
            for row in self._of(task)
        )

    def forget_failures(self) -> None:
        """Try again what has a reason."""
        for row in self.rows:
            row["params"].pop("reason", None)
        self.document["rows"] = [row for row in self.rows if row["params"]["cell"] != "-"]

    def predict(
        self, task: Task, cells: Iterable[tuple[results.Row, Prediction]], sources: Sequence[str]
    ) -> None:
        """Add a row without figures for each prediction, unless the task has any."""
        if any("predicted_at" in row["params"] for row in self._of(task)) or self.is_done(task):
            return
        for row, prediction in cells:
            params: dict[str, Any] = {"predicted_at": now()}
            if prediction.us is None:
                params["no_prediction"] = prediction.reason
            else:
                params["predicted_us"] = round(prediction.us, 3)
                params["predicted_remote_bytes"] = prediction.remote_bytes
                if prediction.note:
                    params["predicted_note"] = prediction.note
            self._add(row, task, params)
        self.document["definitions"]["predicted from"] = ", ".join(sources) or "no file"
        self.write()

    def measured(self, task: Task, part: Mapping[str, Any]) -> None:
        """Take the rows of a task's own result file over."""
        self.document["definitions"] = part["definitions"] | self.document["definitions"]
        self.document["definitions"][f"command of {task.name}"] = _shown(task)
        waiting = {row["params"]["cell"]: row for row in self._of(task)}
        for row in part["rows"]:
            before = waiting.pop(cell_of(row, task.backends), None)
            params: dict[str, Any] = {"measured_at": now()}
            if before is not None:
                self.rows.remove(before)
                params |= {
                    name: value for name, value in before["params"].items() if "predict" in name
                }
                time, predicted = row["slowest_rank_p50_us"], params.get("predicted_us")
                if time and predicted is not None:
                    params["relative_error"] = round(abs(time - predicted) / time, 4)
            self._add(results.Row(**row), task, params)
        self.write()

    def computed(self, task: Task, rows: Iterable[results.Row]) -> None:
        """Rows that no process measured."""
        for row in rows:
            self._add(row, task, {"measured_at": now()})
        self.write()

    def failed(self, task: Task, reason: str) -> None:
        """Keep why a task gave nothing, on its first prediction or on a row of its own."""
        found = self._of(task)
        for row in found[:1]:
            row["params"]["reason"] = reason
        if not found:
            self._add(bare_row(task, self.document), task, {"reason": reason, "cell": "-"})
        self.write()

    def write(self) -> None:
        """The file, whole or as it was."""
        plain = json.loads(json.dumps(self.document))
        results.validate(plain)
        results.write_json(str(self.path), plain)

    def _of(self, task: Task) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["params"].get("task") == task.name]

    def _add(self, row: results.Row, task: Task, params: Mapping[str, Any]) -> None:
        plain = dataclasses.asdict(row)
        where = {"section": task.section, "task": task.name}
        cell = {"cell": cell_of(plain, task.backends)}
        plain["params"] = {**plain["params"], **where, **cell, **params}
        self.rows.append(plain)


def bare_row(task: Task, document: Mapping[str, Any]) -> results.Row:
    """A row of a task that says nothing but that it is there."""
    return results.Row(
        backend=",".join(task.backends), mode="", phase=task.section, layout=None, num_tokens=0,
        hidden=0, num_topk=0, num_experts=0, ep_size=document["topology"]["num_ranks"],
        wire=task.wire or "none", routing="none",
    )  # fmt: skip


def _names(document: Mapping[str, Any]) -> list[str]:
    return [device["name"] for device in document["devices"]]


def _shown(task: Task) -> str:
    return " ".join(results.without_directories(["python", *task.command]))
