"""The runtime form of one layer's MXFP4 experts: preallocated once, filled expert by expert.

Shape legend: H hidden (K3: the 3584-wide latent), I intermediate width, L local experts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe_comm.kernels import mxfp4_format, mxfp4_tiles

LAYOUTS = ("rows", "tiles", "humming")


@dataclass(kw_only=True)
class ScaleRange:
    """The largest scale byte put so far: what a kernel may assume of all weights."""

    largest: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertWeights:
    """The experts of one layer on one rank, preallocated once and filled expert by expert.

    Attributes:
        layout: "rows" (checkpoint form), "tiles" (mxfp4_tiles.py) or "humming".
        num_experts, hidden, inter: L, H, I.
        w13, w13_scale: gate rows first, then up. rows: uint8 [L, 2 I, H / 2] and
            [L, 2 I, H / 32]; tiles: int16 [L, ceil(H / 128), 2 I, 32] and uint8 [..., 4]; humming:
            its own.
        w2, w2_scale: the same of [H, I].
        w13_bias [L, 2 I], w2_bias [L, H]: bfloat16, or None.
        scale_range: kept by `put` for layout "tiles".
    """

    layout: str
    num_experts: int
    hidden: int
    inter: int
    w13: Tensor
    w13_scale: Tensor
    w2: Tensor
    w2_scale: Tensor
    w13_bias: Tensor | None = None
    w2_bias: Tensor | None = None
    scale_range: ScaleRange = field(default_factory=ScaleRange)

    @classmethod
    def empty(
        cls,
        num_experts: int,
        hidden: int,
        inter: int,
        *,
        layout: str,
        device: torch.device | str = "cpu",
        bias: bool = False,
    ) -> ExpertWeights:
        """Room for `num_experts`, uninitialized. hidden and inter are multiples of 32."""
        if layout not in LAYOUTS:
            raise ValueError(f"layout: expected one of {', '.join(LAYOUTS)}, got {layout!r}")
        for name, value in (("hidden", hidden), ("inter", inter)):
            if value < 1 or value % mxfp4_format.GROUP:
                raise ValueError(f"{name}: expected a positive multiple of 32, got {value}")
        if layout == "humming":
            from moe_comm.kernels import expert_gemm_humming

            if bias:
                raise ValueError("bias: expected False for layout humming, got True")
            shapes = expert_gemm_humming.buffer_specs(num_experts, hidden, inter)
        else:
            specs = [(2 * inter, hidden), (hidden, inter)]
            shapes = [spec for n, k in specs for spec in _specs(layout, num_experts, n, k)]
        buffers = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes]
        biases: list[Tensor | None] = [None, None]
        if bias:
            biases = [
                torch.empty(num_experts, width, dtype=torch.bfloat16, device=device)
                for width in (2 * inter, hidden)
            ]
        return cls(
            layout=layout,
            num_experts=num_experts,
            hidden=hidden,
            inter=inter,
            w13=buffers[0],
            w13_scale=buffers[1],
            w2=buffers[2],
            w2_scale=buffers[3],
            w13_bias=biases[0],
            w2_bias=biases[1],
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        held = (self.w13, self.w13_scale, self.w2, self.w2_scale, self.w13_bias, self.w2_bias)
        return sum(t.numel() * t.element_size() for t in held if t is not None)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.w13.device

    def put(
        self,
        slot: int,
        *,
        gate: tuple[Tensor, Tensor],
        up: tuple[Tensor, Tensor],
        down: tuple[Tensor, Tensor],
        gate_bias: Tensor | None = None,
        up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ) -> None:
        """Fill one expert from (packed, scales) pairs in checkpoint form, on this device.

        gate, up: [I, H / 2] and [I, H / 32]; down: [H, I / 2] and [H, I / 32]; biases [I], [I],
        [H]. Temporaries stay within the size of one expert; layout
        tiles synchronizes with the device.
        """
        if not 0 <= slot < self.num_experts:
            raise ValueError(f"slot: expected 0 to {self.num_experts - 1}, got {slot}")
        for name, (packed, scales), n, k in (
            ("gate", gate, self.inter, self.hidden),
            ("up", up, self.inter, self.hidden),
            ("down", down, self.hidden, self.inter),
        ):
            mxfp4_format.check_pair(packed, scales)
            if tuple(packed.shape) != (n, k // 2):
                raise ValueError(f"{name}: expected {(n, k // 2)}, got {tuple(packed.shape)}")
        if self.layout == "humming":
            from moe_comm.kernels import expert_gemm_humming

            expert_gemm_humming.put(self, slot, gate, up, down)
        else:
            if self.layout == "tiles":
                largest = max(int(pair[1].max()) for pair in (gate, up, down))
                self.scale_range.largest = max(self.scale_range.largest, largest)
            top, bottom = slice(0, self.inter), slice(self.inter, 2 * self.inter)
            _put(self.layout, self.w13[slot], self.w13_scale[slot], top, gate)
            _put(self.layout, self.w13[slot], self.w13_scale[slot], bottom, up)
            _put(self.layout, self.w2[slot], self.w2_scale[slot], slice(None), down)
        if self.w13_bias is not None and self.w2_bias is not None:
            if gate_bias is None or up_bias is None or down_bias is None:
                raise ValueError("gate_bias, up_bias, down_bias: expected all three, got None")
            self.w13_bias[slot, : self.inter] = gate_bias
            self.w13_bias[slot, self.inter :] = up_bias
            self.w2_bias[slot] = down_bias

    def get(self, slot: int) -> tuple[tuple[Tensor, Tensor], ...]:
        """One expert back in checkpoint form: gate, up, down as (packed, scales); the exact bytes
        that `put` was given. Not for "humming", whose form is its own."""
        w13, s13, w2, s2 = self.w13[slot], self.w13_scale[slot], self.w2[slot], self.w2_scale[slot]
        if self.layout == "humming":
            raise ValueError("layout: expected rows or tiles, got humming")
        if self.layout == "tiles":
            w13, s13 = mxfp4_tiles.from_tiles(w13, s13, k=self.hidden)
            w2, s2 = mxfp4_tiles.from_tiles(w2, s2, k=self.inter)
        split = self.inter
        return (w13[:split], s13[:split]), (w13[split:], s13[split:]), (w2, s2)


def _specs(layout: str, experts: int, n: int, k: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
    if layout == "rows":
        return [((experts, n, k // 2), torch.uint8), ((experts, n, k // 32), torch.uint8)]
    blocks = mxfp4_tiles.num_blocks(k)
    return [((experts, blocks, n, 32), torch.int16), ((experts, blocks, n, 4), torch.uint8)]


def _put(
    layout: str, weight: Tensor, scale: Tensor, rows: slice, source: tuple[Tensor, Tensor]
) -> None:
    if layout == "rows":
        weight[rows].copy_(source[0])
        scale[rows].copy_(source[1])
    else:
        mxfp4_tiles.to_tiles(*source, weight[:, rows], scale[:, rows])
