"""The slab's device work for one rank, without a process group: what to launch, on which memory.

Both halves of a call may be launched at once (`send=True, receive=True`, one kernel) or apart, as
async_op and tests with virtual ranks do.
"""

from __future__ import annotations

from moe_comm.backends.slab_combine import CombineLaunches
from moe_comm.backends.slab_dispatch import DispatchLaunches
from moe_comm.backends.slab_state import region_sizes

__all__ = ["SlabEngine", "region_sizes"]


class SlabEngine(DispatchLaunches, CombineLaunches):
    """Launches dispatch and combine of one rank; its arguments are SlabState's."""
