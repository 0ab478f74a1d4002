"""Combine on one rank: which launches and copies make it up.

Low latency: one kernel sums and puts the rows of other ranks, sums its own, waits and adds. High
throughput: partial sums go to memory of this rank, and copies take them to the peers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_comm.backends.slab_combine_kernel import Buffers, CombineKernel
from moe_comm.backends.slab_modes import Plan
from moe_comm.calls import CombineCall


class CombineLaunches(CombineKernel):
    """The combine half of SlabEngine."""

    def combine(self, call: CombineCall, *, send: bool, receive: bool) -> Tensor | None:
        """Enqueue the halves asked for; the combined rows where `receive`."""
        self._follow()
        plan = self._plan(call.handle.bucket)
        copies = plan.combine_mode == "high-throughput" and not self.memory.puts
        if call.prepared is None:
            call.prepared = self._buffers(call, copies=copies)
        self.under_way = True
        buffers: Buffers = call.prepared
        if self.memory.puts:
            self._combine_by_puts(call, plan, send=send, receive=receive)
        elif not copies:
            self._combine_kernel(call, plan, send=send, receive=receive)
        else:
            if send:
                self._combine_by_copies(call, plan)
            if receive:
                self._receive_copies(call, plan)
        if not receive:
            return None
        self._used_here(buffers.stream, *buffers[:5])
        call.prepared = None
        if buffers.target is not buffers.out:
            buffers.out.copy_(buffers.target)
        return buffers.out

    def _buffers(self, call: CombineCall, *, copies: bool) -> Buffers:
        y, out = call.y.contiguous(), call.out
        if out is None:
            shape = (call.handle.num_rows, self.config.hidden)
            out = torch.empty(shape, dtype=y.dtype, device=self.device)
        target = out if out.is_contiguous() else torch.empty_like(out).contiguous()
        staging = table = None
        if copies:
            bucket = call.handle.bucket
            width = self._staging_layout(bucket, y.dtype)[1]
            staging = torch.empty(self.num_ranks, width, dtype=torch.uint8, device=self.device)
            table = self._staging_table(staging, bucket, y.dtype)
        return Buffers(y, out, target, summed_bias(call), staging, table, self._last_handle)

    def _combine_by_puts(self, call: CombineCall, plan: Plan, *, send: bool, receive: bool) -> None:
        """Partial sums wait in this rank's block and are forwarded by a launch of their own; in
        high throughput one chunk's on the side stream, while the next is summed."""
        from moe_comm.kernels.signal import ANNOUNCE, COMBINE, COPIES

        slot, bucket = call.handle.slot, call.handle.bucket
        beside = plan.combine_mode == "high-throughput"
        if send:
            staged = self._stage_combine(slot, bucket, call.prepared.y.dtype)
            if beside:
                self._put_release(slot, ANNOUNCE)
            size = -(-bucket // plan.combine_chunks)
            for chunk in range(plan.combine_chunks):
                tokens = (min(chunk * size, bucket), min((chunk + 1) * size, bucket))
                self._combine_kernel(
                    call, plan, send=True, receive=False, staged=staged, chunk=chunk
                )
                if beside:
                    self._fork()
                with torch.cuda.stream(self._side if beside else None):
                    phase = (COPIES if beside else COMBINE) + chunk
                    self._forward_combine(slot, bucket, staged, tokens, phase=phase)
        if receive and beside:
            self._receive_copies(call, plan)
        elif receive:
            self._combine_kernel(call, plan, send=False, receive=True)

    def _receive_copies(self, call: CombineCall, plan: Plan) -> None:
        """High throughput's receive half, chunk by chunk: one program waits, then many add.

        Waiting programs in every multiprocessor would keep out what they wait for: the side
        stream's copies and releases, which may need a multiprocessor too.
        """
        from moe_comm.kernels.signal import COPIES

        for chunk in range(plan.combine_chunks):
            self._wait(call.handle.slot, COPIES + chunk)
            self._combine_kernel(call, plan, send=False, receive=True, chunk=chunk)
        self._join()

    def _combine_by_copies(self, call: CombineCall, plan: Plan) -> None:
        """High throughput: each chunk's partial sums go to memory of this rank, from where copies
        on the side stream take them to the peers while the next chunk is summed. Stores to peers
        would hold up the loads that run beside them."""
        from moe_comm.kernels.signal import COPIES

        slot, bucket = call.handle.slot, call.handle.bucket
        buffers: Buffers = call.prepared
        staging = buffers.staging
        assert staging is not None
        copies = []
        for step in range(1, self.num_ranks if bucket else 1):
            peer = (self.rank + step) % self.num_ranks
            if peer not in self.masked:
                for name, kind, columns, at in self._staging_layout(bucket, buffers.y.dtype)[0]:
                    part = staging[peer, at : at + bucket * columns * kind.itemsize]
                    source = part.view(kind).view(bucket, columns)
                    copies.append((self._rows_at(peer, name, slot, bucket, kind, columns), source))
        self._fork()
        size = -(-bucket // plan.combine_chunks)
        for chunk in range(plan.combine_chunks):
            begin, end = min(chunk * size, bucket), min((chunk + 1) * size, bucket)
            self._combine_kernel(
                call, plan, send=True, receive=False, staging=buffers.table, chunk=chunk
            )
            self._fork()
            with torch.cuda.stream(self._side):
                for target, source in copies if end > begin else ():
                    target[begin:end].copy_(source[begin:end], non_blocking=True)
                self._release(slot, COPIES + chunk)

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
        stride = staging.stride(0)
        parts = self._kept(("parts", stride), lambda: self._rank_numbers * stride)
        return parts + staging.data_ptr(), offsets[0], offsets[-1]


def summed_bias(call: CombineCall) -> Tensor | None:
    if not call.bias:
        return None
    total = call.bias[0].float()
    for bias in call.bias[1:]:
        total = total + bias.float()
    return total.contiguous()
