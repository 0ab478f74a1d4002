"""The c10d backend: any torch.distributed process group, in three modes.

exact: counts on the host, then packed rows; dense: equal splits at the bucket, no counts, no host
sync, capturable; hierarchical: a row crosses to a node once (reduction "node").
"""

from __future__ import annotations

from moe_comm.backends import Support
from moe_comm.communicator import Communicator
from moe_comm.config import EPConfig
from moe_comm.group import Group
from moe_comm.topology import Topology

_BY_REDUCTION = {"rank": ("exact", "dense"), "node": ("hierarchical",)}


def supports(config: EPConfig, topology: Topology) -> Support:
    """Serves every config wherever torch.distributed moves the device's tensors."""
    if topology.device_type == "mixed":
        return Support(False, "the ranks' devices are of different types")
    if topology.device_type != "cpu" and topology.transport == "gloo":
        return Support(
            False,
            f"gloo does not move {topology.device_type} tensors between all ranks; initialize the "
            "process group with the device's own backend",
        )
    modes = _BY_REDUCTION[config.reduction]
    abilities = ["payloads", "autograd", "masking"]
    if "dense" in modes and topology.device_type == "cuda":
        abilities.append("capture")
    if topology.device_type != "cpu":
        abilities.append("overlap")
    return Support(True, f"over {topology.transport}", modes, tuple(abilities))


def build(config: EPConfig, group: Group, mode: str | None) -> Communicator:
    """A communicator over the group. Collective."""
    chosen = mode or _BY_REDUCTION[config.reduction][0]
    if chosen == "exact":
        from moe_comm.backends.c10d_exact import ExactCommunicator

        return ExactCommunicator(config, group)
    if chosen == "dense":
        from moe_comm.backends.c10d_dense import DenseCommunicator

        return DenseCommunicator(config, group)
    from moe_comm.backends.c10d_hierarchical import HierarchicalCommunicator

    return HierarchicalCommunicator(config, group)
