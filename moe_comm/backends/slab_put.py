"""The slab over puts: what is for ranks that stores do not reach waits in this rank's own block
(moe_comm.backends.slab_staging) and is forwarded (moe_comm.kernels.put_remote), by a launch between
those that send and those that wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moe_comm.backends.slab_payloads import payload_layout
from moe_comm.backends.slab_staging import (
    COMBINE_PIECES,
    DISPATCH_PIECES,
    Staged,
    part_bytes,
    stage,
)
from moe_comm.backends.slab_state import SlabState, next_power_of_2
from moe_comm.calls import DispatchCall

# Tokens of one step of a forwarding program. Few sizes, since each is compiled by itself, and
# linking NVSHMEM's library takes seconds.
TILES = (2, 16, 64)


class PutLaunches(SlabState):
    """Staging areas and forwarding; of use where the memory puts."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if not self.memory.puts:
            return
        config, ranks = self.config, self.num_ranks
        self._part_bytes = part_bytes(self.memory.regions.sizes, config.num_slots, ranks)
        shape = (config.num_slots, ranks, self._part_bytes)
        self._parts = self.memory.view("staging", shape, torch.uint8)
        slots = torch.arange(config.num_slots, device=self.device)[:, None]
        self._part_table = self._parts.data_ptr() + self._part_bytes * (
            slots * ranks + self._rank_numbers
        )
        ints: dict[str, Any] = {"dtype": torch.int32, "device": self.device}
        self._arrivals = torch.zeros(config.num_slots * self._phases, ranks, **ints)
        self._pes = self.memory.pes if self.memory.pes is not None else self._empty

    def _stage(self, slot: int, bucket: int, row_bytes: Mapping[str, int]) -> Staged:
        return stage(
            self._part_table[slot], self._part_bytes, row_bytes, bucket=bucket, rank=self.rank
        )

    def _stage_dispatch(self, call: DispatchCall) -> Staged:
        config, wire = self.config, self.config.wire
        scale = wire.scale_dtype.itemsize if wire.scale_dtype is not None else 0
        value = wire.value_dtype or call.x.dtype
        payload = payload_layout(call, config.max_payload_bytes)[1] if call.payloads else 0
        sizes = {
            "dispatch_rows": config.hidden * value.itemsize,
            "dispatch_scales": wire.num_groups(config.hidden) * scale,
            "topk_idx": config.num_topk * 4,
            "topk_weights": config.num_topk * 4,
            "payloads": payload,
        }
        return self._stage(call.slot, call.bucket, sizes)

    def _stage_combine(self, slot: int, bucket: int, dtype: torch.dtype) -> Staged:
        wire, hidden = self.config.return_wire, self.config.hidden
        scale = wire.scale_dtype.itemsize if wire.scale_dtype is not None else 0
        sizes = {
            "combine_rows": hidden * (wire.value_dtype or dtype).itemsize,
            "combine_scales": wire.num_groups(hidden) * scale,
        }
        return self._stage(slot, bucket, sizes)

    def _forward_dispatch(self, call: DispatchCall, staged: Staged) -> None:
        """Forward a dispatch, this rank's own part too, and release it. A token is for a peer where
        its staged ids say so."""
        from moe_comm.kernels.signal import DISPATCH

        first, row_bytes = staged.pieces["topk_idx"]
        marks = self._parts[call.slot].view(-1)[first:].view(torch.int32)
        self._forward(
            call.slot, staged, (0, call.bucket), marks=marks, marks_part=self._part_bytes // 4,
            num_marks=row_bytes // 4, least=0, own=True,
            channel=self._channel(call.slot, DISPATCH), num_tokens=call.num_tokens,
            num_rows=call.num_rows,
        )  # fmt: skip

    def _forward_combine(self, slot: int, bucket: int, staged: Staged, *, phase: int) -> None:
        """Forward the partial sums and release `phase`. A token has one where it has a choice
        here."""
        self._forward(
            slot, staged, (0, bucket), marks=self._slots[slot].order_count, marks_part=bucket,
            num_marks=1, least=1, own=False, channel=self._channel(slot, phase), num_tokens=0,
            num_rows=0,
        )  # fmt: skip

    def _linked(self, kernel: Any) -> Any:
        """The kernel, over NVSHMEM where that puts. Kept by name: Triton hashes a kernel by its
        source text."""
        from moe_comm.kernels.put_remote import over_nvshmem

        if self.memory.pes is None:
            return kernel
        return self._kept(("over nvshmem", kernel.__name__), lambda: over_nvshmem(kernel))

    def _forward(
        self, slot: int, staged: Staged, tokens: tuple[int, int], *, marks: Tensor, marks_part: int,
        num_marks: int, least: int, own: bool, channel: int, num_tokens: int | Tensor,
        num_rows: int,
    ) -> None:  # fmt: skip
        from moe_comm.kernels.put_remote import PAD_BYTES, _forward_kernel

        begin, end = tokens
        lanes = max(1, self.tuning.put_programs // self.num_ranks)
        enough = -(-(end - begin) // lanes)
        tile = next((tile for tile in TILES if tile >= enough), TILES[-1])
        lanes = max(1, min(lanes, -(-(end - begin) // tile)))
        offsets = self.memory.regions.offsets
        places: list[int] = []
        names = COMBINE_PIECES if "combine_rows" in staged.pieces else DISPATCH_PIECES
        for name in (*names, *DISPATCH_PIECES[len(names) :]):
            first, row_bytes = staged.pieces.get(name, (0, 0))
            place = self._base(name, slot) + staged.start * row_bytes
            places.extend((first, place, row_bytes))
        on_device = isinstance(num_tokens, Tensor)
        nvshmem = self.memory.pes is not None
        kernel = self._linked(_forward_kernel)
        warps = self.tuning.put_warps
        kernel[(lanes * self.num_ranks,)](
            self.memory.block, self._parts[slot], self.memory.peers, self._pes, self.alive, marks,
            self.state, self.status, self._arrivals, num_tokens if on_device else self._empty,
            0 if on_device else num_tokens, num_rows, *places, self._part_bytes, marks_part,
            offsets.get("pads", 0), offsets["flags"], channel, self.rank, begin, end,
            TILE=tile, MARKS=num_marks, MARKS_P=next_power_of_2(num_marks), LEAST=least, OWN=own,
            T_ON_DEVICE=on_device, R=self.num_ranks,
            NUM_CHANNELS=self._common["NUM_CHANNELS"], PAD=PAD_BYTES, POLL=self._poll(warps),
            NVSHMEM=nvshmem, num_warps=warps,
        )  # fmt: skip

    def signal_release(self, slot: int, *, send: bool = True, receive: bool = True) -> None:
        """As SlabState.signal_release."""
        from moe_comm.kernels.signal import RELEASE

        puts = self.memory.puts
        if puts and send:
            self._follow()
            self._put_release(slot, RELEASE)
        if receive or not puts:
            super().signal_release(slot, send=send and not puts, receive=receive)

    def _put_release(self, slot: int, phase: int) -> None:
        """Release a channel that speaks of no rows; phase RELEASE settles the slot's dispatch."""
        from moe_comm.kernels.put_remote import PAD_BYTES, _put_release_kernel
        from moe_comm.kernels.signal import DISPATCH, RELEASE

        nvshmem = self.memory.pes is not None
        kernel = self._linked(_put_release_kernel)
        offsets = self.memory.regions.offsets
        kernel[(self.num_ranks,)](
            self.memory.block, self.memory.peers, self._pes, self.alive, self.state, self.status,
            offsets.get("pads", 0), offsets["flags"], self._channel(slot, phase),
            self._channel(slot, DISPATCH), self.rank, R=self.num_ranks,
            NUM_CHANNELS=self._common["NUM_CHANNELS"], PAD=PAD_BYTES, FREES_SLOT=phase == RELEASE,
            POLL=self._poll(1), NVSHMEM=nvshmem, num_warps=1,
        )  # fmt: skip
