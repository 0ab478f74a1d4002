"""c10d, mode exact: counts on the host, then one row per (token, destination rank), packed.

Headers with the counts come first; then records (ids, weights, scales, payloads, the token's
number) and rows, as two exchanges, so that index work overlaps with the rows' arrival and rows
need no copy: a rank that sends (nearly) all its tokens sends x as it lies, and they are received
where they belong. The way back is the same plan with the roles exchanged.

Shape legend: T this rank's tokens, R ranks, B the bucket, K choices, H hidden.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_comm.backends import device_math
from moe_comm.backends.c10d_base import Arrived, C10dCommunicator
from moe_comm.backends.c10d_plan import Plan
from moe_comm.backends.c10d_transport import (
    Done,
    Header,
    Kind,
    Phase,
    Transfer,
    header_rows,
)
from moe_comm.backends.packing import Field, RecordLayout, as_bytes, put_rows, take_rows
from moe_comm.calls import CombineCall, DispatchCall
from moe_comm.handle import Dispatched
from moe_comm.layout import Destinations
from moe_comm.wire import Wire

# Where packing would leave out less than one row in this many, all rows are sent as they lie.
_WHOLE_SHARE = 128


@dataclass(kw_only=True, eq=False)
class _Sent:
    """A dispatch between its halves."""

    plan: Plan
    choice_rank: Tensor
    to: Destinations | None
    values: Tensor
    scales: Tensor | None
    layout: RecordLayout
    records: Tensor
    record_transfer: Transfer
    rows: Tensor
    staged: Tensor
    row_transfer: Transfer


@dataclass(kw_only=True, eq=False)
class _Way:
    """One exchange of a combine under way: rows from ranks in `landing` are packed in `staged`."""

    transfer: Transfer
    places: Tensor
    staged: Tensor
    landing: list[int]


@dataclass(kw_only=True, eq=False)
class _Back:
    """A combine between its halves: `terms` [R, B, D] and their scales, arriving."""

    terms: Tensor
    scales: Tensor | None
    ways: list[_Way]


class ExactCommunicator(C10dCommunicator):
    """See the module."""

    mode = "exact"

    # Dispatch.

    def _start_dispatch(self, call: DispatchCall) -> _Sent:
        values, scales = self._on_wire(call)
        extras = self._record_fields(call, scales)
        if call.reuse is None:
            to, plan, layout = self._plan(call, values, extras)
            choice_rank = to.rank
        else:
            to, layout = None, RecordLayout(extras)
            plan, choice_rank = self._reusable(call.reuse).route, call.reuse.choice_rank
            self._agree(Phase.DISPATCH, self._header(call, values, layout))
        records, record_transfer = self._send_records(call, plan, to, layout, scales)
        rows, staged, row_transfer = self._send_rows(call, plan, values)
        return _Sent(
            plan=plan,
            choice_rank=choice_rank,
            to=to,
            values=values,
            scales=scales,
            layout=layout,
            records=records,
            record_transfer=record_transfer,
            rows=rows,
            staged=staged,
            row_transfer=row_transfer,
        )

    @staticmethod
    def _header(call: DispatchCall, values: Tensor, layout: RecordLayout) -> Header:
        return Header(
            phase=Phase.DISPATCH,
            call=call.call,
            num_tokens=0,
            num_rows=0,
            bucket=call.bucket,
            row_bytes=values.shape[1] * values.dtype.itemsize,
            record_bytes=layout.num_bytes,
        )

    def _plan(
        self, call: DispatchCall, values: Tensor, extras: list[Field]
    ) -> tuple[Destinations, Plan, RecordLayout]:
        """Exchange counts. Blocks the host."""
        num_tokens = self._host_tokens(call.num_tokens, call.num_rows)
        to = self._locate(call, num_tokens)
        token = Field(name="token", dtype=torch.int32)
        layout = RecordLayout([*self._routing_fields(call), *extras, token])
        valid = torch.arange(call.num_rows, device=self.device) < num_tokens
        counts = to.reaches.sum(dim=0)
        whole = (counts > 0) & (counts * _WHOLE_SHARE >= num_tokens * (_WHOLE_SHARE - 1))
        goes = to.reaches | (whole & valid.unsqueeze(-1))
        goes[:, self.rank] = False
        header = self._header(call, values, layout)
        mine = header_rows(header, goes.sum(dim=0))
        mine[:, 2] = num_tokens
        theirs = self._transport.exchange_headers(Phase.DISPATCH, mine)
        self._check_headers(header, theirs, self._transport.others)
        # Free after the headers: their exchange waited for the device already.
        sent = [int(count) for count in mine[:, 3].tolist()]
        by_rank = torch.nonzero_static(goes.t(), size=sum(sent))
        tokens_of = [int(header[2]) for header in theirs.tolist()]
        tokens_of[self.rank] = num_tokens
        received = [int(header[3]) for header in theirs.tolist()]
        received[self.rank] = 0
        plan = Plan(
            num_tokens=num_tokens,
            sent=sent,
            index=by_rank[:, 1],
            received=received,
            tokens_of=tokens_of,
        )
        return to, plan, layout

    def _send_records(
        self,
        call: DispatchCall,
        plan: Plan,
        to: Destinations | None,
        layout: RecordLayout,
        scales: Tensor | None,
    ) -> tuple[Tensor, Transfer]:
        size, slot = layout.num_bytes, self._slots[call.slot]
        out = slot.tensor("records out", (sum(plan.sent), size), torch.uint8)
        landing = slot.tensor("records in", (sum(plan.received), size), torch.uint8)
        if size == 0:
            return landing, Done()
        if to is not None:
            counts = torch.tensor(plan.sent).to(self.device, non_blocking=True)
            ranks = torch.arange(self.num_ranks, device=self.device, dtype=torch.int32)
            target = ranks.repeat_interleave(counts, output_size=sum(plan.sent)).unsqueeze(-1)
            where, tokens = to.rank[plan.index], plan.index
            layout.view(out, "ids").copy_(torch.where(where == target, to.slot[tokens], -1))
            layout.view(out, "weights").copy_(call.topk_weights.detach()[tokens])
            layout.view(out, "token").copy_(tokens)
        self._write_extras(out, layout, call, scales, plan.index)
        transfer = self._transport.all_to_all(
            Phase.DISPATCH,
            {p: out[plan.to(p)] for p in self._transport.others if plan.sent[p]},
            {p: landing[plan.come_from(p)] for p in self._transport.others if plan.received[p]},
            Kind.RECORDS,
        )
        return landing, transfer

    def _send_rows(
        self, call: DispatchCall, plan: Plan, values: Tensor
    ) -> tuple[Tensor, Tensor, Transfer]:
        """Rows under way, also this rank's own: [R, B, H], and what is still packed."""
        slot = self._slots[call.slot]
        source = as_bytes(values)
        rows = self._row_room(call, values)
        places = as_bytes(rows.flatten(0, 1))
        bucket, mine = call.bucket, plan.num_tokens
        packing = [p for p in self._transport.others if plan.sent[p] and not plan.sends_all(p)]
        sends = {p: source[:mine] for p in self._transport.others if plan.sends_all(p)}
        if packing:
            index = torch.cat([plan.index[plan.to(p)] for p in packing])
            packed = slot.tensor("rows out", (index.shape[0], source.shape[1]), torch.uint8)
            take_rows(source, index, packed)
            parts = packed.split([plan.sent[p] for p in packing])
            sends.update(zip(packing, parts, strict=True))
        landing = [p for p in self._transport.others if not plan.receives_all(p)]
        recvs = {
            p: places[p * bucket : p * bucket + plan.received[p]]
            for p in self._transport.others
            if plan.receives_all(p)
        }
        sizes = [plan.received[p] for p in landing]
        staged = slot.tensor("rows in", (sum(sizes), source.shape[1]), torch.uint8)
        recvs.update(zip(landing, staged.split(sizes), strict=True))
        transfer = self._transport.all_to_all(Phase.DISPATCH, sends, recvs, Kind.ROWS)
        # While they travel: this rank's own rows, all of them, since a copy is cheaper than a
        # choice.
        rows[self.rank, :mine].copy_(values[:mine])
        return rows, staged, transfer

    def _finish_dispatch(self, call: DispatchCall, state: _Sent) -> Dispatched:
        state.record_transfer.wait()
        plan, to = state.plan, state.to
        if to is None:
            assert call.reuse is not None
            arrived: Arrived = call.reuse.state
        else:
            arrived = self._arrive(call, state, to)
            plan = arrived.route
        extras = self._read_extras(call, plan, state)
        state.row_transfer.wait()
        self._place_rows(call, plan, state)
        return self._dispatched(
            call, arrived, state.choice_rank, plan.num_tokens, state.rows, extras
        )

    def _arrive(self, call: DispatchCall, state: _Sent, to: Destinations) -> Arrived:
        """Read the routing out of the records, and index it."""
        bucket, plan, num_topk = call.bucket, state.plan, self.config.num_topk
        records, layout = state.records, state.layout
        counts = torch.tensor(plan.received).to(self.device, non_blocking=True)
        start = torch.arange(self.num_ranks, device=self.device) * bucket
        start = start.repeat_interleave(counts, output_size=sum(plan.received))
        places = start + layout.view(records, "token")
        shape = (self.num_ranks, bucket, num_topk)
        local_idx = torch.full(shape, -1, dtype=torch.int32, device=self.device)
        weights = torch.zeros(shape, dtype=call.topk_weights.dtype, device=self.device)
        local_idx.flatten(0, 1).index_copy_(0, places, layout.view(records, "ids"))
        weights.flatten(0, 1).index_copy_(0, places, layout.view(records, "weights"))
        own, rows = to.rank == self.rank, slice(0, call.num_rows)
        local_idx[self.rank, rows] = torch.where(own, to.slot, -1)
        weights[self.rank, rows] = call.topk_weights.detach()
        tokens = torch.tensor(plan.tokens_of, dtype=torch.int32).to(self.device)
        full = dataclasses.replace(plan, places=places)
        return self._index(local_idx, weights, tokens, full)

    def _read_extras(self, call: DispatchCall, plan: Plan, state: _Sent) -> dict[str, Tensor]:
        extras: dict[str, Tensor] = {}
        for name, field in state.layout.fields.items():
            if name in ("ids", "weights", "token"):
                continue
            room = self._extra_room(call, field)
            flat = room.flatten(0, 1)
            assert plan.places is not None
            if field.num_bytes:
                flat[plan.places] = state.layout.view(state.records, name)
                own = state.scales if name == "scales" else call.payloads[name[len("payload ") :]]
                assert own is not None
                room[self.rank, : plan.num_tokens] = own.detach()[: plan.num_tokens]
            extras[name] = room
        return extras

    def _place_rows(self, call: DispatchCall, plan: Plan, state: _Sent) -> None:
        """Rows that were received packed, to their places."""
        landing = [
            p for p in self._transport.others if plan.received[p] and not plan.receives_all(p)
        ]
        if landing:
            assert plan.places is not None
            index = torch.cat([plan.places[plan.come_from(p)] for p in landing])
            put_rows(as_bytes(state.rows.flatten(0, 1)), index, state.staged)

    # Combine.

    def _start_back(self, call: CombineCall, form: Wire, phase: Phase) -> Any:
        arrived: Arrived = call.handle.state
        plan: Plan = arrived.route
        slot = call.handle.slot
        self._agree_back(call, phase)
        values, scales = self._partials(call, arrived, form)
        back = self._slots[slot].tensor("back", values.shape, values.dtype)
        ways = [self._send_back(plan, values, back, slot, phase, Kind.BACK_ROWS)]
        factors = None
        if scales is not None:
            factors = self._slots[slot].tensor("back scales", scales.shape, scales.dtype)
            ways.append(self._send_back(plan, scales, factors, slot, phase, Kind.BACK_SCALES))
        return _Back(terms=back, scales=factors, ways=ways)

    def _send_back(
        self, plan: Plan, terms: Tensor, back: Tensor, slot: int, phase: Phase, kind: Kind
    ) -> _Way:
        """Each source rank's part of `terms` [R, B, D] under way to it, and what comes in return
        into `back` [R, B, D]."""
        bucket, others = back.shape[1], self._transport.others
        source, places = as_bytes(terms.flatten(0, 1)), as_bytes(back.flatten(0, 1))
        width, space = source.shape[1], self._slots[slot]
        packing = [p for p in others if plan.received[p] and not plan.receives_all(p)]
        sends = {
            p: source[p * bucket : p * bucket + plan.received[p]]
            for p in others
            if plan.receives_all(p)
        }
        if packing:
            assert plan.places is not None
            index = torch.cat([plan.places[plan.come_from(p)] for p in packing])
            packed = space.tensor(f"{kind.name} out", (index.shape[0], width), torch.uint8)
            take_rows(source, index, packed)
            parts = packed.split([plan.received[p] for p in packing])
            sends.update(zip(packing, parts, strict=True))
        landing = [p for p in others if plan.sent[p] and not plan.sends_all(p)]
        recvs = {
            p: places[p * bucket : p * bucket + plan.num_tokens]
            for p in others
            if plan.sends_all(p)
        }
        sizes = [plan.sent[p] for p in landing]
        staged = space.tensor(f"{kind.name} in", (sum(sizes), width), torch.uint8)
        recvs.update(zip(landing, staged.split(sizes), strict=True))
        transfer = self._transport.all_to_all(phase, sends, recvs, kind)
        back[self.rank].copy_(terms[self.rank])
        return _Way(transfer=transfer, places=places, staged=staged, landing=landing)

    def _finish_back(self, call: CombineCall, form: Wire, state: _Back) -> Tensor:
        handle = call.handle
        plan: Plan = handle.state.route
        bucket = handle.bucket
        for way in state.ways:
            way.transfer.wait()
            if way.landing:
                index = torch.cat([plan.index[plan.to(p)] + p * bucket for p in way.landing])
                put_rows(way.places, index, way.staged)
        out = self._output(call)
        device_math.fold(
            state.terms,
            state.scales,
            form,
            self._who(handle.choice_rank),
            biases=call.bias,
            out=out,
        )
        return out
