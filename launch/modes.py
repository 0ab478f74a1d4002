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

# Backends whose modes are ways of different libraries: named without a mode, all are meant.
_ALL_MODES = ("deepep",)


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
    """Replace "all" by every mode that all ranks can run, and a backend whose modes are apart by
    those of its own; a name that stands for nothing is left out under "all", else stays, so that
    what uses it says why it cannot. Collective."""
    topology = Topology.detect(ranks.group)
    found = []
    for given in names:
        if given not in ("all", *_ALL_MODES):
            found.append(given)
            continue
        for name in backends.AUTO_ORDER if given == "all" else (given,):
            modes = list(modes_of(name, config, topology))
            agreed = set.intersection(*(set(other) for other in ranks.gather(modes)))
            found += [f"{name}:{mode}" for mode in modes if mode in agreed]
            if not agreed and given != "all":
                found.append(given)
            elif not agreed:
                reason = supports(name, config, topology).reason
                ranks.say(f"note: {name} is left out: {reason or 'another rank cannot'}")
    return list(dict.fromkeys(found))


def can_capture(comm: Communicator) -> bool:
    """Whether this mode of the backend can be captured in a CUDA graph."""
    return "capture" in comm.capabilities and comm.device.type == "cuda"
