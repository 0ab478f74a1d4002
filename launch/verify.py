"""Compare what arrived with what had to arrive: counts of wrong elements, and the first by name.

Shape legend: R ranks, B bucket, T tokens, K choices, H hidden, L local experts, N expert rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe_comm.handle import Dispatched
from moe_comm.launch.oracle import ExpectedDispatch

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(kw_only=True)
class Findings:
    """Of one rank and phase: `wrong` elements, and the first of each kind in words."""

    rank: int
    phase: str
    wrong: int = 0
    first: list[str] = field(default_factory=list)

    def compare(
        self,
        what: str,
        got: Tensor,
        want: Tensor,
        *,
        axes: Sequence[str],
        where: Tensor | None = None,
    ) -> None:
        """Count elements whose bits differ.

        Args:
            what: name of the tensor.
            got, want: equal shapes and dtypes expected; a difference there is one wrong element.
            axes: name of each dimension, for the message.
            where: bool, broadcast over trailing dimensions: elements that count.
        """
        if got.shape != want.shape or got.dtype != want.dtype:
            self._note(
                1,
                f"{what}: expected {list(want.shape)} {want.dtype}, got {list(got.shape)} "
                f"{got.dtype}",
            )
            return
        differs = _bits(got) != _bits(want)
        if where is not None:
            differs &= where.reshape(*where.shape, *[1] * (got.dim() - where.dim()))
        self._report(what, differs, got, want, axes)

    def compare_close(
        self, what: str, got: Tensor, want: Tensor, tolerance: Tensor, *, axes: Sequence[str]
    ) -> None:
        """Count elements further from `want` than `tolerance` (NaN is wrong)."""
        differs = ~((got.double() - want.double()).abs() <= tolerance)
        self._report(what, differs, got, want, axes)

    def _report(
        self, what: str, differs: Tensor, got: Tensor, want: Tensor, axes: Sequence[str]
    ) -> None:
        count = int(differs.sum())
        if count == 0:
            return
        at = tuple(differs.nonzero()[0].tolist())
        place = ", ".join(f"{axis} {index}" for axis, index in zip(axes, at, strict=True))
        self._note(count, f"{what}: {place}: expected {_plain(want[at])}, got {_plain(got[at])}")

    def _note(self, count: int, text: str) -> None:
        self.wrong += count
        self.first.append(f"rank {self.rank}: {self.phase}: {text}")


def check_dispatched(arrived: Dispatched, want: ExpectedDispatch, *, rank: int) -> Findings:
    """Everything dispatch promises, bit for bit."""
    found = Findings(rank=rank, phase="dispatch")
    rows = ("source rank", "token", "column")
    found.compare("rows", arrived.rows, want.values, axes=rows, where=want.reached)
    if want.scales is not None and arrived.scales is not None:
        axes = ("source rank", "token", "scale group")
        found.compare("scales", arrived.scales, want.scales, axes=axes, where=want.reached)
    choice = ("source rank", "token", "choice")
    found.compare("topk_idx", arrived.topk_idx, want.local_idx.int(), axes=choice)
    here = want.local_idx >= 0
    found.compare("topk_weights", arrived.topk_weights, want.weights, axes=choice, where=here)
    found.compare(
        "expert_offsets", arrived.expert_offsets, want.expert_offsets.int(), axes=("expert",)
    )
    total = want.row_index.shape[0]
    index = torch.full_like(arrived.row_index, -1)
    index[:total] = want.row_index.int()
    found.compare("row_index", arrived.row_index, index, axes=("expert row",))
    return found


def check_combined(out: Tensor, want: Tensor, *, rank: int) -> Findings:
    """The combined rows, bit for bit."""
    found = Findings(rank=rank, phase="combine")
    found.compare("out", out, want, axes=("token", "column"))
    return found


def flip_bit(arrived: Dispatched) -> None:
    """Flip one bit in the middle of the first row that arrived, one large enough to reach the
    combined row. For tests of the check."""
    source, token = (arrived.topk_idx >= 0).any(dim=-1).nonzero()[0].tolist()
    row = arrived.rows[source, token].view(torch.uint8)
    row[row.numel() // 2] ^= 0x80


def _bits(tensor: Tensor) -> Tensor:
    if tensor.dtype == torch.bool:
        return tensor
    return tensor.contiguous().view(_BITS[tensor.dtype.itemsize])


def _plain(value: Tensor) -> str:
    number = value.item()
    return f"{number:.9g}" if isinstance(number, float) else str(number)
