"""Plans: which rows go to whom, known on the host before they travel."""

from __future__ import annotations

import abc
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
class Plan(Counts, abc.ABC):
    """The way of one dispatch of mode exact.

    Attributes:
        num_tokens: this rank's T.
        tokens_of: T of each rank.
    """

    num_tokens: int
    tokens_of: list[int]

    @property
    @abc.abstractmethod
    def index(self) -> Tensor:
        """[sum of sent] int64: the tokens sent, by rank, ascending for each."""

    @property
    @abc.abstractmethod
    def places(self) -> Tensor:
        """[sum of received] int64, r * B + t of each received row, in order of arrival."""

    def sends_all(self, rank: int) -> bool:
        """Rank gets every token of this rank."""
        return self.sent[rank] == self.num_tokens

    def receives_all(self, rank: int) -> bool:
        """Every token of `rank` comes here."""
        return self.received[rank] == self.tokens_of[rank]


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedPlan(Plan):
    """Of packed records.

    Attributes:
        positions: [R, T] int, not negative where the token goes to the rank.
        headers: [R, W] int32, what this rank told each rank, where the data is.
        landed: the places, None until the records are there.
    """

    positions: Tensor
    headers: Tensor
    landed: Tensor | None = None

    @cached_property
    def index(self) -> Tensor:
        """See Plan."""
        return torch.nonzero_static(self.positions >= 0, size=sum(self.sent))[:, 1]

    @property
    def places(self) -> Tensor:
        """See Plan."""
        assert self.landed is not None
        return self.landed


@dataclass(frozen=True, kw_only=True, eq=False)
class GatheredPlan(Plan):
    """Of gathered records, which say all that is needed; worked out where something is packed.

    Attributes:
        rank: [T, K] int32 of this rank's choices, -1 where masked.
        local_idx: [R, B, K] int32, -1 where a choice is not here.
    """

    rank: Tensor
    local_idx: Tensor

    @cached_property
    def index(self) -> Tensor:
        """See Plan."""
        every = torch.arange(self.rank.shape[0], device=self.rank.device)
        goes = []
        for peer, rows in enumerate(self.sent):
            if rows == self.num_tokens:
                goes.append(every[:rows])
            elif rows:
                chosen = (self.rank == peer).any(dim=1)
                goes.append(torch.nonzero_static(chosen, size=rows).squeeze(1))
        return torch.cat(goes) if goes else every[:0]

    @cached_property
    def places(self) -> Tensor:
        """See Plan."""
        bucket = self.local_idx.shape[1]
        every = torch.arange(bucket, device=self.local_idx.device)
        comes = []
        for peer, rows in enumerate(self.received):
            if rows == self.tokens_of[peer]:
                comes.append(every[:rows] + peer * bucket)
            elif rows:
                chosen = (self.local_idx[peer] >= 0).any(dim=1)
                found = torch.nonzero_static(chosen, size=rows).squeeze(1)
                comes.append(found + peer * bucket)
        return torch.cat(comes) if comes else every[:0]


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
