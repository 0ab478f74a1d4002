"""What the DeepEP modes share: DeepEP moves rows to ranks, everything about experts is done here.

DeepEP is told of pseudo-experts that stand for ranks, so its limits on experts and choices do not
apply. A message is a row on the wire with a record behind it (source, token, T of the source, ids,
weights, scales, payloads), opaque bytes to DeepEP. After a rank's T rows come header messages,
addressed to every rank, so that each learns every T, and no rank ever sends or receives nothing.
Received messages lie in slots in whatever order; records say where they belong.

On the way back each rank sends its partial sums in the slots' order, and DeepEP adds them up.

Shape legend: T this rank's tokens, R ranks, B the bucket, K choices, H hidden, W bytes of a
message, h header messages, N slots, C columns (ranks that a message can go to).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_comm.backends import device_math
from moe_comm.backends.arrived import ArrivedIndex
from moe_comm.backends.c10d_routing import Located, Router
from moe_comm.backends.deepep_messages import MessageForm, Taken
from moe_comm.backends.deepep_transport import Transport, Way
from moe_comm.backends.packing import Workspace, as_bytes, put_rows
from moe_comm.calls import CombineCall, DispatchCall
from moe_comm.communicator import Communicator
from moe_comm.config import EPConfig
from moe_comm.errors import MoeCommError, PeerTimeoutError
from moe_comm.group import Group, drop_group
from moe_comm.handle import Dispatched
from moe_comm.status import Status, StatusBit


@dataclass(frozen=True, kw_only=True, eq=False)
class Arrived(ArrivedIndex):
    """And the `ways` its rows came."""

    ways: tuple[Way, ...]


class DeepEPCommunicator(Communicator):
    """Dispatch and combine through a Transport."""

    backend = "deepep"

    def __init__(
        self, config: EPConfig, group: Group, transport: Transport, pg: dist.ProcessGroup
    ) -> None:
        """`pg`: the transport's own process group, which ends with the communicator."""
        super().__init__(config, group)
        self.transport, self._own_pg = transport, pg
        self.mode = transport.mode
        self.capabilities = transport.capabilities
        self._slots = [Workspace(group.device) for _ in range(config.num_slots)]
        self._status = torch.zeros(1, dtype=torch.int32, device=group.device)
        self._router = Router(
            rank=self.rank,
            num_ranks=self.num_ranks,
            copy_table=self._copy_table,
            num_copies=self._num_copies,
            width=self.placement.max_local_experts,
            status=self._status,
            uses_kernels=group.device.type == "cuda",
        )
        self._is_broken = False

    # The sum over ranks is DeepEP's.

    def adds_exactly(self, *, num_biases: int = 0) -> bool:
        """Whether combine gives the contract's bits. Apart from the sign of a zero in v2, where
        two terms, both negative zeros, give one."""
        transport = self.transport
        if not transport.adds_in_order:
            return min(self.num_ranks, self.config.num_topk) <= 2 and not num_biases
        biases_fit = num_biases <= (2 if transport.adds_biases else 0)
        return transport.num_passes == 1 and biases_fit

    def sum_tolerance(self, size: Tensor) -> Tensor:
        """Bound of |combined - contract| where adds_exactly() is false.

        Args:
            size: fp32, the sum of the magnitudes of an element's terms and biases. Two different
                roundings to bf16 differ by 2^-8 of it, one more on the way by as much again, and n
                additions in fp32 by n * 2^-22.
        """
        terms = min(self.num_ranks, self.config.num_topk) + 2
        return size * (2.0**-7 + terms * 2.0**-22)

    # Dispatch.

    def _start_dispatch(self, call: DispatchCall) -> Dispatched:
        return self._dispatch_at_once(call)

    def _finish_dispatch(self, call: DispatchCall, state: Any) -> Dispatched:
        result: Dispatched = state
        return result

    def _dispatch_at_once(self, call: DispatchCall) -> Dispatched:
        with self._library("dispatch"):
            return self._dispatch(call)

    def _dispatch(self, call: DispatchCall) -> Dispatched:
        num_tokens = call.num_tokens
        if isinstance(num_tokens, Tensor):
            num_tokens = num_tokens.reshape(()).to(self.device).clamp(0, call.num_rows)
        before: Arrived | None = None
        if call.reuse is not None:
            before = call.reuse.state
            assert before is not None
            located, route = before.located, before.route
        else:
            located = self._router.locate(call.topk_idx, num_tokens)
            route = self.transport.route(located.rank)
        values, scales = device_math.quantize(call.x.detach(), self.config.wire)
        if call.is_quantized:
            values, scales = call.x, call.scales
        form = MessageForm(call, values, scales, routing=before is None)
        if form.num_bytes > self.transport.row_bytes:
            raise ValueError(
                f"payloads: expected at most {self.transport.row_bytes} bytes of a row with its "
                f"ids, weights, scales and payloads, got {form.num_bytes}; raise "
                "EPConfig.max_payload_bytes"
            )
        num_places = self.num_ranks * call.bucket
        taken = Taken(
            rows=self._room(call, "rows", (values.shape[1],), values.dtype),
            records=torch.zeros(
                num_places, form.layout.num_bytes, dtype=torch.uint8, device=self.device
            ),
            reached=torch.zeros(num_places, dtype=torch.bool, device=self.device),
            tokens=torch.zeros(self.num_ranks + 1, dtype=torch.int32, device=self.device),
        )
        ways: list[Way] = []
        if call.bucket:
            messages = self._message_room(call)
            form.write(
                messages,
                located,
                rank=self.rank,
                num_tokens=num_tokens,
                experts_a_rank=self._router.width,
            )
            for part in self.transport.dispatch(messages, route, call.bucket):
                ways.append(form.take(part, taken, first=not ways))
        extras = self._extras(call, form, taken)
        if before is not None:
            arrived = dataclasses.replace(before, ways=tuple(ways))
        else:
            arrived = self._index(call, located, route, tuple(ways), form, taken)
        return arrived.dispatched(call, num_tokens, taken.rows, extras, self.config.wire)

    def _message_room(self, call: DispatchCall) -> Tensor:
        """uint8 [T + h, W] of the call's slot."""
        headers, width = self.transport.num_headers, self.transport.row_bytes
        return self._slots[call.slot].tensor(
            "messages",
            (call.num_rows + headers, width),
            torch.uint8,
            reserve=(self.config.bucket + headers) * width,
        )

    def _room(
        self, call: DispatchCall, name: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        """[R, B, ...] of the call's slot."""
        return self._slots[call.slot].tensor(name, (self.num_ranks, call.bucket, *shape), dtype)

    def _extras(self, call: DispatchCall, form: MessageForm, taken: Taken) -> dict[str, Tensor]:
        """Scales and payloads, [R, B, ...]."""
        extras = {}
        for field in form.fields:
            if field.name == "scales" or field.name.startswith("payload "):
                room = self._room(call, field.name, field.shape, field.dtype)
                room.flatten(0, 1).copy_(form.layout.view(taken.records, field.name))
                extras[field.name] = room
        return extras

    def _index(
        self,
        call: DispatchCall,
        located: Located,
        route: Any,
        ways: tuple[Way, ...],
        form: MessageForm,
        taken: Taken,
    ) -> Arrived:
        width = self._router.width
        ids = form.layout.view(taken.records, "ids") - self.rank * width
        here = taken.reached[:, None] & (ids >= 0) & (ids < width)
        local_idx = torch.where(here, ids, -1)
        offsets, row_index, position = device_math.expert_index(
            local_idx,
            num_local_experts=self.num_local_experts,
            capacity=self.expert_row_capacity(call.bucket),
            status=self._status,
        )
        shape = (self.num_ranks, call.bucket, self.config.num_topk)
        return Arrived(
            located=located,
            route=route,
            ways=ways,
            local_idx=local_idx.view(shape),
            weights=form.layout.view(taken.records, "weights").contiguous().view(shape),
            num_tokens_per_rank=taken.tokens[: self.num_ranks],
            expert_offsets=offsets,
            row_index=row_index,
            choice_position=position,
        )

    # Combine.

    def _start_combine(self, call: CombineCall) -> Tensor:
        return self._combine_at_once(call)

    def _finish_combine(self, call: CombineCall, state: Any) -> Tensor:
        result: Tensor = state
        return result

    def _combine_at_once(self, call: CombineCall) -> Tensor:
        with self._library("combine"):
            return self._combine(call)

    def _combine(self, call: CombineCall) -> Tensor:
        arrived: Arrived = call.handle.state
        rows, hidden = call.handle.num_rows, self.config.hidden
        out = call.y.new_empty(rows, hidden) if call.out is None else call.out
        inside = self.transport.adds_biases
        given = self._bias_rows(call) if inside else ()
        if len(arrived.ways) == 1 and (inside or not call.bias):
            way = arrived.ways[0]
            sums = self.transport.combine(way, self._terms(call, arrived, way), given)
            return out.copy_(sums[:rows, :hidden])
        total = torch.zeros(rows, hidden, dtype=torch.float32, device=self.device)
        for bias in call.bias:
            total += bias
        for way in arrived.ways:
            sums = self.transport.combine(way, self._terms(call, arrived, way), ())
            # A part's last messages may be headers.
            part = total[way.tokens]
            part += sums[: part.shape[0], :hidden]
        return out.copy_(total)

    def _terms(self, call: CombineCall, arrived: Arrived, way: Way) -> Tensor:
        """This rank's partial sums in the order of a way's slots, bf16 [N, hidden]. Slots without
        a row hold anything."""
        num_slots, num_places = way.place.shape[0], way.slot.shape[0]
        hidden, wide = self.config.hidden, self.transport.hidden
        weights = arrived.weights.flatten(0, 1)
        if num_slots <= 2 * num_places:
            # Few slots are empty: straight into them.
            place = way.place.clamp_max(num_places - 1)
            if call.layout == "rows":
                rows = call.y.detach().flatten(0, 1)[place]
            else:
                empty = (way.place == num_places).unsqueeze(-1)
                position = arrived.choice_position[place].masked_fill(empty, -1)
                rows = self._partial_sums(call, weights[place], position)
            if wide == hidden:
                return rows
            terms = rows.new_zeros(num_slots, wide)
            terms[:, :hidden].copy_(rows)
            return terms
        if call.layout == "rows":
            rows = call.y.detach().flatten(0, 1)
        else:
            rows = self._partial_sums(call, weights, arrived.choice_position)
        # Rows that did not come this way go to one more slot, which is cut off.
        terms = rows.new_empty(num_slots + 1, wide)
        put_rows(as_bytes(terms)[:, : 2 * hidden], way.slot, as_bytes(rows.contiguous()))
        return terms[:num_slots]

    def _partial_sums(self, call: CombineCall, weights: Tensor, position: Tensor) -> Tensor:
        y = call.y.detach().contiguous()
        out = y.new_empty(position.shape[0], y.shape[1])
        device_math.partial_sums(
            y,
            weights.contiguous(),
            position.contiguous(),
            weights_applied=call.weights_applied,
            fill_empty=self.config.max_expert_rows is not None,
            out=out,
        )
        return out

    def _bias_rows(self, call: CombineCall) -> tuple[Tensor, ...]:
        """At most two biases, [T + h, hidden]; more are summed and split into two bf16 terms."""
        biases = call.bias
        if len(biases) > 2:
            total = torch.stack([bias.float() for bias in biases]).sum(0)
            high = total.to(torch.bfloat16)
            biases = (high, (total - high.float()).to(torch.bfloat16))
        padded = []
        for bias in biases:
            rows = bias.new_zeros(bias.shape[0] + self.transport.num_headers, self.transport.hidden)
            rows[: bias.shape[0], : bias.shape[1]].copy_(bias)
            padded.append(rows)
        return tuple(padded)

    # The rest of the protocol.

    @contextlib.contextmanager
    def _library(self, phase: str) -> Iterator[None]:
        """Errors of the library under our names."""
        try:
            yield
        except (MoeCommError, ValueError, TypeError):
            raise
        except Exception as error:
            self._is_broken = True
            text = f"{type(error).__name__}: {error}"
            if any(word in text.lower() for word in ("timeout", "timed out", "cpu wait")):
                raise PeerTimeoutError(
                    phase, self.rank, None, timeout_s=self.config.wait_s, detail=text
                ) from error
            raise MoeCommError(f"{phase} on rank {self.rank}: deep_ep: {text}") from error

    def _read_status(self) -> Status:
        bits = StatusBit(int(self._status))
        self._status.zero_()
        return Status(bits=bits)

    def abandon(self) -> None:
        """Drop everything without telling other ranks: they are not there, or elsewhere."""
        self._is_broken = True
        self.destroy()

    def _close(self) -> None:
        try:
            # The library's own destroy waits for all ranks.
            if not self._is_broken:
                self.transport.close()
        finally:
            drop_group(self._own_pg)
            # They would keep the process group's threads and sockets.
            del self.transport, self._own_pg
            for slot in self._slots:
                slot.clear()
