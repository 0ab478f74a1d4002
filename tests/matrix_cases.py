"""A pair's result files for tests of the matrix."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from moe_comm import EPConfig
from moe_comm.launch.matrix_pair import PairData
from moe_comm.launch.results import Row, write_json

K3 = EPConfig.preset("kimi-k3")
# A pair: dispatch takes 10 us and 0.02 a token, combine 12 and 0.04, copies 5 us and 400 GB/s.
RATE = 400e3


def row(phase: str, tokens: int, time: float, **changes) -> Row:
    config = changes.pop("config", K3)
    plain = Row(
        backend="slab", mode="low-latency", phase=phase, layout="expert", num_tokens=tokens,
        hidden=config.hidden, num_topk=config.num_topk, num_experts=config.num_experts, ep_size=2,
        wire="bf16", routing="uniform", cuda_graph=True, samples=3, p50_us=time,
        slowest_rank_p50_us=time, remote_bytes=tokens * 7296, limit_kind="peer copy",
        limit_us=5 + tokens * 7296 / RATE, wrong=0,
    )  # fmt: skip
    return dataclasses.replace(plain, **changes)


def document(rows, ranks=2, name="NVIDIA H200", kind="cuda"):
    return {
        "schema_version": 1, "command": "run", "argv": [], "started": "2026-01-01T00:00:00+00:00",
        "git": {"commit": "0" * 40, "dirty": False}, "versions": {},
        "devices": [{"rank": r, "type": kind, "name": name} for r in range(ranks)],
        "topology": {"num_ranks": ranks}, "config": {}, "seed": 0, "definitions": {},
        "rows": [dataclasses.asdict(one) for one in rows],
    }  # fmt: skip


def pair_rows():
    return [
        row(phase, tokens, base + slope * tokens,
            mode="high-throughput" if tokens == 4096 else "low-latency")
        for phase, base, slope in (("dispatch", 10.0, 0.02), ("combine", 12.0, 0.04))
        for tokens in (1, 128, 4096)
    ]  # fmt: skip


def pair_of(tmp_path: Path, rows, **options) -> PairData:
    write_json(str(tmp_path / "2026-01-01_x_run.json"), document(rows, **options))
    return PairData.load(tmp_path, device="NVIDIA H200", graphs=True)
