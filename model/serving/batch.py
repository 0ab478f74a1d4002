"""One forward pass of the hybrid model over packed sequences, prefill chunks and decode alike.

Shapes: N packed tokens, S sequences, L KDA layers, M MLA layers, P tokens a page.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch


class StateTensors(Protocol):
    """What the model reads and writes of a state pool; it updates the rows of its slots in place.

    `recurrent`: [L, num_slots, H, Dk, Dv] fp32. `conv`: groups "q", "k", "v" to
    [L, num_slots, channels, W - 1], oldest token first.
    """

    @property
    def recurrent(self) -> torch.Tensor: ...

    @property
    def conv(self) -> Mapping[str, torch.Tensor]: ...


@dataclass(frozen=True, kw_only=True)
class ForwardBatch:
    """Input of `model.forward`. Sequence i owns tokens [cu_seqlens[i], cu_seqlens[i + 1]).

    A sequence's state always comes from its slot, whatever its start position and length: a new
    request's slot is zero, so no flag says whether there is an initial state, and a chunk of one
    token is no special case. Row p of a sequence's MLA cache lies in page `block_tables[i, p // P]`
    at row p % P; the forward writes rows [start, start + length) and reads rows below them.

    Fields
    - `token_ids`: [N] int64. N may be 0 (an idle rank takes part in the expert exchange).
    - `cu_seqlens`: [S + 1] int64, from 0 to N, non-decreasing.
    - `start_positions`: [S] int64, tokens of the sequence that its state already holds.
    - `slots`: [S] int64, distinct; 0 is the reserved slot of padding and never a request's.
    - `block_tables`: [S, max_pages] int32, padded with page 0, which is reserved likewise.
    - `pool`, `cache`: the state tensors and the paged MLA rows [M, num_pages, P, width].
    - `bucket`: the token bucket, equal on all ranks; at least the largest N of any rank.
    - `lengths`, `starts`: host copies of sequence lengths and start positions, so that the forward
      plans its chunks without a device sync.
    """

    token_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    start_positions: torch.Tensor
    slots: torch.Tensor
    block_tables: torch.Tensor
    pool: StateTensors
    cache: torch.Tensor
    bucket: int
    lengths: tuple[int, ...]
    starts: tuple[int, ...]

    @property
    def num_seqs(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


@dataclass(frozen=True, kw_only=True)
class SequenceSlice:
    """One sequence's part of a batch: the tokens to process and where its state lies."""

    token_ids: tuple[int, ...]
    start: int
    slot: int
    pages: tuple[int, ...]


def make_batch(
    sequences: list[SequenceSlice],
    *,
    pool: StateTensors,
    cache: torch.Tensor,
    bucket: int | None = None,
) -> ForwardBatch:
    """Pack sequences into a batch on the cache's device.

    `bucket` defaults to the number of tokens. Raises ValueError for a slot that is reserved or
    given twice, a page that is reserved, pages that do not cover the rows to write, an empty
    sequence, or a bucket below the number of tokens.
    """
    lengths = tuple(len(s.token_ids) for s in sequences)
    starts = tuple(s.start for s in sequences)
    total = sum(lengths)
    if bucket is not None and bucket < total:
        raise ValueError(f"bucket: expected at least {total} tokens, got {bucket}")
    page_size = cache.shape[2]
    seen: set[int] = set()
    for i, seq in enumerate(sequences):
        if seq.slot <= 0 or seq.slot in seen:
            raise ValueError(
                f"sequences[{i}].slot: expected a distinct slot above 0, got {seq.slot}"
            )
        seen.add(seq.slot)
        if not seq.token_ids:
            raise ValueError(f"sequences[{i}].token_ids: expected at least one token, got none")
        if any(page <= 0 for page in seq.pages):
            raise ValueError(f"sequences[{i}].pages: expected pages above 0, got {seq.pages}")
        end = seq.start + len(seq.token_ids)
        if len(seq.pages) * page_size < end:
            raise ValueError(
                f"sequences[{i}].pages: expected room for {end} rows, "
                f"got {len(seq.pages)} pages of {page_size}"
            )
    device = cache.device
    width = max((len(s.pages) for s in sequences), default=0)
    tables = torch.zeros(len(sequences), width, dtype=torch.int32)
    for i, seq in enumerate(sequences):
        tables[i, : len(seq.pages)] = torch.tensor(seq.pages, dtype=torch.int32)
    cu_seqlens = torch.zeros(len(sequences) + 1, dtype=torch.int64)
    cu_seqlens[1:] = torch.tensor(lengths, dtype=torch.int64).cumsum(0)
    tokens = [token for seq in sequences for token in seq.token_ids]
    return ForwardBatch(
        token_ids=torch.tensor(tokens, dtype=torch.int64).to(device),
        cu_seqlens=cu_seqlens.to(device),
        start_positions=torch.tensor(starts, dtype=torch.int64).to(device),
        slots=torch.tensor([s.slot for s in sequences], dtype=torch.int64).to(device),
        block_tables=tables.to(device),
        pool=pool,
        cache=cache,
        bucket=total if bucket is None else bucket,
        lengths=lengths,
        starts=starts,
    )
