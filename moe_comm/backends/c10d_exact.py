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
from moe_comm.backends.c10d_routing import Located
from moe_comm.backends.c10d_transport import (
    Done,
    Header,
    Headers,
    Kind,
    Phase,
    Transfer,
)
from moe_comm.backends.packing import (
    Field,
    RecordLayout,
    Workspace,
    as_bytes,
    put_rows,
    take_rows,
)
from moe_comm.calls import CombineCall, DispatchCall
from moe_comm.handle import Dispatched
from moe_comm.wire import Wire


@dataclass(kw_only=True, eq=False)
class _Sent:
    """A dispatch between its halves."""

    plan: Plan
    to: Located | None
    headers: Headers | None
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
        to: Located | None = None
        headers: Headers | None = None
        if call.reuse is None:
            token = Field(name="token", dtype=torch.int32)
            layout = RecordLayout([*self._routing_fields(call), *extras, token])
            to, plan, headers = self._plan(call, values, layout)
        else:
            layout = RecordLayout(extras)
            plan = self._reusable(call.reuse).route
            self._agree(Phase.DISPATCH, self._header(call, values, layout))
        slot, width = self._slots[call.slot], as_bytes(values).shape[1]
        packing = [p for p in self._transport.others if not plan.sends_all(p)]
        packed = slot.tensor("rows out", (sum(plan.sent[p] for p in packing), width), torch.uint8)
        records = slot.tensor("records out", (sum(plan.sent), layout.num_bytes), torch.uint8)
        self._router.pack(
            plan,
            to,
            layout,
            call.topk_weights.detach(),
            as_bytes(values),
            records=records,
            packed=packed,
            packing=packing,
        )
        if extras:
            self._write_extras(records, layout, call, scales, plan.index)
        landing, record_transfer = self._send_records(plan, records, slot)
        rows, staged, row_transfer = self._send_rows(call, plan, values, packed)
        return _Sent(
            plan=plan,
            to=to,
            headers=headers,
            values=values,
            scales=scales,
            layout=layout,
            records=landing,
            record_transfer=record_transfer,
            rows=rows,
            staged=staged,
            row_transfer=row_transfer,
        )

    @staticmethod
    def _header(
        call: DispatchCall, values: Tensor, layout: RecordLayout, num_tokens: int = 0
    ) -> Header:
        return Header(
            phase=Phase.DISPATCH,
            call=call.call,
            num_tokens=num_tokens,
            num_rows=0,
            bucket=call.bucket,
            row_bytes=values.shape[1] * values.dtype.itemsize,
            record_bytes=layout.num_bytes,
        )

    def _plan(
        self, call: DispatchCall, values: Tensor, layout: RecordLayout
    ) -> tuple[Located, Plan, Headers]:
        """Exchange counts. Blocks the host."""
        num_tokens = self._host_tokens(call.num_tokens, call.num_rows)
        to = self._router.locate(call.topk_idx, num_tokens)
        header = self._header(call, values, layout, num_tokens)
        positions, mine = self._router.choose(to, header)
        told = self._transport.exchange_headers(Phase.DISPATCH, mine)
        self._check_headers(header, told.theirs, self._transport.others)
        tokens_of = [int(count) for count in told.theirs[:, 2].tolist()]
        tokens_of[self.rank] = num_tokens
        received = [int(count) for count in told.theirs[:, 3].tolist()]
        received[self.rank] = 0
        plan = Plan(
            num_tokens=num_tokens,
            sent=[int(count) for count in told.mine[:, 3].tolist()],
            received=received,
            tokens_of=tokens_of,
            positions=positions,
            headers=mine,
        )
        return to, plan, told

    def _send_records(
        self, plan: Plan, records: Tensor, slot: Workspace
    ) -> tuple[Tensor, Transfer]:
        size = records.shape[1]
        landing = slot.tensor("records in", (sum(plan.received), size), torch.uint8)
        if size == 0:
            return landing, Done()
        transfer = self._transport.all_to_all(
            Phase.DISPATCH,
            {p: records[plan.to(p)] for p in self._transport.others if plan.sent[p]},
            {p: landing[plan.come_from(p)] for p in self._transport.others if plan.received[p]},
            Kind.RECORDS,
        )
        return landing, transfer

    def _send_rows(
        self, call: DispatchCall, plan: Plan, values: Tensor, packed: Tensor
    ) -> tuple[Tensor, Tensor, Transfer]:
        """Rows under way, also this rank's own: [R, B, H], and what is still packed."""
        others, bucket, mine = self._transport.others, call.bucket, plan.num_tokens
        source = as_bytes(values)
        rows = self._row_room(call, values)
        places = as_bytes(rows.flatten(0, 1))
        packing = [p for p in others if not plan.sends_all(p)]
        sends = {p: source[:mine] for p in others if plan.sends_all(p)}
        sends.update(zip(packing, packed.split([plan.sent[p] for p in packing]), strict=True))
        landing = [p for p in others if not plan.receives_all(p)]
        recvs = {
            p: places[p * bucket : p * bucket + plan.received[p]]
            for p in others
            if plan.receives_all(p)
        }
        sizes = [plan.received[p] for p in landing]
        staged = self._slots[call.slot].tensor(
            "rows in", (sum(sizes), source.shape[1]), torch.uint8
        )
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
        return arrived.dispatched(call, plan.num_tokens, state.rows, extras, self.config.wire)

    def _arrive(self, call: DispatchCall, state: _Sent, to: Located) -> Arrived:
        """Read the routing out of the records, and index it."""
        assert state.headers is not None
        local_idx, weights, places, tokens = self._router.unpack(
            state.plan,
            to,
            state.layout,
            call.topk_weights.detach(),
            state.records,
            state.headers,
            bucket=call.bucket,
        )
        plan = dataclasses.replace(state.plan, places=places)
        return self._index(to, local_idx, weights, tokens, plan)

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
