"""Experts for benchmarks: MXFP4 weights drawn on the device from a seed, and the same in bf16.

Shape legend: H hidden (K3: the 3584-wide latent), I intermediate width, L experts built.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_comm.kernels import mxfp4_format
from moe_comm.kernels.expert_gemm_weights import ExpertWeights

Pair = tuple[Tensor, Tensor]
# Root mean square of E2M1 values over uniform codes: sqrt(68.5 / 8).
_CODE_RMS = 2.926


@dataclass(frozen=True, kw_only=True)
class ExpertSource:
    """Any expert's matrices in checkpoint form, the same wherever they are drawn.

    Attributes:
        seed: of all experts.
        hidden, inter: H, I.
        device: where numbers are drawn; devices of one type draw the same.
    """

    seed: int
    hidden: int
    inter: int
    device: torch.device

    def draw(self, expert: int) -> tuple[Pair, Pair, Pair]:
        """gate [I, H], up [I, H], down [H, I] as packed codes and scales: uniform codes, weights of
        variance about 1 / K with neighbouring groups a factor of two to either side."""
        generator = torch.Generator(self.device).manual_seed((self.seed << 20) + expert)
        h, i = self.hidden, self.inter
        return (
            self._matrix(i, h, generator),
            self._matrix(i, h, generator),
            self._matrix(h, i, generator),
        )

    def _matrix(self, n: int, k: int, generator: torch.Generator) -> Pair:
        center = 127 + round(-math.log2(_CODE_RMS * math.sqrt(k)))
        packed, scales = (
            torch.randint(
                low, high, size, dtype=torch.uint8, generator=generator, device=self.device
            )
            for low, high, size in (
                (0, 256, (n, k // 2)),
                (center - 1, center + 2, (n, k // mxfp4_format.GROUP)),
            )
        )
        return packed, scales

    @property
    def mxfp4_bytes(self) -> int:
        """Bytes of one expert, packed."""
        matrix = self.hidden * self.inter
        return 3 * (matrix // 2 + matrix // mxfp4_format.GROUP)

    @property
    def bf16_bytes(self) -> int:
        """Bytes of one expert in bfloat16."""
        return 3 * 2 * self.hidden * self.inter

    def mxfp4(self, ids: Sequence[int], *, layout: str) -> ExpertWeights:
        """Experts `ids` in a runtime layout; slot i is ids[i]."""
        weights = ExpertWeights.empty(
            len(ids), self.hidden, self.inter, layout=layout, device=self.device
        )
        for slot, expert in enumerate(ids):
            gate, up, down = self.draw(expert)
            weights.put(slot, gate=gate, up=up, down=down)
        return weights

    def bf16(self, ids: Sequence[int]) -> Pair:
        """The same values unpacked: w13 [L, 2 I, H], gate rows first, and w2 [L, H, I]."""
        w13 = torch.empty(
            len(ids), 2 * self.inter, self.hidden, dtype=torch.bfloat16, device=self.device
        )
        w2 = torch.empty(
            len(ids), self.hidden, self.inter, dtype=torch.bfloat16, device=self.device
        )
        for slot, expert in enumerate(ids):
            gate, up, down = self.draw(expert)
            w13[slot, : self.inter] = mxfp4_format.dequantize(*gate)
            w13[slot, self.inter :] = mxfp4_format.dequantize(*up)
            w2[slot] = mxfp4_format.dequantize(*down)
        return w13, w2


@dataclass(kw_only=True, eq=False)
class ExpertSet:
    """One rank's experts, built when first asked for: at K3's EP2 7.9 GB of MXFP4 and 29.6 GB of
    bf16."""

    source: ExpertSource
    ids: Sequence[int]
    layout: str
    _mxfp4: ExpertWeights | None = None
    _bf16: Pair | None = None

    @property
    def mxfp4(self) -> ExpertWeights:
        """In `layout`; slot i is ids[i]."""
        if self._mxfp4 is None:
            self._mxfp4 = self.source.mxfp4(self.ids, layout=self.layout)
        return self._mxfp4

    @property
    def bf16(self) -> Pair:
        """w13 and w2, unpacked."""
        if self._bf16 is None:
            self._bf16 = self.source.bf16(self.ids)
        return self._bf16
