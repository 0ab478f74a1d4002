"""Launches of the dispatch kernel: what it reads, where it writes, and its constants."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_comm.backends.slab_launch import Form, Places, launch
from moe_comm.backends.slab_modes import Plan
from moe_comm.backends.slab_payloads import pack_payloads
from moe_comm.backends.slab_put import PutLaunches
from moe_comm.backends.slab_staging import DISPATCH_PIECES, Staged
from moe_comm.backends.slab_state import WIRE_CODE, alignment, next_power_of_2
from moe_comm.calls import DispatchCall


class Inputs(NamedTuple):
    """What the launches of a dispatch read, made before the first of them: where memory is short,
    that is found out while nothing has been sent.

    Fields: tensors as the kernel takes them (`_empty` where there is none), and what the constants
    of the kernel depend on: bytes of a token's given scales and payload, and of a value. `stream`:
    the handle of the stream that sends."""

    x: Tensor
    scales: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    payload: Tensor
    num_tokens: Tensor
    stream: int
    quantizes: bool
    on_device: bool
    scale_bytes: int
    payload_bytes: int
    value_bytes: int


class DispatchKernel(PutLaunches):
    """One launch of a dispatch, and the index where that takes launches of its own."""

    def _inputs(self, call: DispatchCall) -> Inputs:
        wire, nothing = self.config.wire, self._empty
        x, num_tokens = call.x, call.num_tokens
        if x.stride(-1) != 1:
            x = x.contiguous()
        scales, scale_bytes = nothing, 0
        if call.scales is not None:
            scales = call.scales.contiguous().view(torch.uint8)
            scale_bytes = scales.shape[1]
        payload, payload_bytes = nothing, 0
        if call.payloads:
            payload = pack_payloads(call, self.config.max_payload_bytes)
            payload_bytes = payload.shape[1]
        on_device = isinstance(num_tokens, Tensor)
        return Inputs(
            x, scales, call.topk_idx.contiguous(), call.topk_weights.contiguous(), payload,
            num_tokens if isinstance(num_tokens, Tensor) else nothing, self._last_handle,
            wire.scale_dtype is not None and not call.is_quantized, on_device, scale_bytes,
            payload_bytes, 1 if wire.scale_dtype is not None else x.element_size(),
        )  # fmt: skip

    def _dispatch_kernel(
        self, call: DispatchCall, plan: Plan, *, send: bool, receive: bool,
        rows_copied: bool = False, release_after: bool = True, staged: Staged | None = None,
    ) -> None:  # fmt: skip
        """Put ids, weights and rows, where `rows_copied` those of this rank alone; wait for every
        source; index, in launches of their own where choices are very many."""
        from moe_comm.kernels.dispatch import ID_TOKENS, _dispatch_kernel
        from moe_comm.kernels.ranked_index import ranking_programs
        from moe_comm.kernels.signal import ROWS

        inputs: Inputs = call.prepared
        number, bucket = call.slot, call.bucket
        form = self._dispatch_form(
            plan, bucket, inputs, rows_copied=rows_copied, releases=release_after, send=send,
            receive=receive, indexes=call.reuse is None,
        )  # fmt: skip
        # Each program releases what it put, unless there are very many words to tell. Only the one
        # launch of a low-latency dispatch has the same programs on every rank.
        most = plan.dispatch_programs
        if form.options["CHUNKED"]:
            # Leaves room for the programs that index.
            most = min(most, plan.counted_programs)
        elif form.options["RANKED"]:
            # Each waits for its stores before it releases, which takes longer than a few rows.
            most = min(most, plan.ranked_programs)
        if form.options["RANKED"]:
            choices = bucket * self.config.num_topk
            queries = self.tuning.queries_of(choices)
            ids = ranking_programs(choices, self.num_ranks, form.options["P"], queries)
        else:
            ids = max(1, min(-(-bucket // ID_TOKENS), plan.dispatch_programs))
        rows = max(1, min(bucket * form.blocks, most))
        direct = form.options["DIRECT"]
        if staged is None:
            key = ("dispatch", number, bucket)
            places = self._kept(key, lambda: self._dispatch_places(number, bucket, None))
        else:
            places = self._dispatch_places(number, bucket, staged)
        given = (
            inputs.x, inputs.scales, inputs.topk_idx, inputs.topk_weights, inputs.payload,
            inputs.num_tokens, 0 if inputs.on_device else call.num_tokens, call.num_rows,
            inputs.x.stride(0), ids, rows,
            ids if direct and not form.indexes else 1, rows if direct else 1,
        )  # fmt: skip
        count = (ids + rows if send else 0) + (form.receivers if receive else 0)
        launch(_dispatch_kernel, count, places, form, given)
        if receive and not form.indexes and call.reuse is None:
            self._index_by_launches(call)
            if self._rows_apart(plan):
                self._wait(number, ROWS, releases=rows if direct else 1)

    def _rows_apart(self, plan: Plan) -> bool:
        """Whether the dispatch kernel releases rows by themselves."""
        return plan.mode == "low-latency" and not self.memory.puts

    def _dispatch_places(self, number: int, bucket: int, staged: Staged | None) -> Places:
        """The kernel's arguments that a slot's calls of this bucket have in common."""
        from moe_comm.kernels.dispatch import _dispatch_kernel
        from moe_comm.kernels.signal import COMBINE, DISPATCH, ROWS

        slot = self._slots[number]
        offsets = {
            name: self._base(name, number) if staged is None else staged.offset(name)
            for name in DISPATCH_PIECES
        }
        return Places(
            _dispatch_kernel, 13,
            copy_table_ptr=self.routing_table, num_copies_ptr=self.num_copies,
            alive_ptr=self.alive, peers_ptr=self.memory.peers if staged is None else staged.table,
            rows_offset=offsets["dispatch_rows"], scales_offset=offsets["dispatch_scales"],
            ids_offset=offsets["topk_idx"], weights_offset=offsets["topk_weights"],
            choices_offset=self._base("choices", number),
            starts_offset=self._base("starts", number),
            payload_offset=offsets["payloads"], flags_offset=self.memory.regions.offsets["flags"],
            ids_ptr=self._ids(number, bucket), weights_ptr=self._weights(number, bucket),
            choices_ptr=self._view("choices", number, (1,), torch.int64),
            starts_ptr=self._view("starts", number, (1,), torch.int64), flags_ptr=self.flags,
            choice_rank_ptr=slot.choice_rank, fold_rank_ptr=slot.fold_rank,
            fold_count_ptr=slot.fold_count, tokens_out_ptr=slot.tokens, readable_ptr=slot.readable,
            offsets_ptr=slot.offsets, row_index_ptr=slot.row_index, position_ptr=slot.position,
            order_ptr=slot.order, order_weights_ptr=slot.order_weights,
            order_count_ptr=slot.order_count, words_ptr=slot.words, state_ptr=self.state,
            status_ptr=self.status, channel=self._channel(number, DISPATCH),
            rows_channel=self._channel(number, ROWS),
            combine_channel=self._channel(number, COMBINE), rank=self.rank, bucket=bucket,
            capacity=self._capacity(bucket), E=self.config.num_experts, L=self.num_local_experts,
            timeout_ns=self._wait_ns,
        )  # fmt: skip

    def _dispatch_form(
        self, plan: Plan, bucket: int, inputs: Inputs, *, rows_copied: bool, releases: bool,
        send: bool, receive: bool, indexes: bool,
    ) -> Form:  # fmt: skip
        # The constants' part of the inputs.
        key = ("form", bucket, inputs[7:], rows_copied, releases, send, receive, indexes)

        def make() -> Form:
            from moe_comm.kernels import chunked_index as counting
            from moe_comm.kernels import ranked_index as ranking
            from moe_comm.kernels.dispatch import ID_TOKENS

            config, wire, tuning = self.config, self.config.wire, self.tuning
            block, warps = self._dispatch_block()
            apart = self._rows_apart(plan)
            choices, starts = bucket * config.num_topk, self._starts
            most_ranked = min(tuning.ranked_choices, ranking.RANKED_CHOICES)
            ranked = apart and indexes and choices <= most_ranked
            chunked = apart and indexes and not ranked and choices <= tuning.counted_choices
            tile, padded = self._tile(), next_power_of_2(config.num_topk)
            chunks = counting.chunks_of(self.num_ranks * bucket, padded, tile)
            receivers, largest_key = 1, self.num_local_experts * tile
            if ranked:
                largest_key = self.num_ranks * starts * max(choices, 1)
                receivers += ranking.adding_programs(
                    self.num_ranks * bucket, padded, self.num_local_experts, tile
                )
            elif chunked:
                receivers += counting.indexing_programs(chunks, self.num_local_experts)
            # Of those that rank; the same for others, whose kernel does not depend on them.
            ranking_choices = choices if ranked else 1
            scale_bytes, width = inputs.scale_bytes, inputs.payload_bytes
            keys = min(256, max(32, next_power_of_2(ranking_choices)))
            options = dict(
                H=config.hidden, G=scale_bytes or max(wire.num_groups(config.hidden), 1),
                GP=next_power_of_2(scale_bytes) if scale_bytes else 0,
                GROUP=wire.group if inputs.quantizes else block, K=config.num_topk,
                KP=padded, C=self.routing_table.shape[1], BLOCK=block,
                WIRE=WIRE_CODE[wire.name] if inputs.quantizes else 0,
                VALUE_BYTES=inputs.value_bytes, PAYLOAD=width,
                PAYLOAD_P=next_power_of_2(width) if width else 0, ROWS_COPIED=rows_copied,
                ROW_ALIGN=alignment(config.hidden * inputs.value_bytes),
                TOKENS=ID_TOKENS, T_ON_DEVICE=inputs.on_device, RELEASE_IDS=releases,
                RELEASE_ROWS=releases,
                # Where later launches index, yet another one waits for the rows.
                WAIT_ROWS=apart and (ranked or chunked or not indexes),
                DIRECT=plan.mode == "low-latency" and self._tells_directly,
                SEND=send, RECEIVE=receive, RANKED=ranked, P=starts, TILE=tile,
                QUERY=tuning.queries_of(ranking_choices), KEYS=keys,
                KEYS_UNROLL=min(16, next_power_of_2(-(-ranking_choices // keys))),
                # An element a thread at least, as in self._tile.
                CHUNKED=chunked, BINS=max(next_power_of_2(self.num_local_experts + 1), 32 * warps),
                CHUNKS=min(counting.SCANNED_CHUNKS, 64 if chunks <= 64 else 256),
                # Sort keys are whole numbers in fp32, unless they are too large for it.
                EXACT=self._interpret or largest_key >= 1 << 24,
                POLL=self._poll(warps), num_warps=warps, **self._common,
            )  # fmt: skip
            registers = tuning.ranked_registers if ranked else tuning.counted_registers
            if registers and (ranked or chunked):
                options["maxnreg"] = registers
            return Form(
                options,
                blocks=-(-config.hidden // block),
                receivers=receivers,
                indexes=ranked or chunked,
            )

        return self._kept(key, make)

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
        )
