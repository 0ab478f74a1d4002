"""The slab's device work for one rank, without a process group: what to launch, on which memory.

Legend: R ranks, B the bucket, T tokens here, H hidden, G scale groups, K choices, L local experts,
S slots. The slab of one slot holds row (source, token) at source * B + token, so no rank has to
know any other's counts before rows move.

Both halves of a call may be launched at once (`send=True, receive=True`, one kernel) or apart, as
async_op and tests with virtual ranks do.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_comm.backends.slab_modes import Plan, SlabTuning
from moe_comm.calls import CombineCall, DispatchCall
from moe_comm.config import EPConfig
from moe_comm.handle import Dispatched, DispatchHandle
from moe_comm.status import Status, StatusBit
from moe_comm.symmetric import SymmetricMemory
from moe_comm.wire import Wire

PAYLOAD_ALIGNMENT = 16
_WIRE_CODE = {"bf16": 0, "none": 0, "fp8": 1, "mxfp8": 2}


def next_power_of_2(n: int) -> int:
    """The smallest power of two >= max(n, 1)."""
    return 1 << max(n - 1, 0).bit_length()


def chunk_edges(num_rows: int, chunks: int) -> list[tuple[int, int]]:
    """Token ranges of about equal length; the first is half as long, so that transfer starts
    early."""
    if chunks == 1 or num_rows < 2 * chunks:
        return [(0, num_rows)]
    size = num_rows / (chunks - 0.5)
    marks = [0, *(round(size * (i + 0.5)) for i in range(chunks - 1)), num_rows]
    return list(itertools.pairwise(marks))


def _alignment(row_bytes: int) -> int:
    """The largest power of two up to 16 that every row of this size is aligned to."""
    return min(16, row_bytes & -row_bytes)


def region_sizes(config: EPConfig, num_ranks: int) -> dict[str, int]:
    """Bytes of each region of a rank's block: EPConfig.buffer_bytes and the flags."""
    from moe_comm.kernels import signal

    sizes = config.buffer_bytes(num_ranks)
    del sizes["total"]
    sizes["flags"] = config.num_slots * signal.NUM_PHASES * num_ranks * 8
    return sizes


@dataclass(kw_only=True)
class _Slot:
    """Private memory of a slot, int32 but for the weights. Of this rank's tokens: choice_rank
    [B, K], and the ranks of each in the order combine adds, fold_rank [B, K] and fold_count [B].
    Of received rows: tokens [R], readable [1] (choices that may be
    read), offsets [L + 1], row_index [capacity], position [R * B, K], and
    each row's choices here without gaps, order and order_weights [R * B, K], order_count
    [R * B]."""

    choice_rank: Tensor
    fold_rank: Tensor
    fold_count: Tensor
    tokens: Tensor
    readable: Tensor
    offsets: Tensor
    row_index: Tensor
    position: Tensor
    order: Tensor
    order_weights: Tensor
    order_count: Tensor


class SlabEngine:
    """Launches dispatch and combine of one rank.

    Args:
        config: the shape.
        rank, num_ranks, num_local_experts: who this is.
        memory: this rank's symmetric memory, with `region_sizes` regions.
        copy_table, num_copies: the placement's tables on the device.
        tuning: blocks, warps and program counts.
    """

    def __init__(
        self,
        config: EPConfig,
        *,
        rank: int,
        num_ranks: int,
        num_local_experts: int,
        memory: SymmetricMemory,
        copy_table: Tensor,
        num_copies: Tensor,
        tuning: SlabTuning | None = None,
    ) -> None:
        from moe_comm.kernels import signal
        from moe_comm.kernels.expert_index import workspace_size

        self.config, self.rank, self.num_ranks = config, rank, num_ranks
        self.num_local_experts, self.memory = num_local_experts, memory
        self._copy_table, self.num_copies = copy_table, num_copies
        # The copy table with the ranks that are masked taken out; read by captured graphs.
        self.routing_table = copy_table.clone()
        self.tuning = tuning or SlabTuning()
        self.device = device = memory.block.device
        self._interpret = device.type == "cpu"
        self._phases = signal.NUM_PHASES
        channels = config.num_slots * self._phases
        ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self.state = torch.zeros(signal.STATE_ROWS, channels, **ints)
        self.status = torch.zeros(signal.STATUS_WORDS, **ints)
        self.alive = torch.ones(num_ranks, **ints)
        self._bucket = config.bucket
        capacity = config.expert_row_capacity(num_ranks, num_local_experts, self._bucket)
        width, rows = config.num_topk, num_ranks * self._bucket

        def ints_of(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self._slots = [
            _Slot(
                choice_rank=ints_of(self._bucket, width),
                fold_rank=ints_of(self._bucket, width),
                fold_count=ints_of(self._bucket),
                tokens=ints_of(num_ranks),
                readable=ints_of(1),
                offsets=ints_of(num_local_experts + 1),
                row_index=ints_of(capacity),
                position=ints_of(rows, width),
                order=ints_of(rows, width),
                order_weights=torch.zeros(rows, width, device=device),
                order_count=ints_of(rows),
            )
            for _ in range(config.num_slots)
        ]
        self._empty = torch.zeros(1, **ints)
        self._rank_numbers = torch.arange(num_ranks, device=device)
        choices = rows * width
        self._workspace = torch.zeros(workspace_size(choices, num_local_experts), **ints)
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._multiprocessors = (
            torch.cuda.get_device_properties(device).multi_processor_count
            if device.type == "cuda"
            else 1
        )
        self._common: dict[str, Any] = {
            "R": num_ranks,
            "RP": max(next_power_of_2(num_ranks), 2),
            "NUM_CHANNELS": channels,
            "CHANNELS_P": next_power_of_2(channels),
            "INTERPRET": self._interpret,
        }
        self.flags = memory.view("flags", (channels, num_ranks), torch.int64)

    def seed_counters(self, count: int) -> None:
        """Set every counter as after `count` releases on each channel: a test that counters may
        wrap. All ranks seed alike, before the first call."""
        wrapped = (count + 2**31) % 2**32 - 2**31
        from moe_comm.kernels.signal import RELEASE

        self.state[0].fill_(wrapped)
        self.state[2, RELEASE :: self._phases] = wrapped
        self.flags.fill_(wrapped << 32)

    def dispatch(self, call: DispatchCall, *, send: bool, receive: bool) -> Dispatched | None:
        """Enqueue the halves asked for; the result where `receive`."""
        plan = self.tuning.plan(self.config, self.num_ranks, call.bucket)
        if plan.mode == "low-latency":
            self._dispatch_kernel(call, plan, send=send, receive=receive)
        else:
            self._dispatch_by_copies(call, plan, send=send, receive=receive)
        return self._dispatched(call, plan) if receive else None

    def combine(self, call: CombineCall, *, send: bool, receive: bool) -> Tensor | None:
        """Enqueue the halves asked for; the combined rows where `receive`."""
        plan = self.tuning.plan(self.config, self.num_ranks, call.handle.bucket)
        if call.y.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise ValueError(
                f"y: expected bfloat16, float16 or float32 on the slab backend, got {call.y.dtype}"
            )
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
        bias = self._summed_bias(call)
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
            WIRE=_WIRE_CODE[wire.name], GROUP=wire.group or block, VALUE_BYTES=value.itemsize,
            ROWS_LAYOUT=call.layout == "rows", APPLIED=call.weights_applied,
            ROW_ALIGN=_alignment(hidden * value.itemsize), HAS_BIAS=bias is not None,
            CHUNKS=chunks, NUM_CHANNELS=self._common["NUM_CHANNELS"],
            CHANNELS_P=self._common["CHANNELS_P"], RELEASE_AFTER=staging is None, SEND=send,
            RECEIVE=receive, POLL=self._poll(warps), INTERPRET=self._interpret, num_warps=warps,
        )  # fmt: skip

    def _combine_by_copies(self, call: CombineCall, plan: Plan, y: Tensor, target: Tensor) -> None:
        """High throughput: each chunk's partial sums go to memory of this rank, from where copies
        on the side stream take them to the peers while the next chunk is summed. Stores to peers
        would hold up the loads that run beside them."""
        from moe_comm.kernels.signal import COMBINE

        handle, wire, hidden = call.handle, self.config.return_wire, self.config.hidden
        bucket, value = handle.bucket, self.config.return_wire.value_dtype or y.dtype
        pieces = [("combine_rows", value, hidden)]
        if wire.scale_dtype is not None:
            pieces.append(("combine_scales", wire.scale_dtype, wire.num_groups(hidden)))
        width = sum(kind.itemsize * columns for _, kind, columns in pieces)
        staging = torch.empty(self.num_ranks, bucket * width, dtype=torch.uint8, device=self.device)
        self._fork()
        size = -(-bucket // plan.combine_chunks)
        for chunk in range(plan.combine_chunks):
            begin, end = min(chunk * size, bucket), min((chunk + 1) * size, bucket)
            self._combine_kernel(
                call, plan, y, target, send=True, receive=False, staging=staging, chunk=chunk
            )
            self._fork()
            with torch.cuda.stream(self._side):
                for step in range(1, self.num_ranks):
                    peer = (self.rank + step) % self.num_ranks
                    at = 0
                    for name, kind, columns in pieces:
                        row = columns * kind.itemsize
                        source = staging[peer, at + begin * row : at + end * row]
                        offset = self._offset(name, handle.slot)
                        offset += (self.rank * bucket + begin) * row
                        shape = (end - begin, columns)
                        self.memory.peer_view(peer, name, shape, kind, offset=offset).copy_(
                            source.view(kind).view(shape), non_blocking=True
                        )
                        at += bucket * row
            self._release(handle.slot, COMBINE + chunk)
        if self._side is not None and not torch.cuda.is_current_stream_capturing():
            # The side stream still reads it after this call has returned.
            staging.record_stream(self._side)

    def _staging_table(
        self, staging: Tensor, bucket: int, dtype: torch.dtype
    ) -> tuple[Tensor, int, int]:
        """(addresses, rows offset, scales offset) that make the kernel's address of row
        (this rank, token) at peer p that of row `token` in staging[p]."""
        wire, hidden = self.config.return_wire, self.config.hidden
        row = hidden * (wire.value_dtype or dtype).itemsize
        scale = wire.num_groups(hidden) * (wire.scale_dtype.itemsize if wire.scale_dtype else 0)
        start = self.rank * bucket
        table = self._rank_numbers * staging.stride(0) + staging.data_ptr()
        return table, -start * row, bucket * row - start * scale

    def signal_release(self, slot: int) -> None:
        """Tell every rank that this one has read what it needs of the slot."""
        from moe_comm.kernels.signal import RELEASE

        self._release(slot, RELEASE)

    def read_status(self) -> Status:
        """The status word; bits that are not sticky are cleared. Synchronizes."""
        words = self.status.tolist()
        bits = StatusBit(words[0])
        sticky = bits & (StatusBit.TIMEOUT | StatusBit.PHASE)
        if bits != sticky:
            self.status[0] = int(sticky)
        if not sticky:
            return Status(bits=bits)
        return Status(
            bits=bits,
            phase=self._phase_name(words[1] - 1),
            peer=words[2],
            seen=words[3],
            wanted=words[4],
            other_phase=self._phase_name(words[5] - 1),
        )

    def mask_rank(self, rank: int) -> None:
        """Go on without `rank`: nothing is sent to it or awaited from it, and choices of its
        experts count as masked. Clears the status word, and settles what a failed call left."""
        self.alive[rank] = 0
        self.refresh_routing()
        self.status.zero_()
        self.state[0] += self.state[1]
        self.state[1].zero_()

    def refresh_routing(self) -> None:
        """Take the placement's table over, less the masked ranks; in place."""
        ranks = self._copy_table[..., :1]
        dead = (ranks >= 0) & (self.alive[ranks.clamp_min(0).long()] == 0)
        self.routing_table.copy_(torch.where(dead, -1, self._copy_table))

    # Launches.

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
        payload = self._packed_payloads(call)
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
            WIRE=_WIRE_CODE[wire.name] if quantizes else 0, VALUE_BYTES=value_bytes,
            PAYLOAD=width, PAYLOAD_P=next_power_of_2(width) if width else 0, ROWS_TO=rows_to,
            ROW_ALIGN=_alignment(hidden * value_bytes), T_ON_DEVICE=on_device,
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
            self._fork()
            if not quantizes:
                self._copy_rows(call, 0, call.num_rows, from_x=True)
            for begin, end in chunk_edges(call.num_rows, chunks):
                last = end == call.num_rows
                self._dispatch_kernel(
                    call, plan, send=True, receive=False, rows_to=1, release_after=last,
                    tokens=(begin, call.bucket if last else end),
                )  # fmt: skip
                if quantizes:
                    self._fork()
                    self._copy_rows(call, begin, end, from_x=False)
            self._release(call.slot, ROWS)
        if receive:
            self._dispatch_kernel(call, plan, send=False, receive=True)
            self._wait(call.slot, ROWS)
            self._join()

    def _join(self) -> None:
        """The current stream goes on after the side stream."""
        if self._side is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._side)

    def _fork(self) -> None:
        """The side stream goes on from here."""
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream(self.device))

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

    def _release(self, slot: int, phase: int) -> None:
        """Release a channel. Copies come before the release of what they carry: that one is on the
        side stream."""
        from moe_comm.kernels.dispatch import _release_kernel
        from moe_comm.kernels.signal import DISPATCH, RELEASE

        common = {k: v for k, v in self._common.items() if k in ("R", "RP", "NUM_CHANNELS")}
        with torch.cuda.stream(self._side if phase != RELEASE else None):
            _release_kernel[(1,)](
                self.memory.peers, self.alive, self.state, self.status,
                self.memory.regions.offsets["flags"], self._channel(slot, phase),
                self._channel(slot, DISPATCH), self.rank, FREES_SLOT=phase == RELEASE,
                num_warps=1, **common,
            )  # fmt: skip

    def _wait(self, slot: int, phase: int) -> None:
        from moe_comm.kernels.dispatch import _wait_kernel

        _wait_kernel[(1,)](
            self.alive, self.state, self.status, self.flags, self._channel(slot, phase), self.rank,
            self._timeout_ns(), POLL=self._poll(1), num_warps=1, **self._common,
        )  # fmt: skip

    def _poll(self, warps: int) -> int:
        """Elements of a polling tensor: one a thread, so that warps cannot disagree."""
        return max(32 * warps, int(self._common["RP"]))

    # Views and numbers.

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
            topk_idx=self._ids(call.slot, bucket).view(ranks, bucket, -1),
            topk_weights=weights,
            num_tokens_per_rank=slot.tokens,
            payloads=self._payload_views(call),
            expert_offsets=slot.offsets,
            row_index=slot.row_index[: self._capacity(bucket)],
            wire=wire,
            handle=handle,
        )

    def _capacity(self, bucket: int) -> int:
        return self.config.expert_row_capacity(self.num_ranks, self.num_local_experts, bucket)

    def _block(self, wire: Wire, *, combine: bool) -> tuple[int, int]:
        """(columns of a block, warps): a power of two, at least one scale group."""
        limit = self.tuning.combine_block if combine else self.tuning.dispatch_block
        warps = self.tuning.combine_warps if combine else self.tuning.dispatch_warps
        return min(limit, max(next_power_of_2(self.config.hidden), wire.group, 32)), warps

    def _channel(self, slot: int, phase: int) -> int:
        return slot * self._phases + phase

    def _phase_name(self, channel: int) -> str:
        if channel < 0:
            return ""
        phase = channel % self._phases
        names = ("dispatch", "dispatch (rows)", "release")
        return names[phase] if phase < len(names) else "combine"

    def _offset(self, name: str, slot: int) -> int:
        """Bytes into the region at which the slot's part begins."""
        return slot * (self.memory.regions.sizes[name] // self.config.num_slots)

    def _base(self, name: str, slot: int) -> int:
        """Bytes into the block."""
        return self.memory.regions.offsets[name] + self._offset(name, slot)

    def _timeout_ns(self) -> int:
        return int(self.config.wait_s * 1e9)

    def _ids(self, slot: int, bucket: int) -> Tensor:
        shape = (self.num_ranks * bucket, self.config.num_topk)
        return self.memory.view(
            "topk_idx", shape, torch.int32, offset=self._offset("topk_idx", slot)
        )

    def _weights(self, slot: int, bucket: int) -> Tensor:
        shape = (self.num_ranks, bucket, self.config.num_topk)
        return self.memory.view(
            "topk_weights", shape, torch.float32, offset=self._offset("topk_weights", slot)
        )

    def _combine_rows(self, slot: int, bucket: int, dtype: torch.dtype) -> Tensor:
        shape = (self.num_ranks * bucket, self.config.hidden)
        offset = self._offset("combine_rows", slot)
        return self.memory.view("combine_rows", shape, dtype, offset=offset)

    def _combine_scales(self, slot: int, bucket: int) -> Tensor:
        wire = self.config.return_wire
        if wire.scale_dtype is None:
            return self._empty
        shape = (self.num_ranks * bucket, wire.num_groups(self.config.hidden))
        offset = self._offset("combine_scales", slot)
        return self.memory.view("combine_scales", shape, wire.scale_dtype, offset=offset)

    def _summed_bias(self, call: CombineCall) -> Tensor | None:
        if not call.bias:
            return None
        total = call.bias[0].float()
        for bias in call.bias[1:]:
            total = total + bias.float()
        return total.contiguous()

    def _payload_layout(self, call: DispatchCall) -> tuple[list[tuple[str, int, int]], int]:
        """(name, first byte, bytes) of each payload in a token's payload, and its whole width."""
        layout, at = [], 0
        for name, tensor in call.payloads.items():
            size = (
                tensor[:1].numel() * tensor.element_size()
                if tensor.shape[0]
                else (tensor.new_empty(tensor.shape[1:]).numel() * tensor.element_size())
            )
            layout.append((name, at, size))
            at += -(-size // PAYLOAD_ALIGNMENT) * PAYLOAD_ALIGNMENT
        if at > self.config.max_payload_bytes:
            raise ValueError(
                f"payloads: expected at most max_payload_bytes = {self.config.max_payload_bytes} "
                f"bytes a token (each payload rounded up to {PAYLOAD_ALIGNMENT}), got {at}"
            )
        return layout, at

    def _packed_payloads(self, call: DispatchCall) -> Tensor | None:
        if not call.payloads:
            return None
        layout, width = self._payload_layout(call)
        packed = torch.zeros(call.num_rows, width, dtype=torch.uint8, device=self.device)
        for name, at, size in layout:
            flat = call.payloads[name].contiguous().view(torch.uint8).view(call.num_rows, size)
            packed[:, at : at + size] = flat
        return packed

    def _payload_views(self, call: DispatchCall) -> dict[str, Tensor]:
        if not call.payloads:
            return {}
        layout, width = self._payload_layout(call)
        shape = (self.num_ranks, call.bucket, width)
        offset = self._offset("payloads", call.slot)
        whole = self.memory.view("payloads", shape, torch.uint8, offset=offset)
        views = {}
        for name, at, size in layout:
            like = call.payloads[name]
            part = whole[..., at : at + size].view(like.dtype)
            views[name] = (
                part.unflatten(-1, like.shape[1:])
                if like.dim() > 2
                else (part if like.dim() == 2 else part[..., 0])
            )
        return views
