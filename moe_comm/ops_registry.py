"""What stands behind the names and tokens that moe_comm.ops puts into graphs."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_comm.handle import Dispatched

if TYPE_CHECKING:
    from moe_comm.communicator import Communicator

_communicators: weakref.WeakValueDictionary[str, Communicator] = weakref.WeakValueDictionary()
# Token -> what was dispatched; an entry lives as long as its token's memory.
_routings: dict[int, Dispatched] = {}
_next_token = 0


def name_of(comm: Communicator) -> str:
    """The name by which the ops find a communicator of this process."""
    name = getattr(comm, "_op_name", None)
    if name is None:
        name = f"moe_comm_{len(_communicators)}_{id(comm):x}"
        comm._op_name = name
        _communicators[name] = comm
    return name


def communicator_of(name: str) -> Communicator:
    comm = _communicators.get(name)
    if comm is None:
        raise ValueError(f"communicator: expected the name of a live one, got {name!r}")
    return comm


def new_token(arrived: Dispatched) -> Tensor:
    global _next_token
    _next_token += 1
    number = _next_token
    token = torch.tensor([number])
    _routings[number] = arrived
    weakref.finalize(token.untyped_storage(), _routings.pop, number, None)
    return token


def routing_of(token: Tensor) -> Dispatched:
    arrived = _routings.get(int(token))
    if arrived is None:
        raise ValueError(f"token: expected one of moe_comm::dispatch, got {int(token)}")
    return arrived
