"""What a soak runs on: communicators, real or virtual, captured calls, and what was counted."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from moe_comm.communicator import Communicator
from moe_comm.config import EPConfig
from moe_comm.launch.results import Row
from moe_comm.launch.slab_soak_calls import Ledger, Member
from moe_comm.launch.slab_soak_pairs import run_pairs
from moe_comm.launch.worker import Ranks
from moe_comm.negotiate import create_communicator

_NOTES = 5


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a soak was asked for; equal on all ranks.

    Attributes:
        config: with max_tokens_per_rank the largest of `buckets`.
        backends: a communicator each, all alive at once.
        buckets: token buckets, one drawn a call.
        pairs, seconds: bounds; None: no bound in time.
        window: pairs from one agreement of the ranks to the next; its last pair is compared with
            the reference.
        eager: share of the other pairs that are called eagerly.
        graphs: replay captured calls for the rest.
        lanes: pairs in one captured graph: all their dispatches, then all their combines.
        split: send and receive halves apart.
        max_delay_us: largest injected delay, 0: none.
        seed_counters: counts from which the slab's counters begin; None: as they are.
        virtual: ranks of a virtual world in one process, 0: real ranks.
        flip_pair: the first eager pair from this one on has a bit flipped on rank 0.
    """

    config: EPConfig
    backends: tuple[str, ...]
    buckets: tuple[int, ...]
    pairs: int
    seconds: float | None = None
    window: int = 500
    eager: float = 0.02
    graphs: bool = True
    lanes: int = 2
    split: bool = False
    max_delay_us: float = 0.0
    seed_counters: int | None = None
    seed: int = 0
    virtual: int = 0
    flip_pair: int | None = None


@dataclass(kw_only=True)
class Tally:
    """Counts of one communicator over all ranks. `wrong_pairs`: those whose checksum or combined
    rows differ; `checked`: pairs compared with the reference; `wrong_elements`: found there."""

    pairs: int = 0
    eager: int = 0
    checked: int = 0
    wrong_pairs: int = 0
    wrong_elements: int = 0
    first: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Keep the first few findings in words."""
        if len(self.first) < _NOTES:
            self.first.append(text)


@dataclass(kw_only=True, eq=False)
class World:
    """One communicator: the members of this process and their captured calls, by bucket."""

    name: str
    members: list[Member]
    graphs: dict[int, torch.cuda.CUDAGraph] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)

    def row(self, plan: Plan, num_ranks: int, params: dict[str, Any]) -> Row:
        """The result row, without times of single calls."""
        comm, config, tally = self.members[0].comm, plan.config, dataclasses.asdict(self.tally)
        return Row(
            backend=comm.backend,
            mode=comm.mode,
            phase="soak",
            layout="expert",
            num_tokens=max(plan.buckets),
            hidden=config.hidden,
            num_topk=config.num_topk,
            num_experts=config.num_experts,
            ep_size=num_ranks,
            wire=config.dispatch_wire,
            routing="random",
            cuda_graph=bool(self.graphs),
            params={**tally, **params},
            wrong=self.tally.wrong_pairs + self.tally.wrong_elements,
        )


def build_worlds(plan: Plan, ranks: Ranks) -> list[World]:
    """Every communicator, its counters seeded. Collective."""
    # Cycles of about 1.7 GHz.
    cycles = int(plan.max_delay_us * 1700) if ranks.device.type == "cuda" else 0
    worlds = []
    for name in plan.backends:
        comms = (
            _virtual(plan, name, ranks.device)
            if plan.virtual
            else [create_communicator(plan.config, ranks.group, name)]
        )
        if plan.seed_counters is not None:
            for comm in comms:
                _engine_of(comm).seed_counters(plan.seed_counters)
        members = [Member(c, plan.buckets, num_lanes=plan.lanes, max_delay=cycles) for c in comms]
        worlds.append(World(name=name, members=members))
    if ranks.device.type == "cuda":
        torch.cuda.synchronize(ranks.device)
    # No rank may send before every rank has set its counters.
    ranks.gather(None, what="counters")
    return worlds


def capture(plan: Plan, worlds: Sequence[World], ledger: Ledger, stream: torch.cuda.Stream) -> None:
    """Call every shape eagerly, so that all is compiled, then capture it. Collective."""
    split = plan.split or plan.virtual > 0
    for world in worlds:
        for bucket in plan.buckets:
            for _ in range(2):
                run_pairs(world.members, bucket, plan.lanes, ledger, split=split)
            ledger.clear()
    torch.cuda.synchronize()
    for world in worlds:
        for bucket in plan.buckets:
            graph = torch.cuda.CUDAGraph()
            # thread_local: NCCL's watchdog queries events from a thread of its own meanwhile.
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                run_pairs(world.members, bucket, plan.lanes, ledger, split=split)
            world.graphs[bucket] = graph
    ledger.clear()


def _virtual(plan: Plan, name: str, device: torch.device) -> Sequence[Communicator]:
    """A slab communicator a rank, all in this process."""
    from moe_comm.backends.slab_modes import SlabTuning
    from moe_comm.launch.virtual_ranks import apart

    backend, _, mode = name.partition(":")
    if backend != "slab":
        raise ValueError(f"backends: expected slab or slab:mode for virtual ranks, got {name!r}")
    return apart(plan.config, [device] * plan.virtual, SlabTuning(mode=mode or "auto"))


def _engine_of(comm: Communicator) -> Any:
    engine = getattr(comm, "engine", None)
    if engine is None:
        raise ValueError(f"seed_counters: expected the slab, {comm.backend} keeps no counters")
    return engine
