"""The baseline: expert parallelism as one writes it with torch alone, a row per (token, expert).

Sort the choices by expert, exchange counts, all_to_all_single of K rows a token, regroup by local
expert; back the same way, and a weighted sum in fp32 at the source. No deduplication.

Shape legend: T tokens, K choices, H hidden, S rows sent (live choices), N rows received, L local
experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from moe_comm.group import Group
from moe_comm.placement import ExpertPlacement


@dataclass(frozen=True, kw_only=True, eq=False)
class PerExpertArrived:
    """What dispatch leaves: `rows` [N, H] grouped by local expert, `counts` [L] rows of each, and
    what the way back needs."""

    rows: Tensor
    counts: Tensor
    regroup: Tensor
    order: Tensor
    send_splits: list[int]
    receive_splits: list[int]


class PerExpert:
    """One rank's side. Experts lie on ranks in consecutive blocks, as in the contiguous placement.

    Attributes:
        sent_bytes: bytes sent to other ranks by the last call.
    """

    def __init__(self, group: Group, placement: ExpertPlacement) -> None:
        self.group, self.placement = group, placement
        counts = [placement.num_local_experts(rank) for rank in range(group.num_ranks)]
        self._experts_per_rank = counts
        self._num_local = counts[group.rank]
        self.sent_bytes = 0

    def dispatch(self, x: Tensor, topk_idx: Tensor) -> PerExpertArrived:
        """Send a row per live choice: x [T, H], topk_idx [T, K]. Collective."""
        ranks, num_topk = self.group.num_ranks, topk_idx.shape[1]
        flat = topk_idx.reshape(-1)
        order = torch.argsort(torch.where(flat >= 0, flat, self.placement.num_experts), stable=True)
        counts = torch.bincount(flat.clamp_min(-1) + 1, minlength=self.placement.num_experts + 1)
        counts = counts[1:]
        order = order[: int(counts.sum())]
        theirs = torch.empty(ranks * self._num_local, dtype=torch.int64, device=x.device)
        dist.all_to_all_single(
            theirs,
            counts,
            output_split_sizes=[self._num_local] * ranks,
            input_split_sizes=self._experts_per_rank,
            group=self.group.pg,
        )
        here = theirs.view(ranks, self._num_local)
        send_splits = [int(part.sum()) for part in counts.cpu().split(self._experts_per_rank)]
        receive_splits = here.sum(dim=1).tolist()
        received = x.new_empty(sum(receive_splits), x.shape[1])
        dist.all_to_all_single(
            received, x[order // num_topk], receive_splits, send_splits, group=self.group.pg
        )
        expert_of_row = torch.arange(self._num_local, device=x.device).repeat(ranks)
        regroup = torch.argsort(expert_of_row.repeat_interleave(theirs), stable=True)
        elsewhere = sum(send_splits) - send_splits[self.group.rank]
        other_experts = self.placement.num_experts - self._num_local
        self.sent_bytes = elsewhere * x.shape[1] * x.element_size() + other_experts * 8
        return PerExpertArrived(
            rows=received[regroup],
            counts=here.sum(dim=0),
            regroup=regroup,
            order=order,
            send_splits=send_splits,
            receive_splits=receive_splits,
        )

    def combine(self, y: Tensor, arrived: PerExpertArrived, topk_weights: Tensor) -> Tensor:
        """Return y [N, H], grouped by local expert, and sum: [T, H]. Collective."""
        ungrouped = torch.empty_like(y)
        ungrouped[arrived.regroup] = y
        back = y.new_empty(sum(arrived.send_splits), y.shape[1])
        dist.all_to_all_single(
            back, ungrouped, arrived.send_splits, arrived.receive_splits, group=self.group.pg
        )
        elsewhere = sum(arrived.receive_splits) - arrived.receive_splits[self.group.rank]
        self.sent_bytes = elsewhere * y.shape[1] * y.element_size()
        by_choice = y.new_zeros(topk_weights.numel(), y.shape[1])
        by_choice[arrived.order] = back
        shaped = by_choice.view(*topk_weights.shape, y.shape[1]).float()
        return (shaped * topk_weights.unsqueeze(-1)).sum(dim=1).to(y.dtype)
