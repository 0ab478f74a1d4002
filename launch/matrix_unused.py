"""The static slab against compacted variants: what is unused of it, and what that costs.

The slab gives every token of every rank a row on every rank; a compacted layout has rows of those
tokens alone that reach the rank. Two things are compared. Computed (this module): rows that are
reached, by the run's own routing. Measured (tasks of section unused): slab:high-throughput, which
copies whole blocks, unused rows with them; slab:low-latency, which sends the rows that are reached
and leaves the others as they are; and c10d, exact (counts first, then packed rows and nothing else)
and dense (whole blocks again). No slab with compacted memory exists: its transfer is what
low-latency sends, and its memory what is computed here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moe_comm.config import EPConfig
from moe_comm.launch.matrix_predict import traffic_of
from moe_comm.launch.matrix_tasks import Task, canonical
from moe_comm.launch.results import Row

WAYS = {
    "slab:low-latency": "compacted transfer",
    "slab:high-throughput": "whole blocks",
    "c10d:exact": "compacted",
    "c10d:dense": "whole blocks",
}


def unused_rows(
    preset: str, routings: Sequence[str], num_tokens: Sequence[int], num_ranks: int, seed: int
) -> Iterator[Row]:
    """A row a routing and T: rows of the slab, and how many of the fullest rank's are reached."""
    config = EPConfig.preset(preset)
    row_bytes = config.wire.row_bytes(config.hidden)
    for routing in routings:
        text = canonical(routing, preset)
        for tokens in num_tokens:
            rows = traffic_of(config, num_ranks, tokens, text, seed).rows
            reached = rows.sum(dim=0)
            total = num_ranks * tokens
            yield Row(
                backend="slab", mode="", phase="slab_rows", layout=None, num_tokens=tokens,
                hidden=config.hidden, num_topk=config.num_topk, num_experts=config.num_experts,
                ep_size=num_ranks, wire=config.dispatch_wire, routing=text,
                params={
                    "rows": total,
                    "reached_most": int(reached.max()),
                    "reached_least": int(reached.min()),
                    "unused_share": round(1 - float(reached.float().mean()) / total, 4),
                    "slab_bytes": total * row_bytes,
                    "compacted_bytes": int(reached.max()) * row_bytes,
                },
            )  # fmt: skip


def computed_task(preset: str) -> Task:
    """Stands for the computed rows, which no command makes."""
    return Task(name=f"unused rows {preset}", section="unused", command=(), seconds=0.0)


def verdict(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """In words: for each T the fastest way to dispatch, of what section unused measured."""
    times: dict[int, dict[str, float]] = {}
    for row in rows:
        time = row["slowest_rank_p50_us"]
        if row["params"].get("section") == "unused" and row["phase"] == "dispatch" and time:
            name = f"{row['backend']}:{row['mode']}"
            times.setdefault(row["num_tokens"], {})[name] = time
    lines = []
    for tokens, found in sorted(times.items()):
        best = min(found, key=lambda name: found[name])
        others = ", ".join(f"{n} {t:.1f} us" for n, t in sorted(found.items(), key=lambda i: i[1]))
        lines.append(f"dispatch, {tokens} tokens: {WAYS.get(best, '')} ({best}) wins: {others}")
    return lines
