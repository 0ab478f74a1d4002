"""c10d, mode dense: every rank gets every row of the bucket. For groups where nearly every rank is
reached anyway; fixed sizes, no counts, no host sync, so a CUDA graph can hold it.

Records go first, so that index work overlaps with the rows' arrival. Rows travel from where they
lie into their places, and this rank's own are copied meanwhile; combine is an all-to-all of equal
splits.

Shape legend: T this rank's tokens, R ranks, B the bucket, K choices, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moe_comm.backends.c10d_back import ReturnedTerms
from moe_comm.backends.c10d_gathered import GatheredRecords, Gathering
from moe_comm.backends.c10d_transport import Transfer
from moe_comm.calls import DispatchCall
from moe_comm.config import EPConfig
from moe_comm.group import Group
from moe_comm.handle import Dispatched


@dataclass(kw_only=True, eq=False)
class _Sent:
    """A dispatch between its halves; `values` where this rank's rows are still to be placed."""

    gathering: Gathering
    values: Tensor | None
    transfer: Transfer


class DenseCommunicator(GatheredRecords, ReturnedTerms):
    """See the module."""

    mode = "dense"

    def __init__(self, config: EPConfig, group: Group) -> None:
        super().__init__(config, group)
        if self.device.type == "cuda":
            self.capabilities = (*self.capabilities, "capture")

    # Dispatch.

    def _dispatch_at_once(self, call: DispatchCall) -> Dispatched:
        return self._finish_dispatch(call, self._send(call, inline=True))

    def _start_dispatch(self, call: DispatchCall) -> _Sent:
        return self._send(call, inline=False)

    def _send(self, call: DispatchCall, *, inline: bool) -> _Sent:
        """inline: both halves follow each other, so that x stays as it is until all is there, and
        nothing else runs on the current stream before the records are read."""
        values, scales = self._on_wire(call)
        lane = self._lane(call, values, scales)
        gathering = self._gather(call, lane, scales, inline=inline)
        # Straight from x, where it has all rows that all ranks send.
        direct = inline and self._transport.in_place and call.num_rows == call.bucket
        transfer = self._send_bucket(call, lane, values, direct=direct)
        return _Sent(gathering=gathering, values=values if direct else None, transfer=transfer)

    def _finish_dispatch(self, call: DispatchCall, state: _Sent) -> Dispatched:
        gathering, num_tokens = state.gathering, call.num_tokens
        gathering.transfer.wait()
        if gathering.located is None:
            assert call.reuse is not None
            arrived = self._reusable(call.reuse)
        else:
            routing = gathering.lane.blocks.read(call.topk_weights)
            arrived = self._gathered_index(gathering, routing, None)
            if isinstance(num_tokens, Tensor):
                num_tokens = routing[2][self.rank]
        extras = self._gathered_extras(call, gathering)
        rows = gathering.lane.rows
        if state.values is not None:
            rows[self.rank].copy_(state.values)
        state.transfer.wait()
        return arrived.dispatched(call, num_tokens, rows, extras, self.config.wire)
