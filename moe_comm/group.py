"""Group: the ranks of one communicator over a torch.distributed process group."""

from __future__ import annotations

import datetime
import socket
from typing import Any

import torch
import torch.distributed as dist

from moe_comm import env


class Group:
    """Ranks, nodes and small agreed exchanges of one process group.

    Attributes:
        pg: the torch.distributed process group.
        rank, num_ranks: this process and the size, inside the group.
        device: where this rank's tensors live.
        node_of_rank: for every rank, the index of its node (0, 1, ... in order of appearance).

    Construction is collective: ranks exchange their host names once.
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
        self.node_of_rank = self._find_nodes()

    def _find_nodes(self) -> tuple[int, ...]:
        per_node = env.NODE_RANKS.get()
        if per_node is not None:
            return tuple(rank // per_node for rank in range(self.num_ranks))
        names = self.all_gather(socket.gethostname())
        order = {name: index for index, name in enumerate(dict.fromkeys(names))}
        return tuple(order[name] for name in names)

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
