"""Topology: what backends ask about the ranks before one of them is chosen."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_comm.group import Group


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The same on every rank.

    Attributes:
        num_ranks: R.
        node_of_rank: node index of each rank.
        device_type: "cuda", "cpu", ... of all ranks (mixed groups say "mixed").
        device_names: name of each rank's device.
        peer_access: every rank of a node reaches the memory of every other on it directly.
        transport: torch.distributed's backend for the device ("gloo", "nccl", ...).
    """

    num_ranks: int
    node_of_rank: tuple[int, ...]
    device_type: str
    device_names: tuple[str, ...]
    peer_access: bool
    transport: str

    @property
    def num_nodes(self) -> int:
        """Nodes the ranks span."""
        return len(set(self.node_of_rank))

    @classmethod
    def detect(cls, group: Group) -> Topology:
        """Collective: ranks exchange what they are and what they reach."""
        device = group.device
        name, index = device.type, device.index or 0
        if device.type == "cuda":
            name = torch.cuda.get_device_name(device)
        facts = group.all_gather((device.type, name, index))
        types = {fact[0] for fact in facts}
        reach = device.type == "cuda" and _reaches_all(group, index, [fact[2] for fact in facts])
        return cls(
            num_ranks=group.num_ranks,
            node_of_rank=group.node_of_rank,
            device_type=types.pop() if len(types) == 1 else "mixed",
            device_names=tuple(fact[1] for fact in facts),
            peer_access=all(group.all_gather(reach)),
            transport=group.backend_name,
        )


def _reaches_all(group: Group, index: int, indices: list[int]) -> bool:
    """Whether this rank's GPU reaches those of its node. Where a rank sees only its own GPU
    (CUDA_VISIBLE_DEVICES), CUDA cannot answer here; symmetric memory's set-up then decides."""
    here = group.node_of_rank[group.rank]
    peers = [indices[rank] for rank in group.ranks_of_node(here) if rank != group.rank]
    visible = torch.cuda.device_count()
    return all(
        peer == index or peer >= visible or torch.cuda.can_device_access_peer(index, peer)
        for peer in peers
    )
