"""Backends and their modes as the command line names them, taken from the registry."""

from __future__ import annotations

from typing import get_args

from moe_comm import backends
from moe_comm.backends import Support
from moe_comm.communicator import Communicator
from moe_comm.config import EPConfig, Reduction
from moe_comm.launch.worker import Ranks
from moe_comm.negotiate import supports
from moe_comm.topology import Topology

# Modes that size their messages on the host, so that no graph can hold them.
_SIZED_ON_HOST = {("c10d", "exact"), ("c10d", "hierarchical")}


def verdicts(name: str, config: EPConfig, topology: Topology) -> dict[Reduction, Support]:
    """A backend's answers, one for each reduction, config's own first: modes hang on it."""
    own = config.reduction
    orders: list[Reduction] = [own, *(r for r in get_args(Reduction) if r != own)]
    return {
        reduction: supports(name, config.replace(reduction=reduction), topology)
        for reduction in orders
    }


def modes_of(name: str, config: EPConfig, topology: Topology) -> dict[str, Reduction]:
    """Each mode that can run here, and the reduction that it belongs to."""
    modes: dict[str, Reduction] = {}
    for reduction, verdict in verdicts(name, config, topology).items():
        if verdict.ok:
            for mode in verdict.modes:
                modes.setdefault(mode, reduction)
    return modes


def config_for(asked: str, config: EPConfig, topology: Topology) -> EPConfig:
    """The config with the reduction that the mode of "name:mode" belongs to."""
    name, _, mode = asked.partition(":")
    if not mode or name not in backends.MODULES:
        return config
    return config.replace(reduction=modes_of(name, config, topology).get(mode, config.reduction))


def expand(names: list[str], config: EPConfig, ranks: Ranks) -> list[str]:
    """Replace "all" by every mode that all ranks can run. Collective."""
    if "all" not in names:
        return names
    topology = Topology.detect(ranks.group)
    found = []
    for name in backends.AUTO_ORDER:
        modes = list(modes_of(name, config, topology))
        agreed = set.intersection(*(set(other) for other in ranks.gather(modes)))
        found += [f"{name}:{mode}" for mode in modes if mode in agreed]
        if not agreed:
            reason = supports(name, config, topology).reason
            ranks.say(f"note: {name} is left out: {reason or 'another rank cannot'}")
    return [n for given in names for n in (found if given == "all" else [given])]


def can_capture(comm: Communicator, topology: Topology) -> bool:
    """Whether this mode of the backend can be captured in a CUDA graph."""
    if comm.device.type != "cuda" or (comm.backend, comm.mode) in _SIZED_ON_HOST:
        return False
    return "capture" in supports(comm.backend, comm.config, topology).capabilities
