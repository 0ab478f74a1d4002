"""The pair's data: what result files of two ranks say of times and copies, as curves, and what
those of slab_stand_in say of one rank among more."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_comm.backends.slab_modes import SlabTuning
from moe_comm.config import EPConfig
from moe_comm.launch.results import read_json
from moe_comm.wire import WIRES

Points = Sequence[tuple[float, float]]
# Other commands turn knobs, or mean something else by a phase.
_COMMANDS = ("run", "matrix", "matrix_copies")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a curve was measured at: row of `hidden` elements on `wire`, K choices of E experts."""

    hidden: int
    num_topk: int
    num_experts: int
    wire: str

    def __str__(self) -> str:
        return f"{self.num_experts}/{self.num_topk}/{self.hidden} {self.wire}"

    @property
    def row_bytes(self) -> int:
        """Values and scales of a row."""
        return WIRES[self.wire].row_bytes(self.hidden)

    @property
    def config(self) -> EPConfig:
        """One that dispatches and combines such rows."""
        return EPConfig(
            num_experts=self.num_experts, num_topk=self.num_topk, hidden=self.hidden,
            dispatch_wire=self.wire, combine_wire=self.wire,
        )  # fmt: skip


@dataclass(kw_only=True)
class PairData:
    """Times of two ranks.

    Attributes:
        curves: (backend or backend:mode, phase) -> shape -> tokens -> microseconds of each routing.
        copies: bytes to the peer -> microseconds, in a graph.
        limits: the same, of copies beside other rows; what there is where `copies` is empty.
        stand_ins: (phase, mode of the slab) -> shape -> ranks -> tokens -> microseconds of one of
            so many ranks; mode is "" for combine, whose launches do not depend on it.
        files: names of what was read.
    """

    curves: dict[tuple[str, str], dict[Shape, dict[int, dict[str, float]]]] = field(
        default_factory=dict
    )
    copies: dict[int, float] = field(default_factory=dict)
    limits: dict[int, float] = field(default_factory=dict)
    stand_ins: dict[tuple[str, str], dict[Shape, dict[int, dict[int, float]]]] = field(
        default_factory=dict
    )
    files: list[str] = field(default_factory=list)
    # Of each curve of stand_ins.
    _days: dict[tuple[Any, ...], str] = field(default_factory=dict)

    @classmethod
    def load(cls, directory: Path, *, device: str, graphs: bool) -> PairData:
        """Read every result file of the directory that two ranks on such devices wrote.

        Args:
            directory: of result files; newer ones (by name) replace what older ones say.
            device: the devices' name; for a CPU its type, "cpu".
            graphs: take captured times where a row of the same kind was captured.
        """
        eager, captured = cls(), cls()
        for path in sorted(directory.glob("*.json")):
            try:
                document = read_json(path)
            except ValueError:
                # Summaries have a schema of their own.
                continue
            if {device_name(one) for one in document["devices"]} != {device}:
                continue
            if document["command"] == "slab_stand_in":
                eager.files.append(path.name)
                eager._take_stand_ins(document["rows"], path.name.partition("_")[0])
                continue
            rows = [row for row in document["rows"] if _counts(row)]
            if rows and document["command"] in _COMMANDS:
                eager.files.append(path.name)
                for row in rows:
                    (captured if row["cuda_graph"] and graphs else eager)._take(row)
        # A backend that was captured anywhere is not told by its eager calls.
        eager.curves |= captured.curves
        eager.copies |= captured.copies
        eager.limits |= captured.limits
        return eager

    def _take(self, row: Mapping[str, Any]) -> None:
        time = row["slowest_rank_p50_us"]
        if row["phase"] == "copy":
            if row["mode"] == "alone":
                self.copies[row["params"]["bytes"]] = time
            return
        if row["phase"] in ("dispatch", "combine") and row["limit_kind"] == "peer copy":
            self.limits.setdefault(row["remote_bytes"], row["limit_us"])
        shape = _shape_of(row)
        for name in _names_of(row, shape):
            curve = self.curves.setdefault((name, row["phase"]), {}).setdefault(shape, {})
            curve.setdefault(row["num_tokens"], {})[row["routing"]] = time

    def _take_stand_ins(self, rows: Sequence[Mapping[str, Any]], day: str) -> None:
        """Those of a later day, or letter, replace a curve as a whole: its other sizes are of
        kernels that are gone."""
        for row in rows:
            if row["wrong"] or not row["samples"] or row["params"]["changed"]:
                continue
            key = (row["phase"], row["mode"] if row["phase"] == "dispatch" else "")
            shape, ranks = _shape_of(row), row["ep_size"]
            of_ranks = self.stand_ins.setdefault(key, {}).setdefault(shape, {})
            if self._days.get((key, shape, ranks)) != day:
                self._days[key, shape, ranks] = day
                of_ranks[ranks] = {}
            of_ranks[ranks][row["num_tokens"]] = row["slowest_rank_p50_us"]

    def shapes(self, name: str, phase: str) -> list[Shape]:
        """Shapes that a backend's phase was measured at."""
        return list(self.curves.get((name, phase), {}))

    def points(self, name: str, phase: str, shape: Shape, routing: str) -> list[tuple[int, float]]:
        """(tokens, us) ascending: of this routing where it was measured, else the mean of all."""
        found = []
        for tokens, times in sorted(self.curves[name, phase][shape].items()):
            found.append((tokens, times.get(routing, sum(times.values()) / len(times))))
        return found

    def copy_points(self) -> list[tuple[float, float]]:
        """(bytes, us) ascending; sizes within a tenth of each other are one point, so that no
        slope is taken between them."""
        groups: list[list[tuple[int, float]]] = []
        for size, time in sorted((self.copies or self.limits).items()):
            if not groups or size > 1.1 * groups[-1][0][0]:
                groups.append([])
            groups[-1].append((size, time))
        return [
            (sum(size for size, _ in group) / len(group), sum(t for _, t in group) / len(group))
            for group in groups
        ]


def device_name(device: Mapping[str, Any]) -> str:
    """What must be alike: a GPU's name; processors are only told from GPUs."""
    return "cpu" if device["type"] == "cpu" else str(device["name"])


def _shape_of(row: Mapping[str, Any]) -> Shape:
    return Shape(
        hidden=row["hidden"], num_topk=row["num_topk"], num_experts=row["num_experts"],
        wire=row["wire"].partition("/")[0],
    )  # fmt: skip


def _names_of(row: Mapping[str, Any], shape: Shape) -> set[str]:
    """What this row answers for: the slab by itself only in the mode that it takes by the bucket,
    c10d is exact by default."""
    backend, mode = row["backend"], row["mode"]
    full = f"{backend}:{mode}" if mode else backend
    plain = mode == "exact"
    if backend == "slab":
        # A combine is the same in both modes.
        modes = {"low-latency", "high-throughput"}
        if row["phase"] != "combine":
            modes = {SlabTuning().mode_of(shape.config, row["num_tokens"], row["ep_size"])}
        plain = mode in modes
    return {full, backend} if plain else {full}


def _counts(row: Mapping[str, Any]) -> bool:
    params = row["params"]
    return bool(
        row["ep_size"] == 2
        and row["slowest_rank_p50_us"]
        and not row["wrong"]
        and not params.get("virtual")
        and not params.get("emulated")
        and "flushed" not in params.get("timing", "")
    )


def line_through(points: Points, at: float, *, least: float = 0.0) -> float:
    """Piecewise linear, continued at both ends, never below `least`; one point is a constant."""
    if len(points) == 1:
        return points[0][1]
    index = bisect.bisect([x for x, _ in points], at)
    (x0, y0), (x1, y1) = points[max(0, min(index - 1, len(points) - 2)) :][:2]
    return max(least, y0 + (y1 - y0) * (at - x0) / (x1 - x0))


def rate_of(points: Points) -> float | None:
    """Bytes a microsecond at the large end of (bytes, us); None with fewer than two points."""
    if len(points) < 2:
        return None
    (x0, y0), (x1, y1) = points[-2:]
    return (x1 - x0) / (y1 - y0) if y1 > y0 else None
