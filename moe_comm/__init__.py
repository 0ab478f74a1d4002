"""Expert-parallel dispatch and combine for very sparse Mixture-of-Experts models.

    config = EPConfig.preset("kimi-k3", max_tokens_per_rank=128)
    with create_communicator(config) as comm:
        d = comm.dispatch(x, topk_idx, topk_weights)     # collective
        y = experts(d)                                   # [N, hidden], grouped by local expert
        out = comm.combine(y, d.handle)                  # collective

Importing this package starts nothing, touches no device and prints nothing. Names are imported when
they are first asked for, torch with them: a command line answers a typo, and Ctrl-C, at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_comm.chunks import Pending as Pending
    from moe_comm.communicator import Communicator as Communicator
    from moe_comm.config import PRESETS as PRESETS
    from moe_comm.config import EPConfig as EPConfig
    from moe_comm.errors import BackendUnavailableError as BackendUnavailableError
    from moe_comm.errors import ConfigMismatchError as ConfigMismatchError
    from moe_comm.errors import ExpertRowsOverflowError as ExpertRowsOverflowError
    from moe_comm.errors import InvalidRoutingError as InvalidRoutingError
    from moe_comm.errors import MoeCommError as MoeCommError
    from moe_comm.errors import PeerTimeoutError as PeerTimeoutError
    from moe_comm.errors import PhaseError as PhaseError
    from moe_comm.errors import SlotError as SlotError
    from moe_comm.errors import WrongDataError as WrongDataError
    from moe_comm.group import Group as Group
    from moe_comm.handle import Dispatched as Dispatched
    from moe_comm.handle import DispatchHandle as DispatchHandle
    from moe_comm.negotiate import create_communicator as create_communicator
    from moe_comm.placement import ExpertPlacement as ExpertPlacement
    from moe_comm.topology import Topology as Topology
    from moe_comm.wire import WIRES as WIRES
    from moe_comm.wire import Wire as Wire
    from moe_comm.wire import dequantize as dequantize
    from moe_comm.wire import quantize as quantize

__version__ = "0.1.0"

_HOMES = {
    "chunks": ("Pending",),
    "communicator": ("Communicator",),
    "config": ("PRESETS", "EPConfig"),
    "errors": (
        "BackendUnavailableError",
        "ConfigMismatchError",
        "ExpertRowsOverflowError",
        "InvalidRoutingError",
        "MoeCommError",
        "PeerTimeoutError",
        "PhaseError",
        "SlotError",
        "WrongDataError",
    ),
    "group": ("Group",),
    "handle": ("Dispatched", "DispatchHandle"),
    "negotiate": ("create_communicator",),
    "placement": ("ExpertPlacement",),
    "topology": ("Topology",),
    "wire": ("WIRES", "Wire", "dequantize", "quantize"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = list(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME_OF])
