"""Dispatch on one rank: which launches and copies make it up, and what arrives.

Low latency: one kernel puts rows, ids and weights, waits and indexes. High throughput: a kernel
puts ids and weights while whole blocks of rows travel by copies.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from moe_comm.backends.slab_dispatch_kernel import DispatchKernel, Inputs
from moe_comm.backends.slab_modes import Plan
from moe_comm.backends.slab_payloads import payload_layout, payload_views
from moe_comm.calls import DispatchCall
from moe_comm.handle import Dispatched, DispatchHandle


def chunk_edges(num_rows: int, chunks: int) -> list[tuple[int, int]]:
    """Token ranges of about equal length; the first is half as long, so that transfer starts
    early."""
    if chunks == 1 or num_rows < 2 * chunks:
        return [(0, num_rows)]
    size = num_rows / (chunks - 0.5)
    marks = [0, *(round(size * (i + 0.5)) for i in range(chunks - 1)), num_rows]
    return list(itertools.pairwise(marks))


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
        """High throughput: ids and weights are put by a kernel and indexed while whole blocks of
        rows travel by copies, on a stream of their own: by the copy engine where there is one. What
        has to be quantized first is, on that stream, piece by piece."""
        from moe_comm.kernels.signal import ROWS

        if send:
            inputs: Inputs = call.prepared
            # No rank reads the slot any more: the call that freed it has waited for all of them.
            self._fork()
            if inputs.quantizes:
                with torch.cuda.stream(self._side):
                    for begin, end in chunk_edges(call.num_rows, plan.dispatch_chunks):
                        self._dispatch_kernel(
                            call, plan, send=True, receive=False, ids_too=False, rows_to=1,
                            release_after=False, tokens=(begin, end),
                        )  # fmt: skip
                        self._copy_rows(call, begin, end, from_x=False)
                self._dispatch_kernel(call, plan, send=True, receive=False, rows_to=0)
            else:
                self._copy_rows(call, 0, call.num_rows, from_x=True)
                self._dispatch_kernel(call, plan, send=True, receive=False, rows_to=1)
                # Given scales and payloads are put by the kernel, and told of with the rows.
                self._fork()
            with torch.cuda.stream(self._side):
                self._release(call.slot, ROWS)
        if receive:
            self._dispatch_kernel(call, plan, send=False, receive=True)
            self._wait(call.slot, ROWS)
            self._join()

    def _copy_rows(self, call: DispatchCall, begin: int, end: int, *, from_x: bool) -> None:
        """Rows [begin, end) of this rank to every other rank's slab: of x, or of what the kernel
        has put into the own slab."""
        if end <= begin:
            return
        wire, hidden, x = self.config.wire, self.config.hidden, call.prepared.x
        pieces = [("dispatch_rows", x.dtype if from_x else wire.value_dtype or x.dtype, hidden)]
        if wire.scale_dtype is not None and not from_x:
            pieces.append(("dispatch_scales", wire.scale_dtype, wire.num_groups(hidden)))
        with torch.cuda.stream(self._side):
            for name, kind, columns in pieces:
                place = (name, call.slot, call.bucket, kind, columns)
                source = x if from_x else self._rows_at(self.rank, *place)
                for step in range(1, self.num_ranks):
                    peer = (self.rank + step) % self.num_ranks
                    if peer not in self.masked:
                        target = self._rows_at(peer, *place)
                        target[begin:end].copy_(source[begin:end], non_blocking=True)

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
