"""One rank's share of routed expert rows at Kimi K3's shapes, and the check of its results.

Used by bench_gemm: inputs from a seed, on the GPU, and a float32 product to compare with.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_comm.kernels.expert_gemm_weights import ExpertWeights
from moe_comm.launch.expert_reference import reference_mlp
from moe_comm.launch.expert_source import ExpertSource

HIDDEN, INTER, EXPERTS, TOPK = 3584, 3072, 896, 16


@dataclass(kw_only=True)
class Case:
    """One rank's share of a routed batch: rows [R, B, H] and their index, in expert order."""

    experts: int
    count: int
    seed: int
    rows: Tensor
    row_index: Tensor
    offsets: Tensor

    @property
    def ranks(self) -> int:
        """R."""
        return self.rows.shape[0]

    @property
    def source(self) -> ExpertSource:
        """Of the experts' matrices."""
        device = torch.device("cuda", torch.cuda.current_device())
        return ExpertSource(seed=self.seed, hidden=HIDDEN, inter=INTER, device=device)

    @property
    def active(self) -> int:
        """Experts with at least one row."""
        return int((self.offsets.diff() > 0).sum())


def make_case(experts: int, count: int, *, seed: int) -> Case:
    """Uniform top-16 of 896 for R * B tokens, of which the first `count` choices of this rank's
    experts are kept; the capacity is twice that, as a rank's buffers would have."""
    generator = torch.Generator("cuda").manual_seed(seed)
    ranks = EXPERTS // experts
    bucket = -(-count // TOPK)
    tokens = ranks * bucket
    # A few tokens more, so that `count` choices are surely there.
    scores = torch.rand(tokens + 64, EXPERTS, generator=generator, device="cuda")
    chosen = scores.topk(TOPK, dim=1).indices
    mine = (chosen < experts).nonzero()
    token, expert = mine[:, 0] % tokens, chosen[mine[:, 0], mine[:, 1]]
    token, expert = token[:count], expert[:count]
    order = torch.argsort(expert, stable=True)
    counts = torch.bincount(expert, minlength=experts)
    offsets = torch.zeros(experts + 1, dtype=torch.int32, device="cuda")
    offsets[1:] = counts.cumsum(0)
    index = torch.full((2 * count,), -1, dtype=torch.int32, device="cuda")
    index[: len(order)] = token[order].to(torch.int32)
    rows = torch.randn(
        ranks, bucket, HIDDEN, generator=generator, dtype=torch.bfloat16, device="cuda"
    )
    return Case(
        experts=experts, count=len(order), seed=seed, rows=rows, row_index=index, offsets=offsets
    )


def make_weights(case: Case, layout: str) -> ExpertWeights:
    """All experts of the case."""
    return case.source.mxfp4(range(case.experts), layout=layout)


def count_wrong(case: Case, y: Tensor) -> int:
    """Elements of up to 8 experts' rows beyond the tolerance (see DEFINITIONS)."""
    counts = case.offsets.diff().tolist()
    present = sorted((e for e in range(case.experts) if counts[e]), key=lambda e: counts[e])
    chosen = present[:: max(1, len(present) // 7)] + present[-1:]
    wrong = 0
    for expert in chosen:
        start, end = int(case.offsets[expert]), int(case.offsets[expert + 1])
        x = case.rows.flatten(0, 1)[case.row_index[start:end].long()].float()
        wanted, allowed = reference_mlp(x, *case.source.draw(expert))
        wrong += int((~((y[start:end].float() - wanted).abs() <= allowed)).sum())
    return wrong
