"""Dispatches of mode exact that are like the one before, in the shortest way.

Serving makes the same call again and again: tensors of the same kind, the same bucket, and between
two ranks all rows of it. Such a call has nothing left to be checked, found or made; what remains
are the launches and one exchange.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_comm.backends.c10d_blocks import Routing
from moe_comm.backends.c10d_counted import Counted, Recent
from moe_comm.backends.c10d_gathered import GatheredRecords, Lane
from moe_comm.backends.c10d_index import Index
from moe_comm.backends.c10d_routing import Located
from moe_comm.backends.c10d_transport import Phase
from moe_comm.calls import CombineCall, DispatchCall, Rows
from moe_comm.config import EPConfig
from moe_comm.group import Group
from moe_comm.handle import Dispatched, DispatchHandle


@dataclass(kw_only=True, eq=False)
class _Known:
    """A call that may be repeated.

    Attributes:
        kind: of its tensors.
        bucket: B; as many tokens as there are rows.
        own: where this rank's rows belong.
        records: sent and received beside rows. theirs: where rows are received.
        ready: for the next call, made while the device was busy with the last.
    """

    kind: tuple[object, ...]
    bucket: int
    lane: Lane
    recent: Recent
    own: Tensor
    records: tuple[Tensor, Tensor]
    theirs: Tensor
    ready: _Ready | None = None


@dataclass(kw_only=True, eq=False)
class _Ready:
    """Tensors for what a dispatch answers.

    Attributes:
        made: on which stream, and whether in inference mode: they are for calls made so.
        rank: of this rank's choices.
    """

    made: tuple[int, bool]
    rank: Tensor
    routing: Routing
    index: Index


def _kind(x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> tuple[object, ...]:
    return (
        x.shape, x.dtype, x.device, topk_idx.shape, topk_idx.dtype, topk_idx.device,
        topk_weights.shape, topk_weights.dtype, topk_weights.device,
    )  # fmt: skip


class RepeatedDispatch(GatheredRecords):
    """See the module.

    Attributes:
        _recent: by bucket.
        _known: by slot.
    """

    def __init__(self, config: EPConfig, group: Group) -> None:
        super().__init__(config, group)
        self._recent: dict[int, Recent] = {}
        self._known: dict[int, _Known] = {}

    def _note(self, call: DispatchCall, lane: Lane, recent: Recent) -> None:
        """A full dispatch of rows as they are, between two ranks: it may be repeated as it is."""
        plain = self.config.wire.scale_dtype is None and not call.payloads
        whole = isinstance(call.num_tokens, int) and call.num_tokens == call.bucket
        if lane.blocks.index is None or not plain or not whole:
            self._known.pop(call.slot, None)
            return
        (peer,) = self._transport.others
        blocks = lane.blocks
        self._known[call.slot] = _Known(
            kind=_kind(call.x, call.topk_idx, call.topk_weights),
            bucket=call.bucket,
            lane=lane,
            recent=recent,
            own=lane.rows[self.rank],
            records=(blocks.mine, blocks.memory[peer]),
            theirs=self._row_bytes(call, lane)[peer],
        )

    def dispatch(
        self,
        x: Rows,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        *,
        num_tokens: int | Tensor | None = None,
        bucket: int | None = None,
        payloads: Mapping[str, Tensor] | None = None,
        handle: DispatchHandle | None = None,
        async_op: bool = False,
    ) -> Any:
        """See Communicator."""
        if (
            not self._known
            or torch.compiler.is_compiling()
            or async_op
            or payloads
            or handle is not None
            or not (num_tokens is None or isinstance(num_tokens, int))
        ):
            slot = None
        else:
            slot = self._slot_to_repeat(x, topk_idx, topk_weights, num_tokens, bucket)
        if slot is None:
            longer: Any = super().dispatch
            return longer(
                x,
                topk_idx,
                topk_weights,
                num_tokens=num_tokens,
                bucket=bucket,
                payloads=payloads,
                handle=handle,
                async_op=async_op,
            )
        known = self._known[slot]
        tensors: Any = (x, topk_idx, topk_weights)
        self._busy_slots.add(slot)
        on_cuda = self.device.type == "cuda"
        if on_cuda:
            torch.cuda.nvtx.range_push("moe_comm.dispatch")
        try:
            arrived = self._guard(slot, lambda: self._repeat(known, slot, *tensors))
        finally:
            if on_cuda:
                torch.cuda.nvtx.range_pop()
        self._next_call += 1
        self._metrics.dispatches += 1
        arrived.handle._owner = self
        return arrived

    def _slot_to_repeat(
        self, x: Any, topk_idx: Any, topk_weights: Any, num_tokens: int | None, bucket: int | None
    ) -> int | None:
        """The slot whose last call these arguments repeat, or None."""
        slot = 0
        while slot in self._busy_slots:
            slot += 1
        known = self._known.get(slot)
        if (
            known is None
            or not type(x) is type(topk_idx) is type(topk_weights) is Tensor
            or _kind(x, topk_idx, topk_weights) != known.kind
            or not (x.is_contiguous() and topk_idx.is_contiguous() and topk_weights.is_contiguous())
            or (self.config.bucket if bucket is None else bucket) != known.bucket
            or (known.bucket if num_tokens is None else num_tokens) != known.bucket
            or known.lane.age != self._slots[slot].age
            or (torch.is_grad_enabled() and (x.requires_grad or topk_weights.requires_grad))
            or self._destroyed
            or self._hooks
            or self._compares_headers
        ):
            return None
        if known.recent.last is not None:
            self._guard(slot, known.recent.settle)
        return slot if known.recent.expects else None

    def _repeat(
        self, known: _Known, slot: int, x: Tensor, topk_idx: Tensor, topk_weights: Tensor
    ) -> Dispatched:
        """As ExactCommunicator's two halves, with all that is known."""
        lane, recent, bucket, number = known.lane, known.recent, known.bucket, self._next_call
        blocks = lane.blocks
        assert blocks.index is not None
        ready, known.ready = known.ready, None
        if ready is None or ready.made != self._made_here():
            ready = self._make_ready(known)
        rank = blocks.announce(
            topk_idx, topk_weights, bucket, number, was_full=recent.was_full, rank=ready.rank
        )
        pairs = (known.records, (x.view(torch.uint8), known.theirs))
        transfer = self._transport.swap(Phase.DISPATCH, pairs)
        # While they travel.
        known.own.copy_(x)
        to = Located(rank=rank, ids=topk_idx)
        counted = Counted(
            blocks,
            self._transport,
            to,
            topk_weights,
            transfer,
            recent,
            apart=False,
            out=ready.routing,
        )
        routing = counted.routing()
        index = blocks.index(routing[0], ready.index)
        arrived = self._arrived(to, *routing, index, counted)
        call = DispatchCall(
            x=x,
            scales=None,
            is_quantized=False,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            num_tokens=bucket,
            bucket=bucket,
            slot=slot,
            call=number,
        )
        return arrived.dispatched(call, bucket, lane.rows, {}, self.config.wire)

    def _made_here(self) -> tuple[int, bool]:
        stream = torch.cuda.current_stream().cuda_stream if self.device.type == "cuda" else 0
        return stream, torch.is_inference_mode_enabled()

    def _make_ready(self, known: _Known) -> _Ready:
        blocks = known.lane.blocks
        assert blocks.index is not None
        shape = (known.bucket, self.config.num_topk)
        return _Ready(
            made=self._made_here(),
            rank=torch.empty(shape, dtype=torch.int32, device=self.device),
            routing=blocks.room(),
            index=blocks.index.room(),
        )

    def _combine_at_once(self, call: CombineCall) -> Tensor:
        combined = super()._combine_at_once(call)
        known = self._known.get(call.handle.slot)
        if known is not None and known.ready is None:
            known.ready = self._make_ready(known)
        return combined

    def mask_rank(self, rank: int) -> None:
        """See C10dCommunicator."""
        super().mask_rank(rank)
        self._recent.clear()
        self._known.clear()

    def _close(self) -> None:
        self._known.clear()
        super()._close()
