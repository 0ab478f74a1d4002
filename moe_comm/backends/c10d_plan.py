"""Plans: which rows go to whom, known on the host before they travel."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Hop:
    """One exchange of packed rows. Lists have one entry a rank, the own entries are 0.

    Attributes:
        sent, received: rows to and from each rank.
        index: [sum of sent] int64, the row of the sender's array that each sent row is, by rank,
            ascending for each.
    """

    sent: list[int]
    received: list[int]
    index: Tensor

    def to(self, rank: int) -> slice:
        """Where the rows to `rank` lie in the order of sending."""
        start = sum(self.sent[:rank])
        return slice(start, start + self.sent[rank])

    def come_from(self, rank: int) -> slice:
        """Where the rows from `rank` lie in the order of arrival."""
        start = sum(self.received[:rank])
        return slice(start, start + self.received[rank])


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan(Hop):
    """The way of one dispatch of mode exact: a hop from this rank's tokens.

    Attributes:
        num_tokens: this rank's T.
        tokens_of: T of each rank.
        places: [sum of received] int64, r * B + t of each received row, in order of arrival; None
            until the records are there.
    """

    num_tokens: int
    tokens_of: list[int]
    places: Tensor | None = None

    def sends_all(self, rank: int) -> bool:
        """Rank gets every token of this rank."""
        return self.sent[rank] == self.num_tokens

    def receives_all(self, rank: int) -> bool:
        """Every token of `rank` comes here."""
        return self.received[rank] == self.tokens_of[rank]
