"""What travels in the c10d modes, rows and the records beside them, and the memory of a slot that
it lies in.

Shape legend: T this rank's tokens, R ranks, B the bucket, H hidden, D width of a combined row,
G scale groups, N records.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_comm.backends import device_math
from moe_comm.backends.c10d_routing import ROUTING
from moe_comm.backends.c10d_transport import Header, Phase
from moe_comm.backends.packing import Field, RecordLayout, Workspace
from moe_comm.calls import DispatchCall
from moe_comm.communicator import Communicator
from moe_comm.config import EPConfig
from moe_comm.group import Group


class TravellingRows(Communicator):
    """See the module.

    Attributes:
        _slots: memory of each slot.
    """

    def __init__(self, config: EPConfig, group: Group) -> None:
        super().__init__(config, group)
        self._slots = [Workspace(group.device) for _ in range(config.num_slots)]

    # What travels.

    def _on_wire(self, call: DispatchCall) -> tuple[Tensor, Tensor | None]:
        """x as it travels: [T, H] contiguous and its scales."""
        if call.is_quantized:
            scales = None if call.scales is None else call.scales.contiguous()
            return call.x.contiguous(), scales
        x = call.x.detach()
        values, scales = device_math.quantize(x, self.config.wire)
        return values.contiguous(), scales

    def _record_fields(self, call: DispatchCall, scales: Tensor | None) -> list[Field]:
        """What travels beside a row apart from the routing: scales and payloads."""
        fields = []
        if scales is not None:
            fields.append(Field(name="scales", dtype=scales.dtype, shape=tuple(scales.shape[1:])))
        for name, tensor in sorted(call.payloads.items()):
            shape = tuple(tensor.shape[1:])
            fields.append(Field(name=f"payload {name}", dtype=tensor.dtype, shape=shape))
        return fields

    def _routing_fields(self, call: DispatchCall) -> list[Field]:
        choices = (self.config.num_topk,)
        return [
            Field(name="ids", dtype=torch.int32, shape=choices),
            Field(name="weights", dtype=call.topk_weights.dtype, shape=choices),
        ]

    def _write_extras(
        self,
        records: Tensor,
        layout_: RecordLayout,
        call: DispatchCall,
        scales: Tensor | None,
        tokens: Tensor | slice,
    ) -> None:
        """Scales and payloads of `tokens` into records [n, bytes]."""
        if scales is not None:
            layout_.view(records, "scales").copy_(scales[tokens])
        for name, tensor in call.payloads.items():
            layout_.view(records, f"payload {name}").copy_(tensor.detach()[tokens])

    @staticmethod
    def _dispatch_header(
        call: DispatchCall, row_bytes: int, layout_: RecordLayout, num_tokens: int = 0
    ) -> Header:
        return Header(
            phase=Phase.DISPATCH,
            call=call.call,
            num_tokens=num_tokens,
            num_rows=0,
            bucket=call.bucket,
            row_bytes=row_bytes,
            record_bytes=layout_.num_bytes,
        )

    def _placed_extras(
        self, call: DispatchCall, layout_: RecordLayout, records: Tensor, places: Tensor
    ) -> dict[str, Tensor]:
        """Scales and payloads in records [N, bytes] at their places r * B + t: [R, B, ...] each.
        Other rows stay undefined."""
        extras: dict[str, Tensor] = {}
        for name, field in layout_.fields.items():
            if name not in ROUTING:
                room = self._extra_room(call, field)
                if field.num_bytes:
                    room.flatten(0, 1)[places] = layout_.view(records, name)
                extras[name] = room
        return extras

    # Receive memory.

    def _row_room(self, call: DispatchCall, like: Tensor) -> Tensor:
        """[R, B, H] of the call's slot, in the dtype that travels."""
        size = self.num_ranks * like.shape[1] * like.dtype.itemsize
        return self._slots[call.slot].tensor(
            "rows",
            (self.num_ranks, call.bucket, like.shape[1]),
            like.dtype,
            reserve=size * self.config.bucket,
        )

    def _extra_room(self, call: DispatchCall, field: Field) -> Tensor:
        """[R, B, ...] of the call's slot for one field."""
        return self._slots[call.slot].tensor(
            field.name,
            (self.num_ranks, call.bucket, *field.shape),
            field.dtype,
            reserve=self.num_ranks * self.config.bucket * field.num_bytes,
        )

    def _term_room(self, name: str, slot: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """[R, B, D] of a slot for terms of a combine; of the largest bucket's size, so that it
        stays where graphs of smaller ones have it."""
        most = self.num_ranks * self.config.bucket * shape[2] * dtype.itemsize
        return self._slots[slot].tensor(name, shape, dtype, reserve=most)
