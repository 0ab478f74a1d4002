"""Records that are packed: each rank gets those of the rows that reach it, beside the rows.

Headers with the counts come first; then records (ids, weights, scales, payloads, the token's
number), as an exchange of its own, so that index work overlaps with the rows' arrival.

Shape legend: T this rank's tokens, R ranks, B the bucket, K choices.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_comm.backends.c10d_base import Arrived, C10dCommunicator
from moe_comm.backends.c10d_counted import plan_of
from moe_comm.backends.c10d_plan import PackedPlan, Plan
from moe_comm.backends.c10d_routing import Located
from moe_comm.backends.c10d_transport import Done, Headers, Kind, Phase, Transfer
from moe_comm.backends.packing import Field, RecordLayout, Workspace, as_bytes
from moe_comm.calls import DispatchCall


@dataclass(kw_only=True, eq=False)
class Packing:
    """Records on their way; `packed` uint8 [n, bytes], the rows for ranks that do not get all;
    `located` and `headers` where the routing is new."""

    plan: Plan
    located: Located | None
    headers: Headers | None
    layout: RecordLayout
    packed: Tensor
    records: Tensor
    transfer: Transfer


class PackedRecords(C10dCommunicator):
    """See the module."""

    def _pack(self, call: DispatchCall, values: Tensor, scales: Tensor | None) -> Packing:
        """Agree on counts, which blocks the host, unless a handle's routing is repeated; pack
        records and rows, and send the records."""
        extras = self._record_fields(call, scales)
        width = values.shape[1] * values.dtype.itemsize
        to: Located | None = None
        headers: Headers | None = None
        plan: Plan
        if call.reuse is None:
            token = Field(name="token", dtype=torch.int32)
            layout = RecordLayout([*self._routing_fields(call), *extras, token])
            to, plan, headers = self._plan(call, width, layout)
        else:
            layout = RecordLayout(extras)
            plan = plan_of(self._reusable(call.reuse).route)
            self._agree(Phase.DISPATCH, self._dispatch_header(call, width, layout))
        slot = self._slots[call.slot]
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
        landing, transfer = self._send_records(plan, records, slot)
        return Packing(
            plan=plan,
            located=to,
            headers=headers,
            layout=layout,
            packed=packed,
            records=landing,
            transfer=transfer,
        )

    def _plan(
        self, call: DispatchCall, row_bytes: int, layout: RecordLayout
    ) -> tuple[Located, PackedPlan, Headers]:
        """Exchange counts. Blocks the host."""
        num_tokens = self._host_tokens(call.num_tokens, call.num_rows)
        to = self._router.locate(call.topk_idx, num_tokens)
        header = self._dispatch_header(call, row_bytes, layout, num_tokens)
        positions, mine = self._router.choose(to, header)
        told = self._transport.exchange_headers(Phase.DISPATCH, mine)
        self._check_headers(header, told.theirs, self._transport.others)
        tokens_of = [int(count) for count in told.theirs[:, 2].tolist()]
        tokens_of[self.rank] = num_tokens
        received = [int(count) for count in told.theirs[:, 3].tolist()]
        received[self.rank] = 0
        plan = PackedPlan(
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

    def _unpack(self, call: DispatchCall, state: Packing) -> Arrived:
        """Read the routing out of the records, and index it."""
        assert isinstance(state.plan, PackedPlan)
        assert state.headers is not None
        assert state.located is not None
        local_idx, weights, places, tokens = self._router.unpack(
            state.plan,
            state.located,
            state.layout,
            call.topk_weights.detach(),
            state.records,
            state.headers,
            bucket=call.bucket,
        )
        plan = dataclasses.replace(state.plan, landed=places)
        return self._index(state.located, local_idx, weights, tokens, plan)

    def _packed_extras(
        self, call: DispatchCall, plan: Plan, state: Packing, scales: Tensor | None
    ) -> dict[str, Tensor]:
        """Scales and payloads of the rows that came, and this rank's own: [R, B, ...]."""
        extras = self._placed_extras(call, state.layout, state.records, plan.places)
        for name, room in extras.items():
            own = scales if name == "scales" else call.payloads[name[len("payload ") :]]
            assert own is not None
            room[self.rank, : plan.num_tokens] = own.detach()[: plan.num_tokens]
        return extras
