"""Timing, limits and result rows of bench_gemm."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_comm.kernels.expert_gemm_config import TileConfig
from moe_comm.kernels.expert_gemm_weights import ExpertWeights
from moe_comm.kernels.situ import SITU
from moe_comm.launch import results
from moe_comm.launch.bench_gemm_case import EXPERTS, HIDDEN, INTER, TOPK, Case, count_wrong
from moe_comm.launch.timing import percentile


def time_graph(call: Callable[[], object], *, iters: int) -> list[float]:
    """Microseconds of each replay of a graph that holds one call."""
    return time_in_turn([call], iters=iters)[0]


def time_in_turn(calls: Sequence[Callable[[], object]], *, iters: int) -> list[list[float]]:
    """As time_graph for several calls, a replay of each in turn: what the GPU's clock does under
    load then meets all of them alike."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graphs = []
    for call in calls:
        with torch.cuda.stream(stream):
            for _ in range(2):
                call()
        torch.cuda.synchronize()
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], stream=stream):
            call()
    samples: list[list[float]] = [[] for _ in calls]
    for index in range(iters + 2):
        for graph, taken in zip(graphs, samples, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            if index >= 2:
                taken.append(start.elapsed_time(end) * 1e3)
    return samples


@dataclass(frozen=True, kw_only=True)
class Limits:
    """read: bytes a microsecond; dense: bf16 operations a microsecond."""

    read: float
    dense: float

    @classmethod
    def measure(cls, iters: int) -> Limits:
        """On an otherwise idle GPU."""
        dense = 2 * 8192**3 / _dense_us(iters)
        return cls(read=_READ_BYTES / _read_us(iters), dense=dense)


_READ_BYTES = 4 << 30


def _read_us(iters: int) -> float:
    from moe_comm.kernels.expert_gemm_read import read_memory

    source = torch.zeros(_READ_BYTES // 4, dtype=torch.int32, device="cuda")
    out = torch.empty(2048, dtype=torch.int32, device="cuda")
    return percentile(time_graph(lambda: read_memory(source, out=out), iters=iters), 50)


def _dense_us(iters: int) -> float:
    a, b, c = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    return percentile(time_graph(lambda: torch.mm(a, b, out=c), iters=iters), 50)


def row(
    case: Case,
    limits: Limits,
    samples: list[float],
    *,
    backend: str,
    part: str,
    wrong: int | None,
    **params: Any,
) -> results.Row:
    """One result; `part` names the launches that were timed."""
    matrices = {"w13": 2, "w2": 1, "all": 3}.get(part, 0)
    flops = 2 * matrices * case.count * HIDDEN * INTER
    one = HIDDEN * INTER
    weight_bytes = matrices * case.active * (2 * one if backend == "bf16" else one // 2 + one // 32)
    row_bytes = case.count * 2 * {"w13": HIDDEN + INTER, "w2": HIDDEN + INTER}.get(part, 0)
    if part == "all":
        row_bytes = case.count * 4 * (HIDDEN + INTER)
    p50 = percentile(samples, 50)
    limit = max((weight_bytes + row_bytes) / limits.read, flops / limits.dense)
    params |= {"part": part, "experts_per_rank": case.experts, "rows": case.count}
    if matrices:
        params |= {
            "of_limit": limit / p50,
            "weight_gbps": weight_bytes / p50 / 1e3,
            "of_read": weight_bytes / p50 / limits.read,
            "tflops": flops / p50 / 1e6,
            "of_dense": flops / p50 / limits.dense,
        }
    return results.Row(
        backend=backend,
        mode="bf16" if backend == "bf16" else "w4a16",
        phase="experts",
        layout="expert",
        num_tokens=case.rows.shape[1],
        hidden=HIDDEN,
        num_topk=TOPK,
        num_experts=EXPERTS,
        ep_size=case.ranks,
        wire="bf16",
        routing="uniform",
        cuda_graph=True,
        params=params,
        samples=len(samples),
        p50_us=p50,
        p99_us=percentile(samples, 99),
        slowest_rank_p50_us=p50,
        limit_us=limit if matrices else None,
        limit_kind="memory or tensor cores" if matrices else None,
        wrong=wrong,
    )


def checked(case: Case, call: Callable[[], Tensor]) -> int:
    """Wrong elements of a call whose output memory held NaN before."""
    call().fill_(torch.nan)
    return count_wrong(case, call())


def triton_part(
    case: Case, weights: ExpertWeights, config: TileConfig, *, gated: bool
) -> Callable[[], Tensor]:
    """One product of the Triton kernel alone, without plans."""
    from moe_comm.kernels.expert_gemm_triton import choose_mode, expert_product, plan_parts

    room = len(case.row_index)
    parts = plan_parts(case.offsets, room, config)
    width = INTER if gated else HIDDEN
    out = torch.empty(room, width, dtype=torch.bfloat16, device="cuda")
    x = case.rows
    if not gated:
        x = torch.randn(1, room, INTER, dtype=torch.bfloat16, device="cuda")

    def call() -> Tensor:
        for tiles, plan in parts:
            expert_product(
                x,
                case.row_index,
                case.offsets,
                plan,
                weights,
                gated=gated,
                activation=SITU,
                config=tiles,
                mode=choose_mode(weights),
                out=out,
            )
        return out

    return call


def triton_row(
    case: Case, weights: ExpertWeights, limits: Limits, config: TileConfig, *, iters: int
) -> results.Row:
    """The whole Triton path with these tiles, checked, then timed."""
    from moe_comm.kernels.expert_gemm_triton import grouped_mlp_triton

    out = torch.empty(len(case.row_index), HIDDEN, dtype=torch.bfloat16, device="cuda")

    def call() -> Tensor:
        return grouped_mlp_triton(
            case.rows,
            case.row_index,
            case.offsets,
            weights,
            None,
            SITU,
            case.count,
            out,
            tiles=config,
        )

    wrong = checked(case, call)
    return row(
        case,
        limits,
        time_graph(call, iters=iters),
        backend="triton",
        part="all",
        wrong=wrong,
        tiles=dataclasses.asdict(config),
    )
