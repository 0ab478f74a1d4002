"""What dispatch returns: the rows that arrived, and the handle that combine needs.

Shape legend: R ranks, B the bucket (rows a source rank has room for), T this rank's tokens,
H hidden, G scale groups, K choices, L local experts, N expert rows (N <= capacity).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moe_comm.wire import Wire, dequantize


@dataclass(kw_only=True, eq=False)
class DispatchHandle:
    """The routing of one dispatch. Opaque to users: pass it to combine, release(), or dispatch.

    Attributes:
        call: number of the dispatch on this communicator, equal on all ranks.
        slot: the receive slot it took.
        bucket: B of the call.
        num_rows: rows of x as given (T, padding included).
        num_tokens: valid tokens, an int or a scalar tensor on the device.
        topk_idx: [T, K] global expert ids of this rank's tokens: as given, or with -1 where a
            choice is masked, as the backend needs them.
        choice_rank: [T, K] int32 rank that serves each choice, -1 where masked.
        topk_weights: [T, K] fp32 weights of this rank's tokens.
        received_weights: [R, B, K] fp32 weights of the received rows.
        choice_position: [R * B, K] int32, the expert row of each choice of each received row;
            -1 where the choice is not on this rank.
        num_tokens_per_rank: [R] int32, each source rank's valid tokens.
        state: what the backend keeps for the way back.
        combined, released: whether the slot was given back, and how.
        token: stands for the handle in moe_comm.ops, where gradients are recorded; else None.
    """

    call: int
    slot: int
    bucket: int
    num_rows: int
    num_tokens: int | Tensor
    topk_idx: Tensor
    choice_rank: Tensor
    topk_weights: Tensor
    received_weights: Tensor
    choice_position: Tensor
    num_tokens_per_rank: Tensor
    state: Any = None
    combined: bool = False
    released: bool = False
    token: Tensor | None = None
    _owner: Any = field(default=None, repr=False)

    def release(self) -> None:
        """Give the receive slot back without a combine. Collective in order: every rank releases
        or combines each handle. Further uses of the rows are invalid. On the slab the stream then
        waits until every rank has done so."""
        self._owner.release(self)


@dataclass(frozen=True, kw_only=True, eq=False)
class Dispatched:
    """Rows that arrived at this rank, all on its device.

    Attributes:
        rows: [R, B, H] in the wire's value dtype: row (r, t) is source rank r's token t. Where t
            chose no expert here, and past r's tokens, the content is undefined. The inner two
            dimensions are contiguous; the outer stride may be larger than B * H. Memory of the
            communicator: valid until the slot is taken again.
        scales: [R, B, G] of the wire (fp32, or uint8 E8M0), or None.
        topk_idx: [R, B, K] int32 local expert ids; -1 where the choice is not on this rank.
        topk_weights: [R, B, K] fp32; undefined where topk_idx is -1.
        num_tokens_per_rank: [R] int32, each source rank's T.
        payloads: name -> [R, B, ...], as `rows`.
        expert_offsets: [L + 1] int32: local expert e owns expert rows expert_offsets[e] up to
            expert_offsets[e + 1].
        row_index: [capacity] int32: expert row n is received row row_index[n] = r * B + t;
            -1 from expert_offsets[-1] on. Rows of an expert are in order of (r, t, choice).
        wire: the wire of rows and scales.
        handle: for combine.
    """

    rows: Tensor
    scales: Tensor | None
    topk_idx: Tensor
    topk_weights: Tensor
    num_tokens_per_rank: Tensor
    payloads: dict[str, Tensor]
    expert_offsets: Tensor
    row_index: Tensor
    wire: Wire
    handle: DispatchHandle

    @property
    def num_tokens_per_expert(self) -> Tensor:
        """[L] int32: expert rows of each local expert."""
        return self.expert_offsets.diff()

    @property
    def num_local_experts(self) -> int:
        """L."""
        return self.expert_offsets.shape[0] - 1

    def counts(self) -> list[int]:
        """Expert rows of each local expert, on the host. Synchronizes with the device."""
        return [int(count) for count in self.num_tokens_per_expert.cpu()]

    def dequantized_rows(self) -> Tensor:
        """[R, B, H] in fp32 for fp8 and mxfp8; `rows` itself for bf16 and none."""
        return dequantize(self.rows, self.scales, self.wire)

    def expert_rows(self, alignment: int = 1) -> tuple[Tensor, Tensor]:
        """The expert-major copy, for a GEMM that wants one.

        Args:
            alignment: each expert's rows start at a multiple of it.

        Returns:
            rows [capacity', H] (dequantized; capacity' leaves room for the padding), zero where
            no row lies, and offsets [L + 1] int32, the padded start of each expert. With
            alignment 1, capacity' = len(row_index) and offsets = expert_offsets.
        """
        if alignment < 1:
            raise ValueError(f"alignment: expected a whole number >= 1, got {alignment}")
        num_experts, capacity = self.num_local_experts, self.row_index.shape[0]
        flat = self.dequantized_rows().flatten(0, 1)
        count = self.num_tokens_per_expert.to(torch.int64)
        padded = (count + alignment - 1) // alignment * alignment
        offsets = torch.zeros_like(self.expert_offsets, dtype=torch.int64)
        torch.cumsum(padded, 0, out=offsets[1:])
        room = capacity + num_experts * (alignment - 1)
        out = flat.new_zeros(room + 1, flat.shape[-1])
        n = torch.arange(capacity, device=flat.device)
        live = self.row_index >= 0
        expert = torch.searchsorted(self.expert_offsets[1:].to(torch.int64), n, right=True)
        expert = expert.clamp_max(max(num_experts - 1, 0))
        if num_experts:
            target = offsets[expert] + n - self.expert_offsets[expert]
            target = torch.where(live, target, room)
            source = flat[torch.where(live, self.row_index, 0).to(torch.int64)]
            # The last row swallows what lies past the end, without a host sync.
            out.index_copy_(0, target, source)
        return out[:room], offsets.to(torch.int32)

    def source_of(self, n: int) -> tuple[int, int]:
        """(source rank, token) of expert row n. Synchronizes; for error messages and tests."""
        row = int(self.row_index[n])
        return divmod(row, self.handle.bucket)
