"""The slab backend: dispatch and combine over memory that ranks reach directly.

Each source rank owns a block of rows in every rank's receive memory, so a row's place is
arithmetic, no counts are exchanged before rows move, and results do not depend on timing. Kernels:
moe_comm.kernels.dispatch and .combine; launches: moe_comm.backends.slab_engine; which way a call
takes: moe_comm.backends.slab_modes.

Health: every wait is bounded by timeout_s on the device. After the first timeout or phase error
later waits return at once, dispatch delivers no rows, combine delivers NaN, and check() raises; so
does the next call that is not captured, once the device has told the host, which it does without
being asked. Ids out of range and dropped rows are told by check() alone. The process lives and can
build a new communicator.

Streams: a communicator's calls, their halves and releases run in one order, since counters and
working memory are common to all slots. Calls on the same stream do. A call on another stream than
the last one is put behind what that stream holds so far; in a capture the caller sees to the order
(torch.cuda.Stream.wait_stream). What a call is given is read until its second half has run: write
to it only after that, in stream order. It may be freed once the second half is enqueued.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_comm import env
from moe_comm.backends import Support
from moe_comm.backends.slab_engine import SlabEngine, region_sizes
from moe_comm.backends.slab_modes import MODES, SlabTuning
from moe_comm.calls import CombineCall, DispatchCall
from moe_comm.communicator import Communicator
from moe_comm.config import EPConfig
from moe_comm.errors import MoeCommError, PeerTimeoutError, SlotError
from moe_comm.group import Group, drop_group
from moe_comm.handle import Dispatched, DispatchHandle
from moe_comm.placement import ExpertPlacement
from moe_comm.status import Status
from moe_comm.symmetric import SymmetricMemory, allocate, needs_puts, unreached
from moe_comm.topology import Topology

CAPABILITIES = ("capture", "overlap", "masking", "payloads")
# One more where rows are put by NVSHMEM instead of stored.
PUT = "put"
# The index packs a local expert id into 15 bits.
MAX_LOCAL_EXPERTS = 1 << 15
# Survivors of a lost rank notice it at different times.
_AGREE_TIMEOUT_S = 600.0


class SlabCommunicator(Communicator):
    """Dispatch and combine through symmetric memory. Construction is collective.

    Args:
        config: the shape.
        group: ranks that reach each other's memory, or that NVSHMEM joins.
        mode: one of MODES; "auto" goes by the bucket.
        tuning: knobs; default SlabTuning of this mode. Its mode and `mode` are one setting: a
            ValueError where both are given and differ.
        memory: symmetric memory to use instead of a block of its own.
    """

    backend = "slab"
    capabilities: tuple[str, ...] = CAPABILITIES

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
        self.tuning = SlabTuning(mode=mode) if tuning is None else tuning.with_mode(mode)
        self.mode = self.tuning.mode
        if memory is None:
            puts = needs_puts(group)
            sizes = region_sizes(config, group.num_ranks, puts=puts)
            memory = allocate(group, sizes, puts=puts)
        self._memory = memory
        if memory.puts:
            self.capabilities = (*CAPABILITIES, PUT)
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
        # What ended a call after it had begun to send.
        self._broken_by: BaseException | None = None

    def mode_for(self, bucket: int) -> str:
        """What a dispatch of this bucket runs: "low-latency" or "high-throughput", with "+put"
        where rows are put."""
        mode = self.tuning.mode_of(self.config, bucket, self.num_ranks)
        return f"{mode}+{PUT}" if self._memory.puts else mode

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

    def _check_usable(self) -> None:
        if self._broken_by is not None:
            kind = type(self._broken_by).__name__
            raise MoeCommError(
                f"an earlier call failed after it had begun to send ({kind}: {self._broken_by}): "
                "this rank is out of step with the others; destroy the communicator and create a "
                "new one"
            ) from self._broken_by
        self.engine.under_way = False
        if self.engine.has_failed():
            error = self.engine.told_status().error(rank=self.rank, timeout_s=self.config.wait_s)
            if error is not None:
                timed_out = isinstance(error, PeerTimeoutError)
                self._metrics.timeouts += timed_out
                self._metrics.errors += not timed_out
                raise error

    def _nothing_sent(self, error: BaseException) -> bool:
        if self.engine.under_way:
            self._broken_by = error
        return not self.engine.under_way

    def _check_dispatch(self, call: DispatchCall) -> None:
        if call.topk_weights.dtype != torch.float32:
            raise ValueError(
                f"topk_weights: expected torch.float32 on the slab backend, got "
                f"{call.topk_weights.dtype}"
            )

    def _start_dispatch(self, call: DispatchCall) -> Any:
        self.engine.dispatch(call, send=True, receive=False)
        self._slot_calls[call.slot] = call.call

    def _finish_dispatch(self, call: DispatchCall, state: Any) -> Dispatched:
        result = self.engine.dispatch(call, send=False, receive=True)
        assert result is not None
        return result

    def _dispatch_at_once(self, call: DispatchCall) -> Dispatched:
        result = self.engine.dispatch(call, send=True, receive=True)
        assert result is not None
        self._slot_calls[call.slot] = call.call
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
        try:
            self.engine.signal_release(handle.slot)
        except BaseException as error:
            self._broken_by = error
            raise

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
        pg = self.group.subgroup(
            f"without {sorted({*range(self.num_ranks)} - {*self._survivors})}",
            self._survivors,
            backend="gloo",
            timeout_s=_AGREE_TIMEOUT_S,
        )
        try:
            counters: list[list[int]] = [[] for _ in self._survivors]
            dist.all_gather_object(counters, self.engine.read_counters(), group=pg)
            self.engine.agree_on_counters(counters)
            # Nobody may release into memory whose counters are not set yet.
            dist.barrier(group=pg)
        finally:
            drop_group(pg)
        self._busy_slots.clear()
        self._slot_calls.clear()
        self._broken_by = None

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
    """Whether ranks reach each other's memory, by stores or by NVSHMEM's puts, and the shape
    fits."""
    if topology.device_type != "cuda":
        return Support(False, f"needs CUDA devices, the ranks have {topology.device_type}")
    if importlib.util.find_spec("triton") is None:
        return Support(False, "needs triton; pip install 'triton>=3.6'")
    if config.reduction != "rank":
        return Support(False, f"adds rank by rank, the config asks for {config.reduction!r}")
    largest = config.placement_for(topology.num_ranks).max_local_experts
    if largest >= MAX_LOCAL_EXPERTS:
        return Support(False, f"serves up to {MAX_LOCAL_EXPERTS - 1} experts a rank, got {largest}")
    why = unreached(topology)
    if env.SLAB_FORCE_PUT.get():
        why = f"{env.SLAB_FORCE_PUT.name} is set"
    if not why:
        return Support(True, "", MODES, CAPABILITIES)
    from moe_comm import symmetric_nvshmem

    missing = symmetric_nvshmem.missing()
    if missing:
        return Support(False, f"{why}, so rows would be put by NVSHMEM, but {missing}")
    return Support(True, f"rows are put by NVSHMEM: {why}", MODES, (*CAPABILITIES, PUT))


def build(config: EPConfig, group: Group, mode: str | None) -> SlabCommunicator:
    """A communicator over symmetric memory: torch's, or NVSHMEM's where rows are put."""
    return SlabCommunicator(config, group, mode=mode or "auto")
