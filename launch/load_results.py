"""What `moe-bench load` found, as a result document: a row for the load and for what it is compared
with."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from moe_comm.launch import results

if TYPE_CHECKING:
    from moe_comm.model.config import K3Config

DEFINITIONS = {
    "p50_us": "time of one load, microseconds: reading, hashing, copying, repacking; mode `plain`: "
    "of reading all shards in large pieces with as many threads, keeping nothing",
    "limit_us": "the same bytes at the rate of the faster plain read of the same run",
    "params.gbps": "bytes read / time, decimal GB/s",
    "params.of_plain": "gbps / the faster plain read's",
    "params.peak_extra_bytes": "host and device memory beyond the weights in place, the two peaks "
    "added; bound_bytes: four experts and 64 MiB",
}


def document(
    result: Mapping[str, Any],
    config: K3Config,
    *,
    argv: Sequence[str],
    started: datetime.datetime,
) -> dict[str, Any]:
    """The schema's document.

    Args:
        result: of the load, with the comparison where there was one.
        argv: the command's arguments; directories are left out.
        started: when, in UTC.
    """
    rank = result["rank"]
    plain: dict[str, Any] = json.loads(
        json.dumps(
            {
                "schema_version": results.SCHEMA_VERSION,
                "command": "load",
                "argv": results.without_directories(argv),
                "started": started.isoformat(timespec="seconds"),
                "git": results.git_facts(),
                "versions": results.versions(),
                "devices": [results.device_facts(rank, torch.device(result["device"]))],
                "topology": {"num_nodes": 1, "num_ranks": 1},
                "config": {
                    "num_experts": config.num_experts,
                    "num_topk": config.num_experts_per_token,
                    "hidden": config.routed_expert_hidden_size,
                    "num_hidden_layers": config.num_hidden_layers,
                },
                "seed": 0,
                "definitions": DEFINITIONS,
                "rows": [dataclasses.asdict(row) for row in rows(result, config)],
            }
        )
    )
    results.validate(plain)
    return plain


def rows(result: Mapping[str, Any], config: K3Config) -> list[results.Row]:
    """The load that was asked for first, then what it is compared with: the load with hashing the
    other way, and the plain reads."""
    modes = {True: "hashing", False: "no_hashing"}
    compared = result.get("of_plain", {})
    best = result.get("plain_gbps")
    mode = modes[result["hashed"]]
    of_plain = {"of_plain": compared[mode]["of_plain"]} if mode in compared else {}
    skipped = ("device", "rank", "ep_size", "of_plain", "plain_bytes", "plain_gbps_each")
    first = {k: v for k, v in result.items() if k not in skipped and k != "plain_gbps"}
    made = [_row(result, config, mode, result["read_bytes"], first | of_plain, best)]
    for name, one in compared.items():
        if name != mode:
            made.append(_row(result, config, name, result["read_bytes"], one, best))
    for rate in result.get("plain_gbps_each", ()):
        made.append(_row(result, config, "plain", result["plain_bytes"], {"gbps": rate}, best))
    return made


def _row(
    result: Mapping[str, Any],
    config: K3Config,
    mode: str,
    nbytes: int,
    params: Mapping[str, Any],
    best: float | None,
) -> results.Row:
    time_us = nbytes / params["gbps"] / 1e3
    return results.Row(
        backend="load",
        mode=mode,
        phase="load",
        layout=None,
        num_tokens=0,
        hidden=config.routed_expert_hidden_size,
        num_topk=config.num_experts_per_token,
        num_experts=config.num_experts,
        ep_size=result["ep_size"],
        wire="none",
        routing="none",
        params={"bytes": nbytes, **params},
        samples=1,
        p50_us=time_us,
        p99_us=time_us,
        slowest_rank_p50_us=time_us,
        limit_us=None if best is None else nbytes / best / 1e3,
        limit_kind=None if best is None else "plain reads of the same files",
    )
