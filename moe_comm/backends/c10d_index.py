"""Grouping received rows by expert, with launches that are set up once for many calls.

Launches the kernels of moe_comm.kernels.expert_index as expert_index() there does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_comm.backends.direct_launch import Launch

# expert_offsets [L + 1], row_index [capacity], choice_position [M, K], int32.
Index = tuple[Tensor, Tensor, Tensor]


def index_bytes(num_rows: int, num_topk: int, num_local_experts: int) -> int:
    """Of the memory that IndexLaunches needs for so many rows, or fewer."""
    from moe_comm.kernels.expert_index import workspace_size

    return 4 * workspace_size(num_rows * num_topk, num_local_experts)


class IndexLaunches:
    """For one number of rows. Calls with one memory must not overlap on the device.

    Args:
        num_rows: M, at least 1. num_topk: K. num_local_experts: L, below 2^15.
        capacity: expert rows there is room for, at most M * K.
        memory: int32, index_bytes() or more; 0 at first.
        status: int32 [1]; bit 2 is set where choices were dropped beyond the capacity.
    """

    def __init__(
        self,
        num_rows: int,
        num_topk: int,
        num_local_experts: int,
        capacity: int,
        *,
        memory: Tensor,
        status: Tensor,
    ) -> None:
        from moe_comm.kernels import expert_index as kernels

        self.num_rows, self.num_topk = num_rows, num_topk
        self.num_local_experts, self.capacity = num_local_experts, capacity
        self.device = status.device
        choices, experts = num_rows * num_topk, num_local_experts
        totals, counts = kernels.split_workspace(memory, experts)
        chunks = -(-choices // kernels.CHUNK)
        # Nothing goes through the pointers of an Order, which is not wanted here.
        common: dict[str, Tensor | int] = {
            "status_ptr": status, "counts_ptr": counts, "starts_ptr": counts, "totals_ptr": totals,
            "num_choices": choices, "num_chunks": chunks, "capacity": capacity, "L": experts,
            "readable_ptr": status, "order_ptr": status, "order_weights_ptr": status,
            "count_ptr": status, "weights_ptr": status,
        }  # fmt: skip

        def step(kernel: Any, options: dict[str, Any]) -> Launch:
            known = {name: common[name] for name in kernel.arg_names if name in common}
            return Launch(kernel, options, **known)

        shape = {"K": num_topk, "KP": _power_of_2(num_topk), "ORDER": False, "num_warps": 8}
        self._at_once = choices <= kernels.ONE_LAUNCH_CHOICES
        if self._at_once:
            counting = kernels.one_launch_form(
                choices, experts, interpreted=self.device.type == "cpu"
            )
            self._rank = step(
                kernels._one_launch_kernel, {**shape, "QUERY": kernels.QUERIES, **counting}
            )
            self._programs = kernels.one_launch_programs(choices, experts), 1
            return
        self._programs, self._scanners = (chunks, 1), (-(-experts // kernels.SCANNED), 1)
        bins, rows = _power_of_2(experts + 1), min(256, _power_of_2(chunks))
        chunk = {"BLOCK": kernels.CHUNK, "BINS": bins}
        self._count = step(kernels._count_kernel, {**chunk, "ORDER": False})
        scan = {"EXPERTS": kernels.SCANNED, "ROWS": rows, "BINS": bins, "num_warps": 8}
        self._scan = step(kernels._scan_kernel, scan)
        self._place = step(kernels._place_kernel, {**shape, **chunk})

    def room(self) -> Index:
        """New tensors for a call's answer."""
        device, kind = self.device, torch.int32
        return (
            torch.empty(self.num_local_experts + 1, dtype=kind, device=device),
            torch.empty(self.capacity, dtype=kind, device=device),
            torch.empty(self.num_rows, self.num_topk, dtype=kind, device=device),
        )

    def __call__(self, local_idx: Tensor, out: Index | None = None) -> Index:
        """Group M * K local ids int32, contiguous, -1 where a choice is not here.

        Returns: out, or room().
        """
        offsets, row_index, position = out = self.room() if out is None else out
        if self.num_local_experts == 0:
            offsets.zero_()
            row_index.fill_(-1)
            position.fill_(-1)
        elif self._at_once:
            self._rank(self._programs, local_idx, *out)
        else:
            self._count(self._programs, local_idx)
            self._scan(self._scanners, offsets)
            self._place(self._programs, local_idx, *out)
        return out


def _power_of_2(value: int) -> int:
    """The next one, at least 1."""
    return 1 << (value - 1).bit_length() if value > 1 else 1
