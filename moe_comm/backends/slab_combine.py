"""Combine on one rank: which launches make it up.

One kernel sums and puts the rows of other ranks, sums its own, waits and adds. Where stores do not
reach every rank, partial sums wait in this rank's own block and are forwarded.
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
        if call.prepared is None:
            call.prepared = self._buffers(call)
        self.under_way = True
        buffers: Buffers = call.prepared
        if self.memory.puts:
            self._combine_by_puts(call, plan, send=send, receive=receive)
        else:
            self._combine_kernel(call, plan, send=send, receive=receive)
        if not receive:
            return None
        self._used_here(buffers.stream, *buffers[:4])
        call.prepared = None
        if buffers.target is not buffers.out:
            buffers.out.copy_(buffers.target)
        return buffers.out

    def _buffers(self, call: CombineCall) -> Buffers:
        y, out = call.y.contiguous(), call.out
        if self.memory.holds(y):
            # Received rows given back as they are: a rank that is done may dispatch into them while
            # this one still reads.
            y = y.clone()
        if out is None:
            shape = (call.handle.num_rows, self.config.hidden)
            out = torch.empty(shape, dtype=y.dtype, device=self.device)
        target = out if out.is_contiguous() else torch.empty_like(out).contiguous()
        return Buffers(y, out, target, summed_bias(call), self._last_handle)

    def _combine_by_puts(self, call: CombineCall, plan: Plan, *, send: bool, receive: bool) -> None:
        """Partial sums wait in this rank's block and are forwarded by a launch of their own."""
        from moe_comm.kernels.signal import COMBINE

        slot, bucket = call.handle.slot, call.handle.bucket
        if send:
            staged = self._stage_combine(slot, bucket, call.prepared.y.dtype)
            self._combine_kernel(call, plan, send=True, receive=False, staged=staged)
            self._forward_combine(slot, bucket, staged, phase=COMBINE)
        if receive:
            self._combine_kernel(call, plan, send=False, receive=True)


def summed_bias(call: CombineCall) -> Tensor | None:
    if not call.bias:
        return None
    total = call.bias[0].float()
    for bias in call.bias[1:]:
        total = total + bias.float()
    return total.contiguous()
