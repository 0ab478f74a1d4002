"""Choosing the next token: greedy, or sampled with a random stream a request.

A request's tokens depend on its logits, its seed and its own count of tokens, never on the batch.
"""

from __future__ import annotations

import dataclasses
import hashlib

import torch

from moe_comm.model.layers.router import lowest_id_topk


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """`temperature` 0 is greedy (ties to the lowest id); `top_p` keeps the smallest set of tokens
    whose probability reaches it."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"temperature: expected at least 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: expected in (0, 1], got {self.top_p}")

    def choose(self, logits: torch.Tensor, requests: list[tuple[int, int]]) -> list[int]:
        """logits [S, vocab] fp32; requests: (request number, tokens it has) a row. S token ids.
        Synchronizes: the ids are needed on the host."""
        if self.temperature == 0:
            return [int(i) for i in lowest_id_topk(logits, 1)[:, 0].cpu()]
        wide = logits.double().cpu()
        return [self._sample(row, *of) for row, of in zip(wide, requests, strict=True)]

    def _sample(self, logits: torch.Tensor, request: int, count: int) -> int:
        p, order = torch.softmax(logits / self.temperature, dim=0).sort(
            descending=True, stable=True
        )
        below = p.cumsum(0) - p
        kept = p.masked_fill(below >= self.top_p, 0.0).cumsum(0)
        digest = hashlib.sha256(f"{self.seed} {request} {count}".encode()).digest()
        uniform = int.from_bytes(digest[:8], "little") / 2**64 * float(kept[-1])
        # The first token whose running sum passes the draw; never one of probability zero.
        at = int(torch.searchsorted(kept, torch.tensor(uniform, dtype=kept.dtype), right=True))
        return int(order[min(at, int((kept < kept[-1]).sum()))])
