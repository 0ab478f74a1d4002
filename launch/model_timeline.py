"""When each kernel of a captured call ran, and with how many blocks: what stood in whose way."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from moe_comm.launch.model_measure import Bench

Kernel = dict[str, Any]
# Parts of names of kernels that communicate: the slab's, DeepEP's, NCCL's.
COMMUNICATES = ("dispatch", "combine", "nccl", "_wait_kernel", "_release_kernel")


def timeline(bench: Bench, call: Callable[[], Any]) -> list[Kernel]:
    """The first rank's kernels of the second of two captured calls, in order of their start;
    nothing on other ranks, or where the profiler records no kernels. Collective.

    The first call absorbs how much later one rank begins than another.
    """

    def twice() -> None:
        call()
        call()

    graph, _ = bench.capture(twice)
    bench.replay(graph)
    if not bench.ranks.is_first:
        bench.replay(graph)
        return []
    found = profiled(lambda: bench.replay(graph))
    return shifted(found[len(found) // 2 :])


def profiled(call: Callable[[], object]) -> list[Kernel]:
    """The kernels that a call launches and waits for; as kernels_of."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return kernels_of(json.loads(path.read_text(encoding="utf-8")))


def kernels_of(trace: dict[str, Any]) -> list[Kernel]:
    """The kernels of a Chrome trace by torch's profiler, in order of their start; start_us, us."""
    found = []
    for event in trace.get("traceEvents", ()):
        if event.get("cat") == "kernel":
            args = event["args"]
            found.append(
                {
                    "name": event["name"][:60],
                    "start_us": float(event["ts"]),
                    "us": float(event["dur"]),
                    "blocks": _product(args.get("grid", ())),
                    "threads": _product(args.get("block", ())),
                    "registers": args.get("registers per thread"),
                    "shared_bytes": args.get("shared memory"),
                    "stream": args.get("stream"),
                }
            )
    return sorted(found, key=lambda kernel: kernel["start_us"])


def shifted(kernels: Sequence[Kernel]) -> list[Kernel]:
    """The same with the first start at 0, rounded to a hundredth of a microsecond."""
    first = kernels[0]["start_us"] if kernels else 0.0
    return [
        kernel | {"start_us": round(kernel["start_us"] - first, 2), "us": round(kernel["us"], 2)}
        for kernel in kernels
    ]


def beside(kernels: Sequence[Kernel]) -> float | None:
    """The share of the communicating kernels' time in which another kernel ran too; None without
    any.

    Example: a dispatch from 0 to 10 us and a product from 4 to 30 us: 0.6.
    """
    comm = [k for k in kernels if _communicates(k)]
    others = [k for k in kernels if not _communicates(k)]
    total = sum(k["us"] for k in comm)
    if not total:
        return None
    covered = 0.0
    for kernel in comm:
        at, end = kernel["start_us"], kernel["start_us"] + kernel["us"]
        for other in sorted(others, key=lambda k: float(k["start_us"])):
            start = max(other["start_us"], at)
            stop = min(other["start_us"] + other["us"], end)
            if stop > start:
                covered += stop - start
                at = stop
    return float(covered / total)


def _communicates(kernel: Kernel) -> bool:
    return any(part in kernel["name"] for part in COMMUNICATES)


def _product(sizes: Sequence[int]) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result
