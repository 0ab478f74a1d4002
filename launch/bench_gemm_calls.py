"""What bench_gemm times: whole expert MLPs, humming's launches one by one, bf16 weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from moe_comm.kernels.expert_gemm import grouped_mlp
from moe_comm.kernels.expert_gemm_weights import ExpertWeights
from moe_comm.launch.bench_gemm_case import HIDDEN, INTER, Case
from moe_comm.launch.expert_mlps import bf16_mlp


def whole(case: Case, weights: ExpertWeights) -> Callable[[], Tensor]:
    """grouped_mlp of the implementation that reads these weights, into memory of its own."""
    out = torch.empty(len(case.row_index), HIDDEN, dtype=torch.bfloat16, device="cuda")
    return lambda: grouped_mlp(
        case.rows, case.row_index, case.offsets, weights, expected_rows=case.count, out=out
    )


def humming_parts(case: Case, weights: ExpertWeights) -> Iterator[tuple[str, Callable[[], Any]]]:
    """humming's launches one by one; each reads what the one before left. Where humming would let
    programs share reductions, that form of a product too."""
    from moe_comm.kernels.expert_gemm_activate import activate_rows
    from moe_comm.kernels.expert_gemm_gather import gather_rows
    from moe_comm.kernels.expert_gemm_humming import LOCK_WORDS, grouped_product, tuning

    room = len(case.row_index)
    x, gate_up, hidden, y = (
        torch.empty(room, width, dtype=torch.bfloat16, device="cuda")
        for width in (HIDDEN, 2 * INTER, INTER, HIDDEN)
    )
    last = case.offsets[-1:]
    yield "gather", lambda: gather_rows(case.rows, None, case.row_index, last, out=x)
    for part, source, w, s, target in (
        ("w13", x, weights.w13, weights.w13_scale, gate_up),
        ("w2", hidden, weights.w2, weights.w2_scale, y),
    ):
        if part == "w2":
            yield "activation", lambda: activate_rows(gate_up, last, out=hidden)
        call = functools.partial(
            grouped_product, source, w, s, case.offsets, expected_rows=case.count, out=target
        )
        yield part, call
        n, k = target.shape[1], source.shape[1]
        if tuning(case.experts, n, k, case.count, torch.cuda.current_device())["use_stream_k"]:
            locks = torch.zeros(LOCK_WORDS, dtype=torch.int32, device="cuda")
            yield f"{part}+shared", functools.partial(call, locks=locks)


def bf16_call(case: Case) -> Callable[[], Tensor]:
    """The same experts with bfloat16 weights through torch._grouped_mm: gather, two products and
    the activation."""
    mlp = bf16_mlp(*case.source.bf16(range(case.experts)))
    index = case.row_index[: case.count].long()
    return lambda: mlp(case.rows.flatten(0, 1)[index], case.offsets)
