"""Records that are gathered: every rank gets those of all ranks, at the size of the bucket.

No counts are needed for it, and it is one exchange of sizes that all ranks know. Mode dense always
does so; mode exact where records are small, since another exchange takes longer than they do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_comm.backends.c10d_base import Arrived, C10dCommunicator
from moe_comm.backends.c10d_blocks import HEAD_BYTES, Blocks, Routing
from moe_comm.backends.c10d_index import IndexLaunches, index_bytes
from moe_comm.backends.c10d_routing import Located
from moe_comm.backends.c10d_transport import Done, Header, Kind, Phase, Transfer
from moe_comm.backends.packing import RecordLayout, Workspace, as_bytes, round_up
from moe_comm.calls import DispatchCall
from moe_comm.config import EPConfig
from moe_comm.group import Group

# Lanes kept: enough for the buckets that recur.
_MOST_LANES = 64
# Records' fields, and rows, begin at multiples of so many bytes.
_ALIGNED, _ROW_ALIGNED = 16, 256


@dataclass(kw_only=True, eq=False)
class Lane:
    """What the dispatches of one slot and bucket have in common.

    Attributes:
        age: of the slot's memory that it lies in.
        blocks: where records are gathered.
        rows: [R, B, H] for what arrives.
        joint: where records and rows of a rank lie next to each other: uint8 [R, n], all that
            travels when the dispatch is full.
    """

    age: int
    blocks: Blocks
    rows: Tensor
    joint: Tensor | None


@dataclass(kw_only=True, eq=False)
class Gathering:
    """Records on their way to all ranks; `located` is this rank's routing, if it is new."""

    lane: Lane
    located: Located | None
    transfer: Transfer


class GatheredRecords(C10dCommunicator):
    """See the module.

    Attributes:
        _tells: the host asks what the blocks say.
        _joins: rows may travel along with records.
    """

    _tells = _joins = False

    def __init__(self, config: EPConfig, group: Group) -> None:
        super().__init__(config, group)
        self._lanes: dict[tuple[object, ...], Lane] = {}

    def _record_layout(self, call: DispatchCall, scales: Tensor | None) -> RecordLayout:
        extras = self._record_fields(call, scales)
        if call.reuse is not None:
            return RecordLayout(extras)
        return RecordLayout([*self._routing_fields(call), *extras])

    def _lane(self, call: DispatchCall, values: Tensor, scales: Tensor | None) -> Lane:
        """The call's lane, made at its first use."""
        extras: tuple[object, ...] = ()
        if call.payloads:
            extras = tuple(
                (name, tensor.dtype, tensor.shape[1:]) for name, tensor in call.payloads.items()
            )
        key = (
            call.slot, call.bucket, call.reuse is None, values.dtype, call.topk_weights.dtype,
            scales is None, extras,
        )  # fmt: skip
        lane = self._lanes.get(key)
        if lane is not None and lane.age == self._slots[call.slot].age:
            return lane
        lane = self._make_lane(call, values, scales)
        if len(self._lanes) >= _MOST_LANES:
            self._lanes.clear()
        self._lanes[key] = lane
        return lane

    def _make_lane(self, call: DispatchCall, values: Tensor, scales: Tensor | None) -> Lane:
        layout, slot = self._record_layout(call, scales), self._slots[call.slot]
        head, joint = 0 if call.reuse is not None else HEAD_BYTES, None
        if self._joins and head and self.num_ranks == len(self._ranks_alive) == 2:
            joint, memory, rows = self._join(call, layout, values)
        else:
            most = self.config.bucket * layout.num_bytes + HEAD_BYTES
            memory = slot.tensor(
                "records",
                (self.num_ranks, head + call.bucket * layout.num_bytes),
                torch.uint8,
                reserve=self.num_ranks * most,
            )
            rows = self._row_room(call, values)
        index = None
        if head and call.bucket and self._router.fits(call.topk_weights):
            index = self._index_launches(slot, call.bucket)
        blocks = Blocks(
            self._router,
            layout,
            memory,
            bucket=call.bucket,
            row_bytes=values.shape[1] * values.dtype.itemsize,
            index=index,
            tells=self._tells,
            own=None if joint is None else rows[self.rank],
        )
        return Lane(age=slot.age, blocks=blocks, rows=rows, joint=joint)

    def _join(
        self, call: DispatchCall, layout: RecordLayout, values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Memory in which a rank's records and rows travel as one message, and rows lie together
        all the same: rank 0's records, rank 0's rows, rank 1's rows, rank 1's records.

        Returns: the joint memory [2, n], records [2, bytes], rows [2, B, H].
        """
        width = values.shape[1] * values.dtype.itemsize

        def sizes(bucket: int) -> tuple[int, int]:
            """Bytes of a rank's records, room to align the second's included, and of its rows."""
            records = HEAD_BYTES + bucket * layout.num_bytes
            return round_up(records + _ALIGNED, _ROW_ALIGNED), bucket * width

        records, rows = sizes(call.bucket)
        most = 2 * sum(sizes(self.config.bucket))
        joint = self._slots[call.slot].tensor(
            "joint", (2, records + rows), torch.uint8, reserve=most
        )
        flat = joint.view(-1)
        used = HEAD_BYTES + call.bucket * layout.num_bytes
        second = round_up(records + 2 * rows, _ALIGNED)
        placed = flat[records : records + 2 * rows].view(values.dtype)
        return (
            joint,
            flat.as_strided((2, used), (second, 1)),
            placed.view(2, call.bucket, values.shape[1]),
        )

    def _index_launches(self, slot: Workspace, bucket: int) -> IndexLaunches:
        """Those of the slot; their memory is never replaced, since graphs may hold it."""
        topk, experts = self.config.num_topk, self.num_local_experts
        age, most = slot.age, index_bytes(self.num_ranks * self.config.bucket, topk, experts)
        memory = slot.bytes("index", most)
        if slot.age != age:
            memory.zero_()
        return IndexLaunches(
            self.num_ranks * bucket,
            topk,
            experts,
            self.expert_row_capacity(bucket),
            memory=memory.view(torch.int32),
            status=self._status,
        )

    def _gather(
        self,
        call: DispatchCall,
        lane: Lane,
        scales: Tensor | None,
        *,
        inline: bool,
        was_full: bool = False,
        joint: Tensor | None = None,
    ) -> Gathering:
        """Write this rank's records, and send them to all.

        inline: as all_gather has it. was_full: a fact. joint: the lane's, where rows, already in
        their place, travel along.
        """
        blocks = lane.blocks
        self._agree_on(call, blocks)
        if not self._transport.has_headers:
            self._transport.doing = blocks.header(call.call)
        if scales is not None or call.payloads:
            mine = blocks.records[self.rank, : call.num_rows]
            self._write_extras(mine, blocks.form, call, scales, slice(None))
        located = None
        if call.reuse is None:
            weights = call.topk_weights.detach()
            located = blocks.write(
                call.topk_idx, weights, call.num_tokens, call.call, was_full=was_full
            )
        transfer: Transfer = Done()
        if blocks.memory.shape[1]:
            transfer = self._transport.all_gather(
                Phase.DISPATCH,
                blocks.memory if joint is None else joint,
                Kind.RECORDS,
                inline=inline,
            )
        return Gathering(lane=lane, located=located, transfer=transfer)

    def _agree_on(self, call: DispatchCall, blocks: Blocks) -> None:
        """Compare headers where that is asked for, and cheap or wanted."""
        if self._compares_headers:
            self._agree(Phase.DISPATCH, Header(*blocks.header(call.call)))

    def _gathered_index(self, gathering: Gathering, routing: Routing, route: object) -> Arrived:
        """Index the routing that Blocks.read returned."""
        assert gathering.located is not None
        index = gathering.lane.blocks.index
        if index is None:
            return self._index(gathering.located, *routing, route)
        return self._arrived(gathering.located, *routing, index(routing[0]), route)

    def _gathered_extras(self, call: DispatchCall, gathering: Gathering) -> dict[str, Tensor]:
        """Scales and payloads of all ranks, [R, B, ...]."""
        extras: dict[str, Tensor] = {}
        blocks = gathering.lane.blocks
        for name, field in blocks.form.fields.items():
            if name not in ("ids", "weights"):
                came = blocks.form.view(blocks.records, name)
                extras[name] = self._extra_room(call, field).copy_(came)
        return extras

    def _send_bucket(
        self, call: DispatchCall, lane: Lane, values: Tensor, *, direct: bool
    ) -> Transfer:
        """The whole bucket's rows under way to all ranks, into their places. direct: from `values`
        themselves, which are the whole bucket; this rank's own are still to be placed then."""
        places = as_bytes(lane.rows.flatten(1))
        if not direct:
            lane.rows[self.rank, : call.num_rows].copy_(values)
        if not self._transport.in_place:
            return self._transport.all_gather(Phase.DISPATCH, places, Kind.ROWS)
        if not call.bucket:
            return Done()
        mine = as_bytes(values).view(-1) if direct else places[self.rank]
        others = self._transport.others
        return self._transport.all_to_all(
            Phase.DISPATCH,
            dict.fromkeys(others, mine),
            {peer: places[peer] for peer in others},
            Kind.ROWS,
        )

    def mask_rank(self, rank: int) -> None:
        """See C10dCommunicator."""
        super().mask_rank(rank)
        self._lanes.clear()

    def _close(self) -> None:
        self._lanes.clear()
        super()._close()
