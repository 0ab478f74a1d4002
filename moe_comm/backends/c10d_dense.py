"""c10d, mode dense: every rank gets every row of the bucket. For groups where nearly every rank is
reached anyway; fixed sizes, no counts, no host sync, so a CUDA graph can hold it.

Dispatch is an all-gather of rows straight into their places, and one of records before it (ids,
weights, scales, payloads); combine is an all-to-all of equal splits. A choice travels as
`rank * S + slot`, S the largest number of experts on a rank, so each rank picks its own.

Shape legend: T this rank's tokens, R ranks, B the bucket, K choices, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_comm.backends import device_math
from moe_comm.backends.c10d_base import Arrived, C10dCommunicator
from moe_comm.backends.c10d_routing import HEAD_BYTES, Located
from moe_comm.backends.c10d_transport import Done, Header, Kind, Phase, Transfer
from moe_comm.backends.packing import RecordLayout, as_bytes
from moe_comm.calls import CombineCall, DispatchCall
from moe_comm.handle import Dispatched
from moe_comm.wire import Wire


@dataclass(kw_only=True, eq=False)
class _Sent:
    """A dispatch between its halves."""

    located: Located | None
    num_tokens: int | Tensor
    layout: RecordLayout
    records: Tensor
    record_transfer: Transfer
    rows: Tensor
    row_transfer: Transfer


@dataclass(kw_only=True, eq=False)
class _Way:
    """One exchange of a combine under way: rows or scales, [R, B, ...] each."""

    sent: Tensor
    received: Tensor
    transfer: Transfer


class DenseCommunicator(C10dCommunicator):
    """See the module."""

    mode = "dense"

    # Dispatch.

    def _start_dispatch(self, call: DispatchCall) -> _Sent:
        values, scales = self._on_wire(call)
        extras = self._record_fields(call, scales)
        layout = RecordLayout(
            extras if call.reuse is not None else [*self._routing_fields(call), *extras]
        )
        self._agree(
            Phase.DISPATCH,
            Header(
                phase=Phase.DISPATCH,
                call=call.call,
                num_tokens=0,
                num_rows=0,
                bucket=call.bucket,
                row_bytes=values.shape[1] * values.dtype.itemsize,
                record_bytes=layout.num_bytes,
            ),
        )
        num_tokens = call.num_tokens
        if isinstance(num_tokens, Tensor):
            num_tokens = num_tokens.reshape(()).to(self.device).clamp(0, call.num_rows)
        records, located = self._records(call, layout, scales, num_tokens)
        transfer: Transfer = Done()
        if records.shape[1]:
            transfer = self._transport.all_gather(Phase.DISPATCH, records, Kind.RECORDS)
        rows = self._row_room(call, values)
        rows[self.rank, : call.num_rows].copy_(values)
        flat = as_bytes(rows.view(self.num_ranks, -1))
        row_transfer = self._transport.all_gather(Phase.DISPATCH, flat, Kind.ROWS)
        return _Sent(
            located=located,
            num_tokens=num_tokens,
            layout=layout,
            records=records,
            record_transfer=transfer,
            rows=rows,
            row_transfer=row_transfer,
        )

    def _records(
        self,
        call: DispatchCall,
        layout: RecordLayout,
        scales: Tensor | None,
        num_tokens: int | Tensor,
    ) -> tuple[Tensor, Located | None]:
        """uint8 [R, head + B * record] with this rank's row filled in; and its routing, if new."""
        size = call.bucket * layout.num_bytes
        head = 0 if call.reuse is not None else HEAD_BYTES
        most = self.config.bucket * layout.num_bytes + HEAD_BYTES
        records = self._slots[call.slot].tensor(
            "records", (self.num_ranks, head + size), torch.uint8, reserve=self.num_ranks * most
        )
        body = records[self.rank, head:].view(call.bucket, layout.num_bytes)
        mine = body[: call.num_rows]
        self._write_extras(mine, layout, call, scales, slice(None))
        if call.reuse is not None:
            return records, None
        to = self._router.locate(call.topk_idx, num_tokens)
        weights = call.topk_weights.detach()
        self._router.write_block(
            to, layout, weights, num_tokens, records[self.rank], bucket=call.bucket
        )
        return records, to

    def _finish_dispatch(self, call: DispatchCall, state: _Sent) -> Dispatched:
        state.record_transfer.wait()
        arrived = self._arrive(call, state) if call.reuse is None else self._reusable(call.reuse)
        extras: dict[str, Tensor] = {}
        for name, field in state.layout.fields.items():
            if name not in ("ids", "weights"):
                room = self._extra_room(call, field)
                extras[name] = room.copy_(state.layout.view(self._body(call, state), name))
        state.row_transfer.wait()
        return arrived.dispatched(call, state.num_tokens, state.rows, extras, self.config.wire)

    def _body(self, call: DispatchCall, state: _Sent) -> Tensor:
        """uint8 [R, B, record] of all ranks."""
        head = state.records.shape[1] - call.bucket * state.layout.num_bytes
        shape = (self.num_ranks, call.bucket, state.layout.num_bytes)
        return state.records[:, head:].view(shape)

    def _arrive(self, call: DispatchCall, state: _Sent) -> Arrived:
        assert state.located is not None
        local_idx, weights, tokens = self._router.read_blocks(
            state.records, state.layout, call.topk_weights, bucket=call.bucket
        )
        return self._index(state.located, local_idx, weights, tokens, None)

    # Combine.

    def _start_back(self, call: CombineCall, form: Wire, phase: Phase) -> list[_Way]:
        arrived: Arrived = call.handle.state
        slot = self._slots[call.handle.slot]
        self._agree_back(call, phase)
        values, scales = self._partials(call, arrived, form)
        ways = []
        for kind, terms in ((Kind.BACK_ROWS, values), (Kind.BACK_SCALES, scales)):
            if terms is None:
                continue
            back = slot.tensor(kind.name, terms.shape, terms.dtype)
            give, take = (as_bytes(t.view(self.num_ranks, -1)) for t in (terms, back))
            transfer = self._transport.all_to_all_equal(phase, give, take, kind)
            ways.append(_Way(sent=terms, received=back, transfer=transfer))
        return ways

    def _finish_back(self, call: CombineCall, form: Wire, state: Any) -> Tensor:
        ways: list[_Way] = state
        for way in ways:
            way.transfer.wait()
            way.received[self.rank].copy_(way.sent[self.rank])
        out = self._output(call)
        device_math.fold(
            ways[0].received,
            ways[1].received if len(ways) > 1 else None,
            form,
            self._who(call.handle.choice_rank),
            biases=call.bias,
            out=out,
        )
        return out
