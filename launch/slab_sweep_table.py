"""What a file of slab_sweep says: the bytes from which copies win, the best knobs, and the rest of
its figures as tables. Times are slowest_rank_p50_us; where a case was timed several times, their
median."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from moe_comm.launch.slab_sweep_problem import IN_A_ROW, PAIRS
from moe_comm.launch.slab_sweep_settings import HALVES, HIGH, LOW, OVERLAP, PROGRAM_KNOBS
from moe_comm.launch.timing import percentile

Row = Mapping[str, Any]
# How the knobs of each phase alone begin.
_ONLY = {
    "dispatch": ("dispatch_", "ranked_", "counted_", "aside_", "index_", "copy_from"),
    "combine": ("combine_",),
}


class Case(NamedTuple):
    """A phase at a size; `size` is the bytes to one peer."""

    phase: str
    wire: str
    num_tokens: int
    size: int
    mode: str

    def __str__(self) -> str:
        return f"{self.phase} {self.wire} T={self.num_tokens} {self.mode}"


# By the knobs that differ from the defaults, of those that the phase reads.
Knobs = tuple[tuple[str, Any], ...]
Times = dict[Case, dict[Knobs, float]]


def recommend(rows: Sequence[Row]) -> str:
    """The tables, as text."""
    times, pairs = whole_calls(rows), whole_calls(rows, PAIRS)
    parts = [
        *_crossovers(times), _best(times), *_programs(times), _definitions(times, pairs, rows),
        _halves(rows), _overlap(rows), _failed(rows),
    ]  # fmt: skip
    return "\n\n".join(part for part in parts if part) or "no times yet"


def whole_calls(rows: Sequence[Row], timing: str = IN_A_ROW) -> Times:
    """Medians of whole calls with nothing beside them; wrong ones left out."""
    found: dict[Case, dict[Knobs, list[float]]] = {}
    for row in rows:
        params, phase = row["params"], row["phase"]
        alone = params.get("beside", "nothing") == "nothing" and params.get("timing") == timing
        if phase not in _ONLY or not alone or row["wrong"] != 0:
            continue
        (other,) = set(_ONLY) - {phase}
        changed = params["changed"].items()
        knobs = tuple(sorted(kv for kv in changed if not kv[0].startswith(_ONLY[other])))
        case = Case(phase, row["wire"], row["num_tokens"], params["to_peer_bytes"], row["mode"])
        found.setdefault(case, {}).setdefault(knobs, []).append(row["slowest_rank_p50_us"])
    return {
        case: {knobs: percentile(taken, 50) for knobs, taken in by_knobs.items()}
        for case, by_knobs in sorted(found.items())
    }


def crossover(points: Sequence[tuple[int, float, float]]) -> tuple[int | None, float]:
    """The bytes from which high throughput is to be taken, and what that costs at most.

    Args:
        points: (bytes to a peer, us in low latency, us in high throughput), at least one.

    Returns:
        The threshold: halfway, on a logarithmic scale, between two sizes; 0: always; None: never.
        Of all these, the one whose choice is slower than the better mode by the smallest factor at
        the worst point, then on average; and that factor.
    """
    sizes = sorted({size for size, _, _ in points})
    between = [math.isqrt(a * b) for a, b in itertools.pairwise(sizes)]

    def cost(threshold: int | None) -> tuple[float, float]:
        factors = [
            (high if threshold is not None and size >= threshold else low) / min(low, high)
            for size, low, high in points
        ]
        return max(factors), sum(factors)

    best = min([0, *between, None], key=cost)
    return best, cost(best)[0]


def _crossovers(times: Times) -> Iterator[str]:
    """Of dispatch: a combine is the same in both modes."""
    lines, points = [], []
    for case, by_knobs in times.items():
        low = by_knobs.get(())
        high = times.get(case._replace(mode=HIGH), {}).get(())
        if case.phase != "dispatch" or case.mode != LOW or low is None or high is None:
            continue
        points.append((case.size, low, high))
        better = "low latency" if low <= high else "high throughput"
        lines.append([case.wire, case.num_tokens, case.size, low, high, better])
    if points:
        threshold, factor = crossover(points)
        said = "no size" if threshold is None else f"{threshold} bytes"
        titles = ["wire", "T", "bytes to a peer", "low latency", "high throughput", "better"]
        yield _table(
            f"dispatch: high throughput from {said} on (copy_from_bytes): at worst "
            f"{factor - 1:.1%} slower than the better mode of a size. us",
            titles, lines,
        )  # fmt: skip


def _best(times: Times) -> str:
    lines: list[list[Any]] = []
    for case, by_knobs in times.items():
        knobs, best = min(by_knobs.items(), key=lambda kv: kv[1])
        plain = by_knobs.get(())
        if len(by_knobs) > 1:
            gain = "" if plain is None else f"{1 - best / plain:.1%}"
            lines.append([case, len(by_knobs), plain, best, gain, _words(knobs)])
    titles = ["case", "settings", "default", "best", "less by", "with"]
    return _table("best knobs of each case that was timed with several. us", titles, lines)


def _programs(times: Times) -> Iterator[str]:
    """Time against programs, a table a role."""
    for role in PROGRAM_KNOBS:
        found: dict[Case, dict[int, float]] = {}
        for case, by_knobs in times.items():
            # The other roles are left as they are, but for the one that is changed with dispatch's.
            of_role = {
                dict(k)[role]: us for k, us in by_knobs.items() if [n for n, _ in k] == [role]
            }
            if of_role:
                found[case] = of_role
        counts = sorted({count for of_role in found.values() for count in of_role})
        if found:
            lines = [
                [case, *(of_role.get(count) for count in counts), times[case].get(())]
                for case, of_role in found.items()
            ]
            yield _table(f"time against {role}. us", ["case", *map(str, counts), "default"], lines)


def _definitions(times: Times, pairs: Times, rows: Sequence[Row]) -> str:
    """Defaults by both definitions, beside the limit."""
    limits = {
        (row["phase"], row["wire"], row["num_tokens"]): row["limit_us"]
        for row in rows if row["limit_us"] is not None
    }  # fmt: skip
    lines = [
        [case, times.get(case, {}).get(()), by_knobs[()], limits.get(case[:3])]
        for case, by_knobs in pairs.items()
    ]
    titles = ["case", IN_A_ROW, PAIRS, "limit"]
    return _table("defaults by both definitions of a time. us", titles, lines)


def _halves(rows: Sequence[Row]) -> str:
    lines = [
        [f"{row['wire']} T={row['num_tokens']} {row['mode']}", row["phase"],
         row["slowest_rank_p50_us"], _words(row["params"]["changed"].items())]
        for row in rows if row["params"]["kind"] == HALVES
    ]  # fmt: skip
    return _table("halves apart. us", ["case", "part", "time", "with"], lines)


def _overlap(rows: Sequence[Row]) -> str:
    lines = [
        [f"{row['phase']} {row['wire']} T={row['num_tokens']} {row['mode']}",
         row["params"]["beside"], row["params"]["call_us"], row["params"]["gemm_us"],
         row["slowest_rank_p50_us"], row["params"]["hidden_share"]]
        for row in rows if row["params"]["kind"] == OVERLAP and "hidden_share" in row["params"]
    ]  # fmt: skip
    titles = ["case", "beside a GEMM", "call", "GEMM", "both", "share hidden"]
    return _table("beside a GEMM of a shared expert's size. us", titles, lines)


def _failed(rows: Sequence[Row]) -> str:
    lines = [
        [f"{row['phase']} T={row['num_tokens']} {row['mode']}", row["wrong"],
         row["params"].get("error", ""), _words(row["params"]["changed"].items())]
        for row in rows if row["wrong"] or "error" in row["params"]
    ]  # fmt: skip
    return _table("wrong, or could not run", ["case", "wrong", "error", "with"], lines)


def _words(knobs: Any) -> str:
    return ", ".join(f"{name}={value}" for name, value in knobs) or "defaults"


def _table(title: str, titles: Sequence[str], lines: Sequence[Sequence[Any]]) -> str:
    """Aligned columns under a title; nothing without lines."""
    if not lines:
        return ""
    text = [list(titles), *([_cell(cell) for cell in line] for line in lines)]
    widths = [max(len(line[i]) for line in text) for i in range(len(titles))]
    body = (
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in text
    )
    return "\n".join([f"# {title}", *body])


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
