"""Communicator: dispatch and combine, the rules every backend shares, and their life cycle.

Shape legend: T this rank's tokens, R ranks, B the bucket, H hidden, K choices, N expert rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Literal, Self, overload

import torch
from torch import Tensor

from moe_comm import recorded
from moe_comm.calls import Rows
from moe_comm.chunks import Pending, forward_in_chunks
from moe_comm.engine import Engine
from moe_comm.errors import PeerTimeoutError, SlotError
from moe_comm.handle import Dispatched, DispatchHandle
from moe_comm.metrics import Hook
from moe_comm.placement import ExpertPlacement


class Communicator(Engine):
    """Expert-parallel dispatch and combine of one MoE layer's shape over one group.

    Every method named collective is called by all ranks of the group in the same order. A
    communicator is not thread-safe. Use it as a context manager, or call destroy(). One serves any
    number of layers of this shape and placement. After destroy() calls raise RuntimeError.

    Attributes:
        config: the agreed EPConfig.
        group: the ranks.
        rank, num_ranks: this rank and their number, inside the group.
        device: where every tensor given to it must be.
        placement: the table in force.
        num_local_experts: physical experts of this rank.
        backend, mode: what runs inside ("c10d", "exact").
        capabilities: as the backend's Support has them.
    """

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
            x: [T, H]: bf16 (any dtype for wire "none"), or (values, scales) already on the wire,
                as moe_comm.quantize returns them.
            topk_idx: [T, K] int16, int32 or int64, logical expert ids; -1 masks a choice. Any
                other id outside [0, num_experts) counts as -1 and is reported by check().
            topk_weights: [T, K] fp32 (fp64 too where both wires are "none"); used by combine.
            num_tokens: valid tokens, an int or a scalar integer tensor on the device; rows past
                it are padding. Default T. 0 is fine. Modes that size messages on the host
                (c10d exact, hierarchical) synchronize to read a tensor.
            bucket: the token bucket B >= T, equal on all ranks; default the capacity. Every
                choice that ranks must share depends on it, never on T.
            payloads: name -> [T, ...], further tensors that travel with the rows.
            handle: repeat this handle's routing (topk_idx, topk_weights, num_tokens and bucket
                come from it) without index work. The handle must have been combined or released.
            async_op: return once the send half is enqueued; `wait()` gives the Dispatched. Until
                then the arguments' memory must not be written to.

        Returns:
            Dispatched, or Pending[Dispatched].

        Raises:
            ValueError, TypeError: an argument is wrong; nothing was sent. Other ranks wait for
                this one until their timeout.
            SlotError: num_slots dispatches are outstanding, or `handle` still holds its slot.
            PeerTimeoutError: a rank did not arrive, where the backend blocks the host; elsewhere
                check(), or a later call, raises it.
            PhaseError: another rank is in another call. ConfigMismatchError: it gives another
                bucket, dtype or payloads. Both where the backend compares before rows move.

        Where gradients are recorded (x or topk_weights requires them), or under torch.compile,
        the call goes through moe_comm.ops: rows are a copy, and async_op overlaps nothing.
        """
        self._check_alive()
        if recorded.wants_ops(self, x, topk_weights, handle.topk_weights if handle else None):
            result = recorded.dispatch_through(
                self,
                x,
                topk_idx,
                topk_weights,
                num_tokens=num_tokens,
                bucket=bucket,
                payloads=payloads,
                handle=handle,
            )
            return recorded.as_pending(result) if async_op else result
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
            ValueError: an argument is wrong, or the handle is another communicator's.
            SlotError: the handle was combined or released before.
            PeerTimeoutError, PhaseError, ConfigMismatchError: as dispatch.

        Gradients (of y, the dispatch's topk_weights and the biases): as dispatch; `out` must be
        None then.
        """
        self._check_alive()
        biases = bias if isinstance(bias, tuple) else (bias,)
        if recorded.wants_ops(self, y, handle.topk_weights, *biases):
            result = recorded.combine_through(
                self,
                y,
                handle,
                layout=layout,
                weights_applied=weights_applied,
                bias=bias,
                out=out,
            )
            return recorded.as_pending(result) if async_op else result
        return self._combine_now(
            y,
            handle,
            layout=layout,
            weights_applied=weights_applied,
            bias=bias,
            out=out,
            async_op=async_op,
        )

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

        Returns: [T, H] in x's dtype.

        Raises: ValueError where T, num_tokens and bucket do not fit each other; else as dispatch
            and combine.
        """
        return forward_in_chunks(
            self, x, topk_idx, topk_weights, experts, num_tokens=num_tokens, bucket=bucket
        )

    def release(self, handle: DispatchHandle) -> None:
        """Give the handle's slot back without a combine. Collective in order.

        Raises ValueError where the handle is another communicator's.
        """
        if handle._owner is not self:
            raise ValueError("handle: expected a handle of this communicator, got another's")
        if handle.combined or handle.released:
            return
        handle.released = True
        self._signal_release(handle)
        self._busy_slots.discard(handle.slot)

    def check(self) -> None:
        """Raise what the device recorded since the last call; else return. Synchronizes.

        A timeout or phase error on the slab is raised by the next eager dispatch or combine too,
        which need not synchronize to see it.

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
        more copies of one expert than the communicator was created with; SlotError where a dispatch
        is outstanding.
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
        """Go on without a dead rank: its experts contribute nothing from now on, and nothing is
        sent to it. Collective among the others. Where "masking" is a capability; else
        NotImplementedError. ValueError where `rank` is this one, or masked already."""
        raise NotImplementedError(
            f"mask_rank: the {self.backend} backend cannot go on without {rank}"
        )

    def metrics(self) -> dict[str, int]:
        """Counts since creation, by the names of moe_comm.metrics.Metrics' fields."""
        return self._metrics.snapshot()

    def add_hook(self, hook: Hook) -> None:
        """Call `hook(CallEvent)` on the host as each dispatch and combine is enqueued."""
        self._hooks.append(hook)

    def destroy(self) -> None:
        """Free buffers, and process groups of the communicator's own; `group` stays the caller's.
        Every rank calls it, since some backends free theirs together. Over gloo it waits, as long
        as a call would, for messages of an asynchronous call that nobody waited for. Safe to call
        twice."""
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
