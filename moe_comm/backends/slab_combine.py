"""Combine on one rank: what is launched.

Low latency: one kernel sums and puts the rows of other ranks, sums its own, waits and adds. High
throughput: partial sums go to memory of this rank, and copies take them to the peers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_comm.backends.slab_launch import Form, Places, launch
from moe_comm.backends.slab_modes import Plan
from moe_comm.backends.slab_put import PutLaunches
from moe_comm.backends.slab_staging import Staged
from moe_comm.backends.slab_state import WIRE_CODE, alignment, next_power_of_2
from moe_comm.calls import CombineCall


class Buffers(NamedTuple):
    """Tensors of a combine, made before its first launch and kept from one half to the other:
    where memory is short, that is found out while nothing has been sent.

    Fields: y without gaps; out, and target, which is out without gaps; the sum of the biases, or
    None; staging, uint8 [R, bytes], where copies are taken from, with its _staging_table, or None;
    the handle of the stream that sends.
    """

    y: Tensor
    out: Tensor
    target: Tensor
    bias: Tensor | None
    staging: Tensor | None
    table: tuple[Tensor, int, int] | None
    stream: int


class CombineLaunches(PutLaunches):
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

    def _combine_kernel(
        self, call: CombineCall, plan: Plan, *, send: bool, receive: bool,
        staging: tuple[Tensor, int, int] | None = None, staged: Staged | None = None,
        chunk: int | None = None,
    ) -> None:  # fmt: skip
        """Partial sums and final sum. With `staging` (_staging_table), one chunk's partial sums go
        there instead of to the peers, and only the first of them releases anything: that this call
        was issued. With `staged` they wait there to be put, and nothing is released."""
        from moe_comm.kernels.combine import _combine_kernel
        from moe_comm.kernels.signal import ANNOUNCE, COMBINE, COPIES

        handle, bucket, number = call.handle, call.handle.bucket, call.handle.slot
        buffers: Buffers = call.prepared
        bias = buffers.bias if receive else None
        form = self._combine_form(
            plan, bucket, buffers.y.dtype, layout=call.layout, applied=call.weights_applied,
            biased=bias is not None, releases=send and not chunk and staged is None, send=send,
            receive=receive,
        )  # fmt: skip
        tokens = bucket if chunk is None else -(-bucket // plan.combine_chunks)
        remote_items = tokens * (self.num_ranks - 1) * form.blocks
        programs = min(max(remote_items, 1), plan.combine_send_programs)
        senders = programs if send else 0
        receivers = 0
        if receive:
            rows = min(handle.num_rows, tokens)
            receivers = min(max(rows * form.blocks, 1), plan.combine_receive_programs)
        phase = COMBINE if plan.combine_mode == "low-latency" else COPIES
        if staging is not None:
            phase = ANNOUNCE
            peers, rows_at, scales_at = staging
        elif staged is not None:
            peers = staged.table
            rows_at, scales_at = staged.offset("combine_rows"), staged.offset("combine_scales")
        else:
            peers = self.memory.peers
            rows_at, scales_at = (
                self._base("combine_rows", number),
                self._base("combine_scales", number),
            )
        dtype = buffers.y.dtype
        places = self._kept(
            ("combine", number, bucket, dtype),
            lambda: self._combine_places(number, bucket, dtype),
        )
        given = (
            buffers.y, bias if bias is not None else buffers.target, buffers.target, peers, rows_at,
            scales_at, self._channel(number, phase), handle.num_rows, chunk or 0,
            1 if chunk is not None else plan.combine_chunks, senders,
            programs if form.options["DIRECT"] else 1,
        )  # fmt: skip
        launch(_combine_kernel, senders + receivers, places, form, given)

    def _combine_places(self, number: int, bucket: int, dtype: torch.dtype) -> Places:
        """The kernel's arguments that a slot's calls of this bucket have in common."""
        from moe_comm.kernels.combine import _combine_kernel
        from moe_comm.kernels.signal import DISPATCH

        slot = self._slots[number]
        partials, scales = self._returned(number, bucket, dtype)
        return Places(
            _combine_kernel, 12,
            order_ptr=slot.order, order_weights_ptr=slot.order_weights,
            order_count_ptr=slot.order_count, fold_rank_ptr=slot.fold_rank,
            fold_count_ptr=slot.fold_count, alive_ptr=self.alive, peers_ptr=self.memory.peers,
            partials_ptr=partials,
            partial_scales_ptr=scales if scales is not None else self._empty,
            flags_offset=self.memory.regions.offsets["flags"], flags_ptr=self.flags,
            state_ptr=self.state, status_ptr=self.status,
            dispatch_channel=self._channel(number, DISPATCH), rank=self.rank, bucket=bucket,
            timeout_ns=self._wait_ns,
        )  # fmt: skip

    def _combine_form(
        self, plan: Plan, bucket: int, dtype: torch.dtype, *, layout: str, applied: bool,
        biased: bool, releases: bool, send: bool, receive: bool,
    ) -> Form:  # fmt: skip
        def make() -> Form:
            config, wire, hidden = self.config, self.config.return_wire, self.config.hidden
            value = wire.value_dtype or dtype
            block, warps = self._combine_block(bucket)
            # As many loads in flight as a row has choices here on average.
            average = -(-config.num_topk // self.num_ranks)
            unroll = self.tuning.combine_unroll or min(8, max(2, next_power_of_2(average)))
            options = dict(
                H=hidden, G=max(wire.num_groups(hidden), 1), K=config.num_topk, UNROLL=unroll,
                FOLD_UNROLL=min(4, next_power_of_2(self.num_ranks)), BLOCK=block,
                WIRE=WIRE_CODE[wire.name], GROUP=wire.group or block, VALUE_BYTES=value.itemsize,
                ROWS_LAYOUT=layout == "rows", APPLIED=applied,
                ROW_ALIGN=alignment(hidden * value.itemsize), HAS_BIAS=biased,
                CHUNKS=plan.combine_chunks, RELEASE_AFTER=releases,
                DIRECT=plan.combine_mode == "low-latency" and self._tells_directly, SEND=send,
                RECEIVE=receive, WAIT=plan.combine_mode == "low-latency", POLL=self._poll(warps),
                num_warps=warps, **self._common,
            )  # fmt: skip
            return Form(options, blocks=-(-hidden // block))

        key = (
            "combine form", bucket, dtype, layout, applied, biased, releases, send, receive
        )  # fmt: skip
        return self._kept(key, make)

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
