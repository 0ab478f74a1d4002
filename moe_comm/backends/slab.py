"""The slab backend: dispatch and combine over memory that ranks reach directly.

Each source rank owns a block of rows in every rank's receive memory, so a row's place is
arithmetic, no counts are exchanged before rows move, and results do not depend on timing. Kernels:
moe_comm.kernels.dispatch and .combine; launches: moe_comm.backends.slab_engine; which way a call
takes: moe_comm.backends.slab_modes.

Health: every wait is bounded by timeout_s on the device. After the first timeout or phase error
later waits return at once, dispatch delivers no rows, combine delivers NaN, and check() raises.
The process lives and can build a new communicator.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_comm.backends import Support
from moe_comm.backends.slab_engine import SlabEngine, region_sizes
from moe_comm.backends.slab_modes import SlabTuning
from moe_comm.calls import CombineCall, DispatchCall
from moe_comm.communicator import Communicator
from moe_comm.config import EPConfig
from moe_comm.errors import SlotError
from moe_comm.group import Group
from moe_comm.handle import Dispatched, DispatchHandle
from moe_comm.placement import ExpertPlacement
from moe_comm.status import Status
from moe_comm.symmetric import SymmetricMemory, TorchSymmetricMemory
from moe_comm.topology import Topology

MODES = ("auto", "low-latency", "high-throughput")
CAPABILITIES = ("capture", "overlap", "masking", "payloads")
# The index packs a local expert id into 15 bits.
MAX_LOCAL_EXPERTS = 1 << 15


class SlabCommunicator(Communicator):
    """Dispatch and combine through symmetric memory. Construction is collective.

    Args:
        config: the shape.
        group: ranks that reach each other's memory.
        mode: one of MODES; "auto" goes by the bucket.
        tuning: knobs; default SlabTuning of this mode.
        memory: symmetric memory to use instead of a block of its own.
    """

    backend = "slab"
    capabilities = CAPABILITIES

    def __init__(
        self,
        config: EPConfig,
        group: Group,
        *,
        mode: str = "auto",
        tuning: SlabTuning | None = None,
        memory: SymmetricMemory | None = None,
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"mode: expected one of {', '.join(MODES)}, got {mode!r}")
        super().__init__(config, group)
        self.tuning = tuning or SlabTuning(mode=mode)
        self.mode = self.tuning.mode
        self._memory = memory or TorchSymmetricMemory(group, region_sizes(config, group.num_ranks))
        self.engine = SlabEngine(
            config,
            rank=self.rank,
            num_ranks=self.num_ranks,
            num_local_experts=self.num_local_experts,
            memory=self._memory,
            copy_table=self._copy_table,
            num_copies=self._num_copies,
            tuning=self.tuning,
        )
        # The dispatch whose routing each slot still holds, as the table in force has it.
        self._slot_calls: dict[int, int] = {}
        self._survivors = list(range(self.num_ranks))

    def mode_for(self, bucket: int) -> str:
        """What a dispatch of this bucket runs: "low-latency" or "high-throughput"."""
        return self.tuning.plan(self.config, bucket).mode

    def _take_slot(self, reuse: DispatchHandle | None) -> int:
        if reuse is None:
            return super()._take_slot(None)
        if self._slot_calls.get(reuse.slot) != reuse.call or reuse.slot in self._busy_slots:
            raise SlotError(
                f"handle: the routing of dispatch {reuse.call} lay in slot {reuse.slot}, which has "
                "been taken since, or the placement or the masked ranks have changed; repeat a "
                "routing before"
            )
        self._busy_slots.add(reuse.slot)
        return reuse.slot

    def _start_dispatch(self, call: DispatchCall) -> Any:
        self._slot_calls[call.slot] = call.call
        self.engine.dispatch(call, send=True, receive=False)

    def _finish_dispatch(self, call: DispatchCall, state: Any) -> Dispatched:
        result = self.engine.dispatch(call, send=False, receive=True)
        assert result is not None
        return result

    def _dispatch_at_once(self, call: DispatchCall) -> Dispatched:
        self._slot_calls[call.slot] = call.call
        result = self.engine.dispatch(call, send=True, receive=True)
        assert result is not None
        return result

    def _check_combine(self, call: CombineCall) -> None:
        handle = call.handle
        if self._slot_calls.get(handle.slot) != handle.call:
            raise SlotError(f"handle: dispatch {handle.call} was given up by mask_rank()")
        if call.y.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise ValueError(
                f"y: expected bfloat16, float16 or float32 on the slab backend, got {call.y.dtype}"
            )

    def _start_combine(self, call: CombineCall) -> Any:
        self.engine.combine(call, send=True, receive=False)

    def _finish_combine(self, call: CombineCall, state: Any) -> Tensor:
        result = self.engine.combine(call, send=False, receive=True)
        assert result is not None
        return result

    def _combine_at_once(self, call: CombineCall) -> Tensor:
        result = self.engine.combine(call, send=True, receive=True)
        assert result is not None
        return result

    def _signal_release(self, handle: DispatchHandle) -> None:
        self.engine.signal_release(handle.slot)

    def _read_status(self) -> Status:
        return self.engine.read_status()

    def mask_rank(self, rank: int) -> None:
        """Go on without a dead rank: its experts contribute nothing. Clears a recorded timeout.

        Collective among the survivors, with no dispatch outstanding that they mean to combine: they
        make a gloo group of their own to agree on counters, so the store of the default group must
        still be reachable (it is lost with the rank that holds it, unless a launcher holds it).
        """
        if rank == self.rank or rank not in self._survivors:
            raise ValueError(
                f"rank: expected one of the other live ranks, of {self._survivors}, got {rank} on "
                f"rank {self.rank}"
            )
        self._survivors.remove(rank)
        self.engine.mask_rank(rank)
        world = dist.get_process_group_ranks(self.group.pg)
        pg = dist.new_group(
            [world[alive] for alive in self._survivors],
            backend="gloo",
            use_local_synchronization=True,
        )
        counters: list[list[int]] = [[] for _ in self._survivors]
        dist.all_gather_object(counters, self.engine.read_counters(), group=pg)
        self.engine.agree_on_counters(counters)
        self._busy_slots.clear()
        self._slot_calls.clear()

    def update_placement(self, placement: ExpertPlacement) -> None:
        """As Communicator.update_placement; masked ranks stay masked."""
        super().update_placement(placement)
        self.engine.refresh_routing()
        self._slot_calls.clear()

    def _close(self) -> None:
        torch.cuda.synchronize(self.device)
        # The engine's views would keep the memory.
        del self.engine
        self._memory.close()


def supports(config: EPConfig, topology: Topology) -> Support:
    """Whether ranks reach each other's memory and the shape fits."""
    if topology.device_type != "cuda":
        return Support(False, f"needs CUDA devices, the ranks have {topology.device_type}")
    if importlib.util.find_spec("triton") is None:
        return Support(False, "needs triton; pip install 'triton>=3.6'")
    if topology.num_nodes > 1:
        return Support(False, f"needs one node, the ranks span {topology.num_nodes}")
    if not topology.peer_access:
        return Support(False, "needs direct access between all GPUs (NVLink or PCIe P2P)")
    if config.reduction != "rank":
        return Support(False, f"adds rank by rank, the config asks for {config.reduction!r}")
    largest = config.placement_for(topology.num_ranks).max_local_experts
    if largest >= MAX_LOCAL_EXPERTS:
        return Support(False, f"serves up to {MAX_LOCAL_EXPERTS - 1} experts a rank, got {largest}")
    return Support(True, "", MODES, CAPABILITIES)


def build(config: EPConfig, group: Group, mode: str | None) -> SlabCommunicator:
    """A communicator over torch's symmetric memory."""
    return SlabCommunicator(config, group, mode=mode or "auto")
