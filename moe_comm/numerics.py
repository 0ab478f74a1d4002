"""The arithmetic of the numeric contract, in torch: a true fused multiply-add in fp32.

torch has no fused multiply-add whose rounding is promised on every device. float64 gives one: the
product of two fp32 numbers is exact there, and a float64 sum rounded *to odd* keeps enough of the
lost part that the second rounding, to fp32, is the only one that counts (Boldo and Melquiond,
"Emulation of FMA and correctly rounded sums", IEEE Transactions on Computers 57(4), 2008).
"""

from __future__ import annotations

import torch
from torch import Tensor

# A float64 significand has 29 bits more than a float32 one; this pattern is exactly half a unit.
_TAIL_MASK = (1 << 29) - 1
_TAIL_HALF = 1 << 28
# Below the smallest normal fp32 number the position of the half unit moves.
_SMALLEST_NORMAL = 2.0**-126


def fma_f32(weight: Tensor, value: Tensor, acc: Tensor) -> Tensor:
    """weight * value + acc, rounded once to fp32. Inputs broadcast; fp32 or narrower.

    The obvious form: every element goes through round-to-odd.
    """
    product = weight.double() * value.double()
    return _sum_to_f32_by_odd(product, acc.double())


def fma_f32_fast(weight: Tensor, value: Tensor, acc: Tensor) -> Tensor:
    """As `fma_f32`, to the bit, in fewer passes.

    Rounding twice differs from rounding once only where the float64 sum lies exactly half way
    between two fp32 numbers, or is too small for a normal one: only those elements are redone.
    """
    product = weight.double() * value.double()
    wide = acc.double()
    total = product + wide
    out = total.float()
    doubtful = (total.view(torch.int64) & _TAIL_MASK) == _TAIL_HALF
    doubtful |= total.abs() < _SMALLEST_NORMAL
    if bool(doubtful.any()):
        out[doubtful] = _sum_to_f32_by_odd(product[doubtful], wide[doubtful])
    return out


class FusedMultiplyAdd:
    """acc = weight * value + acc in place on blocks of rows, to the bit as `fma_f32`, on the CPU.

    Holds the scratch of a block, which should fit a core's cache.

    Args:
        num_rows, width: the largest block.
    """

    def __init__(self, num_rows: int, width: int) -> None:
        self._scratch = torch.empty(4, num_rows * width, dtype=torch.float64)

    def __call__(self, weight: Tensor, value: Tensor, acc: Tensor) -> None:
        """weight [n] fp32, value [n, width] fp32 or narrower, acc [n, width] fp32 contiguous."""
        if not acc.numel():
            return
        product, wide, total, lost = (row[: acc.numel()].view_as(acc) for row in self._scratch)
        product.copy_(value).mul_(weight.unsqueeze(-1))
        wide.copy_(acc)
        torch.add(wide, product, out=total)
        # Where the float64 sum is exact, the rounding to fp32 is the only one. It is exact where
        # either term comes back when the other is taken away: nearly always.
        torch.sub(total, wide, out=lost).sub_(product)
        redo = _doubtful(lost, total)
        torch.sub(total, product, out=lost).sub_(wide)
        redo_too = _doubtful(lost, total)
        acc.copy_(total)
        for mask in (redo, redo_too):
            if mask is not None:
                acc[mask] = _sum_to_f32_by_odd(product[mask], wide[mask])


def _doubtful(lost: Tensor, total: Tensor) -> Tensor | None:
    """Where an inexact float64 sum may round wrongly to fp32; None for nowhere."""
    low, high = lost.aminmax()
    # A NaN compares unequal to everything.
    if float(low) == 0.0 and float(high) == 0.0:
        return None
    half = (total.view(torch.int64) & _TAIL_MASK) == _TAIL_HALF
    return (lost != 0) & (half | (total.abs() < _SMALLEST_NORMAL))


def _sum_to_f32_by_odd(a: Tensor, b: Tensor) -> Tensor:
    total = a + b
    # TwoSum: `error` is exactly what the float64 sum lost.
    b_part = total - a
    error = (a - (total - b_part)) + (b - b_part)
    bits = total.view(torch.int64)
    inexact = (error != 0) & torch.isfinite(total) & torch.isfinite(error)
    even = (bits & 1) == 0
    # The exact sum lies between `total` and its neighbour towards `error`; of the two, round to
    # odd takes the one whose last bit is set. Bits of a float grow with its magnitude.
    away = (error > 0) == (total > 0)
    step = torch.where(away, 1, -1)
    odd = torch.where(inexact & even, bits + step, bits)
    return odd.view(torch.float64).float()
