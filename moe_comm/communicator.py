"""Communicator: dispatch and combine, the rules every backend shares, and their life cycle.

Shape legend: T this rank's tokens, R ranks, B the bucket, H hidden, K choices, N expert rows.
"""

from __future__ import annotations

import abc
import logging
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, overload

import torch
from torch import Tensor

from moe_comm import ops
from moe_comm.calls import CombineCall, DispatchCall, Rows, check_combine, check_dispatch
from moe_comm.chunks import Pending, forward_in_chunks
from moe_comm.config import EPConfig
from moe_comm.errors import PeerTimeoutError, SlotError
from moe_comm.group import Group
from moe_comm.handle import Dispatched, DispatchHandle
from moe_comm.metrics import CallEvent, Hook, Metrics, nvtx_range
from moe_comm.placement import ExpertPlacement
from moe_comm.status import Status

logger = logging.getLogger("moe_comm")

T = TypeVar("T")


class Communicator(abc.ABC):
    """Expert-parallel dispatch and combine of one MoE layer's shape over one group.

    Every method named collective is called by all ranks of the group in the same order. A
    communicator is not thread-safe. Use it as a context manager, or call destroy().

    Attributes:
        config: the agreed EPConfig.
        group: the ranks.
        placement: the table in force.
        backend, mode: what runs inside ("c10d", "exact").
        capabilities: as the backend's Support has them.
    """

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

    # The interface.

    @overload
    def dispatch(
        self,
        x: Rows,
        topk_idx: Tensor | None = ...,
        topk_weights: Tensor | None = ...,
        *,
        num_tokens: int | Tensor | None = ...,
        bucket: int | None = ...,
        payloads: Mapping[str, Tensor] | None = ...,
        handle: DispatchHandle | None = ...,
        async_op: Literal[False] = ...,
    ) -> Dispatched: ...

    @overload
    def dispatch(
        self,
        x: Rows,
        topk_idx: Tensor | None = ...,
        topk_weights: Tensor | None = ...,
        *,
        num_tokens: int | Tensor | None = ...,
        bucket: int | None = ...,
        payloads: Mapping[str, Tensor] | None = ...,
        handle: DispatchHandle | None = ...,
        async_op: Literal[True],
    ) -> Pending[Dispatched]: ...

    def dispatch(
        self,
        x: Rows,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        *,
        num_tokens: int | Tensor | None = None,
        bucket: int | None = None,
        payloads: Mapping[str, Tensor] | None = None,
        handle: DispatchHandle | None = None,
        async_op: bool = False,
    ) -> Dispatched | Pending[Dispatched]:
        """Send each token's row to every rank that holds one of its experts. Collective.

        Args:
            x: [T, H]: bf16 (any dtype for wire "none"), or (values, scales) already on the wire.
            topk_idx: [T, K] int, logical expert ids; -1 masks a choice. Any other id outside
                [0, num_experts) counts as -1 and is reported by check().
            topk_weights: [T, K] fp32; used by combine.
            num_tokens: valid tokens, an int or a scalar integer tensor on the device; rows past
                it are padding. Default T. 0 is fine. Modes that size messages on the host
                (c10d exact, hierarchical) synchronize to read a tensor.
            bucket: the token bucket B >= T, equal on all ranks; default the capacity. Every
                choice that ranks must share depends on it, never on T.
            payloads: name -> [T, ...], further tensors that travel with the rows.
            handle: repeat this handle's routing (topk_idx, topk_weights, num_tokens and bucket
                come from it) without index work. The handle must have been combined or released.
            async_op: return once the send half is enqueued; `wait()` gives the Dispatched.

        Returns:
            Dispatched, or Pending[Dispatched].

        Raises:
            ValueError, TypeError: an argument is wrong; nothing was sent. Other ranks wait for
                this one until their timeout.
            SlotError: num_slots dispatches are outstanding.
            PeerTimeoutError: a rank did not arrive, where the backend blocks the host.

        Where gradients are recorded (x or topk_weights requires them), or under torch.compile,
        the call goes through moe_comm.ops: rows are a copy, and async_op overlaps nothing.
        """
        self._check_alive()
        if ops.wants_ops(self, x, topk_weights, handle.topk_weights if handle else None):
            recorded = ops.dispatch_through(
                self,
                x,
                topk_idx,
                topk_weights,
                num_tokens=num_tokens,
                bucket=bucket,
                payloads=payloads,
                handle=handle,
            )
            return ops.as_pending(recorded) if async_op else recorded
        return self._dispatch_now(
            x,
            topk_idx,
            topk_weights,
            num_tokens=num_tokens,
            bucket=bucket,
            payloads=payloads,
            handle=handle,
            async_op=async_op,
        )

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
        call.slot = self._take_slot(handle)
        call.call = self._next_call
        self._next_call += 1
        self._metrics.dispatches += 1
        self._emit("dispatch", call.call, call.bucket)
        on_cuda = self.device.type == "cuda"
        if not async_op:
            with nvtx_range("moe_comm.dispatch", enabled=on_cuda):
                arrived = self._guard(call.slot, lambda: self._dispatch_at_once(call))
            arrived.handle._owner = self
            return arrived
        with nvtx_range("moe_comm.dispatch.send", enabled=on_cuda):
            state = self._guard(call.slot, lambda: self._start_dispatch(call))

        def finish() -> Dispatched:
            with nvtx_range("moe_comm.dispatch.receive", enabled=on_cuda):
                result = self._guard(call.slot, lambda: self._finish_dispatch(call, state))
            result.handle._owner = self
            return result

        return Pending(finish)

    @overload
    def combine(
        self,
        y: Tensor,
        handle: DispatchHandle,
        *,
        layout: str = ...,
        weights_applied: bool = ...,
        bias: Tensor | tuple[Tensor, ...] | None = ...,
        out: Tensor | None = ...,
        async_op: Literal[False] = ...,
    ) -> Tensor: ...

    @overload
    def combine(
        self,
        y: Tensor,
        handle: DispatchHandle,
        *,
        layout: str = ...,
        weights_applied: bool = ...,
        bias: Tensor | tuple[Tensor, ...] | None = ...,
        out: Tensor | None = ...,
        async_op: Literal[True],
    ) -> Pending[Tensor]: ...

    def combine(
        self,
        y: Tensor,
        handle: DispatchHandle,
        *,
        layout: str = "expert",
        weights_applied: bool = False,
        bias: Tensor | tuple[Tensor, ...] | None = None,
        out: Tensor | None = None,
        async_op: bool = False,
    ) -> Tensor | Pending[Tensor]:
        """Weight, sum and return the expert rows to their tokens. Collective.

        Args:
            y: layout "expert": [N, H] bf16 rows grouped by local expert, in row_index's order (N
                may be shorter than row_index, never shorter than expert_offsets[-1]); layout
                "rows": [R, B, H], one already reduced row per (source rank, token).
            handle: of the dispatch. Gives its slot back.
            weights_applied: the rows carry their weights already.
            bias: [T, H] in y's dtype, or a tuple of them, summed in fp32 before the first
                partial sum.
            out: [T, H] to write into; default a new tensor.
            async_op: return once the send half is enqueued; `wait()` gives the tensor.

        Returns:
            [T, H] in y's dtype; a token without a valid choice, and padding, get zeros (or the
            biases). The order of summation is the numeric contract: moe_comm.backends.reference.

        Raises:
            ValueError: an argument is wrong. SlotError: the handle was combined or released
            before. PeerTimeoutError, PhaseError: as dispatch.

        Gradients (of y, the dispatch's topk_weights and the biases): as dispatch; `out` must be
        None then.
        """
        self._check_alive()
        biases = bias if isinstance(bias, tuple) else (bias,)
        if ops.wants_ops(self, y, handle.topk_weights, *biases):
            recorded = ops.combine_through(
                self,
                y,
                handle,
                layout=layout,
                weights_applied=weights_applied,
                bias=bias,
                out=out,
            )
            return ops.as_pending(recorded) if async_op else recorded
        return self._combine_now(
            y,
            handle,
            layout=layout,
            weights_applied=weights_applied,
            bias=bias,
            out=out,
            async_op=async_op,
        )

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
        self._metrics.combines += 1
        self._emit("combine", handle.call, handle.bucket)
        handle.combined = True
        on_cuda = self.device.type == "cuda"
        if not async_op:
            with nvtx_range("moe_comm.combine", enabled=on_cuda):
                combined: Tensor = self._guard(handle.slot, lambda: self._combine_at_once(call))
            self._busy_slots.discard(handle.slot)
            return combined
        with nvtx_range("moe_comm.combine.send", enabled=on_cuda):
            state = self._guard(handle.slot, lambda: self._start_combine(call))

        def finish() -> Tensor:
            with nvtx_range("moe_comm.combine.receive", enabled=on_cuda):
                result: Tensor = self._guard(handle.slot, lambda: self._finish_combine(call, state))
            self._busy_slots.discard(handle.slot)
            return result

        return Pending(finish)

    def forward(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        experts: Callable[[Dispatched], Tensor],
        *,
        num_tokens: int | None = None,
        bucket: int | None = None,
    ) -> Tensor:
        """dispatch, `experts` and combine, in chunks of config.chunk_tokens. Collective.

        With two slots or more the next chunk's rows travel while `experts` works on this one, so
        a prompt of any length needs the memory of two chunks.

        Args:
            x, topk_idx, topk_weights: as dispatch; T up to max_tokens_per_rank.
            experts: Dispatched -> [N, H] rows grouped by local expert. Called as often on every
                rank: ceil(bucket / chunk_tokens) times.
            num_tokens: valid tokens, default T.
            bucket: the largest T of any rank, equal on all ranks; default max_tokens_per_rank.

        Returns: [T, H].
        """
        return forward_in_chunks(
            self, x, topk_idx, topk_weights, experts, num_tokens=num_tokens, bucket=bucket
        )

    def release(self, handle: DispatchHandle) -> None:
        """Give the handle's slot back without a combine. Collective in order."""
        if handle.combined or handle.released:
            return
        handle.released = True
        self._signal_release(handle)
        self._busy_slots.discard(handle.slot)

    def check(self) -> None:
        """Raise what the device recorded since the last call; else return. Synchronizes.

        Raises PeerTimeoutError and PhaseError (sticky), ExpertRowsOverflowError and
        InvalidRoutingError (cleared).
        """
        self._check_alive()
        error = self._read_status().error(rank=self.rank, timeout_s=self.config.wait_s)
        if error is not None:
            if isinstance(error, PeerTimeoutError):
                self._metrics.timeouts += 1
            else:
                self._metrics.errors += 1
            raise error

    def update_placement(self, placement: ExpertPlacement) -> None:
        """Swap the table in place; captured graphs stay valid. Collective: every rank gives the
        same table, with no dispatch outstanding. The caller moves the experts' weights.

        Raises ValueError where the table has other experts, ranks or numbers of slots a rank, or
        more copies of one expert than the communicator was created with.
        """
        self._check_alive()
        old = self.placement
        for name, want, got in (
            ("experts", old.num_experts, placement.num_experts),
            ("ranks", old.num_ranks, placement.num_ranks),
            ("slots a rank", [len(s) for s in old.slots], [len(s) for s in placement.slots]),
        ):
            if want != got:
                raise ValueError(f"placement: expected {want} {name}, got {got}")
        width = self._copy_table.shape[1]
        table = placement.copy_table
        if table.shape[1] > width:
            raise ValueError(
                f"placement: expected at most {width} copies of an expert, got {table.shape[1]}"
            )
        if self._busy_slots:
            raise SlotError("placement: expected no outstanding dispatch")
        wide = torch.full((placement.num_experts, width, 2), -1, dtype=torch.int32)
        wide[:, : table.shape[1]] = table
        self._copy_table.copy_(wide)
        self._num_copies.copy_(placement.num_copies)
        self.placement = placement

    def mask_rank(self, rank: int) -> None:
        """Go on without a dead rank, where the backend can: its experts contribute nothing."""
        raise NotImplementedError(
            f"mask_rank: the {self.backend} backend cannot go on without {rank}"
        )

    def expert_row_capacity(self, bucket: int) -> int:
        """Length of row_index at this bucket."""
        return self.config.expert_row_capacity(self.num_ranks, self.num_local_experts, bucket)

    def metrics(self) -> dict[str, int]:
        """Counts since creation: see moe_comm.metrics.Metrics."""
        return self._metrics.snapshot()

    def add_hook(self, hook: Hook) -> None:
        """Call `hook(CallEvent)` on the host as each dispatch and combine is enqueued."""
        self._hooks.append(hook)

    def destroy(self) -> None:
        """Free buffers. The process group stays the caller's. Safe to call twice."""
        if not self._destroyed:
            self._destroyed = True
            self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.destroy()

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

    def _guard(self, slot: int, step: Callable[[], T]) -> T:
        try:
            return step()
        except Exception as error:
            # The call is over: a caller that goes on (mask_rank) must not lose the slot with it.
            self._busy_slots.discard(slot)
            if isinstance(error, PeerTimeoutError):
                self._metrics.timeouts += 1
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
