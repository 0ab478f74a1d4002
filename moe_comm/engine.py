"""Engine: what happens in every call of a communicator, whatever moves the rows.

It numbers calls, gives out slots, checks arguments, and runs the two halves that a backend
implements. Communicator puts the documented interface on top.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor

from moe_comm.calls import CombineCall, DispatchCall, Rows, check_combine, check_dispatch
from moe_comm.chunks import Pending
from moe_comm.config import EPConfig
from moe_comm.errors import PeerTimeoutError, SlotError
from moe_comm.group import Group
from moe_comm.handle import Dispatched, DispatchHandle
from moe_comm.metrics import CallEvent, Hook, Metrics, nvtx_range
from moe_comm.status import Status

T = TypeVar("T")


class Engine(abc.ABC):
    """See the module. Attributes are Communicator's."""

    backend: str
    mode: str
    capabilities: tuple[str, ...] = ()
    _op_name: str | None = None

    def __init__(self, config: EPConfig, group: Group) -> None:
        self.config = config
        self.group = group
        self.placement = config.placement_for(group.num_ranks)
        self.rank, self.num_ranks, self.device = group.rank, group.num_ranks, group.device
        self.num_local_experts = self.placement.num_local_experts(self.rank)
        # Replaced in place by update_placement, so that captured graphs see the new table.
        self._copy_table = self.placement.copy_table.to(self.device)
        self._num_copies = self.placement.num_copies.to(self.device)
        self._metrics = Metrics()
        self._hooks: list[Hook] = []
        self._busy_slots: set[int] = set()
        self._next_call = 0
        self._destroyed = False

    # What a backend implements.

    @abc.abstractmethod
    def _start_dispatch(self, call: DispatchCall) -> Any:
        """Enqueue the send half; returns what _finish_dispatch needs."""

    @abc.abstractmethod
    def _finish_dispatch(self, call: DispatchCall, state: Any) -> Dispatched:
        """Enqueue the receive half and the index computation."""

    @abc.abstractmethod
    def _start_combine(self, call: CombineCall) -> Any:
        """Enqueue the partial sums and the send half."""

    @abc.abstractmethod
    def _finish_combine(self, call: CombineCall, state: Any) -> Tensor:
        """Enqueue the receive half and the final sum: [num_rows, H]."""

    def _check_usable(self) -> None:  # noqa: B027 - few need it
        """Raise where an earlier call has left the communicator unable to go on. On every call, so
        it costs next to nothing."""

    def _check_dispatch(self, call: DispatchCall) -> None:  # noqa: B027 - few need it
        """Raise for what this backend in particular cannot dispatch, before anything is sent."""

    def _check_combine(self, call: CombineCall) -> None:  # noqa: B027 - few need it
        """Raise for what this backend in particular cannot combine, before anything is sent."""

    def _nothing_sent(self, error: BaseException) -> bool:
        """Whether the call that has just failed with `error` is as if it had not been made, because
        nothing of it was sent. Otherwise the call is over, and its slot free."""
        del error
        return False

    def _dispatch_at_once(self, call: DispatchCall) -> Dispatched:
        """Both halves, for backends that can do better than one after the other."""
        return self._finish_dispatch(call, self._start_dispatch(call))

    def _combine_at_once(self, call: CombineCall) -> Tensor:
        """Both halves, likewise."""
        return self._finish_combine(call, self._start_combine(call))

    @abc.abstractmethod
    def _read_status(self) -> Status:
        """Read the status word and clear the bits that are not sticky. Synchronizes."""

    def _close(self) -> None:  # noqa: B027 - most backends hold nothing to close
        """Free what the backend holds."""

    def _signal_release(self, handle: DispatchHandle) -> None:  # noqa: B027 - few need it
        """Tell the sources that a slot was freed without a combine, where that must be told."""

    def _repeat_rows(self, rows: Tensor, handle: DispatchHandle) -> Tensor:
        """Send rows [T, H] along a handle's routing as they are: a new [R, B, H]. Collective; the
        handle may be combined already. For gradients, where "autograd" is a capability."""
        raise NotImplementedError

    def _return_rows(self, rows: Tensor, handle: DispatchHandle) -> Tensor:
        """Add rows [R, B, D] of any float dtype up at their tokens, unweighted and as they are:
        [T, D]. Likewise."""
        raise NotImplementedError

    # The two calls, recording no gradients.

    def _dispatch_now(
        self,
        x: Rows,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        *,
        num_tokens: int | Tensor | None,
        bucket: int | None,
        payloads: Mapping[str, Tensor] | None,
        handle: DispatchHandle | None,
        async_op: bool,
    ) -> Dispatched | Pending[Dispatched]:
        """dispatch, recording nothing."""
        self._check_usable()
        call = check_dispatch(
            self.config,
            self.device,
            x,
            topk_idx,
            topk_weights,
            num_tokens=num_tokens,
            bucket=bucket,
            payloads=payloads,
            handle=handle,
        )
        self._check_dispatch(call)
        call.slot = self._take_slot(handle)
        call.call = self._next_call
        on_cuda = self.device.type == "cuda"

        def send() -> Any:
            self._emit("dispatch", call.call, call.bucket)
            return self._start_dispatch(call) if async_op else self._dispatch_at_once(call)

        name = "moe_comm.dispatch.send" if async_op else "moe_comm.dispatch"
        with nvtx_range(name, enabled=on_cuda):
            state = self._guard(call.slot, send)
        self._next_call += 1
        self._metrics.dispatches += 1
        if not async_op:
            arrived: Dispatched = state
            arrived.handle._owner = self
            return arrived

        def finish() -> Dispatched:
            with nvtx_range("moe_comm.dispatch.receive", enabled=on_cuda):
                result = self._guard(call.slot, lambda: self._finish_dispatch(call, state))
            result.handle._owner = self
            return result

        return Pending(finish)

    def _combine_now(
        self,
        y: Tensor,
        handle: DispatchHandle,
        *,
        layout: str,
        weights_applied: bool,
        bias: Tensor | tuple[Tensor, ...] | None,
        out: Tensor | None,
        async_op: bool,
    ) -> Tensor | Pending[Tensor]:
        """combine, recording nothing."""
        self._check_usable()
        if handle._owner is not self:
            raise ValueError("handle: expected a handle of this communicator, got another's")
        if handle.combined or handle.released:
            done = "combined" if handle.combined else "released"
            raise SlotError(f"handle: dispatch {handle.call} was {done} already")
        call = check_combine(
            self.config,
            self.device,
            self.num_ranks,
            y,
            handle,
            layout=layout,
            weights_applied=weights_applied,
            bias=bias,
            out=out,
            num_expert_rows=self.expert_row_capacity(handle.bucket),
        )
        self._check_combine(call)
        on_cuda = self.device.type == "cuda"

        def send() -> Any:
            self._emit("combine", handle.call, handle.bucket)
            return self._start_combine(call) if async_op else self._combine_at_once(call)

        handle.combined = True
        name = "moe_comm.combine.send" if async_op else "moe_comm.combine"
        with nvtx_range(name, enabled=on_cuda):
            state = self._guard(handle.slot, send, combining=handle)
        self._metrics.combines += 1
        if not async_op:
            self._busy_slots.discard(handle.slot)
            combined: Tensor = state
            return combined

        def finish() -> Tensor:
            with nvtx_range("moe_comm.combine.receive", enabled=on_cuda):
                result: Tensor = self._guard(handle.slot, lambda: self._finish_combine(call, state))
            self._busy_slots.discard(handle.slot)
            return result

        return Pending(finish)

    def expert_row_capacity(self, bucket: int) -> int:
        """Length of row_index at this bucket."""
        return self.config.expert_row_capacity(self.num_ranks, self.num_local_experts, bucket)

    # Shared pieces.

    def _check_alive(self) -> None:
        if self._destroyed:
            raise RuntimeError("this communicator was destroyed; create a new one")

    def _take_slot(self, reuse: DispatchHandle | None) -> int:
        if reuse is not None and not (reuse.combined or reuse.released):
            raise SlotError(
                f"handle: dispatch {reuse.call} still holds slot {reuse.slot}; combine or release "
                "it before its routing is repeated"
            )
        # The lowest free slot: calls come in one order on all ranks, so all take the same.
        for slot in range(self.config.num_slots):
            if slot not in self._busy_slots:
                self._busy_slots.add(slot)
                return slot
        raise SlotError(
            f"dispatch: all {self.config.num_slots} slots are taken; combine or release a handle "
            "first, or raise EPConfig.num_slots"
        )

    def _guard(
        self, slot: int, step: Callable[[], T], *, combining: DispatchHandle | None = None
    ) -> T:
        """step(); `combining` is the handle whose combine it begins. Where it fails after it has
        sent something, the call is over: a caller that goes on (mask_rank) must not lose the slot
        with it. Where it has sent nothing, a combine may be repeated, so its slot stays taken."""
        try:
            return step()
        except BaseException as error:
            if isinstance(error, PeerTimeoutError):
                self._metrics.timeouts += 1
            if self._nothing_sent(error) and combining is not None:
                combining.combined = False
            else:
                self._busy_slots.discard(slot)
            raise

    def _emit(self, phase: str, call: int, bucket: int) -> None:
        if self._hooks:
            event = CallEvent(
                phase=phase,
                call=call,
                backend=self.backend,
                mode=self.mode,
                bucket=bucket,
                rank=self.rank,
            )
            for hook in self._hooks:
                hook(event)
