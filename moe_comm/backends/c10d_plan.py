"""Plans: which rows go to whom, known on the host before they travel."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Counts:
    """Packed rows of one exchange. Lists have one entry a rank, the own entries are 0.

    Attributes:
        sent, received: rows to and from each rank.
    """

    sent: list[int]
    received: list[int]

    def to(self, rank: int) -> slice:
        """Where the rows to `rank` lie in the order of sending."""
        start = sum(self.sent[:rank])
        return slice(start, start + self.sent[rank])

    def come_from(self, rank: int) -> slice:
        """Where the rows from `rank` lie in the order of arrival."""
        start = sum(self.received[:rank])
        return slice(start, start + self.received[rank])


@dataclass(frozen=True, kw_only=True, eq=False)
class Hop(Counts):
    """One exchange of packed rows.

    Attributes:
        index: [sum of sent] int64, the row of the sender's array that each sent row is, by rank,
            ascending for each.
    """

    index: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan(Counts):
    """The way of one dispatch of mode exact.

    Attributes:
        num_tokens: this rank's T.
        tokens_of: T of each rank.
        positions: [R, T] int, not negative where the token goes to the rank.
        headers: [R, W] int32, what this rank told each rank, where the data is.
        places: [sum of received] int64, r * B + t of each received row, in order of arrival; None
            until the records are there.
    """

    num_tokens: int
    tokens_of: list[int]
    positions: Tensor
    headers: Tensor
    places: Tensor | None = None

    @cached_property
    def index(self) -> Tensor:
        """[sum of sent] int64: the tokens sent, by rank, ascending for each."""
        return torch.nonzero_static(self.positions >= 0, size=sum(self.sent))[:, 1]

    def sends_all(self, rank: int) -> bool:
        """Rank gets every token of this rank."""
        return self.sent[rank] == self.num_tokens

    def receives_all(self, rank: int) -> bool:
        """Every token of `rank` comes here."""
        return self.received[rank] == self.tokens_of[rank]


@dataclass(frozen=True, kw_only=True, eq=False)
class Route:
    """The way of one dispatch of mode hierarchical. M rows are held: T own ones, and those that
    crossed from other nodes.

    Attributes:
        num_tokens: T.
        cross: between nodes, from the rank's own tokens.
        inside: in the node, from the M rows held.
        own: [n] int64, held rows that reach this rank itself.
        places: [received inside + n] int64, places of the rows that arrived: those from other
            ranks, then the own ones.
        who: [M, K] int32, for each held row the position in the node of each choice's rank, -1
            where it lies elsewhere.
    """

    num_tokens: int
    cross: Hop
    inside: Hop
    own: Tensor
    places: Tensor
    who: Tensor
