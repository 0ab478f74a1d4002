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

import torch
from torch import Tensor

from moe_comm.backends.c10d_back import ReturnedTerms, Way
from moe_comm.backends.c10d_base import Arrived
from moe_comm.backends.c10d_counted import Counted, Recent, plan_of
from moe_comm.backends.c10d_gathered import Gathering, Lane
from moe_comm.backends.c10d_packed import PackedRecords, Packing
from moe_comm.backends.c10d_plan import Plan
from moe_comm.backends.c10d_repeats import RepeatedDispatch
from moe_comm.backends.c10d_transport import Kind, Phase, Transfer
from moe_comm.backends.packing import as_bytes, put_rows, take_rows
from moe_comm.calls import CombineCall, DispatchCall
from moe_comm.handle import Dispatched

# Bytes of all ranks' records at the size of the bucket, up to which gathering them takes less than
# an exchange of counts beside one of packed records.
_GATHERED_BYTES = 8 << 20


@dataclass(kw_only=True, eq=False)
class _Sent:
    """A dispatch between its halves.

    Attributes:
        values: where this rank's rows are still to be placed.
        sent: rows that arrive packed, if any do, and their transfer.
    """

    records: Gathering | Packing
    route: Plan | Counted
    values: Tensor | None
    scales: Tensor | None
    rows: Tensor
    sent: tuple[Tensor | None, Transfer]


class ExactCommunicator(RepeatedDispatch, PackedRecords, ReturnedTerms):
    """See the module."""

    mode = "exact"
    _tells = _joins = True

    # Dispatch.

    def _dispatch_at_once(self, call: DispatchCall) -> Dispatched:
        return self._finish_dispatch(call, self._send(call, inline=True))

    def _start_dispatch(self, call: DispatchCall) -> _Sent:
        return self._send(call, inline=False)

    def _send(self, call: DispatchCall, *, inline: bool) -> _Sent:
        """inline: both halves follow each other, so that x stays as it is until all is there."""
        values, scales = self._on_wire(call)
        if not self._gathers(call, scales):
            packing = self._pack(call, values, scales)
            rows, plan = self._row_room(call, values), packing.plan
            sent = self._send_rows(call, plan, values, rows, packing.packed, direct=inline)
            return _Sent(
                records=packing,
                route=plan,
                values=values if inline else None,
                scales=scales,
                rows=rows,
                sent=sent,
            )
        lane = self._lane(call, values, scales)
        if call.reuse is not None:
            gathering = self._gather(call, lane, scales, inline=inline)
            plan = plan_of(self._reusable(call.reuse).route)
            sent = self._send_rows(call, plan, values, lane.rows, None, direct=inline)
            return _Sent(
                records=gathering,
                route=plan,
                values=values if inline else None,
                scales=scales,
                rows=lane.rows,
                sent=sent,
            )
        return self._send_new(call, lane, values, scales, inline=inline)

    def _send_new(
        self,
        call: DispatchCall,
        lane: Lane,
        values: Tensor,
        scales: Tensor | None,
        *,
        inline: bool,
    ) -> _Sent:
        """With a routing that is gathered. Blocks the host, unless a full dispatch is expected."""
        recent = self._recent.setdefault(call.bucket, Recent())
        recent.settle()
        flag, whole = recent.was_full, recent.expects
        direct = inline
        sent: tuple[Tensor | None, Transfer] | None = None
        if not whole:
            gathering = self._gather(call, lane, scales, inline=True, was_full=flag)
        elif lane.joint is not None:
            direct = False
            lane.rows[self.rank, : call.num_rows].copy_(values)
            gathering = self._gather(
                call, lane, scales, inline=inline, was_full=flag, joint=lane.joint
            )
            sent = None, gathering.transfer
            self._note(call, lane, recent)
        else:
            direct = inline and self._transport.in_place and call.num_rows == call.bucket
            gathering = self._gather(call, lane, scales, inline=inline, was_full=flag)
            sent = None, self._send_bucket(call, lane, values, direct=direct)
        assert gathering.located is not None
        counted = Counted(
            lane.blocks,
            self._transport,
            gathering.located,
            call.topk_weights,
            gathering.transfer,
            recent,
            whole=whole,
            apart=not inline,
        )
        if sent is None:
            sent = self._send_rows(call, counted.plan(), values, lane.rows, None, direct=direct)
        return _Sent(
            records=gathering,
            route=counted,
            values=values if direct else None,
            scales=scales,
            rows=lane.rows,
            sent=sent,
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

    def _send_rows(
        self,
        call: DispatchCall,
        plan: Plan,
        values: Tensor,
        rows: Tensor,
        packed: Tensor | None,
        *,
        direct: bool,
    ) -> tuple[Tensor | None, Transfer]:
        """Values [T or more, H] under way, straight into their places in rows [R, B, H]; those of
        ranks that do not send all into what is returned.

        packed: values for the ranks that do not get all, where they were packed already. direct:
        this rank's own are still to be placed.
        """
        bucket, mine, slot = call.bucket, plan.num_tokens, self._slots[call.slot]
        if not direct:
            placed = rows[self.rank, :mine]
            values = placed.copy_(values[:mine])
        source = as_bytes(values)
        width = source.shape[1]
        places = as_bytes(rows.flatten(0, 1))
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
        records = state.records
        if isinstance(records, Packing):
            # While records travel.
            self._place_own(call, state)
        records.transfer.wait()
        if call.reuse is not None:
            arrived: Arrived = call.reuse.state
        elif isinstance(records, Packing):
            arrived = self._unpack(call, records)
        else:
            assert isinstance(state.route, Counted)
            arrived = self._gathered_index(records, state.route.routing(), state.route)
        if isinstance(records, Packing):
            extras = self._packed_extras(call, plan_of(arrived.route), records, state.scales)
        else:
            # While rows travel.
            self._place_own(call, state)
            extras = self._gathered_extras(call, records)
        staged, transfer = state.sent
        transfer.wait()
        if staged is not None:
            self._place_rows(plan_of(arrived.route), state.rows, staged)
        num_tokens = call.num_tokens
        if isinstance(num_tokens, Tensor) and call.reuse is None:
            num_tokens = arrived.num_tokens_per_rank[self.rank]
        return arrived.dispatched(call, num_tokens, state.rows, extras, self.config.wire)

    def _place_own(self, call: DispatchCall, state: _Sent) -> None:
        """This rank's own rows. All of them, since a copy is cheaper than a choice."""
        if state.values is not None:
            state.rows[self.rank, : call.num_rows].copy_(state.values)

    def _place_rows(self, plan: Plan, rows: Tensor, staged: Tensor) -> None:
        """Rows that were received packed, to their places."""
        landing = [
            p for p in self._transport.others if plan.received[p] and not plan.receives_all(p)
        ]
        if landing:
            index = torch.cat([plan.places[plan.come_from(p)] for p in landing])
            put_rows(as_bytes(rows.flatten(0, 1)), index, staged)

    # Combine.

    def _send_back(
        self, call: CombineCall, terms: Tensor, back: Tensor, phase: Phase, kind: Kind
    ) -> Way:
        """See ReturnedTerms."""
        route = call.handle.state.route
        if isinstance(route, Counted) and route.whole:
            return self._send_all_back(call, terms, back, phase, kind)
        plan = plan_of(route)
        bucket, others = back.shape[1], self._transport.others
        source, places = as_bytes(terms.flatten(0, 1)), as_bytes(back.flatten(0, 1))
        width, space = source.shape[1], self._slots[call.handle.slot]
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
        if not landing:
            return Way(back=back, transfer=transfer)
        index = torch.cat([plan.index[plan.to(p)] + p * bucket for p in landing])
        return Way(back=back, transfer=transfer, staged=staged, places=index)
