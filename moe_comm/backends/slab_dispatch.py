"""Dispatch on one rank: what is launched, and what arrives.

Low latency: one kernel puts rows, ids and weights, waits and indexes. High throughput: a kernel
puts ids and weights while whole blocks of rows travel by copies.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from moe_comm.backends.slab_modes import Plan
from moe_comm.backends.slab_payloads import pack_payloads, payload_layout, payload_views
from moe_comm.backends.slab_state import WIRE_CODE, SlabState, alignment, next_power_of_2
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


class DispatchLaunches(SlabState):
    """The dispatch half of SlabEngine."""

    def dispatch(self, call: DispatchCall, *, send: bool, receive: bool) -> Dispatched | None:
        """Enqueue the halves asked for; the result where `receive`."""
        plan = self.tuning.plan(self.config, call.bucket)
        if plan.mode == "low-latency":
            self._dispatch_kernel(call, plan, send=send, receive=receive)
        else:
            self._dispatch_by_copies(call, plan, send=send, receive=receive)
        return self._dispatched(call, plan) if receive else None

    def _dispatch_kernel(
        self, call: DispatchCall, plan: Plan, *, send: bool, receive: bool, rows_to: int = 2,
        release_after: bool = True, tokens: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        """Put rows (to whom `rows_to` says), ids and weights of a range of tokens; wait for every
        source; index, in this launch where choices are few."""
        from moe_comm.kernels import expert_index as index
        from moe_comm.kernels.dispatch import _dispatch_kernel
        from moe_comm.kernels.signal import COMBINE, DISPATCH, MAX_CHUNKS, RELEASE

        config, wire, hidden, bucket = (
            self.config,
            self.config.wire,
            self.config.hidden,
            call.bucket,
        )
        begin, end = tokens if tokens is not None else (0, bucket)
        slot, number, experts = self._slots[call.slot], call.slot, self.num_local_experts
        x = call.x if call.x.stride(-1) == 1 else call.x.contiguous()
        quantizes = wire.scale_dtype is not None and not call.is_quantized
        block, warps = self._block(wire, combine=False)
        blocks = -(-hidden // block) if rows_to else 1
        senders = min(max((end - begin) * blocks, 1), plan.dispatch_programs) if send else 0
        choices = self.num_ranks * bucket * config.num_topk
        index_here = receive and call.reuse is None and choices <= index.ONE_LAUNCH_CHOICES
        receivers = index.one_launch_programs(choices, experts) if index_here else 1
        payload = pack_payloads(call, config.max_payload_bytes)
        width = payload.shape[1] if payload is not None else 0
        scales, scale_bytes = self._empty, 0
        if call.scales is not None:
            scales = call.scales.contiguous().view(torch.uint8)
            scale_bytes = scales.shape[1]
        value_bytes = 1 if wire.scale_dtype is not None else x.element_size()
        on_device = isinstance(call.num_tokens, Tensor)
        _dispatch_kernel[(senders + (receivers if receive else 0),)](
            x, scales, call.topk_idx.contiguous(), call.topk_weights.contiguous(),
            payload if payload is not None else self._empty,
            call.num_tokens if on_device else self._empty,
            0 if on_device else call.num_tokens, begin, end, call.num_rows, self.routing_table,
            self.num_copies, self.alive, self.memory.peers,
            self._base("dispatch_rows", number), self._base("dispatch_scales", number),
            self._base("topk_idx", number), self._base("topk_weights", number),
            self._base("payloads", number), self.memory.regions.offsets["flags"],
            self._ids(number, bucket), self._weights(number, bucket), self.flags, slot.choice_rank,
            slot.fold_rank, slot.fold_count, slot.tokens, slot.readable, slot.offsets,
            slot.row_index,
            slot.position, slot.order, slot.order_weights, slot.order_count, self.state,
            self.status, self._channel(number, DISPATCH), self._channel(number, COMBINE),
            self._channel(number, RELEASE), self.rank, bucket, self._capacity(bucket),
            config.num_experts, experts, x.stride(0), senders, self._timeout_ns(),
            H=hidden, G=scale_bytes or max(wire.num_groups(hidden), 1),
            GP=next_power_of_2(scale_bytes) if scale_bytes else 0,
            GROUP=wire.group if quantizes else block, K=config.num_topk,
            KP=next_power_of_2(config.num_topk), C=self.routing_table.shape[1], BLOCK=block,
            WIRE=WIRE_CODE[wire.name] if quantizes else 0, VALUE_BYTES=value_bytes,
            PAYLOAD=width, PAYLOAD_P=next_power_of_2(width) if width else 0, ROWS_TO=rows_to,
            ROW_ALIGN=alignment(hidden * value_bytes), T_ON_DEVICE=on_device,
            RELEASE_AFTER=release_after, CHUNKS=MAX_CHUNKS, SEND=send, RECEIVE=receive,
            INDEX=index_here, QUERY=index.QUERIES, INDEX_BLOCK=index.one_launch_block(choices),
            POLL=self._poll(warps), num_warps=warps, **self._common,
        )  # fmt: skip
        if receive and not index_here and call.reuse is None:
            self._index_by_launches(call)

    def _index_by_launches(self, call: DispatchCall) -> None:
        from moe_comm.kernels.expert_index import Order, expert_index

        slot, bucket = self._slots[call.slot], call.bucket
        capacity, rows = self._capacity(bucket), self.num_ranks * bucket
        expert_index(
            self._ids(call.slot, bucket),
            num_local_experts=self.num_local_experts,
            capacity=capacity,
            status=self.status,
            out=(slot.offsets, slot.row_index[:capacity], slot.position[:rows]),
            order=Order(
                position=slot.order,
                weights=slot.order_weights,
                counts=slot.order_count,
                received_weights=self._weights(call.slot, bucket),
                readable=slot.readable,
            ),
            workspace=self._workspace,
            one_launch=False,
        )

    def _dispatch_by_copies(
        self, call: DispatchCall, plan: Plan, *, send: bool, receive: bool
    ) -> None:
        """High throughput: ids and weights are put by a kernel and indexed while whole blocks of
        rows travel by copies, on a stream of their own: by the copy engine where there is one."""
        from moe_comm.kernels.signal import ROWS

        if send:
            quantizes = self.config.wire.scale_dtype is not None and not call.is_quantized
            chunks = plan.dispatch_chunks if quantizes else 1
            # Where the slot was ever given back without a combine, the kernel waits for its
            # readers, and rows must not travel before.
            at_once = not quantizes and call.slot not in self._released_slots
            self._fork()
            if at_once:
                self._copy_rows(call, 0, call.num_rows, from_x=True)
            for begin, end in chunk_edges(call.num_rows, chunks):
                last = end == call.num_rows
                self._dispatch_kernel(
                    call, plan, send=True, receive=False, rows_to=1, release_after=last,
                    tokens=(begin, call.bucket if last else end),
                )  # fmt: skip
                self._fork()
                if not at_once:
                    self._copy_rows(call, begin, end, from_x=not quantizes)
            # After the kernel's release, as on every rank: a peer that saw this one alone would
            # take it for another call's.
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
        hidden, wire = self.config.hidden, self.config.wire
        dtype = call.x.dtype if from_x else (wire.value_dtype or call.x.dtype)
        start = self.rank * call.bucket + begin
        pieces = [("dispatch_rows", (end - begin, hidden), dtype, hidden)]
        if wire.scale_dtype is not None and not from_x:
            groups = wire.num_groups(hidden)
            pieces.append(("dispatch_scales", (end - begin, groups), wire.scale_dtype, groups))
        with torch.cuda.stream(self._side):
            for step in range(1, self.num_ranks):
                peer = (self.rank + step) % self.num_ranks
                if peer in self.masked:
                    continue
                for name, shape, kind, row in pieces:
                    offset = self._offset(name, call.slot) + start * row * kind.itemsize
                    source = (
                        call.x[begin:end]
                        if from_x
                        else self.memory.view(name, shape, kind, offset=offset)
                    )
                    self.memory.peer_view(peer, name, shape, kind, offset=offset).copy_(
                        source, non_blocking=True
                    )

    def _dispatched(self, call: DispatchCall, plan: Plan) -> Dispatched:
        config, wire, bucket, ranks = self.config, self.config.wire, call.bucket, self.num_ranks
        slot, hidden = self._slots[call.slot], config.hidden
        dtype = wire.value_dtype or call.x.dtype
        offset = self._offset("dispatch_rows", call.slot)
        rows = self.memory.view("dispatch_rows", (ranks, bucket, hidden), dtype, offset=offset)
        scales = None
        if wire.scale_dtype is not None:
            groups = wire.num_groups(hidden)
            scales = self.memory.view(
                "dispatch_scales", (ranks, bucket, groups), wire.scale_dtype,
                offset=self._offset("dispatch_scales", call.slot),
            )  # fmt: skip
        weights = self._weights(call.slot, bucket)
        position = slot.position[: ranks * bucket]
        handle = DispatchHandle(
            call=call.call,
            slot=call.slot,
            bucket=bucket,
            num_rows=call.num_rows,
            num_tokens=call.num_tokens,
            topk_idx=call.topk_idx,
            choice_rank=slot.choice_rank[: call.num_rows],
            topk_weights=call.topk_weights,
            received_weights=weights,
            choice_position=position,
            num_tokens_per_rank=slot.tokens,
            state=plan,
        )
        return Dispatched(
            rows=rows,
            scales=scales,
            topk_idx=self._ids(call.slot, bucket).view(weights.shape),
            topk_weights=weights,
            num_tokens_per_rank=slot.tokens,
            payloads=self._payloads(call),
            expert_offsets=slot.offsets,
            row_index=slot.row_index[: self._capacity(bucket)],
            wire=wire,
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
