"""What `run` measures: a communicator, and the per-expert baseline, behind one face.

A subject prepares itself once for a case (its data, its expert rows), checks itself against the
oracle, counts the bytes it sends, and then offers the two halves that timing.py times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from moe_comm.backends.deepep_base import DeepEPCommunicator
from moe_comm.communicator import Communicator
from moe_comm.config import EPConfig
from moe_comm.handle import Dispatched
from moe_comm.launch.experts import apply_expert, expert_factors, expert_step
from moe_comm.launch.oracle import (
    expected_combine,
    expected_dispatch,
    expected_rows_layout,
    locate,
)
from moe_comm.launch.per_expert import PerExpert, PerExpertArrived
from moe_comm.launch.rank_data import RankData
from moe_comm.launch.verify import Findings, check_combined, check_dispatched, flip_bit
from moe_comm.launch.worker import Ranks
from moe_comm.placement import ExpertPlacement
from moe_comm.traffic import RoutingTraffic
from moe_comm.wire import dequantize, quantize


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """One point of the grid, the same on all ranks.

    Attributes:
        config: with the capacity of this case.
        data: every rank's data, regenerated here.
        traffic: rows that the routing moves.
        routing: its canonical text.
        layout: of combine.
    """

    config: EPConfig
    data: Sequence[RankData]
    traffic: RoutingTraffic
    routing: str
    layout: str

    @property
    def num_tokens(self) -> int:
        """The largest T of any rank."""
        return max(given.num_tokens for given in self.data)


class Measured(Protocol):
    """A subject of timing.py that can also prepare, check and account for itself."""

    backend: str
    mode: str
    can_capture: bool
    # Of partial sums: "rank", "node", or "choice" (none: every choice's row is returned); and how
    # they were held against the contract where not bit for bit.
    reduction: str
    wires: tuple[str, str]
    layout: str

    def prepare(self, *, check: bool, flip: bool) -> dict[str, Findings]:
        """Run once, untimed: findings of "dispatch" and "combine" (empty without check)."""

    def sent_bytes(self) -> tuple[dict[str, int], str]:
        """Bytes this rank sends in each phase, and how they are known. Runs once, untimed."""

    def dispatch(self) -> Any:
        """Rows to their experts."""

    def combine(self, arrived: Any) -> Tensor:
        """Rows back."""

    def close(self) -> None:
        """Free what it holds."""


class CommunicatorSubject:
    """A moe_comm communicator."""

    def __init__(self, comm: Communicator, case: Case, ranks: Ranks, *, can_capture: bool) -> None:
        self.comm, self.case, self.ranks = comm, case, ranks
        self.backend, self.mode, self.can_capture = comm.backend, comm.mode, can_capture
        self.wires = (case.config.dispatch_wire, case.config.combine_wire)
        self.reduction: str = case.config.reduction
        # deepep leaves the sum over ranks to its library, which may add in an order of its own.
        self._tolerance: Callable[[Tensor], Tensor] | None = None
        if isinstance(comm, DeepEPCommunicator) and not comm.adds_exactly():
            self._tolerance = comm.sum_tolerance
            self.reduction += ", within a tolerance"
        self.layout = case.layout
        self.bucket = case.config.bucket
        # A mode that goes by the bucket says which one this bucket takes.
        mode_for = getattr(comm, "mode_for", None)
        if mode_for is not None:
            self.mode = mode_for(self.bucket)
        mine = case.data[ranks.rank]
        self._mine = mine
        self._y = torch.empty(0)
        self._out = torch.empty_like(mine.x)

    def dispatch(self) -> Dispatched:
        mine = self._mine
        return self.comm.dispatch(mine.x, mine.topk_idx, mine.topk_weights, bucket=self.bucket)

    def combine(self, arrived: Dispatched) -> Tensor:
        return self.comm.combine(self._y, arrived.handle, layout=self.layout, out=self._out)

    def prepare(self, *, check: bool, flip: bool) -> dict[str, Findings]:
        config, data, rank = self.case.config, self.case.data, self.ranks.rank
        placement = self.comm.placement
        arrived = self.dispatch()
        if flip:
            flip_bit(arrived)
        found = {}
        if check:
            expected = expected_dispatch(config, data, placement, rank=rank, bucket=self.bucket)
            found["dispatch"] = check_dispatched(arrived, expected, rank=rank)
        if self.layout == "rows":
            self._y = expected_rows_layout(config, data, placement, rank=rank, bucket=self.bucket)
        else:
            factors = expert_factors(config.num_experts, self.ranks.device)
            self._y = expert_step(arrived, factors[placement.local_expert_ids(rank)])
        # An element that combine leaves unwritten must not pass for a right one.
        self._out.fill_(float("nan"))
        out = self.combine(arrived)
        self.comm.check()
        if check:
            want = expected_combine(
                config, self._mine, placement, node_of_rank=self.ranks.group.node_of_rank
            )
            found["combine"] = self._check_combined(out, want)
        return found

    def _check_combined(self, out: Tensor, want: Tensor) -> Findings:
        if self._tolerance is None:
            return check_combined(out, want, rank=self.ranks.rank)
        found = Findings(rank=self.ranks.rank, phase="combine")
        size = terms_size(self.case.config, self._mine, self.comm.placement)
        found.compare_close("out", out, want, self._tolerance(size), axes=("token", "column"))
        return found

    def sent_bytes(self) -> tuple[dict[str, int], str]:
        """Counted by the communicator where its metrics know; else what a transport's messages
        hold, or what a slab must send: rows, scales, ids and weights there, rows and scales back.
        """
        before = self.comm.metrics()["sent_bytes"]
        arrived = self.dispatch()
        middle = self.comm.metrics()["sent_bytes"]
        self.combine(arrived)
        after = self.comm.metrics()["sent_bytes"]
        there, back = middle - before, after - middle
        # Asked of all ranks: one that sends nothing itself must not answer differently.
        if any(self.ranks.gather(there + back > 0)):
            return {"dispatch": there, "combine": back}, "counted"
        config, traffic, rank = self.case.config, self.case.traffic, self.ranks.rank
        if isinstance(self.comm, DeepEPCommunicator):
            transport = self.comm.transport
            # A message that tells T goes to every other rank, and its sum comes back.
            headers = self.ranks.num_ranks - 1
            there, back = transport.row_bytes + transport.own_bytes, 2 * transport.hidden
            return {
                "dispatch": (int(traffic.remote_rows[rank]) + headers) * there,
                "combine": (int(traffic.returned_rows[rank]) + headers) * back,
            }, "computed"
        row = config.wire.row_bytes(config.hidden) + 8 * config.num_topk
        return {
            "dispatch": int(traffic.remote_rows[rank]) * row,
            "combine": int(traffic.returned_rows[rank])
            * config.return_wire.row_bytes(config.hidden),
        }, "computed"

    def close(self) -> None:
        self.comm.destroy()


def terms_size(config: EPConfig, given: RankData, placement: ExpertPlacement) -> Tensor:
    """[T, H] fp32: the sum over ranks of the magnitude of each rank's partial sum, for a tolerance
    of what adds them up in another order."""
    owner, _ = locate(given.topk_idx, placement, source_rank=given.rank)
    factors = expert_factors(config.num_experts, given.x.device)
    ids = given.topk_idx.clamp(0, config.num_experts - 1)
    rows = dequantize(*quantize(given.x, config.wire), config.wire)
    size = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
    for rank in range(placement.num_ranks):
        partial = torch.zeros_like(size)
        for k in range(config.num_topk):
            weight = torch.where(owner[:, k] == rank, given.topk_weights[:, k], 0.0)
            partial += weight.unsqueeze(-1) * apply_expert(rows, factors[ids[:, k]]).float()
        size += partial.abs()
    return size


class PerExpertSubject:
    """The baseline; bf16 in both directions whatever the wires of the run."""

    backend, mode, can_capture, reduction = "per-expert", "", False, "choice"
    wires = ("bf16", "bf16")
    layout = "expert"

    def __init__(self, case: Case, ranks: Ranks) -> None:
        self.case, self.ranks = case, ranks
        self.placement = ExpertPlacement.contiguous(case.config.num_experts, ranks.num_ranks)
        self._baseline = PerExpert(ranks.group, self.placement)
        self._mine = case.data[ranks.rank]
        self._y = torch.empty(0)

    def dispatch(self) -> PerExpertArrived:
        with self.ranks.transport_errors("per-expert dispatch"):
            return self._baseline.dispatch(self._mine.x, self._mine.topk_idx)

    def combine(self, arrived: PerExpertArrived) -> Tensor:
        with self.ranks.transport_errors("per-expert combine"):
            return self._baseline.combine(self._y, arrived, self._mine.topk_weights)

    def prepare(self, *, check: bool, flip: bool) -> dict[str, Findings]:
        del flip
        config, rank = self.case.config.replace(dispatch_wire="bf16"), self.ranks.rank
        arrived = self.dispatch()
        local = expert_factors(config.num_experts, self.ranks.device)[
            self.placement.local_expert_ids(rank)
        ]
        factors = local.repeat_interleave(arrived.counts, output_size=arrived.rows.shape[0])
        self._y = apply_expert(arrived.rows, factors)
        out = self.combine(arrived)
        if not check:
            return {}
        want = expected_dispatch(
            config, self.case.data, self.placement, rank=rank, bucket=config.bucket
        )
        there, back = (
            Findings(rank=rank, phase="dispatch"),
            Findings(rank=rank, phase="combine"),
        )
        rows = want.values.flatten(0, 1)[want.row_index]
        there.compare("rows", arrived.rows, rows, axes=("expert row", "column"))
        exact, tolerance = self._exact_sum()
        back.compare_close("out", out, exact, tolerance, axes=("token", "column"))
        return {"dispatch": there, "combine": back}

    def _exact_sum(self) -> tuple[Tensor, Tensor]:
        """[T, H] float64 sums, and how far K fp32 additions and one rounding to bf16 may stray:
        2^-8 of the sum and K * 2^-24 of the sum of magnitudes."""
        mine, config = self._mine, self.case.config
        factors = expert_factors(config.num_experts, mine.x.device)
        total = torch.zeros(mine.x.shape, dtype=torch.float64, device=mine.x.device)
        size = torch.zeros_like(total)
        for k in range(config.num_topk):
            ids = mine.topk_idx[:, k]
            y = apply_expert(mine.x, factors[ids.clamp_min(0)]).double()
            term = torch.where(ids >= 0, mine.topk_weights[:, k], 0.0).double().unsqueeze(-1) * y
            total += term
            size += term.abs()
        return total, total.abs() * 2**-8 + size * config.num_topk * 2**-24

    def sent_bytes(self) -> tuple[dict[str, int], str]:
        arrived = self.dispatch()
        there = self._baseline.sent_bytes
        self.combine(arrived)
        return {"dispatch": there, "combine": self._baseline.sent_bytes}, "counted"

    def close(self) -> None:
        """Nothing is held."""
