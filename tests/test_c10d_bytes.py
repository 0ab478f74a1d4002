"""What is sent, counted by the library, against what the routing needs."""

from __future__ import annotations

import os

import pytest
from rank_pool import RankContext, run_ranks

from moe_comm import EPConfig
from moe_comm.backends.c10d_transport import HEADER_BYTES
from moe_comm.launch.rank_data import RankData
from moe_comm.traffic import RoutingTraffic, expected_node_traffic

# ids and weights of 16 choices, and the token's number.
RECORD_BYTES = 16 * 4 + 16 * 4 + 4


def dispatch_bytes(
    context: RankContext, mode: str, tokens: int, hidden: int, ranks_per_node: int
) -> dict[str, int]:
    """Metrics of one dispatch at E=896, K=16."""
    os.environ["MOE_COMM_RANKS_PER_NODE"] = str(ranks_per_node)
    try:
        reduction = "node" if mode == "hierarchical" else "rank"
        config = EPConfig.preset(
            "kimi-k3", hidden=hidden, max_tokens_per_rank=tokens, reduction=reduction
        )
        comm = context.communicator(config, f"c10d:{mode}")
    finally:
        del os.environ["MOE_COMM_RANKS_PER_NODE"]
    data = RankData.create(config, rank=context.rank, num_tokens=[tokens] * context.num_ranks)
    with comm:
        comm.dispatch(data.x, data.topk_idx, data.topk_weights).handle.release()
        counted: dict[str, int] = comm.metrics()
    return counted


def traffic_of(num_ranks: int, tokens: int, nodes: list[int] | None = None) -> RoutingTraffic:
    config = EPConfig.preset("kimi-k3", hidden=1, max_tokens_per_rank=tokens)
    data = RankData.create_all(config, num_tokens=[tokens] * num_ranks)
    return RoutingTraffic.of(
        [given.topk_idx for given in data], config.placement_for(num_ranks), node_of_rank=nodes
    )


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_exact_sends_little_more_than_the_rows(num_ranks):
    counted = run_ranks(num_ranks, dispatch_bytes, "exact", 128, 3584, num_ranks)
    traffic = traffic_of(num_ranks, 128)
    least = traffic.minimum_bytes("dispatch", dispatch_row_bytes=7168, combine_row_bytes=7168)
    busiest = max(metrics["sent_bytes"] for metrics in counted)
    assert least <= busiest <= 1.03 * least
    for metrics, rows in zip(counted, traffic.remote_rows.tolist(), strict=True):
        headers = HEADER_BYTES * (num_ranks - 1)
        # Up to one token in 128 may be sent for the sake of not packing.
        extra = num_ranks - 1
        assert 0 <= metrics["sent_bytes"] - headers - rows * (7168 + RECORD_BYTES) <= extra * 7300
        assert metrics["cross_node_bytes"] == 0


@pytest.mark.parametrize(
    ("num_ranks", "ranks_per_node"), [(4, 2), pytest.param(8, 2, marks=pytest.mark.slow)]
)
def test_a_row_crosses_to_a_node_once(num_ranks, ranks_per_node):
    hidden, tokens = 64, 60
    nodes = [rank // ranks_per_node for rank in range(num_ranks)]
    flat_rows, node_rows = traffic_of(num_ranks, tokens, nodes).rows_between_nodes
    assert node_rows < flat_rows
    headers = HEADER_BYTES * sum(
        nodes[a] != nodes[b] for a in range(num_ranks) for b in range(num_ranks)
    )
    for mode, rows in (("exact", flat_rows), ("hierarchical", node_rows)):
        counted = run_ranks(num_ranks, dispatch_bytes, mode, tokens, hidden, ranks_per_node)
        crossed = sum(metrics["cross_node_bytes"] for metrics in counted)
        assert crossed == headers + rows * (2 * hidden + RECORD_BYTES)


def test_eight_nodes_of_eight():
    expected = expected_node_traffic(8, 8, 896, 16)
    assert expected.flat == pytest.approx(12.57, abs=0.005)
    assert expected.hierarchical == pytest.approx(6.19, abs=0.005)
