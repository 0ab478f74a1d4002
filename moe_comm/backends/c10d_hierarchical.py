"""c10d, mode hierarchical: a row crosses to a node once, and is forwarded inside it.

The forwarding rank. Source rank s is the i-th rank of its node (of those alive). Its rows for
another node of n ranks go to that node's rank number i mod n, which holds them for the node; rows
for its own node s holds itself. So the ranks of a node share what comes in.

Dispatch crosses first: rows and records from s to its holders. Then each rank forwards what it
holds, its own tokens included, to the ranks of its node that are reached. Combine goes back the
same way: the partial sums of a node come to the holder, are added there in fp32 (reduction
"node"), rounded, put on the wire, and one row a (token, node) crosses back.

Shape legend: T this rank's tokens, R ranks, B the bucket, M rows held (T, then those that crossed),
N ranks of this node, K choices. A row's place is s * B + t.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_comm.backends import device_math
from moe_comm.backends.c10d_base import Arrived, C10dCommunicator
from moe_comm.backends.c10d_plan import Hop, Route
from moe_comm.backends.c10d_routing import Located, placed_routing
from moe_comm.backends.c10d_transport import Done, Header, Kind, Phase, Transfer, header_rows
from moe_comm.backends.packing import (
    Field,
    RecordLayout,
    as_bytes,
    put_rows,
    take_rows,
)
from moe_comm.calls import CombineCall, DispatchCall
from moe_comm.handle import Dispatched
from moe_comm.wire import Wire


@dataclass(kw_only=True, eq=False)
class _Sent:
    """A dispatch between its halves: what is held, still arriving from other nodes."""

    layout: RecordLayout
    cross: Hop
    tokens_of: list[int]
    num_tokens: int
    located: Located | None
    row_bytes: int
    records: Tensor
    rows: Tensor
    like: Tensor
    transfers: list[Transfer]


class HierarchicalCommunicator(C10dCommunicator):
    """See the module."""

    mode = "hierarchical"

    # Who holds what.

    def _node_ranks(self, node: int) -> list[int]:
        return [r for r in self._ranks_alive if self.group.node_of_rank[r] == node]

    def _mates(self) -> list[int]:
        """This node's live ranks, this one included."""
        return self._node_ranks(self.group.node_of_rank[self.rank])

    def holder(self, source: int, node: int) -> int | None:
        """The rank that holds `source`'s rows on `node`; None where nobody lives there."""
        home = self.group.node_of_rank[source]
        if home == node:
            return source
        ranks = self._node_ranks(node)
        return ranks[self._node_ranks(home).index(source) % len(ranks)] if ranks else None

    # Dispatch: between nodes.

    def _start_dispatch(self, call: DispatchCall) -> _Sent:
        values, scales = self._on_wire(call)
        extras = self._record_fields(call, scales)
        row_bytes = values.shape[1] * values.dtype.itemsize
        if call.reuse is None:
            place = Field(name="place", dtype=torch.int32)
            layout = RecordLayout([*self._routing_fields(call), *extras, place])
            num_tokens = self._host_tokens(call.num_tokens, call.num_rows)
            to: Located | None = self._router.locate(call.topk_idx, num_tokens)
            assert to is not None
            reaches = self._router.reaches(to.rank)
            cross, tokens_of = self._cross(call, layout, row_bytes, num_tokens, reaches)
        else:
            layout = RecordLayout(extras)
            route: Route = self._reusable(call.reuse).route
            num_tokens, cross, tokens_of = route.num_tokens, route.cross, []
            to = None
            self._agree(Phase.DISPATCH, self._dispatch_header(call, row_bytes, layout))
        slot = self._slots[call.slot]
        held = num_tokens + sum(cross.received)
        records = slot.tensor("held records", (held, layout.num_bytes), torch.uint8)
        rows = slot.tensor("held rows", (held, row_bytes), torch.uint8)
        mine = records[:num_tokens]
        if to is not None:
            width = self.placement.max_local_experts
            ids = torch.where(to.rank >= 0, to.rank * width + to.slot, -1)
            layout.view(mine, "ids").copy_(ids[:num_tokens])
            layout.view(mine, "weights").copy_(call.topk_weights.detach()[:num_tokens])
            first = self.rank * call.bucket
            places = torch.arange(first, first + num_tokens, device=self.device)
            layout.view(mine, "place").copy_(places)
        self._write_extras(mine, layout, call, scales, slice(0, num_tokens))
        rows[:num_tokens].copy_(as_bytes(values)[:num_tokens])
        transfers = [
            self._send(
                Phase.DISPATCH, cross, array[:num_tokens], array[num_tokens:], call.slot, kind
            )
            for array, kind in ((records, Kind.RECORDS), (rows, Kind.ROWS))
        ]
        return _Sent(
            layout=layout,
            cross=cross,
            tokens_of=tokens_of,
            num_tokens=num_tokens,
            located=to,
            row_bytes=row_bytes,
            records=records,
            rows=rows,
            like=values,
            transfers=transfers,
        )

    def _cross(
        self,
        call: DispatchCall,
        layout: RecordLayout,
        row_bytes: int,
        num_tokens: int,
        reaches: Tensor,
    ) -> tuple[Hop, list[int]]:
        """Who gets which of this rank's tokens on other nodes, and T of every rank. Blocks."""
        goes = torch.zeros_like(reaches)
        node_of_rank = self.group.node_of_rank
        for node in range(max(node_of_rank) + 1):
            holder = self.holder(self.rank, node)
            if node != node_of_rank[self.rank] and holder is not None:
                there = [rank for rank, at in enumerate(node_of_rank) if at == node]
                goes[:, holder] = reaches[:, there].any(dim=1)
        return self._counts(self._dispatch_header(call, row_bytes, layout, num_tokens), goes, None)

    def _counts(
        self, header: Header, goes: Tensor, among: list[int] | None
    ) -> tuple[Hop, list[int]]:
        """Exchange how many rows go: goes [rows, R] bool. Also T of the ranks asked."""
        mine = header_rows(header, goes.sum(dim=0))
        told = self._transport.exchange_headers(Phase.DISPATCH, mine, among)
        peers = self._transport.others if among is None else among
        self._check_headers(header, told.theirs, [p for p in peers if p != self.rank])
        sent = [int(count) for count in told.mine[:, 3].tolist()]
        received = [int(count) for count in told.theirs[:, 3].tolist()]
        tokens_of = [int(count) for count in told.theirs[:, 2].tolist()]
        tokens_of[self.rank] = header.num_tokens
        index = torch.nonzero_static(goes.t(), size=sum(sent))[:, 1]
        return Hop(sent=sent, received=received, index=index), tokens_of

    def _send(
        self, phase: Phase, hop: Hop, source: Tensor, landing: Tensor, slot: int, kind: Kind
    ) -> Transfer:
        """Rows hop.index of source [*, bytes] under way, into landing [sum of received, bytes]."""
        width = source.shape[1]
        if width == 0:
            return Done()
        packed = self._slots[slot].tensor(
            f"{kind.name} out", (hop.index.shape[0], width), torch.uint8
        )
        take_rows(source, hop.index, packed)
        others = self._transport.others
        return self._transport.all_to_all(
            phase,
            {p: packed[hop.to(p)] for p in others if hop.sent[p]},
            {p: landing[hop.come_from(p)] for p in others if hop.received[p]},
            kind,
        )

    # Dispatch: inside the node.

    def _finish_dispatch(self, call: DispatchCall, state: _Sent) -> Dispatched:
        for transfer in state.transfers:
            transfer.wait()
        if call.reuse is None:
            inside, own, who = self._inside(call, state)
        else:
            route: Route = self._reusable(call.reuse).route
            inside, own, who = route.inside, route.own, route.who
        slot = self._slots[call.slot]
        arrays, transfers = [], []
        came = sum(inside.received)
        for held, kind in (
            (state.records, Kind.FORWARD_RECORDS),
            (state.rows, Kind.FORWARD_ROWS),
        ):
            landing = slot.tensor(kind.name, (came + own.shape[0], held.shape[1]), torch.uint8)
            transfers.append(
                self._send(Phase.DISPATCH, inside, held, landing[:came], call.slot, kind)
            )
            take_rows(held, own, landing[came:])
            arrays.append(landing)
        records, rows = arrays
        transfers[0].wait()
        if call.reuse is None:
            places = state.layout.view(records, "place").to(torch.int64)
            route = Route(
                num_tokens=state.num_tokens,
                cross=state.cross,
                inside=inside,
                own=own,
                places=places,
                who=who,
            )
            arrived = self._arrive(call, state, records, route)
        else:
            arrived = self._reusable(call.reuse)
            route = arrived.route
        extras = self._placed_extras(call, state.layout, records, route.places)
        transfers[1].wait()
        room = self._row_room(call, state.like)
        put_rows(as_bytes(room.flatten(0, 1)), route.places, rows)
        return arrived.dispatched(call, state.num_tokens, room, extras, self.config.wire)

    def _inside(self, call: DispatchCall, state: _Sent) -> tuple[Hop, Tensor, Tensor]:
        """Which held rows go to whom in the node. Blocks the host."""
        mates = self._mates()
        width = self.placement.max_local_experts
        ids = state.layout.view(state.records, "ids")
        rank = torch.where(ids >= 0, ids // width, -1)
        reaches = self._router.reaches(rank)
        # The last entry is for masked choices.
        position = torch.full((self.num_ranks + 1,), -1, dtype=torch.int32)
        position[mates] = torch.arange(len(mates), dtype=torch.int32)
        who = position.to(self.device)[rank.to(torch.int64)]
        goes = torch.zeros_like(reaches)
        goes[:, mates] = reaches[:, mates]
        own = goes[:, self.rank].nonzero().squeeze(1)
        goes[:, self.rank] = False
        header = self._dispatch_header(call, state.row_bytes, state.layout, state.num_tokens)
        inside, _ = self._counts(header, goes, mates)
        return inside, own, who

    def _arrive(self, call: DispatchCall, state: _Sent, records: Tensor, route: Route) -> Arrived:
        width = self.placement.max_local_experts
        local = state.layout.view(records, "ids") - self.rank * width
        local = torch.where((local >= 0) & (local < width), local, -1)
        weights = state.layout.view(records, "weights")
        local_idx, weights = placed_routing(
            local, weights, route.places, num_ranks=self.num_ranks, bucket=call.bucket
        )
        tokens = torch.tensor(state.tokens_of, dtype=torch.int32).to(self.device)
        assert state.located is not None
        return self._index(state.located, local_idx, weights, tokens, route)

    # Combine: inside the node, then between nodes.

    def _start_back(self, call: CombineCall, form: Wire, phase: Phase) -> Any:
        # The holders may have changed with a masked rank.
        arrived = self._reusable(call.handle)
        route: Route = arrived.route
        self._agree_back(call, phase)
        values, scales = self._partials(call, arrived, form)
        slot, came = call.handle.slot, sum(route.inside.received)
        ways = []
        for kind, terms in ((Kind.NODE_ROWS, values), (Kind.NODE_SCALES, scales)):
            if terms is None:
                continue
            source = as_bytes(terms.flatten(0, 1))
            back = Hop(
                sent=route.inside.received,
                received=route.inside.sent,
                index=route.places[:came],
            )
            landing = self._slots[slot].tensor(
                kind.name, (sum(back.received), source.shape[1]), torch.uint8
            )
            transfer = self._send(phase, back, source, landing, slot, kind)
            own = take_rows(source, route.places[came:])
            ways.append((terms, landing, own, transfer))
        return phase, ways

    def _finish_back(self, call: CombineCall, form: Wire, state: Any) -> Tensor:
        phase, ways = state
        route: Route = call.handle.state.route
        slot = self._slots[call.handle.slot]
        mates, held = self._mates(), route.who.shape[0]
        gathered = []
        for terms, landing, own, transfer in ways:
            transfer.wait()
            name = f"node terms {terms.dtype}"
            room = slot.tensor(name, (len(mates), held, terms.shape[-1]), terms.dtype)
            for position, mate in enumerate(mates):
                if mate == self.rank:
                    index, rows = route.own, own
                else:
                    part = route.inside.to(mate)
                    index, rows = route.inside.index[part], landing[part]
                put_rows(as_bytes(room[position]), index, rows)
            gathered.append(room)
        inside = call.y.new_empty(held, call.y.shape[-1])
        device_math.fold(
            gathered[0],
            gathered[1] if len(gathered) > 1 else None,
            form,
            route.who,
            out=inside,
        )
        return self._between_nodes(call, form, phase, inside)

    def _between_nodes(self, call: CombineCall, form: Wire, phase: Phase, inside: Tensor) -> Tensor:
        """One row a (token, node) crosses back; the source adds them up."""
        route: Route = call.handle.state.route
        slot, mine = call.handle.slot, route.num_tokens
        node_of_rank = self.group.node_of_rank
        home, nodes = node_of_rank[self.rank], max(node_of_rank) + 1
        terms = []
        for kind, sent in zip(
            (Kind.BACK_ROWS, Kind.BACK_SCALES), device_math.quantize(inside, form), strict=True
        ):
            if sent is None:
                continue
            source = as_bytes(sent.contiguous())
            came = sum(route.cross.received)
            back = Hop(
                sent=route.cross.received,
                received=route.cross.sent,
                index=torch.arange(mine, mine + came, device=self.device),
            )
            landing = self._slots[slot].tensor(
                kind.name, (sum(back.received), source.shape[1]), torch.uint8
            )
            self._send(phase, back, source, landing, slot, kind).wait()
            room = self._slots[slot].tensor(
                f"{kind.name} terms", (nodes, call.handle.num_rows, sent.shape[-1]), sent.dtype
            )
            room[home, :mine].copy_(sent[:mine])
            for peer in self._transport.others:
                part = route.cross.to(peer)
                if route.cross.sent[peer]:
                    target = as_bytes(room[node_of_rank[peer]])
                    put_rows(target, route.cross.index[part], landing[part])
            terms.append(room)
        rank = self._who(call.handle.choice_rank)
        node = torch.tensor(node_of_rank, dtype=torch.int32).to(self.device)
        who = torch.where(rank >= 0, node[rank.clamp_min(0).to(torch.int64)], -1)
        out = self._output(call)
        device_math.fold(
            terms[0],
            terms[1] if len(terms) > 1 else None,
            form,
            who,
            biases=call.bias,
            out=out,
        )
        return out
