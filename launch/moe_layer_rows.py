"""Result rows of the phase moe_layer: the stages' times and shares, and what they say in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moe_comm.launch.moe_layer_case import LayerCase
from moe_comm.launch.moe_layer_subjects import Layer
from moe_comm.launch.moe_layer_timing import LAYER, STAGES, Samples
from moe_comm.launch.results import Row
from moe_comm.launch.timing import Statistics
from moe_comm.wire import WIRES

MOE_LAYER = "moe_layer"

DEFINITIONS: dict[str, str] = {
    "moe_layer": (
        "route (fp32 router product and top-k), dispatch, the experts' two products with their "
        "activation, combine; no latent projections, norm or shared experts. Router rows are made "
        "so that the router chooses what `routing` says"
    ),
    "params.shares": (
        "median of each stage over the sum of the four; waiting for another rank counts for the "
        "stage that waits, and so does a device left idle by the host"
    ),
    "params.communication_share": "dispatch and combine together, of the same sum",
    "params.emulated": (
        "P: ranks here hold E / P experts each and receive exactly the rows, choices and weights "
        "that the first ranks of a P-rank group receive at num_tokens a rank; (R - 1) / R of them, "
        "not (P - 1) / P, cross between ranks, R - 1 peers instead of P - 1; the router is timed "
        "on num_tokens rows; null: the ranks here hold all experts"
    ),
    "params.dispatched_rows": "rows of z on the rank that has most",
}


def empty_row(layer: Layer, case: LayerCase, *, num_ranks: int, graph: bool) -> Row:
    """A row without figures."""
    config, (there, back) = case.config, layer.wires
    return Row(
        backend=layer.backend,
        mode=layer.mode,
        phase=MOE_LAYER,
        layout="expert",
        num_tokens=case.num_tokens,
        hidden=config.hidden,
        num_topk=config.num_topk,
        num_experts=config.num_experts,
        ep_size=num_ranks,
        wire=there if there == back else f"{there}/{back}",
        routing=case.routing,
        cuda_graph=graph,
        params={
            "experts_by": layer.experts_by,
            "experts_per_rank": config.num_experts // num_ranks,
            "active_experts": case.active_experts,
            "expert_rows": case.expert_rows,
            "emulated": case.emulated,
            "dispatched_rows": config.max_tokens_per_rank,
            "router_hidden": case.x.shape[1],
        },
        minimum_bytes=case.traffic.minimum_bytes(
            "round_trip",
            dispatch_row_bytes=WIRES[there].row_bytes(config.hidden),
            combine_row_bytes=WIRES[back].row_bytes(config.hidden),
        ),
    )


def fill_row(row: Row, per_rank: Sequence[Samples]) -> None:
    """Put every rank's samples into a row: the layer's times, and each stage's share."""
    by_name = {
        name: Statistics.of([samples[name] for samples in per_rank]) for name in (*STAGES, LAYER)
    }
    whole = by_name[LAYER]
    row.samples, row.p50_us, row.p99_us = whole.samples, whole.p50_us, whole.p99_us
    row.slowest_rank_p50_us = whole.slowest_rank_p50_us
    if row.remote_bytes is not None and whole.slowest_rank_p50_us > 0:
        row.remote_gbps = row.remote_bytes / whole.slowest_rank_p50_us / 1e3
    stages = {name: by_name[name].p50_us for name in STAGES}
    total = sum(stages.values())
    row.params["stage_p50_us"] = {name: round(us, 2) for name, us in stages.items()}
    row.params["shares"] = {name: round(us / total, 4) for name, us in stages.items()}
    both = stages["dispatch"] + stages["combine"]
    row.params["communication_share"] = round(both / total, 4)


def layer_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Shares of every row, and what ours gains over the two baselines, like with like."""
    lines = []
    for row in rows:
        if row["samples"] == 0:
            continue
        shares = row["params"]["shares"]
        size = row["params"]["emulated"]
        graph = "captured" if row["cuda_graph"] else "eager"
        text = ", ".join(f"{name} {100 * shares[name]:.1f}%" for name in STAGES)
        gains = [
            _gain(base, row)
            for base in rows
            if row["backend"] != "per-expert"
            and base["backend"] == "per-expert"
            and base["samples"]
            and _same_case(base, row)
        ]
        share = f"a share of EP{size}, " if size else ""
        lines.append(
            f"# {row['backend']}:{row['mode']}, {row['num_tokens']} tokens, {share}"
            f"{row['params']['experts_per_rank']} experts a rank by {row['params']['experts_by']}, "
            f"{graph}: {text}" + "".join(f"; {gain}" for gain in gains)
        )
    return lines


def _gain(base: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    ratio = base["slowest_rank_p50_us"] / row["slowest_rank_p50_us"]
    words = f"{ratio:.2f}x faster" if ratio >= 1 else f"{1 / ratio:.2f}x slower"
    return f"{words} than {base['mode']} experts with per-expert traffic"


def _same_case(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return all(a[key] == b[key] for key in ("num_tokens", "routing", "num_experts", "ep_size"))
