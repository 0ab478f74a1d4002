"""What a DeepEP mode does: messages out to ranks, partial sums back; and to which ranks.

Shape legend: as in deepep_base.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(kw_only=True, eq=False)
class Part:
    """Messages of one call of DeepEP's dispatch.

    Attributes:
        rows: uint8 [N, W].
        valid: bool [N], slots that hold a message; None: all do.
        tokens: the sent messages that took part.
        state: what DeepEP wants for the way back.
    """

    rows: Tensor
    valid: Tensor | None
    tokens: slice
    state: Any


@dataclass(kw_only=True, eq=False)
class Way:
    """What is kept of a Part for the way back: `place` int64 [N], the received row r * B + t of
    each slot, R * B where it holds none; `slot` int64 [R * B], the reverse, N where there is none;
    `tokens` and `state` as Part has them."""

    place: Tensor
    slot: Tensor
    tokens: slice
    state: Any


class Transport(abc.ABC):
    """One mode: messages out, partial sums back. Construction is collective.

    Attributes:
        mode: its name.
        row_bytes: W. own_bytes: what DeepEP sends beside each message for itself.
        hidden: columns of a row on the way back, at least H.
        num_headers: h.
        adds_in_order: the sum over ranks is the contract's, else in order of ranks.
        adds_biases: combine takes up to two biases and adds them first.
        num_passes: of the columns; the results of more than one are rounded before they are added.
        capabilities: of this mode.
    """

    mode: str
    row_bytes: int
    own_bytes: int = 0
    hidden: int
    num_headers: int = 1
    adds_in_order: bool = True
    adds_biases: bool = True
    num_passes: int = 1
    capabilities: tuple[str, ...] = ("payloads",)

    @abc.abstractmethod
    def route(self, rank: Tensor) -> Any:
        """What dispatch needs to know, from the ranks of choices [T, K], -1 where masked."""

    @abc.abstractmethod
    def dispatch(self, messages: Tensor, route: Any, bucket: int) -> Iterator[Part]:
        """Send messages uint8 [T + h, W]; a Part is read before the next is asked for."""

    @abc.abstractmethod
    def combine(self, way: Way, terms: Tensor, biases: tuple[Tensor, ...]) -> Tensor:
        """Return terms bf16 [N, hidden] to their sources: the sums [tokens, hidden]."""

    @abc.abstractmethod
    def close(self) -> None:
        """Free the buffers. Collective."""


def columns_of(rank: Tensor, num_ranks: int, *, num_headers: int) -> Tensor:
    """The ranks that each message goes to, by the last choice on each: the order in which the
    contract adds their terms.

    Args:
        rank: [T, K] int, -1 where masked.
        num_ranks: R. num_headers: h; together they name every rank.

    Returns: int64 [T + h, C], C = min(R, K); -1 behind a token's last.
    """
    num_rows, num_topk = rank.shape
    width = min(num_ranks, num_topk)
    same = rank.unsqueeze(2) == rank.unsqueeze(1)
    later = torch.ones(num_topk, num_topk, dtype=torch.bool, device=rank.device).triu(1)
    last = (rank >= 0) & ~(same & later).any(dim=2)
    column = torch.where(last, last.cumsum(dim=1) - 1, width)
    columns = torch.full((num_rows + num_headers, width + 1), -1, device=rank.device)
    # Choices that are not a rank's last go to a column of their own, which is cut off.
    columns[:num_rows].scatter_(1, column, rank.to(torch.int64))
    named = torch.arange(num_headers * width, device=rank.device).view(num_headers, width)
    columns[num_rows:, :width] = torch.where(named < num_ranks, named, -1)
    return columns[:, :width].contiguous()
