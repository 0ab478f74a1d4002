"""Inside a rank of slab_faults: how it joins, what it calls, what it tells.

Each launch is a set of fresh processes over gloo, whose rendezvous store the parent holds, so that
no rank's death takes it away. A case (slab_faults_cases) reports one dictionary to the parent.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from moe_comm.communicator import Communicator
from moe_comm.config import EPConfig
from moe_comm.errors import MoeCommError, PeerTimeoutError, PhaseError
from moe_comm.group import Group
from moe_comm.launch.experts import expert_factors, expert_step
from moe_comm.launch.oracle import expected_combine, expected_dispatch, locate
from moe_comm.launch.rank_data import RankData
from moe_comm.launch.verify import check_combined, check_dispatched
from moe_comm.negotiate import create_communicator

# Of communicators that must come up, and of compiling.
PATIENCE_S = 60.0
_TOKENS = 48
SHAPE: dict[str, int] = {"hidden": 256, "max_tokens_per_rank": _TOKENS}

Report = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a launch is about: `cases` in order, `victim` the rank that fails."""

    cases: tuple[str, ...]
    num_ranks: int
    victim: int
    device_type: str
    backend: str
    timeout_s: float
    port: int


class Rank:
    """One rank of a launch."""

    def __init__(self, settings: Settings, rank: int) -> None:
        self.settings, self.rank = settings, rank
        self.device = torch.device(settings.device_type)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", rank)
            torch.cuda.set_device(self.device)
        limit = datetime.timedelta(seconds=2 * PATIENCE_S)
        self.store = TCPStore("127.0.0.1", settings.port, is_master=False, timeout=limit)
        dist.init_process_group(
            "gloo", store=self.store, rank=rank, world_size=settings.num_ranks, timeout=limit
        )
        self.config = EPConfig.preset("kimi-k3", **SHAPE)
        self.survivors = [r for r in range(settings.num_ranks) if r != settings.victim]

    @property
    def is_victim(self) -> bool:
        """Whether this is the rank that fails."""
        return self.rank == self.settings.victim

    def meet(self, name: str, ranks: Sequence[int]) -> None:
        """Wait for `ranks` by the store, which survives a rank. Raises TimeoutError."""
        self.store.add(name, 1)
        end = time.monotonic() + 2 * PATIENCE_S
        while self.store.add(name, 0) < len(ranks):
            if time.monotonic() > end:
                raise TimeoutError(f"{name}: not all of ranks {list(ranks)} came")
            time.sleep(0.005)

    def create(self, timeout_s: float, pg: dist.ProcessGroup | None = None) -> Communicator:
        """A communicator over a group, default the world. Collective."""
        group = Group(pg, device=self.device)
        config = self.config.replace(timeout_s=timeout_s)
        return create_communicator(config, group, self.settings.backend)

    def created_warm(self) -> Communicator:
        """The case's communicator, after a patient one has compiled what both launch."""
        with self.create(PATIENCE_S) as patient:
            raise_wrong(wrong_of_pair(patient, 0))
        comm = self.create(self.settings.timeout_s)
        raise_wrong(wrong_of_pair(comm, 1))
        return comm

    def rebuilt(self, alive: Sequence[int]) -> int:
        """Wrong elements of a pair of a new communicator among `alive`."""
        pg = dist.new_group(
            list(alive), timeout=datetime.timedelta(seconds=PATIENCE_S), backend="gloo",
            use_local_synchronization=True,
        )  # fmt: skip
        with self.create(PATIENCE_S, pg) as comm:
            return wrong_of_pair(comm, 2)

    def failing(self, call: Callable[[], object]) -> Report:
        """What a call that cannot succeed ends with, and when."""
        began, error = time.monotonic(), None
        try:
            call()
        except MoeCommError as caught:
            error = caught
        return {"seconds": time.monotonic() - began, "error": describe(error)}


def describe(error: MoeCommError | None) -> Report | None:
    """An error as plain values."""
    if error is None:
        return None
    told: Report = {"type": type(error).__name__, "text": str(error)}
    if isinstance(error, PeerTimeoutError):
        names = ("phase", "peer", "seen", "wanted")
        told |= {name: getattr(error, name) for name in names}
    if isinstance(error, PhaseError):
        told |= {"phase": error.expected, "peer": error.rank}
    return told


def raise_wrong(wrong: int) -> None:
    """What is wrong before anything has failed makes the case worthless."""
    if wrong:
        raise RuntimeError(f"{wrong} wrong elements before anything had failed")


def data_of(comm: Communicator, seed: int, lost: int | None) -> list[RankData]:
    """Every rank's data; a lost rank has no tokens and its experts are not chosen."""
    tokens = [0 if rank == lost else _TOKENS - rank for rank in range(comm.num_ranks)]
    data = RankData.create_all(comm.config, num_tokens=tokens, seed=seed, device=comm.device)
    if lost is None:
        return data
    kept = []
    for given in data:
        owner, _ = locate(given.topk_idx, comm.placement, source_rank=given.rank)
        idx = torch.where(owner == lost, -1, given.topk_idx)
        kept.append(
            RankData(rank=given.rank, x=given.x, topk_idx=idx, topk_weights=given.topk_weights)
        )
    return kept


def wrong_of_pair(comm: Communicator, seed: int, *, lost: int | None = None) -> int:
    """One pair against the reference: elements of this rank that differ."""
    data = data_of(comm, seed, lost)
    # The communicator leaves a masked rank's choices out by itself.
    given = data_of(comm, seed, None)[comm.rank]
    nodes = comm.group.node_of_rank
    d = comm.dispatch(given.x, given.topk_idx, given.topk_weights)
    want = expected_dispatch(
        comm.config, data, comm.placement, rank=comm.rank, bucket=comm.config.bucket
    )
    factors = expert_factors(comm.config.num_experts, comm.device)
    found = check_dispatched(d, want, rank=comm.rank)
    y = expert_step(d, factors[comm.placement.local_expert_ids(comm.rank)])
    out = comm.combine(y, d.handle, out=torch.full_like(given.x, torch.nan))
    comm.check()
    combined = expected_combine(comm.config, data[comm.rank], comm.placement, node_of_rank=nodes)
    return found.wrong + check_combined(out, combined, rank=comm.rank).wrong


def plain_pair(comm: Communicator) -> Tensor:
    """A pair whose result nobody looks at."""
    data = data_of(comm, 3, None)[comm.rank]
    d = comm.dispatch(data.x, data.topk_idx, data.topk_weights)
    y = torch.zeros(len(d.row_index), comm.config.hidden, dtype=data.x.dtype, device=comm.device)
    out = comm.combine(y, d.handle)
    comm.check()
    return out
