"""What settings of a slab sweep have in common: data of one size and wire, what has to come of it,
what the machine needs for the same bytes, and the rows of the result file.

Shape legend: R ranks, T tokens, K choices, H hidden, N expert rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from moe_comm.config import EPConfig
from moe_comm.launch.bench import byte_matrix, memory_bytes
from moe_comm.launch.experts import apply_expert, expert_factors
from moe_comm.launch.limits import Limits
from moe_comm.launch.oracle import ExpectedDispatch, expected_combine, expected_dispatch
from moe_comm.launch.rank_data import RankData
from moe_comm.launch.results import Row
from moe_comm.launch.routing import Routing
from moe_comm.launch.slab_sweep_settings import PROGRAM_KNOBS, Setting
from moe_comm.launch.subjects import Case
from moe_comm.launch.timing import Statistics
from moe_comm.launch.worker import Ranks
from moe_comm.traffic import RoutingTraffic
from moe_comm.wire import dequantize

IN_A_ROW, PAIRS = "in a row", "pairs"
DEFINITIONS = {
    "params.timing = in a row": "one captured graph holds a dispatch and its combine, untimed, "
    "which take up the ranks' skew, then params.calls dispatches one after the other, each into a "
    "slot of its own, then their combines; a sample is the time between the events around all "
    "dispatches (all combines) of a replay over their number. All calls have the same data",
    "params.timing = pairs": "launch/timing.time_graph: events around each dispatch and each "
    "combine of back-to-back pairs in one captured graph; on the same communicator",
    "programs": "the most programs, where that was changed: of those that put a dispatch's rows; "
    "of a combine",
    "params.knobs, params.changed": "every field of SlabTuning, and what is not the default "
    "(side_priority: of the slab's stream for copies)",
    "params.to_peer_bytes": "bucket times bytes of a row: what the mode is chosen by",
    "phase = ..._send, ..._copies, ..._receive": "the send halves of params.calls calls in a row; "
    "what is left of the copies beside them after that; the receive halves of what has all "
    "arrived. Over the number of calls",
    "phase = gemm": "two bf16 products of the size of a shared expert: [T, 7168] x [7168, 6144] "
    "and [T, 6144] x [6144, 7168]; alone",
    "params.beside": "what runs during each call: nothing; split: the GEMM between the call's two "
    "halves, on one stream; streams: the call on a stream of its own beside the GEMM; calls first: "
    "that stream has the higher priority. The time is that of call and GEMM together",
    "params.hidden_share": "(params.call_us + params.gemm_us - slowest_rank_p50_us) / "
    "params.call_us: the share of the call that costs nothing beside the GEMM; below 0 where both "
    "together take longer than one after the other",
    "wrong (slab_sweep)": "elements of one eager call, and of the last call in each timed graph, "
    "into poisoned memory, that differ from the reference",
    "params.compiled, params.seconds": "kernels that were compiled for the setting, and seconds it "
    "took in all",
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a sweep was asked for; equal on all ranks.

    Attributes:
        config: the shape; its wires, capacity and slots are replaced setting by setting.
        routing: of all tokens.
        calls: in a row, and slots.
        replays: samples of each graph.
        seed: of data.
        source: digest of the code that is timed.
    """

    config: EPConfig
    routing: Routing
    calls: int = 8
    replays: int = 20
    seed: int = 0
    source: str = ""


@dataclass(kw_only=True, eq=False)
class Problem:
    """One size and pair of wires.

    Attributes:
        case: every rank's data.
        arrived, combined: expected here.
        y: [N, H] expert rows.
        sent: bytes the busiest rank sends, by phase.
        limits: (microseconds, kind), by phase; empty without a GPU.
    """

    case: Case
    arrived: ExpectedDispatch
    y: Tensor
    combined: Tensor
    sent: dict[str, int]
    limits: dict[str, tuple[float, str]]


def build_problem(
    plan: Plan, ranks: Ranks, limits: Limits, num_tokens: int, wires: tuple[str, str]
) -> Problem:
    """Collective."""
    rank, count = ranks.rank, ranks.num_ranks
    config = plan.config.replace(
        max_tokens_per_rank=num_tokens, dispatch_wire=wires[0], combine_wire=wires[1],
        num_slots=plan.calls,
    )  # fmt: skip
    placement, nodes = config.placement_for(count), ranks.group.node_of_rank
    data = RankData.create_all(
        config, num_tokens=[num_tokens] * count, routing=plan.routing, seed=plan.seed,
        device=ranks.device,
    )  # fmt: skip
    traffic = RoutingTraffic.of([g.topk_idx for g in data], placement, node_of_rank=nodes)
    case = Case(
        config=config, data=data, traffic=traffic, routing=plan.routing.text, layout="expert"
    )
    arrived = expected_dispatch(config, data, placement, rank=rank, bucket=num_tokens)
    rows = dequantize(arrived.values, arrived.scales, config.wire).flatten(0, 1)
    local = expert_factors(config.num_experts, ranks.device)[placement.local_expert_ids(rank)]
    factors = local.repeat_interleave(arrived.expert_offsets.diff())
    # Rows, ids and weights there, rows back.
    there = config.wire.row_bytes(config.hidden) + 8 * config.num_topk
    back = config.return_wire.row_bytes(config.hidden)
    sent = {"dispatch": traffic.remote_rows * there, "combine": traffic.returned_rows * back}
    return Problem(
        case=case,
        arrived=arrived,
        y=apply_expert(rows[arrived.row_index], factors),
        combined=expected_combine(config, data[rank], placement, node_of_rank=nodes),
        sent={phase: int(by_rank.max()) for phase, by_rank in sent.items()},
        limits=_limits_of(case, limits, sent) if ranks.device.type == "cuda" else {},
    )


def _limits_of(
    case: Case, limits: Limits, sent: Mapping[str, Tensor]
) -> dict[str, tuple[float, str]]:
    found = {}
    for phase, by_rank in sent.items():
        copy = limits.peer_copy_us(byte_matrix(case.traffic, phase, by_rank.tolist()))
        memory = limits.memory_us(memory_bytes(case, phase))
        kinds = ((copy, "peer copy"), (memory, "device memory"))
        found[phase] = max((us, kind) for us, kind in kinds if us is not None)
    return found


def sweep_row(
    plan: Plan, num_ranks: int, setting: Setting, problem: Problem, phase: str,
    found: Statistics | None, **params: Any,
) -> Row:  # fmt: skip
    """One row; without times where `found` is None."""
    config, knobs = problem.case.config, setting.knobs
    is_dispatch = phase.startswith("dispatch")
    wire = config.wire if is_dispatch else config.return_wire
    changed = {name: n for name, n in setting.changed.items() if name in PROGRAM_KNOBS}
    of_combine = changed.pop("combine_programs", None)
    programs = next(iter(changed.values()), None) if is_dispatch else of_combine
    row = Row(
        backend="slab", mode=setting.tuning.mode, phase=phase, layout="expert",
        num_tokens=setting.num_tokens, hidden=config.hidden, num_topk=config.num_topk,
        num_experts=config.num_experts, ep_size=num_ranks, wire=wire.name,
        routing=problem.case.routing, cuda_graph=True, programs=programs,
        params={
            "section": setting.section, "setting": setting.identity, "kind": setting.kind,
            "knobs": knobs, "changed": setting.changed, "calls": plan.calls,
            "wires": list(setting.wires), "source": plan.source,
            "to_peer_bytes": setting.num_tokens * wire.row_bytes(config.hidden), **params,
        },
    )  # fmt: skip
    if phase in problem.sent:
        row.remote_bytes = problem.sent[phase]
        row.minimum_bytes = problem.case.traffic.minimum_bytes(
            phase, dispatch_row_bytes=config.wire.row_bytes(config.hidden),
            combine_row_bytes=config.return_wire.row_bytes(config.hidden),
        )  # fmt: skip
        if phase in problem.limits:
            row.limit_us, row.limit_kind = problem.limits[phase]
    if found is not None:
        row.samples, row.p50_us, row.p99_us = found.samples, found.p50_us, found.p99_us
        row.slowest_rank_p50_us = found.slowest_rank_p50_us
        if row.remote_bytes is not None and found.slowest_rank_p50_us > 0:
            row.remote_gbps = row.remote_bytes / found.slowest_rank_p50_us / 1e3
    return row
