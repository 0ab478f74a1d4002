"""AttnRes: attention over earlier blocks' outputs in place of one residual stream.

Each token carries a bank of finished block sums and the running sum of the current block. A site
aggregates them: score_r = rmsnorm(v_r) * norm_w . proj_w, p = softmax over rows, h = sum p_r v_r
(v_r raw). At layers 0, B, 2B, ... the running sum moves into the bank and a new one begins.

Shapes: T tokens, D hidden, R bank rows plus the running sum.
"""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttnResSite:
    """One aggregation site: norm_weight [D], proj_weight [1, D]."""

    norm_weight: torch.Tensor
    proj_weight: torch.Tensor
    eps: float

    def forward(self, bank: list[torch.Tensor], running: torch.Tensor) -> torch.Tensor:
        """Bank rows and the running sum, each [T, D], to [T, D]; fp32 inside, rounded once."""
        weight = self.norm_weight.float() * self.proj_weight.float().view(-1)
        rows = [row.float() for row in (*bank, running)]
        scores = torch.stack(
            [
                (row * weight).sum(dim=-1) * torch.rsqrt(row.square().mean(dim=-1) + self.eps)
                for row in rows
            ],
            dim=-1,
        )
        p = torch.softmax(scores, dim=-1)
        mixed = rows[0] * p[:, 0:1]
        for i, row in enumerate(rows[1:], start=1):
            mixed = mixed + row * p[:, i : i + 1]
        return mixed.to(running.dtype)


class AttnResState:
    """The bank and the running sum of one forward pass."""

    def __init__(self, embedded: torch.Tensor, block_size: int) -> None:
        self.bank: list[torch.Tensor] = []
        self.running: torch.Tensor | None = embedded
        self._block_size = block_size

    def enter(self, layer: int, site: AttnResSite) -> torch.Tensor:
        """The attention input of `layer` (from 0); starts a new block where one is due."""
        assert self.running is not None, "a layer left no running sum"
        hidden = site.forward(self.bank, self.running) if self.bank else self.running
        if layer % self._block_size == 0:
            self.bank.append(self.running)
            self.running = None
        return hidden

    def add(self, update: torch.Tensor) -> None:
        """Add an attention or MLP output to the running sum."""
        self.running = update if self.running is None else self.running + update

    def aggregate(self, site: AttnResSite) -> torch.Tensor:
        """The MLP input of a layer, or the input of the final norm."""
        assert self.running is not None, "aggregate before the layer's attention was added"
        return site.forward(self.bank, self.running)
