"""What a slab sweep calls: a communicator with a setting's knobs on one rank's data, and a GEMM to
run beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_comm.chunks import Pending
from moe_comm.communicator import Communicator
from moe_comm.config import EPConfig
from moe_comm.handle import Dispatched
from moe_comm.launch.rank_data import RankData
from moe_comm.launch.slab_sweep_settings import HIGH, Setting
from moe_comm.launch.worker import Ranks

# Kimi K3's model dimension, and the width of its shared experts.
MODEL_WIDTH, SHARED_WIDTH = 7168, 6144


@dataclass(kw_only=True, eq=False)
class Port:
    """One communicator's calls on one rank's data; a Subject of timing.py.

    Attributes:
        comm: with as many slots as calls in a row.
        mine: this rank's tokens.
        y: [N, H] expert rows to combine, the same for every call.
        out: [T, H], of every combine.
        calls: in a row.
        last: what the latest dispatch returned.
    """

    comm: Communicator
    mine: RankData
    y: Tensor
    out: Tensor
    calls: int
    last: Dispatched | None = None

    def start_dispatch(self) -> Pending[Dispatched]:
        """The send half."""
        mine = self.mine
        return self.comm.dispatch(
            mine.x, mine.topk_idx, mine.topk_weights, bucket=mine.num_tokens, async_op=True
        )

    def dispatch(self) -> Dispatched:
        """A whole one."""
        mine = self.mine
        self.last = self.comm.dispatch(
            mine.x, mine.topk_idx, mine.topk_weights, bucket=mine.num_tokens
        )
        return self.last

    def start_combine(self, arrived: Dispatched) -> Pending[Tensor]:
        """The send half."""
        return self.comm.combine(self.y, arrived.handle, out=self.out, async_op=True)

    def combine(self, arrived: Dispatched) -> Tensor:
        """A whole one."""
        return self.comm.combine(self.y, arrived.handle, out=self.out)

    def pair(self) -> None:
        """A dispatch and its combine, `out` poisoned first."""
        self.out.fill_(float("nan"))
        self.combine(self.dispatch())

    def poison(self) -> None:
        """Make rows that nobody writes again be seen: those of the latest dispatch, and `out`.
        Done on return, so that ranks may write again once all have met."""
        assert self.last is not None
        self.last.rows.view(torch.uint8).fill_(0xFF)
        self.out.fill_(float("nan"))
        if self.out.is_cuda:
            torch.cuda.synchronize(self.out.device)


def open_slab(config: EPConfig, ranks: Ranks, setting: Setting) -> Communicator:
    """A slab with the setting's knobs. Collective."""
    from moe_comm.backends.slab import SlabCommunicator

    comm = SlabCommunicator(config, ranks.group, tuning=setting.tuning)
    if setting.side_priority is not None:
        if not hasattr(comm.engine, "_side"):
            raise AttributeError("the slab's engine has no stream _side for copies")
        comm.engine._side = torch.cuda.Stream(ranks.device, priority=setting.side_priority)
    return comm


def join_copies(comm: Any, mode: str) -> None:
    """The current stream goes on after the copies that a slab's send halves have begun."""
    if mode == HIGH:
        torch.cuda.current_stream().wait_stream(comm.engine._side)


def shared_expert(num_tokens: int, device: torch.device) -> Callable[[], object]:
    """The two products of a shared expert on all tokens, bf16; see DEFINITIONS."""
    shapes = (
        (num_tokens, MODEL_WIDTH), (MODEL_WIDTH, SHARED_WIDTH), (SHARED_WIDTH, MODEL_WIDTH)
    )  # fmt: skip
    x, up, down = (torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes)
    wide = torch.empty(num_tokens, SHARED_WIDTH, device=device, dtype=torch.bfloat16)
    narrow = torch.empty_like(x)

    def work() -> None:
        torch.mm(x, up, out=wide)
        torch.mm(wide, down, out=narrow)

    return work
