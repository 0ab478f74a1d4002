"""Expert-parallel dispatch and combine for very sparse Mixture-of-Experts models.

    config = EPConfig.preset("kimi-k3", max_tokens_per_rank=128)
    with create_communicator(config) as comm:
        d = comm.dispatch(x, topk_idx, topk_weights)     # collective
        y = experts(d)                                   # [N, hidden], grouped by local expert
        out = comm.combine(y, d.handle)                  # collective

Importing this package starts nothing, touches no device and prints nothing.
"""

from __future__ import annotations

from moe_comm.chunks import Pending
from moe_comm.communicator import Communicator
from moe_comm.config import PRESETS, EPConfig
from moe_comm.errors import (
    BackendUnavailableError,
    ConfigMismatchError,
    ExpertRowsOverflowError,
    InvalidRoutingError,
    MoeCommError,
    PeerTimeoutError,
    PhaseError,
    SlotError,
    WrongDataError,
)
from moe_comm.group import Group
from moe_comm.handle import Dispatched, DispatchHandle
from moe_comm.negotiate import create_communicator
from moe_comm.placement import ExpertPlacement
from moe_comm.topology import Topology
from moe_comm.wire import WIRES, Wire, dequantize, quantize

__version__ = "0.1.0"

__all__ = [
    "EPConfig",
    "PRESETS",
    "ExpertPlacement",
    "create_communicator",
    "Communicator",
    "Pending",
    "Dispatched",
    "DispatchHandle",
    "Group",
    "Topology",
    "Wire",
    "WIRES",
    "quantize",
    "dequantize",
    "MoeCommError",
    "BackendUnavailableError",
    "ConfigMismatchError",
    "ExpertRowsOverflowError",
    "InvalidRoutingError",
    "PeerTimeoutError",
    "PhaseError",
    "SlotError",
    "WrongDataError",
]
