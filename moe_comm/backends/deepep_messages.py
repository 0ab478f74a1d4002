"""Messages of the DeepEP modes: a row on the wire, and a record behind it.

A record has the source rank, the token (-1 in a header), the source's T, and where it is new the
routing: ids as rank * S + slot, S the largest number of experts on a rank, and weights; then scales
and payloads. Shape legend: as in deepep_base.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_comm.backends.c10d_routing import Located
from moe_comm.backends.deepep_facts import round_up
from moe_comm.backends.deepep_transport import Part, Way
from moe_comm.backends.packing import Field, RecordLayout, as_bytes, take_rows
from moe_comm.calls import DispatchCall


@dataclass(kw_only=True, eq=False)
class Taken:
    """What messages are put into: `rows` [R, B, H], `records` uint8 [R * B, bytes], `reached` bool
    [R * B], `tokens` int32 [R + 1], the T of each rank."""

    rows: Tensor
    records: Tensor
    reached: Tensor
    tokens: Tensor


class MessageForm:
    """What the messages of one dispatch look like.

    Args:
        call: whose payloads travel.
        values: [T, H] on the wire. scales: [T, G], or None.
        routing: ids and weights travel as well.

    Attributes:
        fields: of a record, the widest elements first: alignment costs nothing between them.
        layout: where they lie in it.
        start: where it begins.
    """

    def __init__(
        self, call: DispatchCall, values: Tensor, scales: Tensor | None, *, routing: bool
    ) -> None:
        self._call, self._values, self._scales = call, values, scales
        fields = [Field(name=name, dtype=torch.int32) for name in ("source", "token", "count")]
        if routing:
            choices = tuple(call.topk_idx.shape[1:])
            fields.append(Field(name="ids", dtype=torch.int32, shape=choices))
            fields.append(Field(name="weights", dtype=torch.float32, shape=choices))
        if scales is not None:
            fields.append(Field(name="scales", dtype=scales.dtype, shape=tuple(scales.shape[1:])))
        for name, tensor in sorted(call.payloads.items()):
            shape = tuple(tensor.shape[1:])
            fields.append(Field(name=f"payload {name}", dtype=tensor.dtype, shape=shape))
        self.fields = sorted(fields, key=lambda field: -field.dtype.itemsize)
        self.layout = RecordLayout(self.fields)
        self.start = round_up(values.shape[1] * values.dtype.itemsize, 16)

    @property
    def num_bytes(self) -> int:
        """Bytes of a message that mean something."""
        return self.start + self.layout.num_bytes

    def write(
        self,
        messages: Tensor,
        located: Located,
        *,
        rank: int,
        num_tokens: int | Tensor,
        experts_a_rank: int,
    ) -> None:
        """Fill messages uint8 [T + h, W]."""
        layout, rows = self.layout, self._values.shape[0]
        flat = as_bytes(self._values.contiguous())
        records = messages[:, self.start : self.num_bytes]
        routing = "ids" in layout.fields
        whole_words = flat.shape[1] % 4 == 0 and flat.storage_offset() % 4 == 0
        if messages.is_cuda and whole_words:
            from moe_comm.kernels.deepep_messages import pack_messages

            names = ("source", "token", "count", *(("ids", "weights") if routing else ()))
            pack_messages(
                flat.view(torch.int32),
                located.rank.contiguous(),
                located.slot.contiguous(),
                self._call.topk_weights.detach().contiguous(),
                messages,
                num_tokens=num_tokens,
                source=rank,
                experts_a_rank=experts_a_rank,
                start=self.start,
                at=layout.start(*names),
            )
        else:
            messages[:rows, : flat.shape[1]].copy_(flat)
            layout.view(records, "source").fill_(rank)
            layout.view(records, "count").fill_(num_tokens)
            token = layout.view(records, "token")
            token[:rows] = torch.arange(rows, dtype=torch.int32, device=messages.device)
            token[rows:] = -1
            if routing:
                ids, weights = layout.view(records, "ids"), layout.view(records, "weights")
                everywhere = located.rank * experts_a_rank + located.slot
                ids[:rows] = torch.where(located.rank >= 0, everywhere, -1)
                weights[:rows] = self._call.topk_weights.detach()
        if self._scales is not None:
            layout.view(records[:rows], "scales").copy_(self._scales)
        for name, tensor in self._call.payloads.items():
            layout.view(records[:rows], f"payload {name}").copy_(tensor.detach())

    def take(self, part: Part, taken: Taken, *, first: bool) -> Way:
        """Put a part's messages where they belong. The `first` part writes everything."""
        layout, device = self.layout, part.rows.device
        num_slots, num_places = part.rows.shape[0], taken.records.shape[0]
        num_ranks = taken.tokens.shape[0] - 1
        bucket = num_places // num_ranks
        records = part.rows[:, self.start : self.num_bytes]
        source = layout.view(records, "source").to(torch.int64)
        token = layout.view(records, "token").to(torch.int64)
        told, has_row = source, token >= 0
        if part.valid is not None:
            # What lies in other slots is garbage.
            told = torch.where(part.valid, source, num_ranks)
            has_row = has_row & part.valid
        taken.tokens.scatter_(0, told, layout.view(records, "count").contiguous())
        place = torch.where(has_row, source * bucket + token, num_places)
        slot = torch.full((num_places + 1,), num_slots, dtype=torch.int64, device=device)
        slot.scatter_(0, place, torch.arange(num_slots, device=device))
        slot = slot[:num_places].contiguous()
        reached = slot < num_slots
        index = slot.clamp_max(num_slots - 1)
        rows = as_bytes(taken.rows.flatten(0, 1))
        for target, arrived in ((rows, part.rows[:, : rows.shape[1]]), (taken.records, records)):
            if first:
                take_rows(arrived, index, target)
            else:
                target.copy_(torch.where(reached[:, None], take_rows(arrived, index), target))
        taken.reached |= reached
        return Way(place=place, slot=slot, tokens=part.tokens, state=part.state)
