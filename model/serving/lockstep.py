"""What all ranks agree on before each step: the token bucket, the clock, and whether to go on."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from moe_comm.errors import PeerTimeoutError


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """`bucket`: the largest rank's tokens, rounded up to a power of two (0: nobody has any).
    `unfinished`: whether any rank has requests left. `now`: the latest rank's clock, seconds."""

    bucket: int
    unfinished: bool
    now: float


def token_bucket(num_tokens: int) -> int:
    """The bucket of a token count: the next power of two, 0 for none."""
    return 1 << (num_tokens - 1).bit_length() if num_tokens > 0 else 0


def agree(
    num_tokens: int,
    *,
    unfinished: bool,
    now: float,
    group: dist.ProcessGroup | None,
    timeout_s: float = 60.0,
) -> Agreement:
    """One all-reduce over `group` (None: this rank alone). Collective: every rank calls it in
    every step, the idle ones too. PeerTimeoutError where a rank does not come."""
    micros = round(now * 1e6)
    values = [num_tokens, int(unfinished), micros]
    if group is not None and dist.get_world_size(group) > 1:
        tensor = torch.tensor(values, dtype=torch.int64)
        if "gloo" not in str(dist.get_backend_config(group)):
            tensor = tensor.to(torch.accelerator.current_accelerator())
        work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group, async_op=True)
        try:
            work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise PeerTimeoutError(
                "scheduler step", dist.get_rank(group), None, timeout_s=timeout_s, detail=str(error)
            ) from error
        values = tensor.tolist()  # a host sync: the bucket decides which kernels are launched
    return Agreement(
        bucket=token_bucket(values[0]), unfinished=bool(values[1]), now=values[2] / 1e6
    )
