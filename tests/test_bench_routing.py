"""Routings and rank data: the same on every rank, in range, and loud about bad files."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch

from moe_comm import EPConfig
from moe_comm.launch.rank_data import RankData
from moe_comm.launch.routing import SHIPPED_TRACE, RoutingError, parse_routing

K3 = EPConfig.preset("kimi-k3", hidden=8)
SHAPE = {"num_experts": 896, "num_topk": 16}


@pytest.mark.parametrize("text", ["auto", "uniform", "zipf:1.2", "hot:16", "hot:3", "masked:0.3"])
def test_every_rank_draws_the_same(text):
    tokens = [5, 0, 9]
    everywhere = RankData.create_all(K3, num_tokens=tokens, routing=text, seed=11)
    for rank in range(3):
        alone = RankData.create(K3, rank=rank, num_tokens=tokens, routing=text, seed=11)
        assert alone.num_tokens == tokens[rank]
        assert torch.equal(alone.x, everywhere[rank].x)
        assert torch.equal(alone.topk_idx, everywhere[rank].topk_idx)
        assert torch.equal(alone.topk_weights, everywhere[rank].topk_weights)


def test_seed_and_rank_change_the_data():
    first = RankData.create(K3, rank=0, num_tokens=[4, 4], seed=1)
    assert not torch.equal(first.x, RankData.create(K3, rank=1, num_tokens=[4, 4], seed=1).x)
    other = RankData.create(K3, rank=0, num_tokens=[4, 4], seed=2)
    assert not torch.equal(first.x, other.x)
    assert not torch.equal(first.topk_idx, other.topk_idx)


@pytest.mark.parametrize("text", ["uniform", "zipf:1.5", "hot:20", "hot:2"])
def test_choices_are_distinct_experts_with_weights_that_sum_to_one(text):
    d = RankData.create(K3, rank=0, num_tokens=[64], routing=text)
    assert int(d.topk_idx.min()) >= 0
    assert int(d.topk_idx.max()) < 896
    assert all(len(set(row)) == 16 for row in d.topk_idx.tolist())
    assert torch.allclose(d.topk_weights.sum(dim=1), torch.ones(64))


def test_hot_keeps_to_its_experts():
    assert int(RankData.create(K3, rank=0, num_tokens=[64], routing="hot:20").topk_idx.max()) < 20
    few = RankData.create(K3, rank=0, num_tokens=[64], routing="hot:2").topk_idx
    assert all({0, 1} <= set(row) for row in few.tolist())


def test_zipf_is_more_skewed_than_uniform():
    def heaviest(text):
        ids = RankData.create(K3, rank=0, num_tokens=[512], routing=text).topk_idx
        return int(torch.bincount(ids.flatten(), minlength=896).max())

    assert heaviest("zipf:1.2") > 5 * heaviest("uniform")


def test_masks_have_their_share():
    ids = RankData.create(K3, rank=0, num_tokens=[512], routing="uniform+masked:0.25").topk_idx
    assert float((ids < 0).float().mean()) == pytest.approx(0.25, abs=0.03)
    gone = RankData.create(K3, rank=0, num_tokens=[8], routing="uniform+masked:1").topk_idx
    assert bool((gone == -1).all())


def test_trace_is_the_file_and_wraps():
    with np.load(SHIPPED_TRACE) as archive:
        want = torch.from_numpy(archive["skewed_topk_idx"][2].astype(np.int64))
    routing = parse_routing("trace:skewed:2", **SHAPE)
    got, _ = routing.draw(rank=1, num_tokens=10, seed=0, first_token=8187)
    assert torch.equal(got, torch.cat([want[8187:], want[:5]]))
    assert routing.wrap_note(num_ranks=2, num_tokens=4096) == ""
    note = routing.wrap_note(num_ranks=8, num_tokens=4096)
    assert "8192 tokens" in note
    assert "mod 8192" in note
    assert "4 times" in note


def test_auto_is_the_trace_only_where_the_shape_matches():
    assert parse_routing("auto", **SHAPE).text == "trace:routing_trace.npz:balanced:0"
    assert parse_routing("auto", num_experts=128, num_topk=8).text == "zipf:1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("unifrm", "did you mean 'uniform'"),
        ("zipf:x", "number from 0 to 16"),
        ("zipf:-1", "number from 0 to 16"),
        ("hot:0", "number from 1 to 896"),
        ("hot:2.5", "whole number"),
        ("uniform:1", "without an argument"),
        ("uniform+maskd:1", "masked:P"),
        ("masked:1.5", "number from 0 to 1"),
        ("trace:/no/such/file.npz", "no such file"),
        ("trace:balanced:9", "layer in 0..2"),
    ],
)
def test_bad_routings_are_named(text, message):
    with pytest.raises(RoutingError, match=message):
        parse_routing(text, **SHAPE)


def test_broken_trace_files_are_named(tmp_path):
    cut = tmp_path / "cut.npz"
    shutil.copy(SHIPPED_TRACE, cut)
    cut.write_bytes(cut.read_bytes()[:5000])
    with pytest.raises(RoutingError, match="cannot be read"):
        parse_routing(f"trace:{cut}", **SHAPE)

    other = tmp_path / "other.npz"
    np.savez(other, balanced_topk_idx=np.zeros((2, 4, 8), np.int16))
    with pytest.raises(RoutingError, match="balanced_topk_weights"):
        parse_routing(f"trace:{other}", **SHAPE)

    ids, weights = np.zeros((2, 4, 8), np.int16), np.zeros((2, 4, 8), np.float16)
    np.savez(other, balanced_topk_idx=ids, balanced_topk_weights=weights)
    with pytest.raises(RoutingError, match=r"\[layers, tokens, 16\]"):
        parse_routing(f"trace:{other}", **SHAPE)
    assert parse_routing(f"trace:{other}:1", num_experts=4, num_topk=8).trace is not None

    np.savez(other, balanced_topk_idx=ids + 7, balanced_topk_weights=weights)
    with pytest.raises(RoutingError, match=r"ids in \[-1, 4\), got 7 to 7"):
        parse_routing(f"trace:{other}", num_experts=4, num_topk=8)

    np.savez(other, balanced_topk_idx=ids.astype(float), balanced_topk_weights=weights)
    with pytest.raises(RoutingError, match="integer ids"):
        parse_routing(f"trace:{other}", num_experts=4, num_topk=8)
