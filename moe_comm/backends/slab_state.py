"""What one rank's slab consists of: private memory, counters and the status word, and signals.

Legend: R ranks, B the bucket, T tokens here, H hidden, G scale groups, K choices, L local experts,
S slots. The slab of one slot holds row (source, token) at source * B + token, so no rank has to
know any other's counts before rows move.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_comm.backends.kernel_keys import settle_keys
from moe_comm.backends.slab_launch import Form, Places, launch
from moe_comm.backends.slab_modes import SlabTuning
from moe_comm.backends.slab_places import alignment, next_power_of_2, starts_of_a_rank
from moe_comm.backends.slab_staging import staging_bytes
from moe_comm.backends.slab_streams import SlabStreams
from moe_comm.config import EPConfig
from moe_comm.status import Status, StatusBit
from moe_comm.symmetric import SymmetricMemory

__all__ = [
    "WIRE_CODE",
    "SlabState",
    "Slot",
    "alignment",
    "next_power_of_2",
    "region_sizes",
]

STICKY = StatusBit.TIMEOUT | StatusBit.PHASE
WIRE_CODE = {"bf16": 0, "none": 0, "fp8": 1, "mxfp8": 2}


def region_sizes(config: EPConfig, num_ranks: int, *, puts: bool = False) -> dict[str, int]:
    """Bytes of each region of a rank's block: EPConfig.buffer_bytes, what sources say of their
    choices (moe_comm.kernels.ranked_index and .chunked_index), the flags and, where rows are put,
    the area in which they wait."""
    from moe_comm.kernels import signal

    sizes = config.buffer_bytes(num_ranks)
    del sizes["total"]
    choices = config.bucket * config.num_topk
    starts = starts_of_a_rank(config.placement_for(num_ranks).max_local_experts)
    sizes["choices"] = config.num_slots * num_ranks * choices * 16
    sizes["starts"] = config.num_slots * num_ranks * starts * 8
    if puts:
        sizes["staging"] = staging_bytes(sizes, config.num_slots, num_ranks)
    sizes["flags"] = config.num_slots * signal.NUM_PHASES * num_ranks * 8
    return sizes


@dataclass(kw_only=True)
class Slot:
    """Private memory of a slot, int32 but for the weights. Of this rank's tokens: choice_rank
    [B, K], and the ranks of each in the order combine adds, fold_rank [B, K] and fold_count [B].
    Of received rows: tokens [R], readable [1] (choices that may be
    read), offsets [L + 1], row_index [capacity], position [R * B, K], and
    each row's choices here without gaps, order and order_weights [R * B, K], order_count
    [R * B]. words: int64, what programs of an index tell each other
    (moe_comm.kernels.chunked_index)."""

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
    words: Tensor


class SlabState(SlabStreams):
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

        settle_keys()
        super().__init__(
            config,
            rank=rank,
            num_ranks=num_ranks,
            num_local_experts=num_local_experts,
            memory=memory,
            tuning=tuning or SlabTuning(),
        )
        self._copy_table, self.num_copies = copy_table, num_copies
        # The copy table with the ranks that are masked taken out; read by captured graphs.
        self.routing_table = copy_table.clone()
        device, channels = self.device, self._common["NUM_CHANNELS"]
        self._tells_directly = num_ranks <= self.tuning.direct_ranks and not memory.puts
        ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self.state = torch.zeros(signal.STATE_ROWS, channels, **ints)
        # Of the first failure, here and on the host; the address of the latter follows the former.
        words = torch.zeros(signal.STATUS_WORDS + 2, **ints)
        self.status = words[: signal.STATUS_WORDS]
        self._told = torch.zeros(
            signal.STATUS_WORDS, dtype=torch.int32, pin_memory=device.type == "cuda"
        )
        words[signal.STATUS_WORDS :].view(torch.int64).fill_(self._told.data_ptr())
        # Read on every call.
        self._told_bits = ctypes.c_int32.from_address(self._told.data_ptr())
        # Whether the last call had begun to launch what it sends or receives.
        self.under_way = False
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
                words=torch.zeros(self._num_words(), dtype=torch.int64, device=device),
            )
            for _ in range(config.num_slots)
        ]
        self._empty = torch.zeros(1, **ints)
        self._rank_numbers = torch.arange(num_ranks, device=device)
        choices = rows * width
        self._workspace = torch.zeros(workspace_size(choices, num_local_experts), **ints)
        self._multiprocessors = (
            torch.cuda.get_device_properties(device).multi_processor_count
            if device.type == "cuda"
            else 1
        )
        self.flags = memory.view("flags", (channels, num_ranks), torch.int64)
        self._empty_returned()
        # Others write there once they have seen a call of this rank, on whatever stream it is.
        self._synchronize()
        self._wait_form = Form({**self._common, "POLL": self._poll(1), "num_warps": 1}, blocks=1)

    def seed_counters(self, count: int) -> None:
        """Set every counter as after `count` releases on each channel: a test that counters may
        wrap. All ranks seed alike, before the first call."""
        wrapped = (count + 2**31) % 2**32 - 2**31
        self.state[0].fill_(wrapped)
        self.flags.fill_(wrapped << 32)
        # Words of an earlier call, whatever the count.
        for name in ("choices", "starts"):
            words = self.memory.regions.sizes[name] // 8
            self.memory.view(name, (words,), torch.int64).fill_(wrapped << 32)
        for slot in self._slots:
            slot.words.fill_(wrapped << 32)

    def _num_words(self) -> int:
        """Words of a slot's programs, at the largest bucket whose choices are counted."""
        from moe_comm.kernels.chunked_index import chunks_of, num_words

        topk = self.config.num_topk
        bucket = min(self._bucket, self.tuning.counted_choices // topk)
        chunks = chunks_of(self.num_ranks * bucket, next_power_of_2(topk), self._tile())
        return num_words(chunks, self.num_local_experts)

    def read_status(self) -> Status:
        """The status word; bits that are not sticky are cleared. Synchronizes."""
        words = self.status.tolist()
        bits = StatusBit(words[0])
        sticky = bits & STICKY
        if bits != sticky:
            self.status[0] = int(sticky)
        return self._status_of(words)

    def has_failed(self) -> bool:
        """Whether the device has told the host of a timeout or a phase error. Costs nothing."""
        return self._told_bits.value != 0

    def told_status(self) -> Status:
        """That failure. Does not synchronize."""
        return self._status_of(self._told.tolist())

    def _status_of(self, words: list[int]) -> Status:
        bits = StatusBit(words[0])
        if not bits & STICKY:
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
        # What is still under way may tell the host what it found.
        self._synchronize()
        self._told.zero_()

    def read_counters(self) -> list[int]:
        """Settled releases of each channel. Synchronizes."""
        counters: list[int] = self.state[0].tolist()
        return counters

    def agree_on_counters(self, counters: list[list[int]]) -> None:
        """Go on from the furthest of every survivor's read_counters(): a failure may have reached
        them in different calls, and a rank that is behind would take an old release for a new
        one. Synchronizes, so that a barrier after it holds for the device too."""
        furthest = []
        for first, *others in zip(*counters, strict=True):
            # Differences wrap, as the counters do.
            ahead = max(((other - first + 2**31) % 2**32 - 2**31 for other in others), default=0)
            furthest.append((first + max(ahead, 0) + 2**31) % 2**32 - 2**31)
        self.state[0].copy_(torch.tensor(furthest, dtype=torch.int32))
        # A call that failed may have left partial sums.
        self._empty_returned()
        # What arrived is counted on from, so every source's words start from the agreed count too.
        self.flags.copy_((self.state[0].long() << 32).unsqueeze(1).expand_as(self.flags))
        self._synchronize()

    def refresh_routing(self) -> None:
        """Take the placement's table over, less the masked ranks; in place."""
        ranks = self._copy_table[..., :1]
        dead = (ranks >= 0) & (self.alive[ranks.clamp_min(0).long()] == 0)
        self.routing_table.copy_(torch.where(dead, -1, self._copy_table))

    def signal_release(self, slot: int, *, send: bool = True, receive: bool = True) -> None:
        """Give a slot back without a combine: tell every rank that this one has read what it needs
        of it, and wait for the same from all, so that the slot may be written whatever comes next,
        captured or not. One launch, or one a half."""
        from moe_comm.kernels.signal import DISPATCH, RELEASE
        from moe_comm.kernels.slot_signals import _free_slot_kernel

        self._follow()
        _free_slot_kernel[(1,)](
            self.memory.peers, self.alive, self.state, self.status, self.flags,
            self.memory.regions.offsets["flags"], self._channel(slot, RELEASE),
            self._channel(slot, DISPATCH), self.rank, self._timeout_ns(), SEND=send,
            RECEIVE=receive, POLL=self._poll(1), num_warps=1, **self._common,
        )  # fmt: skip

    # Signals.

    def _wait(self, slot: int, phase: int, *, releases: int = 1) -> None:
        from moe_comm.kernels.slot_signals import _wait_kernel

        places = self._kept(
            ("wait", slot, phase, releases),
            lambda: Places(
                _wait_kernel, 0, alive_ptr=self.alive, state_ptr=self.state,
                status_ptr=self.status, flags_ptr=self.flags, channel=self._channel(slot, phase),
                releases=releases, rank=self.rank, timeout_ns=self._wait_ns,
            ),
        )  # fmt: skip
        launch(_wait_kernel, 1, places, self._wait_form, ())
