"""c10d, mode exact: counts on the host, then one row per (token, destination rank), packed.

Two ways for what travels beside rows. Where it is small and headers are not cheap, it is gathered
(c10d_gathered), and the counts are taken from it; else headers with counts come first, and records
are packed (c10d_packed). Rows need no copy: a rank that sends (nearly) all its tokens sends x as it
lies, and they are received where they belong. The way back is the same plan with the roles
exchanged.

Shape legend: T this rank's tokens, R ranks, B the bucket, K choices, H hidden.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_comm.backends import device_math
from moe_comm.backends.c10d_base import Arrived
from moe_comm.backends.c10d_gathered import GatheredRecords, Gathering
from moe_comm.backends.c10d_packed import PackedRecords, Packing
from moe_comm.backends.c10d_plan import GatheredPlan, Plan
from moe_comm.backends.c10d_routing import rows_sent
from moe_comm.backends.c10d_transport import Header, Kind, Phase, Transfer, check_header
from moe_comm.backends.packing import as_bytes, put_rows, take_rows
from moe_comm.calls import CombineCall, DispatchCall
from moe_comm.handle import Dispatched
from moe_comm.wire import Wire

# Bytes of all ranks' records at the size of the bucket, up to which gathering them takes less than
# an exchange of counts beside one of packed records.
_GATHERED_BYTES = 8 << 20


@dataclass(kw_only=True, eq=False)
class _Sent:
    """A dispatch between its halves; `routing` where it was gathered and is new: local ids, weights
    and T of each rank."""

    records: Gathering | Packing
    plan: Plan
    routing: tuple[Tensor, Tensor, Tensor] | None
    values: Tensor
    scales: Tensor | None
    rows: Tensor
    staged: Tensor | None
    transfer: Transfer


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


class ExactCommunicator(GatheredRecords, PackedRecords):
    """See the module."""

    mode = "exact"
    _tells = True

    # Dispatch.

    def _start_dispatch(self, call: DispatchCall) -> _Sent:
        values, scales = self._on_wire(call)
        records: Gathering | Packing
        plan: Plan
        routing: tuple[Tensor, Tensor, Tensor] | None = None
        packed: Tensor | None = None
        if self._gathers(call, scales):
            lane = self._lane(call, values, scales)
            rows = lane.rows
            records = self._gather(call, lane, scales, inline=True)
            if call.reuse is None:
                routing, plan = self._read_blocks(call, records)
            else:
                plan = self._reusable(call.reuse).route
        else:
            records = self._pack(call, values, scales)
            plan, packed = records.plan, records.packed
            rows = self._row_room(call, values)
        staged, transfer = self._send_rows(call, plan, values, packed)
        return _Sent(
            records=records,
            plan=plan,
            routing=routing,
            values=values,
            scales=scales,
            rows=rows,
            staged=staged,
            transfer=transfer,
        )

    def _gathers(self, call: DispatchCall, scales: Tensor | None) -> bool:
        """Whether records are gathered: depends on what all ranks know alike."""
        if self._transport.has_headers or call.bucket == 0:
            return False
        # Ids are int32.
        record = self.config.num_topk * (4 + call.topk_weights.dtype.itemsize)
        for extra in (*([] if scales is None else [scales]), *call.payloads.values()):
            record += math.prod(extra.shape[1:]) * extra.dtype.itemsize
        return self.num_ranks * call.bucket * record <= _GATHERED_BYTES

    def _read_blocks(
        self, call: DispatchCall, gathering: Gathering
    ) -> tuple[tuple[Tensor, Tensor, Tensor], GatheredPlan]:
        """The routing, and the plan that follows. Blocks the host."""
        blocks, to = gathering.lane.blocks, gathering.located
        assert to is not None
        gathering.transfer.wait()
        routing = blocks.read(call.topk_weights)
        local_idx = routing[0]
        told = blocks.told(self._transport, to, local_idx)
        mine = told.facts[self.rank]
        for peer in self._transport.others:
            facts = told.facts[peer]
            if facts[:2] != mine[:2] or facts[4:] != mine[4:]:
                check_header(Header(*mine[:-1]), Header(*facts[:-1]), peer)
        tokens_of = [facts[2] for facts in told.facts]
        num_tokens, num_ranks = tokens_of[self.rank], range(self.num_ranks)
        received = [rows_sent(told.counts[rank][0], tokens_of[rank]) for rank in num_ranks]
        received[self.rank] = 0
        plan = GatheredPlan(
            num_tokens=num_tokens,
            sent=[rows_sent(count[1], num_tokens) for count in told.counts],
            received=received,
            tokens_of=tokens_of,
            rank=to.rank,
            local_idx=local_idx,
        )
        return routing, plan

    def _send_rows(
        self, call: DispatchCall, plan: Plan, values: Tensor, packed: Tensor | None
    ) -> tuple[Tensor | None, Transfer]:
        """Rows under way, straight into their places; the rest, from ranks that do not send all,
        into what is returned. `packed`: the rows for the ranks that do not get all, where that was
        done already."""
        bucket, mine, slot = call.bucket, plan.num_tokens, self._slots[call.slot]
        source = as_bytes(values)
        width = source.shape[1]
        places = slot.tensor("rows", (self.num_ranks * bucket, width), torch.uint8)
        valid = source[:mine] if mine < source.shape[0] else source
        sends: dict[int, Tensor] = {}
        recvs: dict[int, Tensor] = {}
        packing, landing = [], []
        for peer in self._transport.others:
            if plan.sends_all(peer):
                sends[peer] = valid
            else:
                packing.append(peer)
            if plan.receives_all(peer):
                start = peer * bucket
                recvs[peer] = places[start : start + plan.received[peer]]
            else:
                landing.append(peer)
        if packing:
            sizes = [plan.sent[peer] for peer in packing]
            if packed is None:
                packed = slot.tensor("rows out", (sum(sizes), width), torch.uint8)
                if packed.shape[0]:
                    take_rows(source, torch.cat([plan.index[plan.to(p)] for p in packing]), packed)
            sends.update(zip(packing, packed.split(sizes), strict=True))
        staged = None
        if landing:
            sizes = [plan.received[peer] for peer in landing]
            staged = slot.tensor("rows in", (sum(sizes), width), torch.uint8)
            recvs.update(zip(landing, staged.split(sizes), strict=True))
        return staged, self._transport.all_to_all(Phase.DISPATCH, sends, recvs, Kind.ROWS)

    def _finish_dispatch(self, call: DispatchCall, state: _Sent) -> Dispatched:
        records, plan = state.records, state.plan
        records.transfer.wait()
        if call.reuse is not None:
            arrived: Arrived = call.reuse.state
        elif isinstance(records, Packing):
            arrived = self._unpack(call, records)
            plan = arrived.route
        else:
            assert state.routing is not None
            arrived = self._gathered_index(records, state.routing, plan)
        # While rows travel: this rank's own, all of them, since a copy is cheaper than a choice.
        mine = plan.num_tokens
        state.rows[self.rank, :mine].copy_(state.values[:mine])
        if isinstance(records, Packing):
            extras = self._packed_extras(call, plan, records, state.scales)
        else:
            extras = self._gathered_extras(call, records)
        state.transfer.wait()
        self._place_rows(plan, state)
        return arrived.dispatched(call, plan.num_tokens, state.rows, extras, self.config.wire)

    def _place_rows(self, plan: Plan, state: _Sent) -> None:
        """Rows that were received packed, to their places."""
        landing = [
            p for p in self._transport.others if plan.received[p] and not plan.receives_all(p)
        ]
        if landing and state.staged is not None:
            index = torch.cat([plan.places[plan.come_from(p)] for p in landing])
            put_rows(as_bytes(state.rows.flatten(0, 1)), index, state.staged)

    # Combine.

    def _start_back(self, call: CombineCall, form: Wire, phase: Phase) -> Any:
        arrived: Arrived = call.handle.state
        plan: Plan = arrived.route
        slot = call.handle.slot
        self._agree_back(call, phase)
        values, scales = self._partials(call, arrived, form)
        back = self._term_room("back", slot, values.shape, values.dtype)
        ways = [self._send_back(plan, values, back, slot, phase, Kind.BACK_ROWS)]
        factors = None
        if scales is not None:
            factors = self._term_room("back scales", slot, scales.shape, scales.dtype)
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
