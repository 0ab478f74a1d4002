"""Calls whose halves lie apart, and long inputs served in chunks whose halves overlap."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from moe_comm.communicator import Communicator
    from moe_comm.handle import Dispatched

T = TypeVar("T")


class Pending(Generic[T]):
    """A call whose send half is under way. `wait()` enqueues the receive half on the caller's
    current stream and returns the result; it may be called more than once."""

    def __init__(self, finish: Callable[[], T]) -> None:
        self._finish: Callable[[], T] | None = finish
        self._result: T | None = None

    def wait(self) -> T:
        """The result. On backends that block the host, blocks until it is there."""
        if self._finish is not None:
            finish, self._finish = self._finish, None
            self._result = finish()
        if self._result is None:
            raise RuntimeError("wait(): the call failed when it was first waited for")
        return self._result


def forward_in_chunks(
    comm: Communicator,
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    experts: Callable[[Dispatched], Tensor],
    *,
    num_tokens: int | None,
    bucket: int | None,
) -> Tensor:
    """See Communicator.forward. The number of chunks depends on the bucket alone."""
    limit = comm.config.max_tokens_per_rank if bucket is None else bucket
    if not 0 <= limit <= comm.config.max_tokens_per_rank:
        raise ValueError(
            f"bucket: expected 0 to {comm.config.max_tokens_per_rank} tokens, got {bucket}"
        )
    num_rows = x.shape[0]
    valid = num_rows if num_tokens is None else num_tokens
    if not 0 <= valid <= num_rows <= limit:
        raise ValueError(
            f"x, num_tokens: expected 0 <= num_tokens <= T <= {limit} (the bucket), got "
            f"num_tokens {valid} and T {num_rows}"
        )
    chunk = max(comm.config.bucket, 1)
    starts = range(0, max(limit, 1), chunk)
    out = torch.empty_like(x)
    parts: list[Tensor] = []

    def start(at: int) -> Pending[Dispatched]:
        here = slice(min(at, num_rows), min(at + chunk, num_rows))
        return comm.dispatch(
            x[here],
            topk_idx[here],
            topk_weights[here],
            num_tokens=min(max(valid - at, 0), here.stop - here.start),
            bucket=min(chunk, limit - at),
            async_op=True,
        )

    pending = start(0)
    for at in starts:
        arrived = pending.wait()
        more = at + chunk < limit
        overlap = more and comm.config.num_slots > 1
        if overlap:
            pending = start(at + chunk)
        here = slice(min(at, num_rows), min(at + chunk, num_rows))
        y = experts(arrived)
        recorded = torch.is_grad_enabled() and (
            y.requires_grad or x.requires_grad or topk_weights.requires_grad
        )
        target = None if recorded else out[here]
        parts.append(comm.combine(y, arrived.handle, out=target))
        if more and not overlap:
            pending = start(at + chunk)
    # Autograd cannot look through slices that are written into.
    return torch.cat(parts) if any(part.requires_grad for part in parts) else out
