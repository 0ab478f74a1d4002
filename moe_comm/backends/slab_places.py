"""Where the parts of a slab lie: offsets and views of a slot at a bucket, made once and kept.

Legend: R ranks, B the bucket, H hidden, G scale groups, K choices.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from moe_comm.backends.slab_modes import Plan, SlabTuning
from moe_comm.backends.slab_payloads import PAYLOAD_ALIGNMENT
from moe_comm.config import EPConfig
from moe_comm.symmetric import SymmetricMemory

# Things kept, of any kind. A slot and bucket have about ten; more buckets than fit are made anew.
MOST_KEPT = 2048
# Integers of a number of bytes.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
T = TypeVar("T")


def next_power_of_2(n: int) -> int:
    """The smallest power of two >= max(n, 1)."""
    return 1 << max(n - 1, 0).bit_length()


def alignment(row_bytes: int) -> int:
    """The largest power of two up to 16 that every row of this size is aligned to."""
    return min(16, row_bytes & -row_bytes)


def starts_of_a_rank(max_local_experts: int) -> int:
    """P of moe_comm.kernels.ranked_index: every expert's start and the end, and so many more that a
    slot's starts are a multiple of 16 bytes."""
    return -(-(max_local_experts + 1) // 4) * 4


class Received(NamedTuple):
    """Views of what a dispatch brings: rows [R, B, H], scales [R, B, G] or None, ids and weights
    [R, B, K]."""

    rows: Tensor
    scales: Tensor | None
    ids: Tensor
    weights: Tensor


class SlabPlaces:
    """Numbers and views that calls have in common.

    Args:
        config: the shape.
        rank, num_ranks, num_local_experts: who this is.
        memory: this rank's symmetric memory.
        tuning: knobs.
    """

    def __init__(
        self,
        config: EPConfig,
        *,
        rank: int,
        num_ranks: int,
        num_local_experts: int,
        memory: SymmetricMemory,
        tuning: SlabTuning,
    ) -> None:
        from moe_comm.kernels.signal import NUM_PHASES

        self.config, self.rank, self.num_ranks = config, rank, num_ranks
        self.num_local_experts, self.memory, self.tuning = num_local_experts, memory, tuning
        self.device = memory.block.device
        self._interpret = self.device.type == "cpu"
        self._phases = NUM_PHASES
        self._starts = starts_of_a_rank(config.placement_for(num_ranks).max_local_experts)
        self._wait_ns = int(config.wait_s * 1e9)
        channels = config.num_slots * NUM_PHASES
        # Constants of every kernel that signals.
        self._common: dict[str, Any] = {
            "R": num_ranks,
            "RP": max(next_power_of_2(num_ranks), 2),
            "NUM_CHANNELS": channels,
            "CHANNELS_P": next_power_of_2(channels),
            "INTERPRET": self._interpret,
        }
        self._memo: dict[Hashable, Any] = {}

    def _kept(self, key: Hashable, make: Callable[[], T]) -> T:
        """What make() gave the first time it was asked for by this key."""
        found: T | None = self._memo.get(key)
        if found is None:
            if len(self._memo) >= MOST_KEPT:
                self._memo.clear()
            # Views are used in and outside of inference mode.
            with torch.inference_mode(False):
                found = self._memo[key] = make()
        return found

    # Numbers.

    def _plan(self, bucket: int) -> Plan:
        return self._kept(
            ("plan", bucket), lambda: self.tuning.plan(self.config, bucket, self.num_ranks)
        )

    def _capacity(self, bucket: int) -> int:
        return self.config.expert_row_capacity(self.num_ranks, self.num_local_experts, bucket)

    def _dispatch_block(self) -> tuple[int, int]:
        """(columns of a block, warps): a power of two, at least one scale group."""
        least = max(next_power_of_2(self.config.hidden), self.config.wire.group, 32)
        return min(self.tuning.dispatch_block, least), self.tuning.dispatch_warps

    def _tile(self) -> int:
        """TILE of a dispatch's index: an element a thread at least, since what others write is
        read, and by one thread each; and a row's choices."""
        from moe_comm.kernels.ranked_index import TILE

        return max(TILE, 32 * self.tuning.dispatch_warps, next_power_of_2(self.config.num_topk))

    def _combine_block(self, bucket: int) -> tuple[int, int]:
        """The same for combine."""
        group = self.config.return_wire.group
        plan = self._plan(bucket)
        block, warps = plan.combine_block, plan.combine_warps
        block = min(block, max(next_power_of_2(self.config.hidden), group, 32))
        # An element a thread at least: what others write is read, and no two threads read the same.
        return block, min(warps, block // 32)

    def _poll(self, warps: int) -> int:
        """Elements of a polling tensor: one a thread, so that warps cannot disagree."""
        return max(32 * warps, int(self._common["RP"]))

    def _timeout_ns(self) -> int:
        return self._wait_ns

    def _channel(self, slot: int, phase: int) -> int:
        return slot * self._phases + phase

    def _phase_name(self, channel: int) -> str:
        if channel < 0:
            return ""
        phase = channel % self._phases
        names = ("dispatch", "dispatch (rows)", "release")
        return names[phase] if phase < len(names) else "combine"

    def _offset(self, name: str, slot: int) -> int:
        """Bytes into the region at which the slot's part begins: at a whole row of it. Payloads'
        rows are whole multiples of PAYLOAD_ALIGNMENT, whatever max_payload_bytes is."""
        part = self.memory.regions.sizes[name] // self.config.num_slots
        if name == "payloads":
            part -= part % PAYLOAD_ALIGNMENT
        return slot * part

    def _base(self, name: str, slot: int) -> int:
        """Bytes into the block."""
        return self.memory.regions.offsets[name] + self._offset(name, slot)

    # Views.

    def _view(self, name: str, slot: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self._kept(
            (name, slot, shape, dtype),
            lambda: self.memory.view(name, shape, dtype, offset=self._offset(name, slot)),
        )

    def _ids(self, slot: int, bucket: int) -> Tensor:
        shape = (self.num_ranks * bucket, self.config.num_topk)
        return self._view("topk_idx", slot, shape, torch.int32)

    def _weights(self, slot: int, bucket: int) -> Tensor:
        shape = (self.num_ranks, bucket, self.config.num_topk)
        return self._view("topk_weights", slot, shape, torch.float32)

    def _received(self, slot: int, bucket: int, dtype: torch.dtype) -> Received:
        """`dtype`: of x, for wire none."""

        def make() -> Received:
            config, wire, room = self.config, self.config.wire, (self.num_ranks, bucket)
            value = wire.value_dtype or dtype
            scales = None
            if wire.scale_dtype is not None:
                shape = (*room, wire.num_groups(config.hidden))
                scales = self._view("dispatch_scales", slot, shape, wire.scale_dtype)
            return Received(
                rows=self._view("dispatch_rows", slot, (*room, config.hidden), value),
                scales=scales,
                ids=self._view("topk_idx", slot, (*room, config.num_topk), torch.int32),
                weights=self._weights(slot, bucket),
            )

        return self._kept(("received", slot, bucket, dtype), make)

    def _returned(self, slot: int, bucket: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Bits of partial sums from every rank, [R * B, H], and of their scales [R * B, G]."""
        wire, rows = self.config.return_wire, self.num_ranks * bucket
        kind = _BITS[(wire.value_dtype or dtype).itemsize]
        values = self._view("combine_rows", slot, (rows, self.config.hidden), kind)
        if wire.scale_dtype is None:
            return values, None
        shape = (rows, wire.num_groups(self.config.hidden))
        return values, self._view("combine_scales", slot, shape, _BITS[wire.scale_dtype.itemsize])

    def _empty_returned(self) -> None:
        """Memory of partial sums as it is between combines: all ones (moe_comm.kernels.combine)."""
        for name in ("combine_rows", "combine_scales"):
            if size := self.memory.regions.sizes[name]:
                self.memory.view(name, (size,), torch.uint8).fill_(0xFF)

    def _rows_at(
        self, peer: int, name: str, slot: int, bucket: int, dtype: torch.dtype, columns: int
    ) -> Tensor:
        """[B, columns]: this rank's rows in a region of another rank's memory; for copies."""

        def make() -> Tensor:
            offset = self._offset(name, slot) + self.rank * bucket * columns * dtype.itemsize
            return self.memory.peer_view(peer, name, (bucket, columns), dtype, offset=offset)

        return self._kept(("rows at", peer, name, slot, bucket, dtype), make)

    def _word_at(self, peer: int, channel: int) -> Tensor:
        """int64 scalar: this rank's word of a channel in another rank's memory; for copies."""

        def make() -> Tensor:
            offset = (channel * self.num_ranks + self.rank) * 8
            return self.memory.peer_view(peer, "flags", (), torch.int64, offset=offset)

        return self._kept(("word at", peer, channel), make)
