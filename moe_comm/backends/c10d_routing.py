"""Routing steps of the c10d modes: where choices lie, who gets which token, packed records out and
in. What is gathered instead of packed: c10d_blocks.

Each step is one Triton launch where kernels are used, and some lines of torch elsewhere; both give
the same. Shape legend: T this rank's tokens, R ranks, B the bucket, K choices, N records.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from moe_comm import layout
from moe_comm.backends import device_math
from moe_comm.backends.c10d_plan import PackedPlan, Plan
from moe_comm.backends.c10d_transport import Header, Headers, header_rows
from moe_comm.backends.packing import RecordLayout, take_rows
from moe_comm.status import StatusBit

# Where packing would leave out less than one row in this many, all rows are sent as they lie.
_WHOLE_SHARE = 128


# Fields of records that say which row it is and where its choices lie.
ROUTING = ("ids", "weights", "token", "place")


def placed_routing(
    local: Tensor, weights: Tensor, places: Tensor, *, num_ranks: int, bucket: int
) -> tuple[Tensor, Tensor]:
    """Local ids [N, K] int32 and weights [N, K] of received rows at their places r * B + t [N]:
    ids [R, B, K], -1 elsewhere, and weights [R, B, K], 0 elsewhere."""
    shape, device = (num_ranks, bucket, local.shape[1]), local.device
    local_idx = torch.full(shape, -1, dtype=torch.int32, device=device)
    received = torch.zeros(shape, dtype=weights.dtype, device=device)
    local_idx.flatten(0, 1).index_copy_(0, places, local)
    received.flatten(0, 1).index_copy_(0, places, weights)
    return local_idx, received


def rows_sent(count: int, num_tokens: int) -> int:
    """Rows that go to a rank that `count` of `num_tokens` tokens have a choice on."""
    whole = count > 0 and count * _WHOLE_SHARE >= num_tokens * (_WHOLE_SHARE - 1)
    return num_tokens if whole else count


@dataclass(frozen=True, kw_only=True, eq=False)
class Located:
    """Where choices lie.

    Attributes:
        rank: [T, K] int32, -1 where masked.
        ids: [T, K], likewise or as given.
        slot: [T, K] int32, as rank; None where records were written at once.
        reaches: [T, R] bool, where kernels don't do without it.
    """

    rank: Tensor
    ids: Tensor
    slot: Any = None
    reaches: Tensor | None = None


class Router:
    """The steps for one rank.

    Args:
        rank, num_ranks: of the communicator.
        copy_table, num_copies: of the placement, on the device; may be overwritten in place.
        width: the largest number of experts on a rank.
        status: int32 [1], the status word.
        uses_kernels: Triton's, where dtypes allow.

    Attributes:
        alive: [R] bool, ranks that take part, or None for all.
    """

    def __init__(
        self,
        *,
        rank: int,
        num_ranks: int,
        copy_table: Tensor,
        num_copies: Tensor,
        width: int,
        status: Tensor,
        uses_kernels: bool,
    ) -> None:
        self.rank, self.num_ranks, self.width = rank, num_ranks, width
        self.copy_table, self.num_copies, self.status = copy_table, num_copies, status
        self.uses_kernels = uses_kernels
        self.device = status.device
        self.alive: Tensor | None = None

    def fits(self, weights: Tensor) -> bool:
        """Whether kernels take these weights."""
        return self.uses_kernels and weights.dtype == torch.float32

    def locate(self, topk_idx: Tensor, num_tokens: int | Tensor) -> Located:
        """Resolve ids [T, K]; sets INVALID_ID."""
        if self.uses_kernels:
            from moe_comm.kernels.route_tokens import locate

            rank, slot, ids = locate(
                topk_idx,
                self.copy_table,
                self.num_copies,
                source=self.rank,
                num_tokens=num_tokens,
                alive=self.alive,
                status=self.status,
            )
            return Located(rank=rank, slot=slot, ids=ids)
        to = layout.destinations(
            topk_idx,
            self.copy_table,
            self.num_copies,
            source_rank=self.rank,
            num_ranks=self.num_ranks,
            num_tokens=num_tokens,
            alive=self.alive,
        )
        device_math.set_bit(self.status, to.num_invalid > 0, StatusBit.INVALID_ID)
        ids = torch.where(to.rank >= 0, topk_idx.to(torch.int64), -1)
        return Located(rank=to.rank, slot=to.slot, ids=ids, reaches=to.reaches)

    def reaches(self, rank: Tensor) -> Tensor:
        """[*, R] bool, from the ranks of choices [*, K]: which ranks a row goes to."""
        column = torch.where(rank >= 0, rank, self.num_ranks).to(torch.int64)
        reaches = torch.zeros(
            rank.shape[0], self.num_ranks + 1, dtype=torch.bool, device=rank.device
        )
        # Masked choices go to a column of their own, which is cut off.
        return reaches.scatter_(1, column, True)[:, : self.num_ranks]

    # Packed rows.

    def choose(self, to: Located, header: Header) -> tuple[Tensor, Tensor]:
        """Who gets which token: positions [R, T] int, not negative where the token goes there, and
        the headers to send, [R, W] int32. `header` holds what they have in common."""
        if self.uses_kernels:
            from moe_comm.kernels.route_tokens import plan

            return plan(
                to.rank,
                num_ranks=self.num_ranks,
                me=self.rank,
                num_tokens=header.num_tokens,
                phase=header.phase,
                call=header.call,
                bucket=header.bucket,
                row_bytes=header.row_bytes,
                record_bytes=header.record_bytes,
                share=_WHOLE_SHARE,
                width=len(astuple(header)),
            )
        goes = self.reaches(to.rank) if to.reaches is None else to.reaches
        valid = torch.arange(goes.shape[0], device=self.device) < header.num_tokens
        counts = goes.sum(dim=0)
        enough = header.num_tokens * (_WHOLE_SHARE - 1)
        whole = (counts > 0) & (counts * _WHOLE_SHARE >= enough)
        goes = goes | (whole & valid.unsqueeze(-1))
        goes[:, self.rank] = False
        return goes.t().to(torch.int8) - 1, header_rows(header, goes.sum(dim=0))

    def pack(
        self,
        plan: Plan,
        to: Located | None,
        form: RecordLayout,
        weights: Tensor,
        source: Tensor,
        *,
        records: Tensor,
        packed: Tensor,
        packing: list[int],
    ) -> None:
        """Routing (where `to` is given) into `records` [N, bytes], by rank, and the rows `source`
        [T, bytes] for the ranks in `packing` into `packed`."""
        if (
            to is not None
            and isinstance(plan, PackedPlan)
            and self.fits(weights)
            and source.shape[1] % 4 == 0
        ):
            from moe_comm.kernels.route_tokens import pack

            pack(
                to.rank,
                to.slot,
                weights.contiguous(),
                plan.positions,
                plan.headers,
                source,
                num_tokens=plan.num_tokens,
                records=records,
                packed=packed,
                at=form.start("ids", "weights", "token"),
            )
            return
        if packed.shape[0]:
            take_rows(source, torch.cat([plan.index[plan.to(p)] for p in packing]), packed)
        if to is not None:
            target = self._by_rank(plan.sent, torch.int32).unsqueeze(-1)
            where, slot = (part.index_select(0, plan.index) for part in (to.rank, to.slot))
            form.view(records, "ids").copy_(torch.where(where == target, slot, -1))
            form.view(records, "weights").copy_(weights.index_select(0, plan.index))
            form.view(records, "token").copy_(plan.index)

    def unpack(
        self,
        plan: PackedPlan,
        to: Located,
        form: RecordLayout,
        weights: Tensor,
        records: Tensor,
        told: Headers,
        *,
        bucket: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Read `records` [N, bytes], by source, and this rank's own routing.

        Returns: local ids [R, B, K] int32, weights [R, B, K], places [N] int64 (r * B + t of each
        record), T of each rank [R] int32.
        """
        if self.fits(weights):
            from moe_comm.kernels.route_tokens import unpack

            shape = (self.num_ranks, bucket, weights.shape[1])
            local_idx = torch.full(shape, -1, dtype=torch.int32, device=self.device)
            received = torch.empty(shape, dtype=weights.dtype, device=self.device)
            places, tokens = unpack(
                records,
                told.on_device,
                to.rank,
                to.slot,
                weights.contiguous(),
                me=self.rank,
                num_tokens=plan.num_tokens,
                local_idx=local_idx,
                received=received,
                at=form.start("ids", "weights", "token"),
            )
            return local_idx, received, places, tokens
        source = self._by_rank(plan.received, torch.int64)
        places = source * bucket + form.view(records, "token")
        local_idx, received = placed_routing(
            form.view(records, "ids"),
            form.view(records, "weights"),
            places,
            num_ranks=self.num_ranks,
            bucket=bucket,
        )
        rows = slice(0, weights.shape[0])
        local_idx[self.rank, rows] = torch.where(to.rank == self.rank, to.slot, -1)
        received[self.rank, rows] = weights
        tokens = torch.tensor(plan.tokens_of, dtype=torch.int32).to(self.device)
        return local_idx, received, places, tokens

    def _by_rank(self, counts: list[int], dtype: torch.dtype) -> Tensor:
        """[sum of counts]: rank r counts[r] times."""
        repeats = torch.tensor(counts).to(self.device, non_blocking=True)
        ranks = torch.arange(self.num_ranks, device=self.device, dtype=dtype)
        return ranks.repeat_interleave(repeats, output_size=sum(counts))
