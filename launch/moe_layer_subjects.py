"""The layers that moe_layer times: a communicator with MXFP4 experts, and two baselines whose rows
travel one for each (token, expert) over torch.distributed alone.

Shape legend: T tokens, N rows dispatched, M expert rows, K choices, H hidden, L local experts.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from moe_comm.communicator import Communicator
from moe_comm.handle import Dispatched
from moe_comm.kernels.expert_gemm_weights import ExpertWeights
from moe_comm.launch.expert_mlps import Mlp
from moe_comm.launch.moe_layer_case import LayerCase
from moe_comm.launch.per_expert import PerExpert, PerExpertArrived
from moe_comm.launch.worker import Ranks
from moe_comm.model.layers.experts import GroupedExperts

Routed = tuple[Tensor, Tensor]


class Layer(Protocol):
    """What is timed: four stages, each reading what the one before left.

    Attributes:
        backend, mode: of the result row.
        wires: dispatch and combine.
        can_capture: whether a CUDA graph can hold it.
        expert_bytes: weights of one expert.
        experts_by: what computes them.
    """

    backend: str
    mode: str
    wires: tuple[str, str]
    can_capture: bool
    expert_bytes: int
    experts_by: str

    def route(self) -> Routed:
        """ids [T, K] and weights [T, K] from the hidden rows."""

    def dispatch(self, routed: Routed) -> Any:
        """Rows to their experts. Collective."""

    def experts(self, arrived: Any) -> Tensor:
        """Both products and the activation: rows grouped by local expert."""

    def combine(self, y: Tensor, arrived: Any, routed: Routed) -> Tensor:
        """[N, H] weighted sums. Collective."""

    def sent_bytes(self) -> tuple[int, str]:
        """Bytes that one whole layer sends to other ranks, and how they are known. Collective."""

    def close(self) -> None:
        """Free what it holds. Collective."""


class CommunicatorLayer:
    """moe_comm's path: dispatch, the model's GroupedExperts over what arrived, combine."""

    def __init__(
        self,
        comm: Communicator,
        case: LayerCase,
        ranks: Ranks,
        weights: ExpertWeights,
        *,
        experts_by: str,
        expert_bytes: int,
        can_capture: bool,
    ) -> None:
        self.comm, self.case, self.ranks = comm, case, ranks
        self.backend, self.mode = comm.backend, comm.mode
        mode_for = getattr(comm, "mode_for", None)
        if mode_for is not None:
            self.mode = mode_for(case.config.bucket)
        self.wires = (case.config.dispatch_wire, case.config.combine_wire)
        self.can_capture, self.expert_bytes = can_capture, expert_bytes
        self.experts_by = experts_by
        self._experts = GroupedExperts(weights=weights, implementation=experts_by)
        self._out = torch.full_like(case.z, torch.nan)

    def route(self) -> Routed:
        return self.case.router.forward(self.case.x)

    def dispatch(self, routed: Routed) -> Dispatched:
        idx, weights = self.case.choices(routed)
        return self.comm.dispatch(self.case.z, idx, weights, bucket=self.case.config.bucket)

    def experts(self, arrived: Dispatched) -> Tensor:
        return self._experts(arrived)

    def combine(self, y: Tensor, arrived: Dispatched, routed: Routed) -> Tensor:
        del routed
        return self.comm.combine(y, arrived.handle, out=self._out)

    def sent_bytes(self) -> tuple[int, str]:
        before = self.comm.metrics()["sent_bytes"]
        routed = self.route()
        arrived = self.dispatch(routed)
        self.combine(self.experts(arrived), arrived, routed)
        counted = self.comm.metrics()["sent_bytes"] - before
        # Asked of all ranks: one that sends nothing itself must not answer differently.
        if any(self.ranks.gather(counted > 0)):
            return counted, "counted"
        config, traffic, rank = self.case.config, self.case.traffic, self.ranks.rank
        row = config.wire.row_bytes(config.hidden) + 8 * config.num_topk
        back = config.return_wire.row_bytes(config.hidden)
        there = int(traffic.remote_rows[rank]) * row
        return there + int(traffic.returned_rows[rank]) * back, "computed"

    def close(self) -> None:
        self.comm.check()
        self.comm.destroy()


class PerExpertLayer:
    """A row a (token, expert), sorted, exchanged with counts from the host, sorted again: what one
    writes with torch alone. bf16 both ways."""

    backend, wires, can_capture = "per-expert", ("bf16", "bf16"), False

    def __init__(
        self,
        case: LayerCase,
        ranks: Ranks,
        mlp: Mlp,
        *,
        mode: str,
        experts_by: str,
        expert_bytes: int,
    ) -> None:
        self.case, self.ranks, self.mode = case, ranks, mode
        self.experts_by, self.expert_bytes = experts_by, expert_bytes
        self._mlp = mlp
        placement = case.config.placement_for(ranks.num_ranks)
        self._baseline = PerExpert(ranks.group, placement)

    def route(self) -> Routed:
        return self.case.router.forward(self.case.x)

    def dispatch(self, routed: Routed) -> PerExpertArrived:
        idx, _ = self.case.choices(routed)
        with self.ranks.transport_errors("per-expert dispatch"):
            return self._baseline.dispatch(self.case.z, idx)

    def experts(self, arrived: PerExpertArrived) -> Tensor:
        counts = arrived.counts
        offsets = torch.zeros(counts.shape[0] + 1, dtype=torch.int32, device=counts.device)
        torch.cumsum(counts, 0, dtype=torch.int32, out=offsets[1:])
        return self._mlp(arrived.rows, offsets) if arrived.rows.shape[0] else arrived.rows

    def combine(self, y: Tensor, arrived: PerExpertArrived, routed: Routed) -> Tensor:
        _, weights = self.case.choices(routed)
        with self.ranks.transport_errors("per-expert combine"):
            return self._baseline.combine(y, arrived, weights)

    def sent_bytes(self) -> tuple[int, str]:
        routed = self.route()
        arrived = self.dispatch(routed)
        there = self._baseline.sent_bytes
        self.combine(self.experts(arrived), arrived, routed)
        return there + self._baseline.sent_bytes, "counted"

    def close(self) -> None:
        """Nothing is held."""
