"""What serve-bench measured: figures of one rank, of all of them, as a table, rows and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from moe_comm.config import EPConfig
from moe_comm.launch.results import Row
from moe_comm.launch.timing import percentile
from moe_comm.model.serving.requests import Phase
from moe_comm.model.serving.scheduler import Scheduler

DEFINITIONS = {
    "ttft": "time to first token: from a request's arrival to the end of the step that made it",
    "tpot": "time per output token after the first, a request's mean",
    "hit rate": "prompt tokens taken from the prefix cache, of all prompt tokens looked up",
    "occupancy": "slots and pages in use after a step, cached prefixes included",
}


@dataclass(kw_only=True)
class RankFigures:
    """One rank's samples. Seconds; a series has one value a step."""

    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    new_tokens: int = 0
    prompt_tokens: int = 0
    finished: int = 0
    tokens_asked: int = 0
    tokens_hit: int = 0
    preemptions: int = 0
    snapshots: int = 0
    steps: int = 0
    wall_s: float = 0.0
    series: dict[str, list[float]] = field(
        default_factory=lambda: {"time_s": [], "slots": [], "pages": [], "running": []}
    )

    def watch(self, scheduler: Scheduler, now: float) -> None:
        """Note the occupancy after a step."""
        pool, cache = scheduler.pool, scheduler.cache
        self.series["time_s"].append(now)
        self.series["slots"].append((pool.num_slots - pool.num_free) / pool.num_slots)
        self.series["pages"].append((cache.num_pages - cache.num_free) / cache.num_pages)
        self.series["running"].append(scheduler.running)

    def close(self, scheduler: Scheduler, wall_s: float) -> None:
        """Take the requests' times and the counters once everything is done."""
        for tracked in scheduler.tracked.values():
            self.finished += tracked.phase is Phase.FINISHED
            times = tracked.token_times
            self.new_tokens += len(tracked.generated)
            self.prompt_tokens += len(tracked.request.prompt)
            if times:
                self.ttft_s.append(times[0] - tracked.request.arrival_s)
            if len(times) > 1:
                self.tpot_s.append((times[-1] - times[0]) / (len(times) - 1))
        if scheduler.prefixes is not None:
            stats = scheduler.prefixes.stats()
            self.tokens_asked, self.tokens_hit = stats.tokens_asked, stats.tokens_hit
        counters = scheduler.counters
        self.preemptions, self.snapshots = counters.preemptions, counters.snapshots
        self.steps, self.wall_s = counters.steps, wall_s


def rows_of(
    figures: Sequence[RankFigures], config: EPConfig, *, backend: str, mode: str, **params: Any
) -> list[Row]:
    """Rows of a result file: ttft, tpot, and the occupancy with the totals in its params."""
    common: dict[str, Any] = {
        "backend": backend,
        "mode": mode,
        "layout": None,
        "num_tokens": max(f.prompt_tokens + f.new_tokens for f in figures),
        "hidden": config.hidden,
        "num_topk": config.num_topk,
        "num_experts": config.num_experts,
        "ep_size": len(figures),
        "wire": config.dispatch_wire,
        "routing": "model",
    }
    rows = []
    for phase, name in (("ttft", "ttft_s"), ("tpot", "tpot_s")):
        samples = [value for f in figures for value in getattr(f, name)]
        if not samples:
            continue
        slowest = max(percentile(getattr(f, name), 50) for f in figures if getattr(f, name))
        rows.append(
            Row(
                **common,
                phase=phase,
                params=dict(params),
                samples=len(samples),
                p50_us=percentile(samples, 50) * 1e6,
                p99_us=percentile(samples, 99) * 1e6,
                slowest_rank_p50_us=slowest * 1e6,
            )
        )
    totals = {**params, **totals_of(figures), "series": [f.series for f in figures]}
    rows.append(Row(**common, phase="occupancy", params=totals))
    return rows


def totals_of(figures: Sequence[RankFigures]) -> dict[str, Any]:
    """Sums and means over ranks."""
    wall = max(f.wall_s for f in figures)
    asked = sum(f.tokens_asked for f in figures)
    slots = [v for f in figures for v in f.series["slots"]]
    pages = [v for f in figures for v in f.series["pages"]]
    return {
        "requests": sum(f.finished for f in figures),
        "prompt_tokens": sum(f.prompt_tokens for f in figures),
        "new_tokens": sum(f.new_tokens for f in figures),
        "wall_s": wall,
        "new_tokens_per_s": sum(f.new_tokens for f in figures) / max(wall, 1e-9),
        "hit_rate": sum(f.tokens_hit for f in figures) / asked if asked else 0.0,
        "preemptions": sum(f.preemptions for f in figures),
        "snapshots": sum(f.snapshots for f in figures),
        "steps": max(f.steps for f in figures),
        "slots_mean": sum(slots) / max(len(slots), 1),
        "slots_peak": max(slots, default=0.0),
        "pages_mean": sum(pages) / max(len(pages), 1),
        "pages_peak": max(pages, default=0.0),
    }


def table(figures: Sequence[RankFigures]) -> str:
    """The figures as lines: name, value, unit."""
    totals = totals_of(figures)
    ttft = [value for f in figures for value in f.ttft_s]
    tpot = [value for f in figures for value in f.tpot_s]
    lines = [
        ("ranks", f"{len(figures)}", ""),
        ("requests finished", f"{totals['requests']}", ""),
        ("time to first token, p50 / p99", _pair(ttft), "ms"),
        ("time per output token, p50 / p99", _pair(tpot), "ms"),
        ("output", f"{totals['new_tokens_per_s']:.1f}", "tokens/s"),
        ("prompt tokens from the prefix cache", f"{totals['hit_rate']:.1%}", ""),
        ("state slots in use, mean / peak", _shares(totals, "slots"), ""),
        ("pages in use, mean / peak", _shares(totals, "pages"), ""),
        ("preemptions", f"{totals['preemptions']}", ""),
        ("steps", f"{totals['steps']}", ""),
    ]
    widths = [max(len(line[i]) for line in lines) for i in range(2)]
    return "\n".join(
        f"{name.ljust(widths[0])}  {value.rjust(widths[1])} {unit}".rstrip()
        for name, value, unit in lines
    )


def plot(figures: Sequence[RankFigures], path: str) -> None:
    """Latency distributions, and occupancy over time. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for name, values in (
        ("time to first token", [v for f in figures for v in f.ttft_s]),
        ("time per output token", [v for f in figures for v in f.tpot_s]),
    ):
        ordered = sorted(values)
        share = [(i + 1) / len(ordered) for i in range(len(ordered))]
        left.step([v * 1e3 for v in ordered], share, where="post", label=name)
    left.set(xscale="log", xlabel="ms", ylabel="share of requests", ylim=(0, 1.02))
    left.legend()
    for rank, one in enumerate(figures):
        for name, style in (("slots", "-"), ("pages", ":")):
            right.plot(one.series["time_s"], one.series[name], style, label=f"{name}, rank {rank}")
    right.set(xlabel="s", ylabel="share in use", ylim=(0, 1.02))
    right.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _pair(values: Sequence[float]) -> str:
    if not values:
        return "-"
    return f"{percentile(values, 50) * 1e3:.1f} / {percentile(values, 99) * 1e3:.1f}"


def _shares(totals: dict[str, Any], name: str) -> str:
    return f"{totals[f'{name}_mean']:.1%} / {totals[f'{name}_peak']:.1%}"
