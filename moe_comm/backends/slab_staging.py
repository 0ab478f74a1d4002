"""Where a call's rows to other ranks wait before they are put.

The staging area of a slot lies in this rank's own block and has one part a rank, this one
included. A dispatch or combine writes to part p what it would write to rank p's block; the pieces
of a part lie one after the other, dense for the call's bucket, each aligned to 256 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from moe_comm.symmetric import ALIGNMENT

DISPATCH_PIECES = ("dispatch_rows", "dispatch_scales", "topk_idx", "topk_weights", "payloads")
COMBINE_PIECES = ("combine_rows", "combine_scales")


@dataclass(frozen=True, kw_only=True)
class Staged:
    """One call's pieces in its slot's staging area.

    Attributes:
        table: int64 [R], the address of each part.
        pieces: (first byte in a part, bytes of a token) by region.
        start: the token in a peer's region at which this rank's begin: rank * bucket.
    """

    table: Tensor
    pieces: Mapping[str, tuple[int, int]]
    start: int

    def offset(self, region: str) -> int:
        """What to add to a part's address so that token `start` comes to lie at the piece: the
        kernels add the place of this rank's rows in a peer's block."""
        first, row_bytes = self.pieces.get(region, (0, 0))
        return first - self.start * row_bytes


def part_bytes(sizes: Mapping[str, int], num_slots: int, num_ranks: int) -> int:
    """Bytes of a part that holds any call's pieces; sizes: bytes of each region, all slots."""

    def needs(names: tuple[str, ...]) -> int:
        return sum(_aligned(sizes[name] // (num_slots * num_ranks)) for name in names)

    return max(needs(DISPATCH_PIECES), needs(COMBINE_PIECES))


def staging_bytes(sizes: Mapping[str, int], num_slots: int, num_ranks: int) -> int:
    """Bytes of the region "staging", all slots together."""
    return num_slots * num_ranks * part_bytes(sizes, num_slots, num_ranks)


def stage(
    table: Tensor, part: int, row_bytes: Mapping[str, int], *, bucket: int, rank: int
) -> Staged:
    """Lay a call's pieces out in parts of `part` bytes.

    Args:
        table: int64 [R], the address of each part.
        row_bytes: bytes of a token by region.
    """
    pieces, first = {}, 0
    for region, size in row_bytes.items():
        pieces[region] = (first, size)
        first += _aligned(bucket * size)
    assert first <= part, (first, part)
    return Staged(table=table, pieces=pieces, start=rank * bucket)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
