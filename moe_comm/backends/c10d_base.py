"""What the c10d modes share: the transport, resolving destinations, the index, the sums of combine,
and ranks that are masked. What travels: c10d_rows.

Shape legend: T this rank's tokens, R ranks, B the bucket, K choices, H hidden, D width of a
combined row (H, or K for the weights' gradients).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_comm import env
from moe_comm.backends import device_math
from moe_comm.backends.arrived import ArrivedIndex
from moe_comm.backends.c10d_collectives import Collective
from moe_comm.backends.c10d_messages import PointToPoint
from moe_comm.backends.c10d_peers import Peers
from moe_comm.backends.c10d_routing import Located, Router
from moe_comm.backends.c10d_rows import TravellingRows
from moe_comm.backends.c10d_transport import (
    Header,
    Phase,
    Transport,
    check_header,
    header_rows,
)
from moe_comm.calls import CombineCall, DispatchCall
from moe_comm.config import EPConfig
from moe_comm.errors import SlotError
from moe_comm.group import Group, backend_for, drop_group
from moe_comm.handle import DispatchHandle
from moe_comm.status import Status, StatusBit
from moe_comm.wire import WIRES, Wire

# Of a group of survivors: as long as torch gives NCCL's.
_MASKED_TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Arrived(ArrivedIndex):
    """And `num_alive`: ranks that took part."""

    num_alive: int


class C10dCommunicator(TravellingRows):
    """The shared part; a mode adds how rows travel."""

    backend = "c10d"
    capabilities: tuple[str, ...] = ("payloads", "autograd", "masking")

    def __init__(self, config: EPConfig, group: Group) -> None:
        super().__init__(config, group)
        self._ranks_alive = list(range(group.num_ranks))
        self._own_pg: dist.ProcessGroup | None = None
        self._transport = self._connect(group.pg)
        self._status = torch.zeros(1, dtype=torch.int32, device=group.device)
        self._router = Router(
            rank=self.rank,
            num_ranks=self.num_ranks,
            copy_table=self._copy_table,
            num_copies=self._num_copies,
            width=self.placement.max_local_experts,
            status=self._status,
            uses_kernels=group.device.type == "cuda",
        )

    def _connect(self, pg: dist.ProcessGroup) -> Transport:
        """The transport for the group's device. Collective among the live ranks."""
        peers = Peers(self.group, pg, self._ranks_alive)
        by_message = self.device.type == "cpu" and backend_for(pg, "cpu") == "gloo"
        kind = PointToPoint if by_message else Collective
        return kind(pg, peers, self._ranks_alive, self.config.wait_s, self._count_sent)

    def _count_sent(self, peer: int, num_bytes: int) -> None:
        self._metrics.sent_bytes += num_bytes
        if self.group.node_of_rank[peer] != self.group.node_of_rank[self.rank]:
            self._metrics.cross_node_bytes += num_bytes

    # The index and the result of dispatch.

    def _index(
        self,
        located: Located,
        local_idx: Tensor,
        weights: Tensor,
        num_tokens_per_rank: Tensor,
        route: Any,
    ) -> Arrived:
        ranks, bucket, num_topk = local_idx.shape
        index = device_math.expert_index(
            local_idx.view(ranks * bucket, num_topk),
            num_local_experts=self.num_local_experts,
            capacity=self.expert_row_capacity(bucket),
            status=self._status,
        )
        return self._arrived(located, local_idx, weights, num_tokens_per_rank, index, route)

    def _arrived(
        self,
        located: Located,
        local_idx: Tensor,
        weights: Tensor,
        num_tokens_per_rank: Tensor,
        index: tuple[Tensor, Tensor, Tensor],
        route: Any,
    ) -> Arrived:
        offsets, row_index, position = index
        return Arrived(
            located=located,
            local_idx=local_idx,
            weights=weights,
            num_tokens_per_rank=num_tokens_per_rank,
            expert_offsets=offsets,
            row_index=row_index,
            choice_position=position,
            num_alive=len(self._ranks_alive),
            route=route,
        )

    # Headers.

    @property
    def _compares_headers(self) -> bool:
        return self._transport.has_headers or env.DEBUG.get()

    def _agree(self, phase: Phase, header: Header) -> None:
        """Compare headers with every other rank.

        Over gloo always: some bytes. On accelerators only under MOE_COMM_DEBUG, since it takes an
        exchange and a host sync, which a CUDA graph could not hold; without it, ranks in different
        calls wait for each other until the backend's own timeout.
        """
        if not self._compares_headers:
            return
        nothing = torch.zeros(self.num_ranks, dtype=torch.int32, device=self.device)
        told = self._transport.exchange_headers(phase, header_rows(header, nothing))
        self._check_headers(header, told.theirs, self._transport.others)

    def _agree_back(self, call: CombineCall, phase: Phase) -> None:
        """The headers of a combine, whose sizes both sides know from the dispatch."""
        if not self._compares_headers:
            return
        self._agree(
            phase,
            Header(
                phase=phase,
                call=call.handle.call,
                num_tokens=0,
                num_rows=0,
                bucket=call.handle.bucket,
                row_bytes=call.y.shape[-1] * call.y.dtype.itemsize,
                record_bytes=0,
            ),
        )

    def _check_headers(self, mine: Header, theirs: Tensor, peers: Sequence[int]) -> None:
        for peer in peers:
            check_header(mine, Header(*theirs[peer].tolist()), peer)

    # Combine.

    def _partials(
        self, call: CombineCall, arrived: Arrived, form: Wire
    ) -> tuple[Tensor, Tensor | None]:
        """This rank's terms for all tokens that came, as they travel: [R, B, D] and scales."""
        if call.layout == "rows":
            rows = call.y.detach()
        else:
            y = call.y.detach().contiguous()
            shape = (*arrived.local_idx.shape[:2], y.shape[1])
            rows = self._term_room("partials", call.handle.slot, shape, y.dtype)
            device_math.partial_sums(
                y,
                arrived.weights.flatten(0, 1),
                arrived.choice_position,
                weights_applied=call.weights_applied,
                fill_empty=self.config.max_expert_rows is not None,
                out=rows.flatten(0, 1),
            )
        values, scales = device_math.quantize(rows, form)
        return values.contiguous(), scales

    def _who(self, choice_rank: Tensor) -> Tensor:
        """The rank of each choice, -1 also where the rank was masked since the dispatch."""
        alive = self._router.alive
        if alive is None:
            return choice_rank
        alive = alive[choice_rank.clamp_min(0).to(torch.int64)]
        return torch.where(alive, choice_rank, -1)

    def _output(self, call: CombineCall) -> Tensor:
        if call.out is not None:
            return call.out
        return call.y.new_empty(call.handle.num_rows, call.y.shape[-1])

    # The rest of the protocol.

    def _repeat_rows(self, rows: Tensor, handle: DispatchHandle) -> Tensor:
        """See Communicator."""
        slot = self._take_slot(None)
        try:
            call = DispatchCall(
                x=rows.contiguous(),
                scales=None,
                # Sent as it is, whatever the wire.
                is_quantized=True,
                topk_idx=handle.topk_idx,
                topk_weights=handle.topk_weights,
                num_tokens=handle.num_tokens,
                bucket=handle.bucket,
                reuse=handle,
                slot=slot,
                call=self._next_call,
            )
            self._next_call += 1
            return self._dispatch_at_once(call).rows.clone()
        finally:
            self._busy_slots.discard(slot)

    def _return_rows(self, rows: Tensor, handle: DispatchHandle) -> Tensor:
        """See Communicator."""
        slot = self._take_slot(None)
        try:
            call = CombineCall(
                y=rows.contiguous(),
                handle=dataclasses.replace(handle, slot=slot),
                layout="rows",
                weights_applied=True,
                bias=(),
                out=None,
            )
            state = self._start_back(call, WIRES["none"], Phase.GRADIENT)
            return self._finish_back(call, WIRES["none"], state)
        finally:
            self._busy_slots.discard(slot)

    def _start_combine(self, call: CombineCall) -> Any:
        return self._start_back(call, self.config.return_wire, Phase.COMBINE)

    def _finish_combine(self, call: CombineCall, state: Any) -> Tensor:
        return self._finish_back(call, self.config.return_wire, state)

    def _start_back(self, call: CombineCall, form: Wire, phase: Phase) -> Any:
        raise NotImplementedError

    def _finish_back(self, call: CombineCall, form: Wire, state: Any) -> Tensor:
        raise NotImplementedError

    def _read_status(self) -> Status:
        bits = StatusBit(int(self._status))
        self._status.zero_()
        return Status(bits=bits)

    def mask_rank(self, rank: int) -> None:
        """Go on without a dead rank. Collective among the survivors, who make a new process group
        of their own (so the store of the default group must still be reachable: it is lost with
        the rank that holds it, unless a launcher holds it). No call may be under way.

        Choices on the rank are masked from now on; a dispatch that was made before and is
        combined after loses the rank's terms. Handles made before cannot be reused.
        """
        if rank == self.rank or rank not in self._ranks_alive:
            raise ValueError(
                f"rank: expected one of the other live ranks {self._transport.others}, got {rank}"
            )
        self._ranks_alive.remove(rank)
        pg = self.group.subgroup(
            f"without {sorted({*range(self.num_ranks)} - {*self._ranks_alive})}",
            self._ranks_alive,
            backend=self.group.backend_name,
            timeout_s=_MASKED_TIMEOUT_S,
        )
        self._drop_own_group()
        self._own_pg = pg
        self._transport = self._connect(pg)
        alive = torch.zeros(self.num_ranks, dtype=torch.bool)
        alive[self._ranks_alive] = True
        self._router.alive = alive.to(self.device)

    def _drop_own_group(self) -> None:
        if self._own_pg is not None:
            drop_group(self._own_pg)

    def _close(self) -> None:
        self._transport.close()
        self._drop_own_group()
        # It would keep the group's threads and sockets.
        del self._transport, self._own_pg
        for slot in self._slots:
            slot.clear()

    def _host_tokens(self, num_tokens: int | Tensor, num_rows: int) -> int:
        """Valid tokens on the host; synchronizes for a device scalar."""
        count = int(num_tokens)
        if not 0 <= count <= num_rows:
            raise ValueError(f"num_tokens: expected 0 to {num_rows} (x.shape[0]), got {count}")
        return count

    def _reusable(self, reuse: DispatchHandle) -> Arrived:
        arrived: Arrived = reuse.state
        if arrived.num_alive != len(self._ranks_alive):
            raise SlotError(f"handle: dispatch {reuse.call} was made before a rank was masked")
        return arrived
