"""How the bytes of a state move: torch.distributed by default, Mooncake where it is installed.

A transport has two sides. The receiver describes itself and hands out regions; the sender writes
its segments, end to end, into them. Neither knows what the bytes mean; checksums are above.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from moe_comm.errors import BackendUnavailableError, MoeCommError
from moe_comm.model.serving.channels import DATA_TAG
from moe_comm.model.serving.segments import Segments
from moe_comm.model.serving.staged_import import Region


class TransferError(MoeCommError):
    """Bytes did not all arrive. `settled`: whether no byte of this transfer can arrive later."""

    def __init__(self, message: str, *, settled: bool) -> None:
        super().__init__(message)
        self.settled = settled


class Transport(Protocol):
    """One side's end of a byte mover. `direct`: a writer reaches the receiver's memory itself, so
    that bytes can land in a staged slot."""

    direct: bool

    def describe(self) -> dict[str, Any]:
        """What the sender needs to reach this receiver, as JSON values."""
        ...

    def expose(self, tensors: Sequence[torch.Tensor]) -> None:
        """Receiver: memory that regions may lie in."""
        ...

    def withdraw(self, tensors: Sequence[torch.Tensor]) -> None:
        """Receiver: no region lies there any more; later writes are refused."""
        ...

    def write(self, target: dict[str, Any], regions: Sequence[Region], source: Segments) -> None:
        """Sender: write the segments into the regions. TransferError where it failed."""
        ...

    def collect(self, landing: Segments, timeout_s: float) -> None:
        """Receiver, not `direct`: fill the buffers with what the sender writes."""
        ...


class GroupTransport:
    """send and receive of torch.distributed (gloo moves host memory)."""

    direct = False

    def __init__(
        self, peer: int, group: dist.ProcessGroup | None = None, *, timeout_s: float = 60.0
    ) -> None:
        self.peer, self._group, self._timeout_s = peer, group, timeout_s

    def describe(self) -> dict[str, Any]:
        return {"kind": "torch.distributed"}

    def expose(self, tensors: Sequence[torch.Tensor]) -> None:
        """Nothing to do: bytes land in buffers that `collect` is given."""

    def withdraw(self, tensors: Sequence[torch.Tensor]) -> None:
        """Nothing to do."""

    def write(self, target: dict[str, Any], regions: Sequence[Region], source: Segments) -> None:
        for tensor in source.values():
            self._wait(dist.isend, _bytes(tensor), self._timeout_s)

    def collect(self, landing: Segments, timeout_s: float) -> None:
        for tensor in landing.values():
            self._wait(dist.irecv, _bytes(tensor), timeout_s)

    def _wait(self, operation: Any, data: torch.Tensor, timeout_s: float) -> None:
        try:
            work = operation(data, self.peer, group=self._group, tag=DATA_TAG)
            done = work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            # A pending receive of the library still points at its buffer.
            raise TransferError(f"rank {self.peer}: {error}", settled=False) from error
        if done is False:
            raise TransferError(f"rank {self.peer}: no end within {timeout_s:g} s", settled=False)


class MooncakeTransport:
    """Mooncake's transfer engine over TCP: one-sided writes into the receiver's host memory.

    The engine listens on all interfaces and anyone who reaches its port can write registered
    memory: use it inside a trusted network. Raises BackendUnavailableError where the package or
    libibverbs is missing, with the command that helps.
    """

    direct = True

    def __init__(self, host: str = "127.0.0.1", *, protocol: str = "tcp") -> None:
        try:
            from mooncake.engine import TransferEngine
        except ImportError as error:
            raise BackendUnavailableError(
                f"mooncake: {error}. pip install 'mooncake-transfer-engine-non-cuda>=0.3.12.post1' "
                "and install libibverbs1"
            ) from error
        self._engine = TransferEngine()
        status = self._engine.initialize(host, "P2PHANDSHAKE", protocol, "")
        if status != 0:
            raise BackendUnavailableError(f"mooncake: initialize({host!r}) returned {status}")
        self._session = f"{host}:{self._engine.get_rpc_port()}"
        self._exposed: list[tuple[int, int]] = []

    def describe(self) -> dict[str, Any]:
        return {"kind": "mooncake", "session": self._session}

    def expose(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            if tensor.device.type != "cpu":
                raise ValueError(f"tensors: expected host memory, got {tensor.device}")
            address, nbytes = tensor.data_ptr(), tensor.numel() * tensor.element_size()
            if nbytes and (address, nbytes) not in self._exposed:
                self._register(address, nbytes)
                self._exposed.append((address, nbytes))

    def withdraw(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            known = (tensor.data_ptr(), tensor.numel() * tensor.element_size())
            if known in self._exposed:
                self._engine.unregister_memory(known[0])
                self._exposed.remove(known)

    def write(self, target: dict[str, Any], regions: Sequence[Region], source: Segments) -> None:
        session = target.get("session")
        if target.get("kind") != "mooncake" or not isinstance(session, str):
            raise TransferError(f"the receiver speaks {target!r}, not mooncake", settled=True)
        data = torch.cat([_bytes(tensor) for tensor in source.values()])
        wanted = sum(region.nbytes for region in regions)
        if data.numel() != wanted:
            raise TransferError(
                f"regions: expected {data.numel()} bytes, got {wanted}", settled=True
            )
        self._register(data.data_ptr(), data.numel())
        try:
            status = self._engine.batch_transfer_sync_write(
                session,
                list(_offsets(data.data_ptr(), regions)),
                [region.address for region in regions],
                [region.nbytes for region in regions],
            )
        finally:
            self._engine.unregister_memory(data.data_ptr())
        if status != 0:
            # A write that timed out may still be on its way.
            raise TransferError(f"mooncake: write to {session} returned {status}", settled=False)

    def collect(self, landing: Segments, timeout_s: float) -> None:
        """Nothing to do: writes land without the receiver's help."""

    def close(self) -> None:
        """Withdraw the exposed memory: later writes are refused."""
        for address, _ in self._exposed:
            self._engine.unregister_memory(address)
        self._exposed.clear()

    def _register(self, address: int, nbytes: int) -> None:
        status = self._engine.register_memory(address, nbytes)
        if status != 0:
            raise BackendUnavailableError(
                f"mooncake: register_memory of {nbytes} bytes returned {status}"
            )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _offsets(address: int, regions: Sequence[Region]) -> Iterator[int]:
    for region in regions:
        yield address
        address += region.nbytes
