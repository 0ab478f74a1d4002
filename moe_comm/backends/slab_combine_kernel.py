"""Launches of the combine kernel: what it reads, where it writes, and its constants."""

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
    None; the handle of the stream that sends.
    """

    y: Tensor
    out: Tensor
    target: Tensor
    bias: Tensor | None
    stream: int


class CombineKernel(PutLaunches):
    """One launch of a combine."""

    def _combine_kernel(
        self, call: CombineCall, plan: Plan, *, send: bool, receive: bool,
        staged: Staged | None = None,
    ) -> None:  # fmt: skip
        """Partial sums and final sum. With `staged` the partial sums wait there to be put, which
        also tells of the call."""
        from moe_comm.kernels.combine import _combine_kernel

        handle, bucket, number = call.handle, call.handle.bucket, call.handle.slot
        buffers: Buffers = call.prepared
        bias = buffers.bias if receive else None
        form = self._combine_form(
            plan, bucket, buffers.y.dtype, layout=call.layout, applied=call.weights_applied,
            biased=bias is not None, releases=send and staged is None, send=send, receive=receive,
        )  # fmt: skip
        adds = bucket * form.blocks
        sends = adds * (self.num_ranks - 1)
        items = (sends if send else 0) + (adds if receive else 0)
        # One more that tells of the call, and one that waits until all ranks are in it.
        programs = min(items, plan.combine_programs or items) + send + receive
        if staged is not None:
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
            scales_at, handle.num_rows, plan.combine_lag * form.blocks, items,
        )  # fmt: skip
        launch(_combine_kernel, programs, places, form, given)

    def _combine_places(self, number: int, bucket: int, dtype: torch.dtype) -> Places:
        """The kernel's arguments that a slot's calls of this bucket have in common."""
        from moe_comm.kernels.combine import _combine_kernel
        from moe_comm.kernels.signal import COMBINE, DISPATCH

        slot = self._slots[number]
        partials, scales = self._returned(number, bucket, dtype)
        return Places(
            _combine_kernel, 9,
            order_ptr=slot.order, order_weights_ptr=slot.order_weights,
            order_count_ptr=slot.order_count, fold_rank_ptr=slot.fold_rank,
            fold_count_ptr=slot.fold_count, alive_ptr=self.alive, peers_ptr=self.memory.peers,
            partials_ptr=partials,
            partial_scales_ptr=scales if scales is not None else self._empty,
            flags_offset=self.memory.regions.offsets["flags"], flags_ptr=self.flags,
            state_ptr=self.state, status_ptr=self.status, channel=self._channel(number, COMBINE),
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
                RELEASE=releases, SEND=send, RECEIVE=receive, POLL=self._poll(warps),
                num_warps=warps, maxnreg=plan.combine_registers, **self._common,
            )  # fmt: skip
            return Form(options, blocks=-(-hidden // block))

        key = ("combine form", bucket, dtype, layout, applied, biased, releases, send, receive)
        return self._kept(key, make)
