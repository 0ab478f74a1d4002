"""Group: the ranks of one communicator over a torch.distributed process group."""

from __future__ import annotations

import copy
import datetime
import itertools
import socket
from collections.abc import Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from moe_comm import env
from moe_comm.bounded import run_bounded

# For names: never the same number twice in a process.
_numbers = itertools.count(1)


class Group:
    """Ranks, nodes and small agreed exchanges of one process group.

    Args:
        pg: a torch.distributed process group; None: the world.
        device: where this rank's tensors will live; None: the current accelerator where the group
            has a backend for it, else the CPU.

    Raises RuntimeError where torch.distributed is not initialized.

    Attributes:
        pg: the torch.distributed process group.
        rank, num_ranks: this process and the size, inside the group.
        device: where this rank's tensors live.
        node_of_rank: for every rank, the index of its node (0, 1, ... in order of appearance).
        name: equal on its ranks, and no other Group's.

    Construction is collective: ranks exchange their host names once. How long they wait for each
    other, there and in all_gather, is the process group's own timeout.
    """

    def __init__(
        self, pg: dist.ProcessGroup | None = None, *, device: torch.device | str | None = None
    ) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "group: expected an initialized torch.distributed; call "
                "torch.distributed.init_process_group() first (torchrun sets its environment)"
            )
        chosen = pg if pg is not None else dist.group.WORLD
        assert chosen is not None
        self.pg: dist.ProcessGroup = chosen
        self.rank: int = dist.get_rank(self.pg)
        self.num_ranks: int = dist.get_world_size(self.pg)
        self.device = indexed(device) if device is not None else default_device(self.pg)
        facts = self.all_gather((socket.gethostname(), new_number()))
        self.node_of_rank = self._find_nodes([host for host, _ in facts])
        self.name = self._named([number for _, number in facts])

    def _find_nodes(self, hosts: list[str]) -> tuple[int, ...]:
        per_node = env.NODE_RANKS.get()
        if per_node is not None:
            return tuple(rank // per_node for rank in range(self.num_ranks))
        order = {host: index for index, host in enumerate(dict.fromkeys(hosts))}
        return tuple(order[host] for host in hosts)

    def _named(self, numbers: list[int]) -> str:
        # Every rank's number grows from exchange to exchange, so the largest does.
        return f"moe_comm/{self.pg.group_name}/{max(numbers)}"

    def renamed(self, numbers: list[int]) -> Self:
        """This group under a new name, from new_number() of all its ranks."""
        other = copy.copy(self)
        other.name = self._named(numbers)
        return other

    @property
    def num_nodes(self) -> int:
        """Nodes the group spans."""
        return len(set(self.node_of_rank))

    def ranks_of_node(self, node: int) -> list[int]:
        """Ranks on one node, ascending."""
        return [rank for rank, at in enumerate(self.node_of_rank) if at == node]

    @property
    def backend_name(self) -> str:
        """torch.distributed's backend for this device: gloo, nccl, mccl, ..."""
        return backend_for(self.pg, self.device.type)

    def all_gather(self, value: Any) -> list[Any]:
        """One picklable value of each rank, in rank order. Collective; small values only."""
        values: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(values, value, group=self.pg)
        return values

    def barrier(self, *, timeout_s: float) -> None:
        """Wait until every rank is here, at most timeout_s where the transport can bound it."""
        if self.backend_name == "gloo":
            dist.monitored_barrier(self.pg, timeout=datetime.timedelta(seconds=timeout_s))
        else:
            dist.barrier(self.pg)

    def subgroup(
        self, purpose: str, ranks: Sequence[int] | None = None, *, backend: str, timeout_s: float
    ) -> dist.ProcessGroup:
        """A process group of its own for `ranks` of these (default all), which keep their order.
        Collective among them alone; end it with drop_group.

        torch's new_group does not serve. As a call of some ranks it derives the name, under which
        they meet, from the number of groups that each is in: where that differs between ranks they
        wait for each other in vain, and where groups were destroyed the name comes again. As a call
        of all ranks it needs those of the whole world, dead ones too.

        Args:
            purpose: unlike any other of this group's subgroups.
            backend: as new_group has it.
            timeout_s: of the meeting, and of what happens in the group.
        """
        world = dist.get_process_group_ranks(self.pg)
        members = world if ranks is None else [world[rank] for rank in ranks]
        pg: dist.ProcessGroup = c10d._new_process_group_helper(
            len(members),
            members.index(dist.get_rank()),
            members,
            dist.Backend(backend),
            c10d._get_default_store(),
            c10d.GroupName(f"{self.name}/{purpose}"),
            timeout=datetime.timedelta(seconds=timeout_s),
            group_desc=f"moe_comm {purpose}",
        )[0]
        c10d._world.pg_group_ranks[pg] = {rank: index for index, rank in enumerate(members)}
        return pg


def new_number() -> int:
    """A number that this process has not used, larger than those before."""
    return next(_numbers)


def drop_group(pg: dist.ProcessGroup, *, timeout_s: float = 5.0) -> None:
    """Destroy what subgroup() made. Not collective: others may be gone. Its threads and sockets end
    with the last reference, so the caller gives up its own."""

    def work() -> None:
        # The caller may have destroyed torch.distributed before, and the group with it.
        if pg in c10d._world.pg_map:
            dist.destroy_process_group(pg)

    # A backend may wait for its transfers, and those for ranks that are lost.
    run_bounded(work, timeout_s=timeout_s, name="drop-group")


def backend_for(pg: dist.ProcessGroup, device_type: str) -> str:
    """The backend that serves `device_type` in a group that may hold one a device type."""
    name = str(dist.get_backend(pg))
    config = str(dist.get_backend_config(pg))
    for part in config.split(","):
        kind, _, backend = part.partition(":")
        if backend and kind == device_type:
            return backend
    return name


def indexed(device: torch.device | str) -> torch.device:
    """The device with its number: "cuda" alone means the current one, and libraries ask for it."""
    chosen = torch.device(device)
    if chosen.index is None and chosen.type != "cpu":
        return torch.device(chosen.type, torch.accelerator.current_device_index())
    return chosen


def default_device(pg: dist.ProcessGroup) -> torch.device:
    """The device of this rank: the current accelerator where the group has a backend for it, else
    the CPU."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and backend_for(pg, accelerator.type) != "gloo":
        return torch.device(accelerator.type, torch.accelerator.current_device_index())
    return torch.device("cpu")
