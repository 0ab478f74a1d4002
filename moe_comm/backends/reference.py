"""The oracle: R ranks inside one process, as an obvious loop.

The numeric contract, for token t, choice k on expert e(t, k) with fp32 weight w and expert output
y, `reduction="rank"`:

    partial(t, r): acc = 0; for k ascending whose expert lies on rank r:
                   acc = fma(w, y, acc), rounded once to fp32; then rounded to y's dtype and put
                   through the combine wire.
    out(t):        acc = 0, or the fp32 sum of the biases in order; for k ascending, at the last
                   k that lies on rank r: acc = acc + partial(t, r) in fp32; then rounded.

`reduction="node"`: the partials of one node are first folded the same way (fp32, at each rank's
last k, then rounded and put through the wire again), and the node takes part at its last k.
With weights_applied the first step is acc + y. In float64 (wire "none") every step is float64 and
the multiply-add rounds twice. Expert rows lie in order of (expert, source rank, token, choice).

The loops run over ranks, choices and expert rows; hidden and tokens are vectors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_comm.calls import CombineCall, DispatchCall, Rows
from moe_comm.communicator import Communicator
from moe_comm.config import EPConfig
from moe_comm.group import Group
from moe_comm.handle import Dispatched, DispatchHandle
from moe_comm.numerics import fma_f32
from moe_comm.status import Status, StatusBit
from moe_comm.topology import Topology
from moe_comm.wire import Wire, dequantize, quantize

from . import Support


@dataclass(frozen=True, kw_only=True, eq=False)
class RankInput:
    """One rank's arguments of dispatch: x [T, H] or (values, scales), topk_idx and topk_weights
    [T, K], num_tokens (default T), payloads."""

    x: Rows
    topk_idx: Tensor
    topk_weights: Tensor
    num_tokens: int | None = None
    payloads: dict[str, Tensor] | None = None

    @property
    def num_rows(self) -> int:
        """T, padding included."""
        return int(self.topk_idx.shape[0])

    @property
    def valid(self) -> int:
        """Tokens that count."""
        return self.num_rows if self.num_tokens is None else self.num_tokens


class ReferenceWorld:
    """R ranks in one process.

    Args:
        config: the shape; config.placement decides where experts lie.
        num_ranks: R.
        node_of_rank: node index of each rank, for reduction "node"; default one node.
    """

    def __init__(
        self, config: EPConfig, num_ranks: int, *, node_of_rank: Sequence[int] | None = None
    ) -> None:
        self.config = config
        self.num_ranks = num_ranks
        self.placement = config.placement_for(num_ranks)
        self.node_of_rank = tuple(node_of_rank or [0] * num_ranks)

    def locate(self, inputs: Sequence[RankInput]) -> list[tuple[Tensor, Tensor]]:
        """For each source rank: [T, K] int64 rank and slot of each choice, -1 where masked."""
        table, copies = self.placement.copy_table.tolist(), self.placement.num_copies.tolist()
        located = []
        for source, given in enumerate(inputs):
            where = torch.full((given.num_rows, self.config.num_topk, 2), -1)
            for token, ids in enumerate(given.topk_idx.tolist()[: given.valid]):
                for k, expert in enumerate(ids):
                    if 0 <= expert < self.config.num_experts:
                        copy = (source + token) % copies[expert]
                        where[token, k] = torch.tensor(table[expert][copy])
            device = given.topk_idx.device
            located.append((where[..., 0].to(device), where[..., 1].to(device)))
        return located

    def dispatch(
        self, inputs: Sequence[RankInput], *, bucket: int | None = None
    ) -> list[Dispatched]:
        """What every rank receives. Rows nobody sent are NaN (0xFF bytes on a quantized wire)."""
        config, wire = self.config, self.config.wire
        bucket = config.bucket if bucket is None else bucket
        located = self.locate(inputs)
        sent = [
            given.x if isinstance(given.x, tuple) else quantize(given.x, wire) for given in inputs
        ]
        return [
            self._receive(rank, inputs, located, sent, bucket) for rank in range(self.num_ranks)
        ]

    def _receive(
        self,
        rank: int,
        inputs: Sequence[RankInput],
        located: Sequence[tuple[Tensor, Tensor]],
        sent: Sequence[tuple[Tensor, Tensor | None]],
        bucket: int,
    ) -> Dispatched:
        config, wire, ranks = self.config, self.config.wire, self.num_ranks
        values0, scales0 = sent[0]
        device = values0.device

        def room(like: Tensor) -> Tensor:
            out = torch.empty((ranks, bucket, *like.shape[1:]), dtype=like.dtype, device=device)
            out.view(torch.uint8).fill_(0xFF)
            return out

        rows = room(values0)
        scales = None if scales0 is None else room(scales0)
        extra = {name: room(tensor) for name, tensor in (inputs[0].payloads or {}).items()}
        local_idx = torch.full((ranks, bucket, config.num_topk), -1, device=device)
        kind = inputs[0].topk_weights.dtype
        weights = torch.zeros(ranks, bucket, config.num_topk, dtype=kind, device=device)
        for source, given in enumerate(inputs):
            choice_rank, slot = located[source]
            here = choice_rank == rank
            tokens = here.any(dim=1).nonzero().flatten()
            values, row_scales = sent[source]
            rows[source, tokens] = values[tokens]
            if scales is not None and row_scales is not None:
                scales[source, tokens] = row_scales[tokens]
            for name, tensor in (given.payloads or {}).items():
                extra[name][source, tokens] = tensor[tokens]
            local_idx[source, : given.num_rows] = torch.where(here, slot, -1)
            weights[source, : given.num_rows] = torch.where(here, given.topk_weights, 0.0)

        experts = self.placement.num_local_experts(rank)
        buckets: list[list[tuple[int, int]]] = [[] for _ in range(experts)]
        for row, ids in enumerate(local_idx.flatten(0, 1).tolist()):
            for k, slot_id in enumerate(ids):
                if slot_id >= 0:
                    buckets[slot_id].append((row, k))
        capacity = config.expert_row_capacity(ranks, experts, bucket)
        offsets, row_index = [0], torch.full((capacity,), -1, dtype=torch.int32)
        position = torch.full((ranks * bucket, config.num_topk), -1, dtype=torch.int32)
        placed = 0
        for choices in buckets:
            for row, k in choices:
                if placed < capacity:
                    row_index[placed] = row
                    position[row, k] = placed
                    placed += 1
            offsets.append(placed)
        total = sum(len(choices) for choices in buckets)

        choice_rank, _ = located[rank]
        given = inputs[rank]
        num_tokens = torch.tensor([g.valid for g in inputs], dtype=torch.int32, device=device)
        handle = DispatchHandle(
            call=0,
            slot=0,
            bucket=bucket,
            num_rows=given.num_rows,
            num_tokens=given.valid,
            topk_idx=torch.where(choice_rank >= 0, given.topk_idx.long(), -1),
            choice_rank=choice_rank.to(torch.int32),
            topk_weights=given.topk_weights,
            received_weights=weights,
            choice_position=position.to(device),
            num_tokens_per_rank=num_tokens,
            state={"dropped": total - placed, "located": list(located)},
        )
        return Dispatched(
            rows=rows,
            scales=scales,
            topk_idx=local_idx.to(torch.int32),
            topk_weights=weights,
            num_tokens_per_rank=num_tokens,
            payloads=extra,
            expert_offsets=torch.tensor(offsets, dtype=torch.int32, device=device),
            row_index=row_index.to(device),
            wire=wire,
            handle=handle,
        )

    def combine(
        self,
        expert_rows: Sequence[Tensor],
        handles: Sequence[DispatchHandle],
        *,
        layout: str = "expert",
        weights_applied: bool = False,
        biases: Sequence[Sequence[Tensor]] | None = None,
        masked_ranks: Sequence[int] = (),
        sources: Sequence[int] | None = None,
    ) -> list[Tensor]:
        """Every rank's combined rows, or those of `sources` alone.

        Args:
            expert_rows: each rank's y, [N, H] or, for layout "rows", [R, B, H].
            handles: each rank's handle of dispatch().
            layout, weights_applied: as Communicator.combine.
            biases: each rank's biases.
            masked_ranks: dead ranks: they contribute nothing.

        Returns: each rank's [T, H].
        """
        partials = [
            self._partials(y, handle, layout=layout, weights_applied=weights_applied)
            for y, handle in zip(expert_rows, handles, strict=True)
        ]
        return [
            self._sum(
                source,
                handles[source],
                [partial[source] for partial in partials],
                tuple(biases[source]) if biases else (),
                set(masked_ranks),
            )
            for source in (range(self.num_ranks) if sources is None else sources)
        ]

    def _partials(
        self, y: Tensor, handle: DispatchHandle, *, layout: str, weights_applied: bool
    ) -> Tensor:
        """[R, B, H] in y's dtype: one rank's partial sum for each received row."""
        shape = (self.num_ranks, handle.bucket, y.shape[-1])
        if layout == "rows":
            return y.reshape(shape)
        acc = _zeros(y, shape[0] * shape[1], shape[2])
        weights = handle.received_weights.flatten(0, 1)
        for k in range(self.config.num_topk):
            position = handle.choice_position[:, k]
            rows = (position >= 0).nonzero().flatten()
            value = y[position[rows].long()]
            if weights_applied:
                acc[rows] = acc[rows] + value.to(acc.dtype)
            elif acc.dtype == torch.float64:
                acc[rows] = acc[rows] + weights[rows, k, None].double() * value
            else:
                acc[rows] = fma_f32(weights[rows, k, None], value, acc[rows])
        return acc.to(y.dtype).reshape(shape)

    def _sum(
        self,
        source: int,
        handle: DispatchHandle,
        partials: Sequence[Tensor],
        biases: Sequence[Tensor],
        masked: set[int],
    ) -> Tensor:
        """[T, H]: the partial sums of all ranks folded in the contract's order."""
        wire, tokens = self.config.return_wire, handle.num_rows
        choice_rank = handle.choice_rank.long()
        sent = [_through(partial[:tokens], wire) for partial in partials]
        total = _zeros(partials[0], tokens, partials[0].shape[-1])
        for bias in biases:
            total = total + bias.to(total.dtype)
        if self.config.reduction == "rank":
            owner = torch.arange(self.num_ranks, device=choice_rank.device)
            return _fold(total, sent, choice_rank, owner, masked).to(partials[0].dtype)
        nodes = torch.tensor(self.node_of_rank, device=choice_rank.device)
        folded = []
        for node in range(int(nodes.max()) + 1):
            elsewhere = {rank for rank, at in enumerate(self.node_of_rank) if at != node}
            owner = torch.arange(self.num_ranks, device=choice_rank.device)
            start = torch.zeros_like(total)
            inside = _fold(start, sent, choice_rank, owner, masked | elsewhere)
            folded.append(_through(inside.to(partials[0].dtype), wire))
        return _fold(total, folded, choice_rank, nodes, set()).to(partials[0].dtype)


def _zeros(like: Tensor, rows: int, width: int) -> Tensor:
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    return torch.zeros(rows, width, dtype=dtype, device=like.device)


def _through(rows: Tensor, wire: Wire) -> Tensor:
    """What arrives of rows sent over a wire."""
    values, scales = quantize(rows, wire)
    return dequantize(values, scales, wire)


def _fold(
    total: Tensor, terms: Sequence[Tensor], choice_rank: Tensor, owner: Tensor, masked: set[int]
) -> Tensor:
    """Add each owner's term at the last choice that lies on it. `owner` [R] maps a rank to the
    index of its term; ranks in `masked` are left out."""
    num_topk = choice_rank.shape[1]
    who = torch.where(choice_rank >= 0, owner[choice_rank.clamp_min(0)], -1)
    for rank in masked:
        who = torch.where(choice_rank == rank, -1, who)
    for k in range(num_topk):
        for index, term in enumerate(terms):
            is_last = (who[:, k] == index) & ~(who[:, k + 1 :] == index).any(dim=1)
            rows = is_last.nonzero().flatten()
            total[rows] = total[rows] + term[rows].to(total.dtype)
    return total


class ReferenceCommunicator(Communicator):
    """The oracle behind the common interface: every rank gathers all inputs and runs the loop for
    the whole group. For tests and for looking at small cases; cost grows with the group."""

    backend, mode = "reference", "loop"

    def __init__(self, config: EPConfig, group: Group) -> None:
        super().__init__(config, group)
        self._bits = StatusBit(0)

    def _world(self) -> ReferenceWorld:
        config = self.config.replace(placement=self.placement)
        return ReferenceWorld(config, self.num_ranks, node_of_rank=self.group.node_of_rank)

    def _start_dispatch(self, call: DispatchCall) -> Any:
        ids = call.topk_idx.cpu()
        live = ids[: int(call.num_tokens)]
        if bool(((live < -1) | (live >= self.config.num_experts)).any()):
            self._bits |= StatusBit.INVALID_ID
        x: Any = call.x.cpu()
        if call.is_quantized and call.scales is not None:
            x = (call.x.cpu(), call.scales.cpu())
        return self.group.all_gather(
            RankInput(
                x=x,
                topk_idx=ids,
                topk_weights=call.topk_weights.detach().cpu(),
                num_tokens=int(call.num_tokens),
                payloads={name: tensor.cpu() for name, tensor in call.payloads.items()},
            )
        )

    def _finish_dispatch(self, call: DispatchCall, state: Any) -> Dispatched:
        mine = self._world().dispatch(state, bucket=call.bucket)[self.rank]
        if mine.handle.state["dropped"]:
            self._bits |= StatusBit.ROWS_OVERFLOW
        mine.handle.call, mine.handle.slot = call.call, call.slot
        return _to_device(mine, self.device)

    def _start_combine(self, call: CombineCall) -> Any:
        return self.group.all_gather(
            (
                call.y.detach().cpu(),
                _moved(call.handle, torch.device("cpu")),
                [bias.cpu() for bias in call.bias],
            )
        )

    def _finish_combine(self, call: CombineCall, state: Any) -> Tensor:
        outs = self._world().combine(
            [given[0] for given in state],
            [given[1] for given in state],
            layout=call.layout,
            weights_applied=call.weights_applied,
            biases=[given[2] for given in state],
        )
        out = outs[self.rank].to(self.device)
        return out if call.out is None else call.out.copy_(out)

    def _read_status(self) -> Status:
        bits, self._bits = self._bits, StatusBit(0)
        return Status(bits=bits)


def _to_device(d: Dispatched, device: torch.device) -> Dispatched:
    moved: dict[str, Any] = {
        name: value.to(device) for name, value in vars(d).items() if isinstance(value, Tensor)
    }
    payloads = {name: tensor.to(device) for name, tensor in d.payloads.items()}
    return dataclasses.replace(d, **moved, payloads=payloads, handle=_moved(d.handle, device))


def _moved(handle: DispatchHandle, device: torch.device) -> DispatchHandle:
    """A copy elsewhere; the backend's own state and the owner stay behind."""
    tensors: dict[str, Any] = {
        name: value.to(device) for name, value in vars(handle).items() if isinstance(value, Tensor)
    }
    return dataclasses.replace(handle, **tensors, state=None, _owner=None)


def supports(config: EPConfig, topology: Topology) -> Support:
    """Serves everything, slowly."""
    del config, topology
    return Support(True, "an oracle for tests, one loop for all ranks", ("loop",), ("payloads",))


def build(config: EPConfig, group: Group, mode: str | None) -> ReferenceCommunicator:
    """The oracle over a group."""
    del mode
    return ReferenceCommunicator(config, group)
