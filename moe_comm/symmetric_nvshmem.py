"""Symmetric memory on NVSHMEM's heap: torch's symmetric memory with its NVSHMEM backend, or
nvshmem4py where that one cannot be had. NVSHMEM itself is one and the same library for both.

NVSHMEM is initialized once a process, over all ranks of the job (the default process group), and
its allocations meet all of them. So a group must hold them all. Blocks are kept until the process
ends and taken again by later communicators: freeing meets all ranks too, and a rank that has died
would keep the others there.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_comm.errors import BackendUnavailableError
from moe_comm.group import Group
from moe_comm.symmetric import Regions, SymmetricMemory

# How long a put to a rank may take that does nothing else.
GREETING_S = 30.0


def missing() -> str:
    """Why this process cannot put through NVSHMEM; empty where it can, as far as that is known
    before NVSHMEM is initialized."""
    import torch.distributed._symmetric_memory as symm_mem

    if not symm_mem.is_nvshmem_available():
        return f"torch {torch.__version__} was built without NVSHMEM"
    try:
        from torch.distributed._symmetric_memory._nvshmem_triton import NvshmemLibFinder

        NvshmemLibFinder.find_device_library()
    except (ImportError, RuntimeError) as error:
        return f"NVSHMEM's device library: {error}"
    return ""


class NvshmemSymmetricMemory(SymmetricMemory):
    """Memory of NVSHMEM's heap. Construction is collective, and puts a word to every rank to see
    whether that works.

    Args:
        group: holds every rank of the job.
        sizes: bytes of each region.
        puts: as SymmetricMemory's; without, every rank must have an address here.

    Raises BackendUnavailableError with the reason where NVSHMEM cannot be had on some rank.
    """

    def __init__(self, group: Group, sizes: Mapping[str, int], *, puts: bool) -> None:
        from moe_comm.kernels.put_remote import PAD_BYTES

        ranks = group.num_ranks
        self.regions = Regions({**sizes, "pads": ranks * PAD_BYTES, "greetings": ranks * 8})
        self.puts = puts
        world = dist.get_process_group_ranks(group.pg)
        reason = missing()
        if not reason and world != list(range(dist.get_world_size())):
            reason = (
                f"NVSHMEM allocates over all {dist.get_world_size()} ranks of the job, the group "
                f"holds {world}"
            )
        _agree(group, reason)
        self._heap = _heap_of(group)
        self._index, self.block = self._heap.take(group, self.regions.total_bytes)
        addresses = self._heap.addresses(self.block, group)
        unreached = [rank for rank, address in enumerate(addresses) if address == 0]
        _agree(
            group,
            f"stores do not reach ranks {unreached}, whose rows must be put"
            if unreached and not puts
            else "",
        )
        self.block.zero_()
        integers: dict[str, Any] = {"device": group.device}
        self.peers = torch.tensor(addresses, dtype=torch.int64, **integers)
        self.pes = torch.tensor(world, dtype=torch.int32, **integers)
        torch.cuda.synchronize(group.device)
        # No rank may write before every rank has cleared its block.
        group.barrier(timeout_s=60.0)
        if puts:
            _agree(group, self._greet(group))

    def peer_view(
        self, rank: int, name: str, shape: tuple[int, ...], dtype: torch.dtype, *, offset: int = 0
    ) -> Tensor:
        """As SymmetricMemory.peer_view; ValueError where stores do not reach the rank."""
        start, size = self.regions.span(name, shape, dtype, offset)
        peer = self._heap.peer_block(self.block, rank)
        if peer is None:
            raise ValueError(f"rank: {rank} has no address here; rows are put to it")
        return peer[start : start + size].view(dtype).view(shape)

    def close(self) -> None:
        """Give the block back to the heap."""
        self._heap.give_back(self._index)
        self.block = self.block.new_empty(0)

    def _greet(self, group: Group) -> str:
        """Put this rank's number to every rank. Returns what went wrong, or an empty text."""
        from moe_comm.kernels.put_remote import PAD_BYTES, _greet_kernel, over_nvshmem

        offsets = self.regions.offsets
        failed = ""
        try:
            over_nvshmem(_greet_kernel)[(group.num_ranks,)](
                self.block, self.peers, self.pes, offsets["pads"], offsets["greetings"],
                group.rank, PAD=PAD_BYTES, NVSHMEM=True, num_warps=1,
            )  # fmt: skip
            failed = _finished(group.device, timeout_s=GREETING_S)
        except Exception as error:  # noqa: BLE001 - compiler, linker or loader: a reason for all
            failed = f"a put failed: {type(error).__name__}: {error}"
        # Every rank's puts have arrived once all ranks are here.
        failures = group.all_gather(failed)
        if any(failures):
            return failed
        seen = self.view("greetings", (group.num_ranks,), torch.int64).tolist()
        wanted = list(range(1, group.num_ranks + 1))
        return "" if seen == wanted else f"puts did not arrive: expected {wanted}, got {seen}"


def _finished(device: torch.device, *, timeout_s: float) -> str:
    """Wait for the device, bounded: a put that hangs must not take the process with it."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    end = time.monotonic() + timeout_s
    while not event.query():
        if time.monotonic() > end:
            return f"a put to every rank did not end within {timeout_s:g} s"
        time.sleep(0.001)
    return ""


def _agree(group: Group, reason: str) -> None:
    """Raise on all ranks where one has a reason."""
    for rank, given in enumerate(group.all_gather(reason)):
        if given:
            raise BackendUnavailableError(f"NVSHMEM: {given} (rank {rank})")


class _Heap:
    """Blocks of one process on NVSHMEM's heap. Every rank has taken the same ones in the same
    order, so a block's index is the same everywhere."""

    def __init__(self, library: _Torch | _Nvshmem4py) -> None:
        self._library = library
        self._blocks: list[Tensor] = []
        self._free: set[int] = set()

    def take(self, group: Group, num_bytes: int) -> tuple[int, Tensor]:
        """(index, block of at least num_bytes): the smallest that is free on every rank, or a new
        one. Collective."""
        offered = {
            index: block.numel()
            for index, block in enumerate(self._blocks)
            if index in self._free and block.numel() >= num_bytes
        }
        everywhere = set.intersection(*(set(other) for other in group.all_gather(list(offered))))
        if everywhere:
            index = min(everywhere, key=lambda index: (offered[index], index))
            self._free.discard(index)
        else:
            block = self._library.allocate(group, num_bytes)
            # Never freed, not even when the interpreter ends: see above.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(block))
            index = len(self._blocks)
            self._blocks.append(block)
        return index, self._blocks[index]

    def give_back(self, index: int) -> None:
        """The block may be taken again."""
        self._free.add(index)

    def addresses(self, block: Tensor, group: Group) -> list[int]:
        """Address of each rank's block here, 0 where stores do not reach it."""
        return self._library.addresses(block, group)

    def peer_block(self, block: Tensor, rank: int) -> Tensor | None:
        """Another rank's block, None where stores do not reach it."""
        return self._library.peer_block(block, rank)


class _Torch:
    """torch.distributed._symmetric_memory with the backend NVSHMEM."""

    def __init__(self) -> None:
        # Rendezvous of each block, by its address.
        self._handles: dict[int, Any] = {}
        self._before: Any = None

    def missing(self, device: torch.device) -> str:
        """Why not; a process keeps the backend of its first allocation."""
        import torch.distributed._symmetric_memory as symm_mem

        before = symm_mem.get_backend(device)
        if before == "NVSHMEM":
            return ""
        try:
            symm_mem.set_backend("NVSHMEM")
        except RuntimeError as error:
            return f"torch's symmetric memory: {str(error).splitlines()[0]}"
        self._before = before
        return ""

    def withdraw(self) -> None:
        """Another rank cannot: nothing was allocated yet, so the backend goes back."""
        import torch.distributed._symmetric_memory as symm_mem

        if self._before is not None:
            # Not every torch knows a way back; allocate() then names the ranks that differ.
            with contextlib.suppress(RuntimeError):
                symm_mem.set_backend(self._before)

    def initialize(self, group: Group) -> None:
        """The first allocation does it."""

    def allocate(self, group: Group, num_bytes: int) -> Tensor:
        """A block; collective over the job."""
        import torch.distributed._symmetric_memory as symm_mem

        block = symm_mem.empty(num_bytes, dtype=torch.uint8, device=group.device)
        self._handles[block.data_ptr()] = symm_mem.rendezvous(block, group.pg.group_name)
        return block

    def addresses(self, block: Tensor, group: Group) -> list[int]:
        """As _Heap.addresses."""
        del group
        pointers: list[int] = list(self._handles[block.data_ptr()].buffer_ptrs)
        return pointers

    def peer_block(self, block: Tensor, rank: int) -> Tensor | None:
        """As _Heap.peer_block."""
        handle = self._handles[block.data_ptr()]
        if not handle.buffer_ptrs[rank]:
            return None
        peer: Tensor = handle.get_buffer(rank, (block.numel(),), torch.uint8, 0)
        return peer


class _Nvshmem4py:
    """nvshmem4py's heap; symmetric tensors and get_peer_tensor."""

    @staticmethod
    def missing(device: torch.device) -> str:
        """Why not."""
        del device
        try:
            found = importlib.util.find_spec("nvshmem.core") is not None
        except ModuleNotFoundError:
            found = False
        return "" if found else "nvshmem4py is not installed; pip install nvshmem4py-cu13"

    def withdraw(self) -> None:
        """Nothing was changed."""

    @staticmethod
    def initialize(group: Group) -> None:
        """NVSHMEM over all ranks of the job; collective."""
        import nvshmem.core as nvshmem

        # As nvshmem4py does, which needs it.
        device = importlib.import_module("cuda.core").Device(group.device.index)
        device.set_current()
        made = nvshmem.get_unique_id() if dist.get_rank() == 0 else None
        given = next(uid for uid in group.all_gather(made) if uid is not None)
        nvshmem.init(
            device=device, uid=given, rank=dist.get_rank(), nranks=dist.get_world_size(),
            initializer_method="uid",
        )  # fmt: skip

    @staticmethod
    def allocate(group: Group, num_bytes: int) -> Tensor:
        """A block; collective over the job."""
        del group
        import nvshmem.core as nvshmem

        block: Tensor = nvshmem.tensor((num_bytes,), dtype=torch.uint8)
        return block

    def addresses(self, block: Tensor, group: Group) -> list[int]:
        """As _Heap.addresses."""
        peers = (self.peer_block(block, rank) for rank in range(group.num_ranks))
        return [0 if peer is None else peer.data_ptr() for peer in peers]

    @staticmethod
    def peer_block(block: Tensor, rank: int) -> Tensor | None:
        """As _Heap.peer_block; ranks are those of the job."""
        import nvshmem.core as nvshmem

        if rank == dist.get_rank():
            return block
        try:
            peer: Tensor = nvshmem.get_peer_tensor(block, rank)
        except nvshmem.NvshmemError:
            return None
        return peer


_LIBRARIES: tuple[Callable[[], _Torch | _Nvshmem4py], ...] = (_Torch, _Nvshmem4py)
# This process's heap: NVSHMEM is initialized once.
_heaps: list[_Heap] = []


def _heap_of(group: Group) -> _Heap:
    """The heap, made over the first library that every rank has. Collective."""
    if not _heaps:
        reasons = []
        for make in _LIBRARIES:
            library = make()
            answers = group.all_gather(library.missing(group.device))
            failed = [(rank, why) for rank, why in enumerate(answers) if why]
            if not failed:
                library.initialize(group)
                _heaps.append(_Heap(library))
                break
            library.withdraw()
            reasons.append(f"{failed[0][1]} (rank {failed[0][0]})")
        else:
            raise BackendUnavailableError(f"NVSHMEM: {'; '.join(reasons)}")
    return _heaps[0]
