"""What one dispatch brought, for backends that index with torch: the index, and the Dispatched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from moe_comm.backends.c10d_routing import Located
from moe_comm.calls import DispatchCall
from moe_comm.handle import Dispatched, DispatchHandle
from moe_comm.wire import Wire


@dataclass(frozen=True, kw_only=True, eq=False)
class ArrivedIndex:
    """The index of one dispatch, kept for its combine and for a repeat of its routing.

    Attributes:
        located: where this rank's own choices lie.
        local_idx: [R, B, K] int32 local expert ids, -1 elsewhere.
        weights: [R, B, K].
        num_tokens_per_rank: [R] int32.
        expert_offsets, row_index, choice_position: as Dispatched and DispatchHandle have them.
        route: what the mode needs for the way back.
    """

    located: Located
    local_idx: Tensor
    weights: Tensor
    num_tokens_per_rank: Tensor
    expert_offsets: Tensor
    row_index: Tensor
    choice_position: Tensor
    route: Any

    def dispatched(
        self,
        call: DispatchCall,
        num_tokens: int | Tensor,
        rows: Tensor,
        extras: dict[str, Tensor],
        wire: Wire,
    ) -> Dispatched:
        """The result of `call`. `extras` holds "scales" where the wire has them, and each payload
        as "payload NAME", [R, B, ...]."""
        handle = DispatchHandle(
            call=call.call,
            slot=call.slot,
            bucket=call.bucket,
            num_rows=call.num_rows,
            num_tokens=num_tokens,
            topk_idx=self.located.ids,
            choice_rank=self.located.rank,
            topk_weights=call.topk_weights,
            received_weights=self.weights,
            choice_position=self.choice_position,
            num_tokens_per_rank=self.num_tokens_per_rank,
            state=self,
        )
        # Aliases: the backend keeps its own views of its memory.
        extras = {name: tensor.detach() for name, tensor in extras.items()}
        return Dispatched(
            rows=rows.detach(),
            scales=extras.get("scales"),
            topk_idx=self.local_idx,
            topk_weights=self.weights,
            num_tokens_per_rank=self.num_tokens_per_rank,
            payloads={
                name.removeprefix("payload "): tensor
                for name, tensor in extras.items()
                if name.startswith("payload ")
            },
            expert_offsets=self.expert_offsets,
            row_index=self.row_index,
            wire=wire,
            handle=handle,
        )
