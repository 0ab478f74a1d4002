"""Dispatch on one rank: which launches and copies make it up, and what arrives.

Low latency: one kernel puts rows, ids and weights, waits and indexes. High throughput: a kernel
puts ids and weights, which are indexed while rows travel by copies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_comm.backends.slab_dispatch_kernel import DispatchKernel
from moe_comm.backends.slab_modes import Plan
from moe_comm.backends.slab_payloads import payload_layout, payload_views
from moe_comm.calls import DispatchCall
from moe_comm.handle import Dispatched, DispatchHandle


class DispatchLaunches(DispatchKernel):
    """The dispatch half of SlabEngine."""

    def dispatch(self, call: DispatchCall, *, send: bool, receive: bool) -> Dispatched | None:
        """Enqueue the halves asked for; the result where `receive`."""
        self._follow()
        if call.prepared is None:
            call.prepared = self._inputs(call)
        self.under_way = True
        plan = self._plan(call.bucket)
        if self.memory.puts:
            self._dispatch_by_puts(call, plan, send=send, receive=receive)
        elif plan.mode == "low-latency":
            self._dispatch_kernel(call, plan, send=send, receive=receive)
        else:
            self._dispatch_by_copies(call, plan, send=send, receive=receive)
        if not receive:
            return None
        self._used_here(call.prepared.stream, *call.prepared[:6])
        call.prepared = None
        return self._dispatched(call)

    def _dispatch_by_puts(
        self, call: DispatchCall, plan: Plan, *, send: bool, receive: bool
    ) -> None:
        """Both modes where stores do not reach every rank: one launch writes what each rank shall
        have to this rank's own block, the next forwards it, and the usual one waits and indexes."""
        if send:
            staged = self._stage_dispatch(call)
            self._dispatch_kernel(
                call, plan, send=True, receive=False, release_after=False, staged=staged
            )
            self._forward_dispatch(call, staged)
        if receive:
            self._dispatch_kernel(call, plan, send=False, receive=True)

    def _dispatch_by_copies(
        self, call: DispatchCall, plan: Plan, *, send: bool, receive: bool
    ) -> None:
        """High throughput: ids and weights are put by a kernel and indexed while rows travel by
        copies, on a stream of their own: by the copy engine where there is one. Rows that are
        quantized on the way the kernel puts too."""
        from moe_comm.kernels.signal import ROWS

        copies = not call.prepared.quantizes
        if send and copies:
            # No rank reads the slot any more: the call that freed it has waited for all of them.
            self._fork()
            self._copy_rows(call)
            self._dispatch_kernel(call, plan, send=True, receive=False, rows_copied=True)
            # Given scales and payloads are put by the kernel, and told of with the rows.
            self._fork()
            self._copy_word(call.slot, ROWS)
        elif send:
            self._dispatch_kernel(call, plan, send=True, receive=False)
        if receive:
            self._dispatch_kernel(call, plan, send=False, receive=True)
            self._wait(call.slot, ROWS)
            if copies:
                self._join()

    def _copy_rows(self, call: DispatchCall) -> None:
        """This rank's rows to every other rank's slab."""
        x, rows = call.prepared.x, call.num_rows
        place = ("dispatch_rows", call.slot, call.bucket, x.dtype, self.config.hidden)
        with torch.cuda.stream(self._side):
            for peer in self._others():
                self._rows_at(peer, *place)[:rows].copy_(x, non_blocking=True)

    def _copy_word(self, slot: int, phase: int) -> None:
        """Release a channel of this rank's on every other rank, behind the copies: a kernel has
        released it here, and its word goes on as it is. A copy after a copy begins sooner than a
        kernel does."""
        channel = self._channel(slot, phase)
        own = self._kept(("own word", channel), lambda: self.flags[channel, self.rank])
        with torch.cuda.stream(self._side):
            for peer in self._others():
                self._word_at(peer, channel).copy_(own, non_blocking=True)

    def _others(self) -> list[int]:
        """The other live ranks, the right neighbour first."""
        ranks = [(self.rank + step) % self.num_ranks for step in range(1, self.num_ranks)]
        return [peer for peer in ranks if peer not in self.masked]

    def _dispatched(self, call: DispatchCall) -> Dispatched:
        bucket, rows = call.bucket, self.num_ranks * call.bucket
        slot = self._slots[call.slot]
        arrived = self._received(call.slot, bucket, call.x.dtype)
        handle = DispatchHandle(
            call=call.call,
            slot=call.slot,
            bucket=bucket,
            num_rows=call.num_rows,
            num_tokens=call.num_tokens,
            topk_idx=call.topk_idx,
            choice_rank=slot.choice_rank[: call.num_rows],
            topk_weights=call.topk_weights,
            received_weights=arrived.weights,
            choice_position=self._kept(
                ("position", call.slot, bucket), lambda: slot.position[:rows]
            ),
            num_tokens_per_rank=slot.tokens,
        )
        return Dispatched(
            rows=arrived.rows,
            scales=arrived.scales,
            topk_idx=arrived.ids,
            topk_weights=arrived.weights,
            num_tokens_per_rank=slot.tokens,
            payloads=self._payloads(call),
            expert_offsets=slot.offsets,
            row_index=self._kept(
                ("row_index", call.slot, bucket),
                lambda: slot.row_index[: self._capacity(bucket)],
            ),
            wire=self.config.wire,
            handle=handle,
        )

    def _payloads(self, call: DispatchCall) -> dict[str, Tensor]:
        if not call.payloads:
            return {}
        limit = self.config.max_payload_bytes
        shape = (self.num_ranks, call.bucket, payload_layout(call, limit)[1])
        offset = self._offset("payloads", call.slot)
        received = self.memory.view("payloads", shape, torch.uint8, offset=offset)
        return payload_views(call, limit, received)
