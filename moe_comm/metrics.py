"""A small snapshot of what a communicator did, and hooks that see every call."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch


@dataclass(kw_only=True)
class Metrics:
    """Counts since creation. Bytes are counted where the host knows them (c10d); other backends
    count calls alone.

    Attributes:
        dispatches, combines: calls.
        sent_bytes: bytes handed to the transport for other ranks.
        cross_node_bytes: those of them for ranks of other nodes.
        timeouts: PeerTimeoutErrors raised.
        errors: other recorded errors raised by check().
        fallbacks: backends that were tried before this one.
    """

    dispatches: int = 0
    combines: int = 0
    sent_bytes: int = 0
    cross_node_bytes: int = 0
    timeouts: int = 0
    errors: int = 0
    fallbacks: int = 0

    def snapshot(self) -> dict[str, int]:
        """A plain copy."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, kw_only=True)
class CallEvent:
    """What a hook sees: `phase` ("dispatch" or "combine"), `call` (its number), `backend`,
    `mode`, `bucket` and `rank`. Sent when the call is enqueued, not when it is done."""

    phase: str
    call: int
    backend: str
    mode: str
    bucket: int
    rank: int


Hook = Callable[[CallEvent], None]


@contextlib.contextmanager
def nvtx_range(name: str, *, enabled: bool) -> Iterator[None]:
    """An NVTX range where CUDA is in use; nothing elsewhere."""
    if not enabled:
        yield
        return
    torch.cuda.nvtx.range_push(name)
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()
