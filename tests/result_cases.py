"""A small, valid result document."""

from __future__ import annotations

from moe_comm.launch.results import Row


def document():
    row = vars(
        Row(
            backend="c10d",
            mode="exact",
            phase="dispatch",
            layout="expert",
            num_tokens=128,
            hidden=3584,
            num_topk=16,
            num_experts=896,
            ep_size=2,
            wire="bf16",
            routing="uniform",
            samples=10,
            p50_us=50.0,
            p99_us=80.0,
            slowest_rank_p50_us=60.0,
            remote_bytes=930_000,
            minimum_bytes=917_504,
            remote_gbps=15.5,
            limit_us=30.0,
            limit_kind="all_to_all_single",
            params={"raw_all_to_all_us": 40.0},
            wrong=0,
        )
    )
    base = {**row, "backend": "per-expert", "mode": "", "remote_bytes": 7_440_000}
    base |= {"slowest_rank_p50_us": 180.0, "params": {}}
    return {
        "schema_version": 1,
        "command": "run",
        "argv": ["run"],
        "started": "2026-01-01T00:00:00+00:00",
        "git": {"commit": "0" * 40, "dirty": False},
        "versions": {"torch": "2.13.0"},
        "devices": [
            {"rank": rank, "type": "cpu", "name": "some CPU", "cores": 2} for rank in range(2)
        ],
        "topology": {"num_ranks": 2, "num_nodes": 1, "transport": "gloo"},
        "config": {
            "num_experts": 896,
            "num_topk": 16,
            "hidden": 3584,
            "dispatch_wire": "bf16",
            "combine_wire": "bf16",
            "reduction": "rank",
        },
        "seed": 0,
        "definitions": {},
        "rows": [row, base],
    }
