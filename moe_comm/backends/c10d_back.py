"""The way back of the modes exact and dense: one row a (token, rank), added up at the source.

Terms of other ranks' tokens are summed first. While they travel, this rank's own are summed where
they belong, so that the links and the memory are busy at once.

Shape legend: R ranks, B the bucket, D width of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from moe_comm.backends import device_math
from moe_comm.backends.c10d_base import Arrived, C10dCommunicator
from moe_comm.backends.c10d_transport import Kind, Phase, Transfer
from moe_comm.backends.packing import as_bytes, put_rows
from moe_comm.calls import CombineCall
from moe_comm.config import EPConfig
from moe_comm.group import Group
from moe_comm.wire import Wire

# Tokens of a bucket whose sums fill the device.
_LARGE = 1024


@dataclass(kw_only=True, eq=False)
class Way:
    """One exchange of a combine under way: terms or scales, arriving in `back` [R, B, D].

    Attributes:
        staged, places: rows that arrive packed, uint8 [n, bytes], and where they belong, r * B + t.
    """

    back: Tensor
    transfer: Transfer
    staged: Tensor | None = None
    places: Tensor | None = None


@dataclass(kw_only=True, eq=False)
class _Halves:
    """What travels, and where it arrives, as bytes by rank: of rooms that recur."""

    terms: Tensor
    back: Tensor
    sends: dict[int, Tensor]
    recvs: dict[int, Tensor]


class ReturnedTerms(C10dCommunicator):
    """See the module.

    Attributes:
        _halves: by slot and kind, the last.
    """

    def __init__(self, config: EPConfig, group: Group) -> None:
        super().__init__(config, group)
        self._halves: dict[tuple[int, Kind], _Halves] = {}

    def _start_back(self, call: CombineCall, form: Wire, phase: Phase) -> list[Way]:
        arrived: Arrived = call.handle.state
        self._agree_back(call, phase)
        slot = call.handle.slot
        if not self._transport.has_headers:
            row_bytes = call.y.shape[-1] * call.y.dtype.itemsize
            number, bucket = call.handle.call, call.handle.bucket
            self._transport.doing = (int(phase), number, 0, 0, bucket, row_bytes, 0)
        if form.scale_dtype is None and call.layout == "expert" and self._transport.in_place:
            y = call.y.detach().contiguous()
            shape = (self.num_ranks, call.handle.bucket, y.shape[1])
            terms = self._term_room("partials", slot, shape, y.dtype)
            back = self._term_room(Kind.BACK_ROWS.name, slot, shape, y.dtype)
            first = self.rank * call.handle.bucket
            last = first + call.handle.bucket
            self._sum_terms(call, arrived, y, terms, range(first))
            self._sum_terms(call, arrived, y, terms, range(last, shape[0] * shape[1]))
            way = self._send_back(call, terms, back, phase, Kind.BACK_ROWS)
            # A kernel that fills the device lets no other in until its last programs have begun:
            # behind a short one the transfer begins before the rest.
            middle = first + (call.handle.bucket // 8 if call.handle.bucket >= _LARGE else 0)
            self._sum_terms(call, arrived, y, back, range(first, middle))
            self._sum_terms(call, arrived, y, back, range(middle, last))
            return [way]
        ways = []
        values, scales = self._partials(call, arrived, form)
        for kind, sent in ((Kind.BACK_ROWS, values), (Kind.BACK_SCALES, scales)):
            if sent is not None:
                back = self._term_room(kind.name, slot, sent.shape, sent.dtype)
                ways.append(self._send_back(call, sent, back, phase, kind))
                # While they travel.
                back[self.rank].copy_(sent[self.rank])
        return ways

    def _sum_terms(
        self, call: CombineCall, arrived: Arrived, y: Tensor, out: Tensor, rows: range
    ) -> None:
        """Terms of some rows into their places in `out` [R, B, D]."""
        if not rows:
            return
        device_math.partial_sums(
            y,
            arrived.weights,
            arrived.choice_position,
            weights_applied=call.weights_applied,
            fill_empty=self.config.max_expert_rows is not None,
            out=out,
            rows=rows,
        )

    def _send_back(
        self, call: CombineCall, terms: Tensor, back: Tensor, phase: Phase, kind: Kind
    ) -> Way:
        """Each source rank's part of `terms` [R, B, D] under way to it, and what comes in return
        into `back` [R, B, D], whose own part is left alone or becomes that of `terms`."""
        return self._send_all_back(call, terms, back, phase, kind)

    def _send_all_back(
        self, call: CombineCall, terms: Tensor, back: Tensor, phase: Phase, kind: Kind
    ) -> Way:
        """All B rows of each rank."""
        if not self._transport.in_place:
            give, take = (as_bytes(tensor.view(self.num_ranks, -1)) for tensor in (terms, back))
            transfer = self._transport.all_to_all_equal(phase, give, take, kind)
            return Way(back=back, transfer=transfer)
        at = call.handle.slot, kind
        halves = self._halves.get(at)
        if halves is None or halves.terms is not terms or halves.back is not back:
            give, take = (as_bytes(tensor.view(self.num_ranks, -1)) for tensor in (terms, back))
            others = self._transport.others
            halves = _Halves(
                terms=terms,
                back=back,
                sends={peer: give[peer] for peer in others},
                recvs={peer: take[peer] for peer in others},
            )
            self._halves[at] = halves
        transfer = self._transport.all_to_all(phase, halves.sends, halves.recvs, kind)
        return Way(back=back, transfer=transfer)

    def _finish_back(self, call: CombineCall, form: Wire, state: Any) -> Tensor:
        ways: Sequence[Way] = state
        for way in ways:
            way.transfer.wait()
            if way.places is not None and way.staged is not None:
                put_rows(as_bytes(way.back.flatten(0, 1)), way.places, way.staged)
        out = self._output(call)
        device_math.fold(
            ways[0].back,
            ways[1].back if len(ways) > 1 else None,
            form,
            self._who(call.handle.choice_rank),
            biases=call.bias,
            out=out,
        )
        return out

    def mask_rank(self, rank: int) -> None:
        """See C10dCommunicator."""
        super().mask_rank(rank)
        self._halves.clear()

    def _close(self) -> None:
        self._halves.clear()
        super()._close()
