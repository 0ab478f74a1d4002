"""Snapshot and restore of one full Kimi K3 request's state against a plain device copy.

    python -m moe_comm.launch.bench_state OUT.json

One GPU. Checks the copies bit for bit first, then times them with CUDA events: a snapshot, a
restore, the copy of one contiguous tensor of the same size, and the way to host memory and back
that preemption takes. Exit code 1 where a copy is wrong, or snapshot and restore stay under 70% of
the plain copy's rate; 3 without a GPU.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable
from typing import Any

import torch

from moe_comm import EPConfig
from moe_comm.launch.results import (
    Row,
    device_facts,
    new_document,
    write_json,
)
from moe_comm.launch.timing import percentile
from moe_comm.model.config import K3Config
from moe_comm.model.serving.layout import StateLayout
from moe_comm.model.serving.paged_cache import PagedCache
from moe_comm.model.serving.segments import export_segments, import_segments, whole_part
from moe_comm.model.serving.slots import Handle
from moe_comm.model.serving.state_pool import StatePool

FLOOR = 0.7
ITERS, WARMUP = 30, 5
POSITION = 4096
DEFINITIONS = {
    "rate": "bytes of one request's recurrent and convolution state over the median time; each "
    "byte is read once and written once",
    "limit_us": "median time of copying one contiguous tensor of the same size on the device",
}


def main(path: str) -> int:
    """Check, time, write the result file; the exit code."""
    if not torch.cuda.is_available():
        print("bench_state: needs one CUDA GPU", file=sys.stderr)
        return 3
    device = torch.device("cuda", 0)
    started = datetime.datetime.now(datetime.UTC)
    layout = StateLayout.from_config(K3Config.preset("kimi-k3"))
    pool = StatePool(layout, 4, device=device)
    cache = PagedCache(layout, 2 * layout.pages_for(POSITION), device=device)
    handle = _random_state(pool)
    snapshot = pool.snapshot(handle, POSITION)
    assert snapshot is not None
    restored = pool.restore(snapshot)
    assert restored is not None
    wrong = _wrong(pool, handle, snapshot) + _wrong(pool, handle, restored)
    source = torch.empty(layout.slot_bytes, dtype=torch.uint8, device=device).random_(0, 256)
    target = torch.empty_like(source)
    plain = _time(lambda: target.copy_(source))
    rows = []
    for phase, action in (
        ("snapshot", lambda: _take_and_drop(pool, handle)),
        ("restore", lambda: pool.restore(snapshot, restored)),
    ):
        rows.append(_row(phase, _time(action), plain, layout.slot_bytes, wrong))
    rows += _host_rows(pool, cache, handle)
    document = new_document(
        command="bench_state", argv=sys.argv[1:], started=started,
        devices=[device_facts(0, device)],
        topology={"num_ranks": 1, "num_nodes": 1, "transport": "none"},
        config=EPConfig.preset("kimi-k3", max_tokens_per_rank=128), definitions=DEFINITIONS,
        rows=rows,
    )  # fmt: skip
    write_json(path, document)
    ratios = {row.phase: (row.limit_us or 0.0) / (row.p50_us or 1.0) for row in rows[:2]}
    for row in rows:
        print(f"{row.phase}: {row.p50_us:.1f} us, {row.params['gbps']:.0f} GB/s, {row.params}")
    print(f"share of a plain copy: {ratios}, wrong elements: {wrong}")
    return 0 if wrong == 0 and min(ratios.values()) >= FLOOR else 1


def _random_state(pool: StatePool) -> Handle:
    handles = pool.allocate(1)
    assert handles is not None
    draw = torch.Generator(device=pool.recurrent.device).manual_seed(0)
    slot = pool.begin(handles[0], 0, POSITION)
    for tensor in pool.tensors.values():
        tensor[:, slot].normal_(generator=draw)
    pool.commit(handles[0], POSITION)
    return handles[0]


def _wrong(pool: StatePool, a: Handle, b: Handle) -> int:
    return sum(int((t[:, a.slot] != t[:, b.slot]).sum()) for t in pool.tensors.values())


def _take_and_drop(pool: StatePool, handle: Handle) -> None:
    snapshot = pool.snapshot(handle, POSITION)
    assert snapshot is not None
    pool.release(snapshot)


def _time(action: Callable[[], object]) -> list[float]:
    """Seconds of each of ITERS runs, by events around the enqueued work."""
    samples = []
    for i in range(WARMUP + ITERS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        action()
        end.record()
        torch.cuda.synchronize()
        if i >= WARMUP:
            samples.append(begin.elapsed_time(end) / 1e3)
    return samples


def _host_rows(pool: StatePool, cache: PagedCache, handle: Handle) -> list[Row]:
    """Out to host memory and back, with 4096 tokens of MLA rows."""
    pages = cache.allocate(pool.layout.pages_for(POSITION))
    assert pages is not None
    cache.rows.normal_()
    part = whole_part(pool.layout)
    segments = export_segments(pool, cache, handle, pages)
    nbytes = sum(t.numel() * t.element_size() for t in segments.values())
    slot = pool.stage()
    assert slot is not None
    fresh = cache.allocate(len(pages))
    assert fresh is not None

    def back() -> None:
        import_segments(pool, cache, slot.slot, fresh, segments, part=part)

    back()
    again = export_segments(pool, cache, pool.publish(slot, POSITION), fresh)
    wrong = sum(int((segments[name] != again[name]).sum()) for name in segments)
    out = _time(lambda: export_segments(pool, cache, handle, pages))
    return [
        _row("to host", out, None, nbytes, wrong),
        _row("from host", _time(back), None, nbytes, wrong),
    ]


def _row(
    phase: str, samples: list[float], plain: list[float] | None, nbytes: int, wrong: int
) -> Row:
    median = percentile(samples, 50)
    params: dict[str, Any] = {"bytes": nbytes, "gbps": nbytes / median / 1e9}
    limit = percentile(plain, 50) * 1e6 if plain else None
    if limit:
        params["share_of_plain_copy"] = limit / (median * 1e6)
    return Row(
        backend="state-pool",
        mode="device",
        phase=phase,
        layout=None,
        num_tokens=POSITION,
        hidden=3584,
        num_topk=16,
        num_experts=896,
        ep_size=1,
        wire="none",
        routing="none",
        params=params,
        samples=len(samples),
        p50_us=median * 1e6,
        p99_us=percentile(samples, 99) * 1e6,
        slowest_rank_p50_us=median * 1e6,
        limit_us=limit,
        limit_kind="device copy" if limit else None,
        wrong=wrong,
    )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m moe_comm.launch.bench_state OUT.json")
    sys.exit(main(sys.argv[1]))
