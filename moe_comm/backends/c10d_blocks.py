"""Gathered blocks: every rank tells all the routing of all its tokens, and each picks its own.

A rank's block is facts (int32: phase, call, T, 0, bucket, bytes of a row, bytes of a record, and
whether its dispatch before was full: see c10d_counted) and B records. A choice travels as
rank * width + slot, width the largest number of experts on a rank. One Triton launch before the
exchange and one after it where kernels are used, and some lines of torch elsewhere; both give the
same.

Shape legend: T this rank's tokens, R ranks, B the bucket, K choices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_comm.backends.c10d_index import Index, IndexLaunches
from moe_comm.backends.c10d_routing import Located, Router
from moe_comm.backends.c10d_transport import Phase, Transport
from moe_comm.backends.direct_launch import Launch
from moe_comm.backends.packing import Parts, RecordLayout

# Numbers of the facts; a multiple of 16 bytes, for the alignment of what follows.
FACTS = 8
HEAD_BYTES = 4 * FACTS

# Local ids [R, B, K] int32, weights [R, B, K], T of each rank [R] int32.
Routing = tuple[Tensor, Tensor, Tensor]


class Told:
    """What the blocks say, on the host.

    Attributes:
        facts: of each rank; all 0 for ranks that take no part.
        counts: of each rank (tokens of it that have a choice here, this rank's tokens that have a
            choice there).
    """

    __slots__ = ("counts", "facts")

    def __init__(self, facts: list[list[int]], counts: list[list[int]]) -> None:
        self.facts, self.counts = facts, counts


class Asked:
    """Told, on its way.

    Args:
        mark: of the stream: it is there from then on. None: `read` waits itself.
        blocks: `read` may block the host.
    """

    __slots__ = ("_blocks", "_mark", "_read", "_transport")

    def __init__(
        self,
        transport: Transport,
        mark: torch.Event | None,
        read: Callable[[], Told],
        *,
        blocks: bool = False,
    ) -> None:
        self._transport, self._mark, self._read, self._blocks = transport, mark, read, blocks

    def ready(self) -> bool:
        """Whether answer() returns at once."""
        return self._mark.query() if self._mark is not None else not self._blocks

    def answer(self) -> Told:
        """May block the host, for a bounded time."""
        self._transport.wait_mark(Phase.DISPATCH, self._mark)
        return self._read()


class Blocks:
    """The blocks of one slot and bucket.

    Args:
        router: resolves choices.
        form: of the records.
        memory: uint8 [R, HEAD_BYTES + B * bytes], or without the head where no routing travels.
        bucket: B. row_bytes: a fact.
        index: groups what came by expert where kernels do; None elsewhere, and where no routing
            travels.
        tells: the host will ask what the blocks say.
        own: where this rank's rows of the bucket belong, if writing may put them there.

    Attributes:
        copies: whether announce() does.
    """

    def __init__(
        self,
        router: Router,
        form: RecordLayout,
        memory: Tensor,
        *,
        bucket: int,
        row_bytes: int,
        index: IndexLaunches | None,
        tells: bool,
        own: Tensor | None = None,
    ) -> None:
        self.router, self.form, self.memory, self.bucket = router, form, memory, bucket
        self.row_bytes, self.index, self.tells, self.own = row_bytes, index, tells, own
        self.copies = False
        self.mine = memory[router.rank]
        self.head = memory.shape[1] - bucket * form.num_bytes
        if index is not None:
            self._prepare(index)

    def _prepare(self, index: IndexLaunches) -> None:
        """Set up the launches."""
        from moe_comm.kernels import gathered_records as kernels

        num_topk, choices = index.num_topk, index.num_rows * index.num_topk
        self._answer = Parts(
            self.bucket * num_topk, choices, choices, choices, index.capacity,
            index.num_local_experts + 1, self.router.num_ranks,
        )  # fmt: skip
        router, form = self.router, self.form
        self._programs = kernels.programs(self.bucket)
        table = self.memory
        if self.tells:
            shape = (router.num_ranks, FACTS + 2 * self._programs)
            # In memory that the device writes and the host reads.
            pinned = router.device.type == "cuda"
            table = torch.zeros(shape, dtype=torch.int32, pin_memory=pinned)
            rows: Any = table.numpy()
            self._facts = rows[:, :FACTS]
            self._parts = rows[:, FACTS:].reshape(router.num_ranks, 2, self._programs)
        ids_at, weights_at = form.start("ids", "weights")
        shared: dict[str, Tensor | int] = {
            "told_ptr": table, "alive_ptr": self.memory if router.alive is None else router.alive,
            "me": router.rank, "bucket": self.bucket, "width": router.width,
            "record_bytes": form.num_bytes, "ids_at": ids_at, "weights_at": weights_at,
        }  # fmt: skip
        constants = {
            "K": num_topk, "KP": 1 << (num_topk - 1).bit_length(),
            "ALIVE": router.alive is not None, "TOLD": self.tells, "HEAD": HEAD_BYTES,
            "FACTS": FACTS, "TOKENS": kernels.TOKENS,
        }  # fmt: skip
        self._gathered, self._gathered_whole = (
            Launch(
                kernels._gathered_kernel, {**constants, "RANK": ranks}, blocks_ptr=self.memory,
                block_bytes=self.memory.stride(0), **shared,
            )
            for ranks in (False, True)
        )  # fmt: skip
        self._gathered_grid = router.num_ranks * self._programs, 1
        words = 0
        if self.own is not None and self.own.nbytes % 16 == 0:
            words = self.own.nbytes // 4
        self.copies = words > 0
        self._copiers = kernels.copiers(words)
        fixed = {
            "block_ptr": self.mine, "table_ptr": router.copy_table, "copies_ptr": router.num_copies,
            "status_ptr": router.status, "phase": int(Phase.DISPATCH), "row_bytes": self.row_bytes,
            "own_ptr": self.mine if self.own is None else self.own, "words": words,
            "E": router.num_copies.shape[0], "R": router.num_ranks, **shared,
        }  # fmt: skip

        def announce(ids: torch.dtype, on_device: torch.dtype | None, copies: bool) -> Launch:
            """Of tensors of so many dtypes."""
            del ids
            options = {
                **constants, "C": router.copy_table.shape[1], "COUNT": on_device is not None,
                "COPY": kernels.COPIED if copies else 0,
            }  # fmt: skip
            return Launch(kernels._announce_kernel, options, **fixed)

        self._announce = functools.cache(announce)

    def header(self, call: int) -> tuple[int, ...]:
        """A Header's numbers of dispatch `call`, but for T and rows."""
        return int(Phase.DISPATCH), call, 0, 0, self.bucket, self.row_bytes, self.form.num_bytes

    @property
    def records(self) -> Tensor:
        """uint8 [R, B, bytes] of all ranks."""
        shape = (self.router.num_ranks, self.bucket, self.form.num_bytes)
        return self.memory[:, self.head :].view(shape)

    def write(
        self,
        topk_idx: Tensor,
        weights: Tensor,
        num_tokens: int | Tensor,
        call: int,
        *,
        was_full: bool = False,
    ) -> Located:
        """Resolve ids [T, K], and put the facts and the routing into this rank's block.

        Args:
            num_tokens: in [0, T]; a tensor is clamped.
            call: number of the dispatch. was_full: a fact.
        """
        if self.index is not None:
            rank = self.announce(
                topk_idx.contiguous(), weights.contiguous(), num_tokens, call, was_full=was_full
            )
            return Located(rank=rank, ids=topk_idx)
        if isinstance(num_tokens, Tensor):
            num_tokens = num_tokens.reshape(()).clamp(0, topk_idx.shape[0])
        to = self.router.locate(topk_idx, num_tokens)
        facts = self.mine[:HEAD_BYTES].view(torch.int32)
        if self.tells:
            known = [*self.header(call), int(was_full)]
            facts.copy_(torch.tensor(known, dtype=torch.int32))
        facts[2].fill_(num_tokens)
        records = self.mine[HEAD_BYTES:].view(self.bucket, self.form.num_bytes)
        num_rows, ids = weights.shape[0], self.form.view(records, "ids")
        ids[num_rows:] = -1
        ids[:num_rows] = torch.where(to.rank >= 0, to.rank * self.router.width + to.slot, -1)
        self.form.view(records[:num_rows], "weights").copy_(weights)
        return to

    def announce(
        self,
        topk_idx: Tensor,
        weights: Tensor,
        num_tokens: int | Tensor,
        call: int,
        *,
        was_full: bool,
    ) -> Tensor:
        """write() by the kernel, of contiguous tensors: the rank of each choice."""
        rank = torch.empty(topk_idx.shape, dtype=torch.int32, device=self.router.device)
        if isinstance(num_tokens, Tensor):
            kind, on_device, on_host = num_tokens.dtype, num_tokens, 0
        else:
            kind, on_device, on_host = None, rank, num_tokens
        launch = self._announce(topk_idx.dtype, kind, False)
        launch(
            (self._programs, 1), topk_idx, weights, rank, rank, on_device, on_host,
            topk_idx.shape[0], call, int(was_full),
        )  # fmt: skip
        return rank

    def announce_whole(
        self, topk_idx: Tensor, weights: Tensor, rows: Tensor, call: int, *, was_full: bool
    ) -> None:
        """As write(), of contiguous tensors of B tokens; puts rows [B, H], in the dtype that
        travels, into their place too. Only where `copies` says so."""
        launch = self._announce(topk_idx.dtype, None, True)
        launch(
            (self._programs + self._copiers, 1), topk_idx, weights, weights, rows, weights,
            self.bucket, self.bucket, call, int(was_full),
        )  # fmt: skip

    def read_whole(self) -> tuple[Tensor, Routing, Index]:
        """What came of dispatches that were announced whole: the rank of each choice [B, K] int32,
        what read() returns, and the index, all in one allocation."""
        index = self.index
        assert index is not None
        made = self._answer.make(self.router.device)
        rank, local_idx, weights, position, row_index, offsets, tokens = made
        shape = self.router.num_ranks, self.bucket, index.num_topk
        routing = local_idx.view(shape), weights.view(torch.float32).view(shape), tokens
        self._gathered_whole(self._gathered_grid, *routing, rank)
        found = offsets, row_index, position.view(index.num_rows, index.num_topk)
        return rank.view(shape[1:]), routing, index(local_idx, found)

    def read(self, like: Tensor) -> Routing:
        """The routing in all ranks' blocks; `like` [T, K] has the weights' dtype. Nothing is read
        of a rank that is not alive.

        Returns: local ids [R, B, K] int32, weights [R, B, K], T of each rank [R] int32.
        """
        router = self.router
        if self.index is not None:
            shape, device = (router.num_ranks, self.bucket, self.index.num_topk), router.device
            tokens = torch.empty(router.num_ranks, dtype=torch.int32, device=device)
            local_idx = torch.empty(shape, dtype=torch.int32, device=device)
            weights = torch.empty(shape, dtype=torch.float32, device=device)
            self._gathered(self._gathered_grid, local_idx, weights, tokens, tokens)
            return local_idx, weights, tokens
        records = self.records
        tokens = self.memory[:, 8:12].view(torch.int32).squeeze(1).clone()
        local_idx = self.form.view(records, "ids") - router.rank * router.width
        here = (local_idx >= 0) & (local_idx < router.width)
        if router.alive is not None:
            tokens = torch.where(router.alive, tokens, 0)
            here &= router.alive.view(-1, 1, 1)
        weights = self.form.view(records, "weights").clone()
        return torch.where(here, local_idx, -1), weights, tokens

    def told(self, transport: Transport, to: Located, local_idx: Tensor) -> Asked:
        """What was read: to be asked for before this bucket's next write."""
        if self.index is not None:

            def in_memory() -> Told:
                return Told(self._facts.tolist(), self._parts.sum(axis=2).tolist())

            return Asked(transport, transport.mark(), in_memory)
        table = self._table(to, local_idx)

        def copied() -> Told:
            rows: Any = transport.to_host(Phase.DISPATCH, table).numpy()
            return Told(rows[:, :FACTS].tolist(), rows[:, FACTS:].tolist())

        return Asked(transport, None, copied, blocks=not table.is_cpu)

    def _table(self, to: Located, local_idx: Tensor) -> Tensor:
        """int32 [R, FACTS + 2]: facts and counts of each rank, where no kernels are used."""
        router = self.router
        facts = self.memory[:, :HEAD_BYTES].view(torch.int32)
        if router.alive is not None:
            facts = torch.where(router.alive.unsqueeze(-1), facts, 0)
        came = (local_idx >= 0).any(dim=2).sum(dim=1, dtype=torch.int32)
        reaches = router.reaches(to.rank) if to.reaches is None else to.reaches
        sent = reaches.sum(dim=0, dtype=torch.int32)
        sent[router.rank] = 0
        return torch.cat((facts, came.unsqueeze(-1), sent.unsqueeze(-1)), dim=1)
