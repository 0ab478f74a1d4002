"""Traffic: how many bytes a routing must move, link by link, and what every GB/s here means.

Shape legend: R ranks, T tokens of a rank, K choices a token, E logical experts.

Rows are counted after deduplication: one row per (token, destination). A destination is a rank,
or, on the way between nodes in hierarchical mode, a node.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_comm.layout import destinations
from moe_comm.placement import ExpertPlacement

# Definitions that travel with every result file.
DEFINITIONS: dict[str, str] = {
    "GB/s": "10^9 bytes a second",
    "num_tokens": "tokens of one rank; the largest where ranks differ",
    "remote_bytes": (
        "bytes the busiest rank sends to other ranks in one call: rows, scales, metadata and "
        "counts; bytes that stay on the rank do not count"
    ),
    "minimum_bytes": (
        "bytes the busiest rank must send: one row with its scales per (token, other rank), "
        "nothing else"
    ),
    "remote_gbps": "remote_bytes / slowest_rank_p50_us; logical local traffic is never counted",
    "p50_us": "median over the samples of all ranks together",
    "p99_us": "99th percentile over the samples of all ranks together",
    "slowest_rank_p50_us": "the largest of the ranks' own medians: the figure to quote",
    "limit_us": (
        "time this machine needs for the same remote bytes, measured in the same run by the means "
        "named in limit_kind; the slowest rank's median"
    ),
    "dispatch": (
        "from the call until expert_offsets and row_index are there, so that a grouped GEMM can "
        "start; quantization included"
    ),
    "combine": (
        "from expert-grouped rows (layout 'expert') or one row per (source rank, token) (layout "
        "'rows') until the summed rows are on their rank; weighting included"
    ),
    "round_trip": "dispatch and combine one after the other, without the expert step",
    "wrong": "elements that differ from the reference, over all ranks; null: not checked",
}


def expected_distinct(num_groups: int, num_experts: int, num_topk: int) -> float:
    """Expected distinct groups (ranks, nodes) that one token reaches, under uniform routing of
    num_topk distinct experts spread evenly over num_groups.

    Exact, group by group: 1 - C(E - e, K) / C(E, K) for a group of e experts.
    """
    if num_groups < 1 or num_topk > num_experts:
        raise ValueError(
            "num_groups, num_topk: expected at least 1 and at most num_experts = "
            f"{num_experts}, got {num_groups} and {num_topk}"
        )
    base, extra = divmod(num_experts, num_groups)
    everything = math.comb(num_experts, num_topk)
    total = 0.0
    for group in range(num_groups):
        here = base + (group < extra)
        total += 1 - math.comb(num_experts - here, num_topk) / everything
    return total


@dataclass(frozen=True, kw_only=True)
class NodeTraffic:
    """Expected rows a token sends out of its node, uniform routing, nodes alike.

    Attributes:
        flat: one row per destination rank.
        hierarchical: one row per destination node.
    """

    flat: float
    hierarchical: float


def expected_node_traffic(
    num_nodes: int, ranks_per_node: int, num_experts: int, num_topk: int
) -> NodeTraffic:
    """Rows a token that cross between nodes. 8 nodes x 8 ranks, 896/16: 12.57 and 6.19."""
    away = (num_nodes - 1) / num_nodes
    ranks = expected_distinct(num_nodes * ranks_per_node, num_experts, num_topk)
    nodes = expected_distinct(num_nodes, num_experts, num_topk)
    return NodeTraffic(flat=ranks * away, hierarchical=nodes * away)


@dataclass(frozen=True, kw_only=True, eq=False)
class RoutingTraffic:
    """Rows that a real routing moves.

    Attributes:
        rows: [R, R] int64: tokens of source rank s that reach rank d (one row each, s = d too).
        choices: [R, R] int64: choices of s that lie on d (rows without deduplication).
        node_rows: [R, nodes] int64: tokens of source rank s that reach some rank of node n.
        node_of_rank: node index of each rank.
    """

    rows: Tensor
    choices: Tensor
    node_rows: Tensor
    node_of_rank: tuple[int, ...]

    @classmethod
    def of(
        cls,
        topk_idx: Sequence[Tensor],
        placement: ExpertPlacement,
        *,
        node_of_rank: Sequence[int] | None = None,
    ) -> RoutingTraffic:
        """Count every rank's routing.

        Args:
            topk_idx: each rank's [T, K] global expert ids; ids outside [0, E) go nowhere.
            placement: where the experts lie.
            node_of_rank: node index of each rank; default one node.
        """
        ranks = placement.num_ranks
        nodes = tuple(node_of_rank or [0] * ranks)
        if len(topk_idx) != ranks or len(nodes) != ranks:
            raise ValueError(
                f"topk_idx, node_of_rank: expected one entry for each of {ranks} ranks, got "
                f"{len(topk_idx)} and {len(nodes)}"
            )
        rows, choices, node_rows = [], [], []
        node_index = torch.tensor(nodes)
        for source, given in enumerate(topk_idx):
            ids = given.cpu()
            to = destinations(
                ids,
                placement.copy_table,
                placement.num_copies,
                source_rank=source,
                num_ranks=ranks,
                num_tokens=ids.shape[0],
            )
            rows.append(to.reaches.sum(dim=0))
            live = to.rank[to.rank >= 0].long()
            choices.append(torch.bincount(live, minlength=ranks))
            node_rows.append(
                torch.stack(
                    [
                        to.reaches[:, node_index == node].any(dim=1).sum()
                        for node in range(max(nodes) + 1)
                    ]
                )
            )
        return cls(
            rows=torch.stack(rows),
            choices=torch.stack(choices),
            node_rows=torch.stack(node_rows),
            node_of_rank=nodes,
        )

    @property
    def remote_rows(self) -> Tensor:
        """[R] int64: rows each rank's dispatch sends to other ranks."""
        return self.rows.sum(dim=1) - self.rows.diagonal()

    @property
    def returned_rows(self) -> Tensor:
        """[R] int64: rows each rank's combine sends to other ranks (one per (token, rank))."""
        return self.rows.sum(dim=0) - self.rows.diagonal()

    @property
    def rows_between_nodes(self) -> tuple[int, int]:
        """Rows of all tokens that leave their node: one per rank there, and one per node there."""
        node = torch.tensor(self.node_of_rank)
        crosses = node[:, None] != node[None, :]
        away = node[:, None] != torch.arange(self.node_rows.shape[1])[None, :]
        return int(self.rows[crosses].sum()), int(self.node_rows[away].sum())

    def minimum_bytes(self, phase: str, *, dispatch_row_bytes: int, combine_row_bytes: int) -> int:
        """Bytes the busiest rank must send to other ranks.

        Args:
            phase: "dispatch", "combine", or "round_trip" (the two added rank by rank).
            dispatch_row_bytes, combine_row_bytes: values and scales of one row each way.
        """
        there = self.remote_rows * dispatch_row_bytes
        back = self.returned_rows * combine_row_bytes
        sent = {"dispatch": there, "combine": back, "round_trip": there + back}
        if phase not in sent:
            raise ValueError(f"phase: expected one of {', '.join(sent)}, got {phase!r}")
        return int(sent[phase].max())

    def bytes_by_link(self, row_bytes: int) -> dict[str, int]:
        """Bytes of all ranks' dispatched rows, by the link they take when sent rank to rank.

        Keys: "local" (stays on its rank), "node" (to another rank of the same node), "network"
        (to another node), and "network_hierarchical" (the same, a row a node once).
        """
        node = torch.tensor(self.node_of_rank)
        same_node = node[:, None] == node[None, :]
        local = int(self.rows.diagonal().sum())
        network, hierarchical = self.rows_between_nodes
        return {
            "local": local * row_bytes,
            "node": (int(self.rows[same_node].sum()) - local) * row_bytes,
            "network": network * row_bytes,
            "network_hierarchical": hierarchical * row_bytes,
        }
