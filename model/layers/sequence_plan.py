"""Where each packed sequence's tokens lie: index tensors that every layer of a forward shares.

Everything is computed from host lengths and device offsets, so nothing synchronizes.

Shapes: N packed tokens, S sequences, W convolution width, P tokens a cache page.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property

import torch

from moe_comm.model.serving.batch import ForwardBatch

CHUNK = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """A run of one sequence that one kernel call handles: `seq` is the sequence, [start, end) its
    packed tokens."""

    seq: int
    start: int
    end: int


@dataclasses.dataclass(frozen=True)
class SequencePlan:
    """Index tensors for one batch."""

    batch: ForwardBatch

    @property
    def device(self) -> torch.device:
        return self.batch.token_ids.device

    @cached_property
    def all_single(self) -> bool:
        """Whether every sequence has one token: a decode step, or chunks of one."""
        return all(length == 1 for length in self.batch.lengths)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Host copy of cu_seqlens."""
        out = [0]
        for length in self.batch.lengths:
            out.append(out[-1] + length)
        return tuple(out)

    @cached_property
    def seq_of_token(self) -> torch.Tensor:
        """[N] int64, the sequence of each token."""
        seqs = torch.arange(self.batch.num_seqs, device=self.device)
        if self.all_single:
            return seqs
        lengths = self.batch.cu_seqlens.diff()
        return torch.repeat_interleave(seqs, lengths, output_size=self.batch.num_tokens)

    @cached_property
    def positions(self) -> torch.Tensor:
        """[N] int64, the position of each token in its sequence."""
        seq = self.seq_of_token
        index = torch.arange(self.batch.num_tokens, device=self.device)
        return index - self.batch.cu_seqlens[seq] + self.batch.start_positions[seq]

    @cached_property
    def cache_rows(self) -> torch.Tensor:
        """[N] int64, each token's row in the cache seen as [num_pages * P, width]."""
        page_size = self.batch.cache.shape[2]
        page = self.batch.block_tables[self.seq_of_token, self.positions // page_size]
        return page.long() * page_size + self.positions % page_size

    @cached_property
    def last_tokens(self) -> torch.Tensor:
        """[S] int64, each sequence's last packed token."""
        return self.batch.cu_seqlens[1:] - 1

    def window_rows(self, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Indices into the rows "W - 1 remembered inputs, then the new ones", sequence by sequence.

        Returns (remembered [S, W - 1], new [N], kept [S, W - 1]): where the remembered inputs go,
        where each token goes, and which rows are to be remembered next. A sequence shorter than
        W - 1 keeps some of the old ones: `kept` simply reaches into them.
        """
        back = width - 1
        tap = torch.arange(back, device=self.device)
        seqs = torch.arange(self.batch.num_seqs, device=self.device)
        start = self.batch.cu_seqlens[:-1] + seqs * back
        end = self.batch.cu_seqlens[1:] + (seqs + 1) * back
        new = torch.arange(self.batch.num_tokens, device=self.device)
        new = new + (self.seq_of_token + 1) * back
        return start[:, None] + tap, new, end[:, None] - back + tap

    def passes(self, *, split_single: bool) -> tuple[list[Piece], list[list[Piece]]]:
        """Pieces for the recurrent form and passes of pieces for the chunked form.

        The chunked form starts its grid of 64 tokens where a call starts, so that calls end, and
        start, at absolute multiples of 64: a sequence that starts off the grid has a first piece up
        to the next multiple, handled in the first pass, and the rest in the second. A state is
        then the same bits however its prompt was cut at multiples of 64.

        `split_single`: sequences of one token go to the recurrent form.
        """
        single: list[Piece] = []
        first: list[Piece] = []
        second: list[Piece] = []
        for seq, (begin, length, position) in enumerate(
            zip(self.offsets[:-1], self.batch.lengths, self.batch.starts, strict=True)
        ):
            end = begin + length
            if length == 1 and split_single:
                single.append(Piece(seq=seq, start=begin, end=end))
                continue
            to_grid = -position % CHUNK
            cut = min(begin + to_grid, end) if to_grid else end
            first.append(Piece(seq=seq, start=begin, end=cut))
            if cut < end:
                second.append(Piece(seq=seq, start=cut, end=end))
        return single, [pieces for pieces in (first, second) if pieces]
