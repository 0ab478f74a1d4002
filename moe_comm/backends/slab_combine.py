"""Combine on one rank: what is launched.

Low latency: one kernel sums and puts the rows of other ranks, sums its own, waits and adds. High
throughput: partial sums go to memory of this rank, and copies take them to the peers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_comm.backends.slab_modes import Plan
from moe_comm.backends.slab_state import WIRE_CODE, SlabState, alignment, next_power_of_2
from moe_comm.calls import CombineCall


class CombineLaunches(SlabState):
    """The combine half of SlabEngine."""

    def combine(self, call: CombineCall, *, send: bool, receive: bool) -> Tensor | None:
        """Enqueue the halves asked for; the combined rows where `receive`."""
        plan = self.tuning.plan(self.config, call.handle.bucket)
        y = call.y.contiguous()
        out = call.out
        if out is None:
            shape = (call.handle.num_rows, self.config.hidden)
            out = torch.empty(shape, dtype=y.dtype, device=self.device)
        target = out if out.is_contiguous() else torch.empty_like(out).contiguous()
        if plan.combine_mode == "low-latency":
            self._combine_kernel(call, plan, y, target, send=send, receive=receive)
        else:
            if send:
                self._combine_by_copies(call, plan, y, target)
            if receive:
                self._combine_kernel(call, plan, y, target, send=False, receive=True)
                self._join()
                del self._staging[call.handle.slot]
        if not receive:
            return None
        if target is not out:
            out.copy_(target)
        return out

    def _combine_kernel(
        self, call: CombineCall, plan: Plan, y: Tensor, target: Tensor, *, send: bool,
        receive: bool, staging: Tensor | None = None, chunk: int | None = None,
    ) -> None:  # fmt: skip
        """Partial sums and final sum. With `staging`, one chunk's partial sums go there instead of
        to the peers, and nothing is released."""
        from moe_comm.kernels.combine import _combine_kernel
        from moe_comm.kernels.signal import COMBINE, DISPATCH

        handle, config = call.handle, self.config
        wire, hidden, bucket = config.return_wire, config.hidden, handle.bucket
        value = wire.value_dtype or y.dtype
        bias = summed_bias(call)
        slot, number = self._slots[handle.slot], handle.slot
        block, warps = self._block(wire, combine=True)
        blocks, chunks = -(-hidden // block), plan.combine_chunks
        tokens = bucket if chunk is None else -(-bucket // chunks)
        remote_items = tokens * (self.num_ranks - 1) * blocks
        limit = plan.combine_send_programs
        senders = min(max(remote_items, 1), limit) if send else 0
        receivers = min(max(handle.num_rows * blocks, 1), plan.combine_receive_programs)
        if not send and plan.combine_mode == "high-throughput":
            # Programs that wait must leave room for the launches on the side stream that they wait
            # for: at 1.5 a multiprocessor there is always some.
            receivers = min(receivers, max(1, self._multiprocessors * 3 // 2))
        peers = self.memory.peers
        rows_at, scales_at = (
            self._base("combine_rows", number),
            self._base("combine_scales", number),
        )
        if staging is not None:
            peers, rows_at, scales_at = self._staging_table(staging, bucket, y.dtype)
        # As many loads in flight as a row has choices here on average.
        unroll = min(8, max(2, next_power_of_2(-(-config.num_topk // self.num_ranks))))
        _combine_kernel[(senders + (receivers if receive else 0),)](
            y, slot.order, slot.order_weights, slot.order_count, slot.fold_rank, slot.fold_count,
            bias if bias is not None else target, target, self.alive, peers,
            self._combine_rows(number, bucket, value), self._combine_scales(number, bucket),
            rows_at, scales_at, self.memory.regions.offsets["flags"], self.flags, self.state,
            self.status, self._channel(number, COMBINE), self._channel(number, DISPATCH),
            self.rank, bucket, handle.num_rows, chunk or 0, 1 if chunk is not None else chunks,
            senders, self._timeout_ns(),
            H=hidden, G=max(wire.num_groups(hidden), 1), K=config.num_topk, R=self.num_ranks,
            RP=self._common["RP"], UNROLL=unroll,
            FOLD_UNROLL=min(4, next_power_of_2(self.num_ranks)), BLOCK=block,
            WIRE=WIRE_CODE[wire.name], GROUP=wire.group or block, VALUE_BYTES=value.itemsize,
            ROWS_LAYOUT=call.layout == "rows", APPLIED=call.weights_applied,
            ROW_ALIGN=alignment(hidden * value.itemsize), HAS_BIAS=bias is not None,
            CHUNKS=chunks, NUM_CHANNELS=self._common["NUM_CHANNELS"],
            CHANNELS_P=self._common["CHANNELS_P"], RELEASE_AFTER=staging is None, SEND=send,
            RECEIVE=receive, POLL=self._poll(warps), INTERPRET=self._interpret, num_warps=warps,
        )  # fmt: skip

    def _combine_by_copies(self, call: CombineCall, plan: Plan, y: Tensor, target: Tensor) -> None:
        """High throughput: each chunk's partial sums go to memory of this rank, from where copies
        on the side stream take them to the peers while the next chunk is summed. Stores to peers
        would hold up the loads that run beside them."""
        from moe_comm.kernels.signal import COMBINE

        handle, bucket = call.handle, call.handle.bucket
        pieces, width = self._staging_layout(bucket, y.dtype)
        staging = torch.empty(self.num_ranks, width, dtype=torch.uint8, device=self.device)
        self._fork()
        size = -(-bucket // plan.combine_chunks)
        for chunk in range(plan.combine_chunks):
            begin, end = min(chunk * size, bucket), min((chunk + 1) * size, bucket)
            self._combine_kernel(
                call, plan, y, target, send=True, receive=False, staging=staging, chunk=chunk
            )
            self._fork()
            with torch.cuda.stream(self._side):
                for step in range(1, self.num_ranks if end > begin else 1):
                    peer = (self.rank + step) % self.num_ranks
                    if peer in self.masked:
                        continue
                    for name, kind, columns, at in pieces:
                        row = columns * kind.itemsize
                        source = staging[peer, at + begin * row : at + end * row]
                        offset = self._offset(name, handle.slot)
                        offset += (self.rank * bucket + begin) * row
                        shape = (end - begin, columns)
                        self.memory.peer_view(peer, name, shape, kind, offset=offset).copy_(
                            source.view(kind).view(shape), non_blocking=True
                        )
            self._release(handle.slot, COMBINE + chunk)
        # The side stream reads it until the receive half has joined; in a capture nothing else
        # keeps later allocations out of it.
        self._staging[handle.slot] = staging
        if self._side is not None and not torch.cuda.is_current_stream_capturing():
            # The receive half may join on another stream than the one it was allocated on.
            staging.record_stream(self._side)

    def _staging_layout(
        self, bucket: int, dtype: torch.dtype
    ) -> tuple[list[tuple[str, torch.dtype, int, int]], int]:
        """(region, dtype, columns, first byte) of what a rank's part of the staging memory holds,
        and its bytes. Every piece and part is aligned to 16 bytes, whatever the bucket."""
        wire, hidden = self.config.return_wire, self.config.hidden
        kinds = [("combine_rows", wire.value_dtype or dtype, hidden)]
        if wire.scale_dtype is not None:
            kinds.append(("combine_scales", wire.scale_dtype, wire.num_groups(hidden)))
        pieces, at = [], 0
        for name, kind, columns in kinds:
            pieces.append((name, kind, columns, at))
            at += -(-bucket * columns * kind.itemsize // 16) * 16
        return pieces, at

    def _staging_table(
        self, staging: Tensor, bucket: int, dtype: torch.dtype
    ) -> tuple[Tensor, int, int]:
        """(addresses, rows offset, scales offset) that make the kernel's address of row
        (this rank, token) at peer p that of row `token` in staging[p]."""
        start = self.rank * bucket
        offsets = [
            at - start * columns * kind.itemsize
            for _, kind, columns, at in self._staging_layout(bucket, dtype)[0]
        ]
        table = self._rank_numbers * staging.stride(0) + staging.data_ptr()
        return table, offsets[0], offsets[-1]


def summed_bias(call: CombineCall) -> Tensor | None:
    if not call.bias:
        return None
    total = call.bias[0].float()
    for bias in call.bias[1:]:
        total = total + bias.float()
    return total.contiguous()
