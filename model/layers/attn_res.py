"""AttnRes: attention over earlier blocks' outputs in place of one residual stream.

Each token carries a bank of finished block sums and the running sum of the current block. A site
aggregates them: score_r = rmsnorm(v_r) * norm_w . proj_w, p = softmax over rows, h = sum p_r v_r
(v_r raw). At layers 0, B, 2B, ... the running sum moves into the bank and a new one begins. Every
aggregation is followed by an RMSNorm, so a site is computed together with it.

Shapes: N tokens, D hidden, R bank rows beside the running sum.
"""

from __future__ import annotations

import dataclasses

import torch

from moe_comm.model.layers.norm import rms_norm


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttnResSite:
    """One aggregation site. `score_weight` [D] fp32: its norm's weight times its projection, which
    is all that the scores need."""

    score_weight: torch.Tensor
    eps: float

    @classmethod
    def create(cls, norm: torch.Tensor, proj: torch.Tensor, eps: float) -> AttnResSite:
        """From the tensors on disk: norm [D] and proj [1, D]."""
        return cls(score_weight=norm.float() * proj.float().view(-1), eps=eps)

    def forward(
        self, bank: torch.Tensor, running: torch.Tensor, wide: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Bank [R, N, D] and running sum [N, D] to the mixture [N, D]; `wide` inside, rounded once.
        With an empty bank that is the running sum itself."""
        if not bank.shape[0]:
            return running
        rows: list[torch.Tensor] = [row.to(wide) for row in (*bank, running)]
        scores = torch.stack([self._score(row) for row in rows], dim=-1)
        p = torch.softmax(scores, dim=-1)
        mixed = rows[0] * p[:, 0:1]
        for i, row in enumerate(rows[1:], start=1):
            mixed = mixed + row * p[:, i : i + 1]
        return mixed.to(running.dtype)

    def _score(self, row: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(row.square().mean(dim=-1) + self.eps)
        score: torch.Tensor = (row * self.score_weight).sum(dim=-1) * scale
        return score


class AttnResState:
    """The bank, the running sum, and an update not yet added to it, of one forward pass."""

    def __init__(
        self, embedded: torch.Tensor, block_size: int, wide: torch.dtype = torch.float32
    ) -> None:
        self.bank = embedded.new_empty(0, *embedded.shape)
        self._running: torch.Tensor | None = embedded
        self._update: torch.Tensor | None = None
        self._block_size, self._wide = block_size, wide

    @property
    def num_rows(self) -> int:
        """R, the bank's rows."""
        return self.bank.shape[0]

    def enter(
        self, layer: int, site: AttnResSite, norm_weight: torch.Tensor, norm_eps: float
    ) -> torch.Tensor:
        """The normed attention input of `layer` (from 0); starts a new block where one is due."""
        normed = self.aggregate(site, norm_weight, norm_eps)
        if layer % self._block_size == 0:
            assert self._running is not None, "aggregate leaves a running sum"
            self.bank = torch.cat([self.bank, self._running.unsqueeze(0)])
            self._running = None
        return normed

    def add(self, update: torch.Tensor) -> None:
        """Add an attention or MLP output to the running sum, when that is next read."""
        assert self._update is None, "two updates without an aggregation between them"
        self._update = update

    def aggregate(
        self, site: AttnResSite, norm_weight: torch.Tensor, norm_eps: float
    ) -> torch.Tensor:
        """rmsnorm(site(bank, running sum)) [N, D]: the input of an MLP, or of the head."""
        if self.bank.is_cuda:
            from moe_comm.kernels.attn_res_norm import attn_res_norm

            normed, self._running = attn_res_norm(
                self.bank,
                self.num_rows,
                self._running,
                self._update,
                site.score_weight,
                norm_weight,
                site_eps=site.eps,
                norm_eps=norm_eps,
            )
            self._update = None
            return normed
        running = self._sum()
        self._running, self._update = running, None
        mixed = site.forward(self.bank, running, self._wide)
        return rms_norm(mixed, norm_weight, norm_eps, self._wide)

    def _sum(self) -> torch.Tensor:
        if self._update is None:
            assert self._running is not None, "a block without any output"
            return self._running
        return self._update if self._running is None else self._running + self._update
