"""Symmetric memory: one block a rank, laid out alike on all, that the others can write into.

Named regions are reserved before the one rendezvous; views are bounds-checked; a table of the
ranks' base addresses lies on the device. Providers: torch (CUDA symmetric memory), NVSHMEM
(moe_comm.symmetric_nvshmem: torch's or nvshmem4py's heap), and virtual (all ranks' blocks in this
process's memory, for tests). No multicast anywhere.

Stores reach the blocks of ranks that have an address here. Where some rank has none, or where
MOE_COMM_SLAB_FORCE_PUT asks for it, the memory is NVSHMEM's and `puts`: what is for other ranks
waits in this rank's own block and is forwarded by NVSHMEM's device-side puts.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_comm import env
from moe_comm.errors import BackendUnavailableError
from moe_comm.group import Group
from moe_comm.topology import Topology

ALIGNMENT = 256


class Regions:
    """Named byte ranges of a block, in the order given, each aligned to 256 bytes."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.offsets: dict[str, int] = {}
        self.sizes: dict[str, int] = {}
        at = 0
        for name, size in sizes.items():
            if size < 0:
                raise ValueError(f"sizes[{name!r}]: expected bytes >= 0, got {size}")
            self.offsets[name], self.sizes[name] = at, size
            at += -(-size // ALIGNMENT) * ALIGNMENT
        self.total_bytes = max(at, ALIGNMENT)

    def span(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, offset: int
    ) -> tuple[int, int]:
        """(first byte, bytes) of a view inside the block; ValueError where it leaves its region."""
        if name not in self.offsets:
            raise ValueError(f"region: expected one of {', '.join(self.offsets)}, got {name!r}")
        size = math.prod(shape) * dtype.itemsize
        if offset < 0 or offset % dtype.itemsize or offset + size > self.sizes[name]:
            raise ValueError(
                f"region {name!r}: [{offset}, {offset + size}) of {dtype} leaves or misaligns its "
                f"{self.sizes[name]} bytes"
            )
        return self.offsets[name] + offset, size


class SymmetricMemory(abc.ABC):
    """This rank's block, and the way to the others'.

    Attributes:
        regions: the common layout.
        block: uint8 [total_bytes], this rank's memory.
        peers: int64 [R] on the device, base address of each rank's block; 0 where stores of this
            rank do not reach it.
        puts: what is for other ranks waits in this block and is forwarded by puts.
        pes: int32 [R] on the device, NVSHMEM's number of each rank; None where the memory is not
            NVSHMEM's.
    """

    regions: Regions
    block: Tensor
    peers: Tensor
    puts: bool = False
    pes: Tensor | None = None

    def view(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, *, offset: int = 0
    ) -> Tensor:
        """A tensor over this rank's region, `offset` bytes into it."""
        start, size = self.regions.span(name, shape, dtype, offset)
        return self.block[start : start + size].view(dtype).view(shape)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in this rank's block."""
        return 0 <= tensor.data_ptr() - self.block.data_ptr() < self.block.numel()

    @abc.abstractmethod
    def peer_view(
        self, rank: int, name: str, shape: tuple[int, ...], dtype: torch.dtype, *, offset: int = 0
    ) -> Tensor:
        """As view, of another rank's block; for copies."""

    def close(self) -> None:  # noqa: B027 - memory of torch's allocator frees itself
        """Free the block where its library has an explicit way."""


class TorchSymmetricMemory(SymmetricMemory):
    """CUDA memory shared by torch.distributed._symmetric_memory. Construction is collective."""

    def __init__(self, group: Group, sizes: Mapping[str, int]) -> None:
        import torch.distributed._symmetric_memory as symm_mem

        self.regions = Regions(sizes)
        self.block = symm_mem.empty(
            self.regions.total_bytes, dtype=torch.uint8, device=group.device
        )
        self._handle: Any = symm_mem.rendezvous(self.block, group.pg.group_name)
        self.block.zero_()
        self.peers = torch.tensor(
            list(self._handle.buffer_ptrs), dtype=torch.int64, device=group.device
        )
        torch.cuda.synchronize(group.device)
        # No rank may write before every rank has cleared its block.
        group.barrier(timeout_s=60.0)

    def peer_view(
        self, rank: int, name: str, shape: tuple[int, ...], dtype: torch.dtype, *, offset: int = 0
    ) -> Tensor:
        start, _ = self.regions.span(name, shape, dtype, offset)
        view: Tensor = self._handle.get_buffer(rank, shape, dtype, start // dtype.itemsize)
        return view

    def close(self) -> None:
        del self._handle
        self.block = self.block.new_empty(0)


class VirtualSymmetricMemory(SymmetricMemory):
    """The blocks of all ranks in one process's memory: a rank's peers are its neighbours there."""

    def __init__(
        self, blocks: Sequence[Tensor] | Tensor, rank: int, regions: Regions, *, puts: bool = False
    ) -> None:
        self.regions, self.puts = regions, puts
        self._blocks = blocks
        self.block = blocks[rank]
        self.peers = torch.tensor(
            [block.data_ptr() for block in blocks], dtype=torch.int64, device=self.block.device
        )

    @classmethod
    def create(
        cls,
        num_ranks: int,
        sizes: Mapping[str, int],
        device: torch.device,
        *,
        puts: bool = False,
    ) -> list[VirtualSymmetricMemory]:
        """One object a rank over a common allocation, cleared. With `puts` the ranks forward as
        over NVSHMEM, by plain stores."""
        regions = Regions(sizes)
        blocks = torch.zeros(num_ranks, regions.total_bytes, dtype=torch.uint8, device=device)
        return [cls(blocks, rank, regions, puts=puts) for rank in range(num_ranks)]

    def peer_view(
        self, rank: int, name: str, shape: tuple[int, ...], dtype: torch.dtype, *, offset: int = 0
    ) -> Tensor:
        start, size = self.regions.span(name, shape, dtype, offset)
        return self._blocks[rank][start : start + size].view(dtype).view(shape)


def unreached(topology: Topology) -> str:
    """Why stores do not reach every rank's memory, as far as the topology tells; empty where they
    do."""
    if topology.num_nodes > 1:
        return f"the ranks span {topology.num_nodes} nodes"
    if not topology.peer_access:
        return "some GPUs have no direct access to others (NVLink or PCIe P2P)"
    return ""


def needs_puts(group: Group) -> bool:
    """Whether this group's ranks put. Collective: one rank that is told to, or that does not reach
    another, decides for all."""
    if any(group.all_gather(env.SLAB_FORCE_PUT.get())):
        return True
    return bool(unreached(Topology.detect(group)))


def allocate(group: Group, sizes: Mapping[str, int], *, puts: bool) -> SymmetricMemory:
    """Symmetric memory with these regions, cleared on every rank. Collective.

    Args:
        sizes: bytes of each region.
        puts: needs_puts() of the group.

    Raises BackendUnavailableError where it puts and NVSHMEM cannot be had, with the reason.
    """
    import torch.distributed._symmetric_memory as symm_mem

    # Processes that have gone over to NVSHMEM's heap take everything from there: torch's tensors on
    # it would be freed, which all ranks must do together.
    found = group.all_gather(symm_mem.get_backend(group.device))
    if len(set(found)) > 1:
        raise BackendUnavailableError(
            f"the ranks' symmetric memory has different backends: {found}; call "
            "torch.distributed._symmetric_memory.set_backend() alike on all, before its first use"
        )
    if not puts and found[0] != "NVSHMEM":
        return TorchSymmetricMemory(group, sizes)
    from moe_comm.symmetric_nvshmem import NvshmemSymmetricMemory

    return NvshmemSymmetricMemory(group, sizes, puts=puts)
