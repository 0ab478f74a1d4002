"""Where this rank stands: tensor-parallel groups for attention, one expert-parallel group for all.

Rank r of R belongs to tensor-parallel group r // tp_size; the groups are the data-parallel
replicas. All ranks of a tensor-parallel group hold the same tokens. Before routing they are cut
into disjoint slices, one a rank, so that every token is dispatched exactly once over all ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
from collections.abc import Iterator

import torch
import torch.distributed as dist

from moe_comm.errors import PeerTimeoutError
from moe_comm.model.layers.linear import Numerics, tiled_matmul


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parallel:
    """Ranks and groups. The default is one rank alone.

    `tp_group` is the tensor-parallel group of this rank (None when tp_size is 1), `ep_group` the
    group of all ranks, for what they agree on (None: the default group, or one rank alone). A
    collective that fails raises PeerTimeoutError, after `timeout_s` at most where create() made the
    groups.
    """

    tp_rank: int = 0
    tp_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    tp_group: dist.ProcessGroup | None = None
    ep_group: dist.ProcessGroup | None = None
    timeout_s: float = 30.0

    @property
    def ep_rank(self) -> int:
        """This rank's number in the expert-parallel group."""
        return self.dp_rank * self.tp_size + self.tp_rank

    @property
    def ep_size(self) -> int:
        """Ranks of the expert-parallel group."""
        return self.dp_size * self.tp_size

    @classmethod
    def create(cls, tp_size: int, *, timeout_s: float = 30.0) -> Parallel:
        """From the initialized default process group. Collective: every rank makes every group,
        that of all ranks over gloo where the default one has it.

        Args:
            tp_size: ranks of a tensor-parallel group.
            timeout_s: how long a collective waits for a rank, where the default group may have half
                an hour; load before.

        Raises ValueError when tp_size does not divide the number of ranks.
        """
        rank, size = dist.get_rank(), dist.get_world_size()
        if tp_size < 1 or size % tp_size:
            raise ValueError(f"tp: expected a divisor of the {size} ranks, got {tp_size}")
        timeout = datetime.timedelta(seconds=timeout_s)
        # Numbers of the host; a communicator of the device's would be memory for nothing.
        over_gloo = "gloo" in str(dist.get_backend_config())
        mine = None
        if tp_size > 1:
            for first in range(0, size, tp_size):
                group = dist.new_group(list(range(first, first + tp_size)), timeout=timeout)
                if first == rank - rank % tp_size:
                    mine = group
        return cls(
            tp_rank=rank % tp_size,
            tp_size=tp_size,
            dp_rank=rank // tp_size,
            dp_size=size // tp_size,
            tp_group=mine,
            ep_group=dist.new_group(timeout=timeout, backend="gloo" if over_gloo else None),
            timeout_s=timeout_s,
        )

    def shard(self, size: int, what: str) -> tuple[int, int]:
        """[start, end) of this rank's equal share of `size` heads, channels or rows."""
        if size % self.tp_size:
            raise ValueError(f"tp: expected a divisor of {what}={size}, got {self.tp_size}")
        share = size // self.tp_size
        return self.tp_rank * share, (self.tp_rank + 1) * share

    def slice_size(self, num_tokens: int) -> int:
        """Tokens of the largest slice when a group's `num_tokens` are split over its ranks."""
        return -(-num_tokens // self.tp_size)

    def token_slice(self, num_tokens: int) -> tuple[int, int]:
        """[start, end) of this rank's slice of its group's tokens; slices are disjoint, cover all
        tokens, and the last ones may be short or empty."""
        size = self.slice_size(num_tokens)
        return (
            min(self.tp_rank * size, num_tokens),
            min((self.tp_rank + 1) * size, num_tokens),
        )

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the tensor-parallel group, in place."""
        if self.tp_size > 1:
            with self._transport("all_reduce"):
                dist.all_reduce(x, group=self.tp_group)
        return x

    def from_first(self, x: torch.Tensor) -> torch.Tensor:
        """The tensor of the tensor-parallel group's first rank, in place."""
        if self.tp_size > 1:
            with self._transport("broadcast"):
                dist.broadcast(x, group=self.tp_group, group_src=0)
        return x

    def largest(self, value: int, device: torch.device) -> int:
        """The largest of all ranks' values. Collective over all ranks; synchronizes."""
        if self.ep_size == 1:
            return value
        held = torch.tensor([value], dtype=torch.int64)
        if "gloo" not in str(dist.get_backend_config(self.ep_group)):
            held = held.to(device)
        with self._transport("agreement"):
            dist.all_reduce(held, op=dist.ReduceOp.MAX, group=self.ep_group)
        return int(held.item())

    def gather_slices(self, x: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """The inverse of `token_slice`: this rank's rows [n, D] to all rows [num_tokens, D]."""
        if self.tp_size == 1:
            return x
        size = self.slice_size(num_tokens)
        padded = x.new_zeros(size, x.shape[1])
        padded[: x.shape[0]] = x
        out = x.new_empty(self.tp_size * size, x.shape[1])
        self._all_gather(out, padded)
        return out[:num_tokens]

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        """Each rank's columns [T, D / tp] to all columns [T, D]."""
        if self.tp_size == 1:
            return x
        out = x.new_empty(self.tp_size * x.shape[0], x.shape[1])
        self._all_gather(out, x.contiguous())
        parts = out.view(self.tp_size, x.shape[0], x.shape[1])
        return parts.transpose(0, 1).reshape(x.shape[0], -1)

    def _all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Every rank's x, one after another, into out. torch 2.13 renamed the call."""
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        with self._transport("all_gather"):
            gather(out, x, group=self.tp_group)

    @contextlib.contextmanager
    def _transport(self, what: str) -> Iterator[None]:
        """Around one collective: what torch.distributed raises when a peer is gone."""
        try:
            yield
        except RuntimeError as error:
            detail = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise PeerTimeoutError(
                what, self.ep_rank, None, timeout_s=self.timeout_s, detail=detail
            ) from error


def row_parallel(
    x: torch.Tensor, weight: torch.Tensor, numerics: Numerics, parallel: Parallel
) -> torch.Tensor:
    """A product whose inputs are split over the tensor-parallel group: x [T, K / tp] times this
    rank's columns of the weight, [N, K / tp], summed over the group; [T, N] in x's dtype.

    The partial sums travel in fp32 (float64 when batch invariant) and are rounded once, after the
    sum: rounding them first would let the number of ranks change router decisions downstream.
    """
    if parallel.tp_size == 1 and not numerics.batch_invariant:
        return torch.nn.functional.linear(x, weight)
    if numerics.batch_invariant:
        partial = tiled_matmul(x, weight, row_tile=numerics.row_tile)
    elif x.is_cuda and x.dtype == weight.dtype == torch.bfloat16:
        partial = torch.mm(x, weight.t(), out_dtype=torch.float32)
    else:
        partial = torch.nn.functional.linear(x.float(), weight.float())
    return parallel.all_reduce(partial).to(x.dtype)
