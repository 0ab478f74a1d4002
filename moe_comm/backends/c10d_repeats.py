"""Dispatches of mode exact that are like the one before, in the shortest way.

Serving makes the same call again and again: tensors of the same kind, the same bucket, and between
two ranks all rows of it. Such a call has nothing left to be checked, found or made; what remains
are the launches and one exchange.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_comm.backends.c10d_counted import Counted, Recent
from moe_comm.backends.c10d_gathered import GatheredRecords, Lane
from moe_comm.backends.c10d_routing import Located
from moe_comm.backends.c10d_transport import Kind, Phase, Transfer
from moe_comm.calls import CombineCall, DispatchCall
from moe_comm.config import EPConfig
from moe_comm.group import Group
from moe_comm.handle import Dispatched


@dataclass(kw_only=True, eq=False)
class _Known:
    """A call that may be repeated.

    Attributes:
        kind: of its tensors.
        bucket: B; as many tokens as there are rows.
        lane: records and rows in one memory. gather: sends and receives all of it.
    """

    kind: tuple[object, ...]
    bucket: int
    lane: Lane
    gather: Callable[[], Transfer]
    recent: Recent


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
        """A full dispatch whose records and rows were one message: it may be repeated as it is."""
        plain = self.config.wire.scale_dtype is None and not call.payloads
        whole = isinstance(call.num_tokens, int) and call.num_tokens == call.bucket
        if not lane.blocks.copies or lane.joint is None or not plain or not whole:
            return
        self._known[call.slot] = _Known(
            kind=_kind(call.x, call.topk_idx, call.topk_weights),
            bucket=call.bucket,
            lane=lane,
            gather=self._transport.gatherer(Phase.DISPATCH, lane.joint, Kind.RECORDS),
            recent=recent,
        )

    def _dispatch_now(self, x: Any, topk_idx: Any, topk_weights: Any, **options: Any) -> Any:
        """See Engine."""
        slot = None
        if self._known and not (options["async_op"] or options["payloads"] or options["handle"]):
            slot = self._slot_to_repeat(
                x, topk_idx, topk_weights, options["num_tokens"], options["bucket"]
            )
        if slot is None:
            return super()._dispatch_now(x, topk_idx, topk_weights, **options)
        known = self._known[slot]
        self._busy_slots.add(slot)
        on_cuda = self.device.type == "cuda"
        if on_cuda:
            torch.cuda.nvtx.range_push("moe_comm.dispatch")
        try:
            arrived = self._guard(
                slot, lambda: self._repeat(known, slot, x, topk_idx, topk_weights)
            )
        finally:
            if on_cuda:
                torch.cuda.nvtx.range_pop()
        self._next_call += 1
        self._metrics.dispatches += 1
        arrived.handle._owner = self
        return arrived

    def _slot_to_repeat(
        self, x: Any, topk_idx: Any, topk_weights: Any, num_tokens: Any, bucket: int | None
    ) -> int | None:
        """The slot whose last call these arguments repeat, or None."""
        slot = 0
        while slot in self._busy_slots:
            slot += 1
        known = self._known.get(slot)
        if (
            known is None
            or not type(x) is type(topk_idx) is type(topk_weights) is Tensor
            or not (num_tokens is None or type(num_tokens) is int)
            or _kind(x, topk_idx, topk_weights) != known.kind
            or not (x.is_contiguous() and topk_idx.is_contiguous() and topk_weights.is_contiguous())
            or (self.config.bucket if bucket is None else bucket) != known.bucket
            or (known.bucket if num_tokens is None else num_tokens) != known.bucket
            or known.lane.age != self._slots[slot].age
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
        blocks.announce_whole(topk_idx, topk_weights, x, number, was_full=recent.was_full)
        self._transport.doing = blocks.header(number)
        transfer = known.gather()
        transfer.wait()
        rank, routing, index = blocks.read_whole()
        to = Located(rank=rank, ids=topk_idx)
        counted = Counted(
            blocks, self._transport, to, topk_weights, transfer, recent, whole=True, apart=False,
            routing=routing,
        )  # fmt: skip
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

    def _combine_at_once(self, call: CombineCall) -> Tensor:
        combined = super()._combine_at_once(call)
        route = call.handle.state.route
        if isinstance(route, Counted):
            # While the device is busy; the next dispatch need not.
            route.settle()
        return combined

    def mask_rank(self, rank: int) -> None:
        """See C10dCommunicator."""
        super().mask_rank(rank)
        self._recent.clear()
        self._known.clear()

    def _close(self) -> None:
        self._known.clear()
        super()._close()
