"""What bench_model's rows say in words, and a picture of decode cost by context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
CONTEXT_PHASES = (("kda_decode", "KDA layer"), ("mla_decode", "Gated MLA layer"))


def summary(rows: Sequence[Row], *, every_overlap: bool = False) -> list[str]:
    """Ours against the other ports, what is hidden by the model's way and by the other that hides
    most (or by every one), and straight lines through decode costs."""
    lines = []
    for row in rows:
        if row["params"].get("port") != "ours":
            continue
        ours = row["slowest_rank_p50_us"]
        ep = row["params"].get("per_rank_shape_of_ep")
        text = f"{row['phase']} T={row['num_tokens']}{f', shape of EP{ep}' if ep else ''}: "
        text += f"{ours / 1e3:.2f} ms"
        for other in rows:
            same = all(row[key] == other[key] for key in ("phase", "num_tokens", "num_experts"))
            if same and other["params"].get("port") not in (None, "ours"):
                theirs = other["slowest_rank_p50_us"]
                text += (
                    f"; {other['params']['port']} {theirs / 1e3:.2f} ms, {theirs / ours:.2f}x, "
                    f"{100 * (1 - ours / theirs):.0f}% less"
                )
        lines.append(text)
    for row in rows:
        if row["phase"] == "moe_layer":
            params = row["params"]
            beside, inside = 100 * params["hidden"], 100 * params["hidden_in_layer"]
            lines.append(
                f"dispatch and combine T={row['num_tokens']}: {params['comm_us']:.1f} us, hidden "
                f"{beside:.0f}%, in the layer {inside:.0f}%"
            )
    others = [row for row in rows if row["phase"] == "overlap"]
    if not every_overlap:
        others = sorted(others, key=lambda row: -row["params"]["hidden"])[:1]
    lines += [_variant(row) for row in others]
    for phase, label in CONTEXT_PHASES:
        points = context_points(rows, phase)
        if len(points) > 1:
            base, slope, worst = fit(points)
            lines.append(
                f"{label} by context: {base:.1f} us + {1024 * slope:.3f} us a 1K tokens, "
                f"off by {100 * worst:.1f}% at most; "
                f"{points[-1][0]} tokens cost {points[-1][1] / points[0][1]:.2f}x {points[0][0]}"
            )
    return lines


def _variant(row: Row) -> str:
    """Example: "overlapped by halves: 100.0 us instead of 81.0 + 29.0, hidden 34%; the layer 2950.0
    us instead of 2960.0"."""
    params = row["params"]
    text = (
        f"overlapped by {params['variant']}: {params['both_us']:.1f} us instead of "
        f"{params['shared_us']:.1f} + {params['comm_us']:.1f}, hidden {100 * params['hidden']:.0f}%"
        f"; the layer {params['layer_us']:.1f} us"
    )
    return text + (f" instead of {params['one_stream_us']:.1f}" if params["one_stream_us"] else "")


def context_points(rows: Sequence[Row], phase: str) -> list[tuple[int, float]]:
    """(context, microseconds), ascending."""
    found = [row for row in rows if row["phase"] == phase]
    return sorted((row["params"]["context"], row["slowest_rank_p50_us"]) for row in found)


def fit(points: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Least squares y = base + slope x of relative errors: (base, slope, the largest relative
    error). Example: (0, 2), (1, 3), (2, 4) -> (2, 1, 0)."""
    total, sum_x, sum_y, sum_xx, sum_xy = 0.0, 0.0, 0.0, 0.0, 0.0
    for x, y in points:
        weight = 1 / y**2
        total += weight
        sum_x += weight * x
        sum_y += weight * y
        sum_xx += weight * x * x
        sum_xy += weight * x * y
    slope = (total * sum_xy - sum_x * sum_y) / (total * sum_xx - sum_x**2)
    base = (sum_y - slope * sum_x) / total
    return base, slope, max(abs(base + slope * x - y) / y for x, y in points)


def plot_context(document: Mapping[str, Any], path: Path) -> None:
    """Decode cost of one layer by context, a line for KDA and one for MLA, both axes logarithmic.
    Needs matplotlib (the extra `plot`)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    requests = {row["num_tokens"] for row in document["rows"] if row["phase"] == "kda_decode"}
    for phase, label in CONTEXT_PHASES:
        points = context_points(document["rows"], phase)
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=label)
    many = "/".join(str(n) for n in sorted(requests))
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="context of each request, tokens",
        ylabel=f"one token of each of {many} requests, us",
    )
    axes.legend()
    axes.grid(visible=True, which="both", alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
