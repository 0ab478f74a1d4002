"""Ranks of a slab that share one process, each on a device of its own or several on one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from moe_comm.backends.slab import SlabCommunicator
from moe_comm.backends.slab_engine import region_sizes
from moe_comm.backends.slab_modes import SlabTuning
from moe_comm.config import EPConfig
from moe_comm.group import Group
from moe_comm.symmetric import Regions, VirtualSymmetricMemory


@dataclass(frozen=True, kw_only=True)
class VirtualGroup:
    """What a communicator asks of its group, for a rank that shares its process with the others."""

    rank: int
    num_ranks: int
    device: torch.device


class ApartMemory(VirtualSymmetricMemory):
    """Blocks of one process on several devices."""

    def peer_view(
        self, rank: int, name: str, shape: tuple[int, ...], dtype: torch.dtype, *, offset: int = 0
    ) -> Tensor:
        view = super().peer_view(rank, name, shape, dtype, offset=offset)
        return view if view.device == self.block.device else _as_here(view, self.block.device)


def _as_here(tensor: Tensor, device: torch.device) -> Tensor:
    """Memory of another GPU under this one's name, as symmetric memory has it: torch's copies
    between devices wait for events of both, which no capture allows."""
    size = tensor.numel() * tensor.element_size()
    storage = torch._C._construct_storage_from_data_pointer(tensor.data_ptr(), device, size)
    alias: Tensor = torch.empty(0, dtype=tensor.dtype, device=device).set_(
        storage, 0, tensor.shape, tensor.stride()
    )
    return alias


def apart(
    config: EPConfig, devices: Sequence[torch.device], tuning: SlabTuning
) -> list[SlabCommunicator]:
    """A communicator a device, rank by rank. Devices may come more than once."""
    count = len(devices)
    regions = Regions(region_sizes(config, count))
    blocks = [torch.zeros(regions.total_bytes, dtype=torch.uint8, device=d) for d in devices]
    for one in blocks:
        # Torch's own copy, once: it switches peer access on.
        one[:1].copy_(blocks[0][:1])
        blocks[0][:1].copy_(one[:1])
    comms = []
    for rank, device in enumerate(devices):
        with on(device):
            group = cast(Group, VirtualGroup(rank=rank, num_ranks=count, device=device))
            memory = ApartMemory(blocks, rank, regions)
            comms.append(SlabCommunicator(config, group, tuning=tuning, memory=memory))
    return comms


@contextlib.contextmanager
def on(device: torch.device, stream: torch.cuda.Stream | None = None) -> Iterator[None]:
    """On a device, and a stream of it; nothing on a CPU."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield
