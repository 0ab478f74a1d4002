"""Rows and bytes by link, against an obvious count."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_comm import EPConfig, ExpertPlacement
from moe_comm.launch.rank_data import RankData
from moe_comm.traffic import (
    DEFINITIONS,
    RoutingTraffic,
    expected_distinct,
    expected_node_traffic,
)


def test_eight_nodes_of_eight_send_half_the_rows():
    rows = expected_node_traffic(8, 8, 896, 16)
    assert rows.flat == pytest.approx(12.57, abs=0.005)
    assert rows.hierarchical == pytest.approx(6.19, abs=0.005)


@pytest.mark.parametrize(("ranks", "want"), [(2, 2.00), (8, 7.07), (64, 14.36)])
def test_expected_distinct_ranks_of_k3(ranks, want):
    assert expected_distinct(ranks, 896, 16) == pytest.approx(want, abs=0.005)


def test_expected_distinct_is_the_mean_over_all_choices():
    # 7 experts on 3 ranks (3, 2, 2), top-3: every subset is equally likely.
    rank_of = [0, 0, 0, 1, 1, 2, 2]
    subsets = list(itertools.combinations(range(7), 3))
    mean = sum(len({rank_of[e] for e in subset}) for subset in subsets) / len(subsets)
    assert expected_distinct(3, 7, 3) == pytest.approx(mean)


@pytest.mark.parametrize(("groups", "experts", "topk"), [(0, 8, 2), (2, 4, 5)])
def test_expected_distinct_refuses_nonsense(groups, experts, topk):
    with pytest.raises(ValueError, match="num_groups, num_topk"):
        expected_distinct(groups, experts, topk)


def test_uniform_routing_meets_the_expectation_at_64_ranks():
    config = EPConfig.preset("kimi-k3", hidden=1)
    data = RankData.create_all(config, num_tokens=[64] * 64, routing="uniform", seed=2)
    traffic = RoutingTraffic.of(
        [d.topk_idx for d in data],
        ExpertPlacement.contiguous(896, 64),
        node_of_rank=[rank // 8 for rank in range(64)],
    )
    flat, hierarchical = traffic.rows_between_nodes
    # 4096 tokens: the standard error of either mean is below 0.03.
    assert flat / 4096 == pytest.approx(12.57, abs=0.1)
    assert hierarchical / 4096 == pytest.approx(6.19, abs=0.1)


@st.composite
def routings(draw):
    ranks = draw(st.integers(1, 5))
    experts = draw(st.integers(1, 12))
    topk = draw(st.integers(1, min(experts, 4)))
    copies = draw(st.integers(0, 3))
    load = draw(st.lists(st.floats(0, 10), min_size=experts, max_size=experts))
    placement = ExpertPlacement.from_load(load, ranks, num_redundant=copies)
    ids = st.integers(-1, experts)
    tokens = st.lists(st.lists(ids, min_size=topk, max_size=topk), max_size=6)
    routed = [draw(tokens) for _ in range(ranks)]
    nodes = sorted(draw(st.lists(st.integers(0, 2), min_size=ranks, max_size=ranks)))
    dense = {node: index for index, node in enumerate(dict.fromkeys(nodes))}
    return placement, routed, topk, [dense[node] for node in nodes]


@settings(max_examples=60, deadline=None)
@given(routings())
def test_counts_equal_a_loop(case):
    placement, routed, topk, nodes = case
    ranks = placement.num_ranks
    table, copies = placement.copy_table.tolist(), placement.num_copies.tolist()
    rows = [[0] * ranks for _ in range(ranks)]
    choices = [[0] * ranks for _ in range(ranks)]
    node_rows = [[0] * (max(nodes) + 1) for _ in range(ranks)]
    for source, tokens in enumerate(routed):
        for position, ids in enumerate(tokens):
            reached = []
            for expert in ids:
                if 0 <= expert < placement.num_experts:
                    reached.append(table[expert][(source + position) % copies[expert]][0])
            for rank in reached:
                choices[source][rank] += 1
            for rank in set(reached):
                rows[source][rank] += 1
            for node in {nodes[rank] for rank in reached}:
                node_rows[source][node] += 1
    traffic = RoutingTraffic.of(
        [torch.tensor(tokens, dtype=torch.int64).reshape(-1, topk) for tokens in routed],
        placement,
        node_of_rank=nodes,
    )
    assert traffic.rows.tolist() == rows
    assert traffic.choices.tolist() == choices
    assert traffic.node_rows.tolist() == node_rows
    sent = [sum(row) - row[rank] for rank, row in enumerate(rows)]
    back = [sum(row[rank] for row in rows) - rows[rank][rank] for rank in range(ranks)]
    wires = {"dispatch_row_bytes": 10, "combine_row_bytes": 3}
    assert traffic.minimum_bytes("dispatch", **wires) == 10 * max(sent)
    assert traffic.minimum_bytes("combine", **wires) == 3 * max(back)
    both = max(10 * there + 3 * home for there, home in zip(sent, back, strict=True))
    assert traffic.minimum_bytes("round_trip", **wires) == both
    links = traffic.bytes_by_link(7)
    assert links["local"] + links["node"] + links["network"] == 7 * sum(map(sum, rows))
    assert links["network_hierarchical"] <= links["network"]


def test_unknown_phase_and_wrong_lengths_are_named():
    traffic = RoutingTraffic.of([torch.zeros(1, 1)] * 2, ExpertPlacement.contiguous(4, 2))
    with pytest.raises(ValueError, match="phase: expected one of dispatch"):
        traffic.minimum_bytes("gather", dispatch_row_bytes=1, combine_row_bytes=1)
    with pytest.raises(ValueError, match="one entry for each of 2 ranks, got 1"):
        RoutingTraffic.of([torch.zeros(1, 1)], ExpertPlacement.contiguous(4, 2))


def test_every_figure_of_a_row_has_a_definition():
    for name in ("remote_bytes", "minimum_bytes", "remote_gbps", "limit_us", "wrong", "GB/s"):
        assert len(DEFINITIONS[name]) > 10
