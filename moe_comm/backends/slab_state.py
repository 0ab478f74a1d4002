"""What one rank's slab consists of: memory, counters, streams, and where everything lies.

Legend: R ranks, B the bucket, T tokens here, H hidden, G scale groups, K choices, L local experts,
S slots. The slab of one slot holds row (source, token) at source * B + token, so no rank has to
know any other's counts before rows move.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_comm.backends.slab_modes import SlabTuning
from moe_comm.backends.slab_payloads import PAYLOAD_ALIGNMENT
from moe_comm.config import EPConfig
from moe_comm.status import Status, StatusBit
from moe_comm.symmetric import SymmetricMemory
from moe_comm.wire import Wire

WIRE_CODE = {"bf16": 0, "none": 0, "fp8": 1, "mxfp8": 2}


def next_power_of_2(n: int) -> int:
    """The smallest power of two >= max(n, 1)."""
    return 1 << max(n - 1, 0).bit_length()


def alignment(row_bytes: int) -> int:
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
class Slot:
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


class SlabState:
    """Memory and counters of one rank, without a process group.

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
        # The same on the host, for copies.
        self.masked: set[int] = set()
        self._bucket = config.bucket
        capacity = config.expert_row_capacity(num_ranks, num_local_experts, self._bucket)
        width, rows = config.num_topk, num_ranks * self._bucket

        def ints_of(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self._slots = [
            Slot(
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
        # Of each slot whose combine is between its halves: what the side stream still reads.
        self._staging: dict[int, Tensor] = {}
        # Slots that were given back without a combine at some time.
        self._released_slots: set[int] = set()
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
        self.masked.add(rank)
        self.refresh_routing()
        self.status.zero_()
        self.state[0] += self.state[1]
        self.state[1].zero_()

    def read_counters(self) -> list[int]:
        """Settled releases of each channel. Synchronizes."""
        counters: list[int] = self.state[0].tolist()
        return counters

    def agree_on_counters(self, counters: list[list[int]]) -> None:
        """Go on from the furthest of every survivor's read_counters(): a failure may have reached
        them in different calls, and a rank that is behind would take an old release for a new one.
        What was released is taken for waited for."""
        from moe_comm.kernels.signal import RELEASE

        furthest = []
        for first, *others in zip(*counters, strict=True):
            # Differences wrap, as the counters do.
            ahead = max(((other - first + 2**31) % 2**32 - 2**31 for other in others), default=0)
            furthest.append((first + max(ahead, 0) + 2**31) % 2**32 - 2**31)
        self.state[0].copy_(torch.tensor(furthest, dtype=torch.int32))
        self.state[2, RELEASE :: self._phases] = self.state[0, RELEASE :: self._phases]

    def refresh_routing(self) -> None:
        """Take the placement's table over, less the masked ranks; in place."""
        ranks = self._copy_table[..., :1]
        dead = (ranks >= 0) & (self.alive[ranks.clamp_min(0).long()] == 0)
        self.routing_table.copy_(torch.where(dead, -1, self._copy_table))

    def signal_release(self, slot: int) -> None:
        """Tell every rank that this one has read what it needs of the slot."""
        from moe_comm.kernels.signal import RELEASE

        self._released_slots.add(slot)
        self._release(slot, RELEASE)

    # Streams and signals.

    def _fork(self) -> None:
        """The side stream goes on from here."""
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream(self.device))

    def _join(self) -> None:
        """The current stream goes on after the side stream."""
        if self._side is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._side)

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
        """Bytes into the region at which the slot's part begins: at a whole row of it. Payloads'
        rows are whole multiples of PAYLOAD_ALIGNMENT, whatever max_payload_bytes is."""
        part = self.memory.regions.sizes[name] // self.config.num_slots
        if name == "payloads":
            part -= part % PAYLOAD_ALIGNMENT
        return slot * part

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
