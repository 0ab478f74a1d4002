"""EPConfig, its presets, and the MOE_COMM_* variables."""

from __future__ import annotations

import pickle

import pytest

from moe_comm import PRESETS, EPConfig, ExpertPlacement, env

SMALL = {"num_experts": 8, "num_topk": 2, "hidden": 16}


def test_presets_are_the_published_shapes():
    assert PRESETS == {
        "kimi-k3": (896, 16, 3584),
        "kimi-k3-wide": (896, 16, 7168),
        "deepseek-v3": (256, 8, 7168),
        "qwen3-235b": (128, 8, 4096),
        "gpt-oss-120b": (128, 4, 2880),
        "k3-tiny": (896, 16, 64),
    }
    config = EPConfig.preset("kimi-k3", max_tokens_per_rank=7, hidden=32)
    assert (config.num_experts, config.num_topk, config.hidden) == (896, 16, 32)
    assert config.bucket == 7
    assert (config.dispatch_wire, config.combine_wire) == ("bf16", "bf16")


def test_unknown_preset_lists_the_known_and_the_nearest():
    with pytest.raises(ValueError, match=r"kimi-k3, .*got 'kimik3'; did you mean 'kimi-k3'\?"):
        EPConfig.preset("kimik3")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"num_topk": 9}, "num_topk: expected at most num_experts = 8, got 9"),
        ({"num_experts": 0}, "num_experts: expected a whole number >= 1, got 0"),
        ({"hidden": 1.5}, "hidden: expected a whole number >= 1, got 1.5"),
        ({"num_topk": True}, "num_topk: expected a whole number >= 1, got True"),
        ({"max_tokens_per_rank": -1}, "max_tokens_per_rank: expected a whole number >= 0"),
        ({"num_slots": 0}, "num_slots: expected a whole number >= 1"),
        ({"chunk_tokens": 0}, "chunk_tokens: expected a whole number >= 1 or None"),
        ({"max_expert_rows": 0}, "max_expert_rows: expected a whole number >= 1 or None"),
        ({"dispatch_wire": "fp4"}, "dispatch_wire: expected one of bf16, fp8, mxfp8, none"),
        ({"combine_wire": "int8"}, "combine_wire: expected one of"),
        ({"reduction": "tree"}, "reduction: expected 'rank' or 'node', got 'tree'"),
        ({"timeout_s": 0.0}, "timeout_s: expected seconds above 0"),
        ({"timeout_s": float("nan")}, "timeout_s: expected seconds above 0"),
        ({"timeout_s": float("inf")}, "timeout_s: expected seconds above 0"),
        (
            {"placement": ExpertPlacement.contiguous(9, 2)},
            "placement: expected a table of num_experts = 8 experts, got 9",
        ),
    ],
)
def test_bad_fields_are_named(fields, text):
    with pytest.raises(ValueError, match=text):
        EPConfig(**{**SMALL, **fields})


def test_placement_must_fit_the_group():
    config = EPConfig(**SMALL, placement=ExpertPlacement.contiguous(8, 2))
    assert config.placement_for(2) is config.placement
    with pytest.raises(ValueError, match="a table for 3 ranks, got 2"):
        config.placement_for(3)
    assert EPConfig(**SMALL).placement_for(3).slots == ((0, 1, 2), (3, 4, 5), (6, 7))


def test_configs_travel_and_compare():
    config = EPConfig(**SMALL, placement=ExpertPlacement.from_load([1.0] * 8, 3))
    assert pickle.loads(pickle.dumps(config)) == config
    other = config.replace(num_slots=3)
    assert {k for k, v in config.describe().items() if other.describe()[k] != v} == {"num_slots"}
    with pytest.raises(AttributeError):
        config.hidden = 3


def test_chunks_bound_the_memory():
    whole = EPConfig(**SMALL, max_tokens_per_rank=1000)
    chunked = whole.replace(chunk_tokens=10)
    assert chunked.bucket == 10
    assert chunked.buffer_bytes(4)["total"] * 100 == whole.buffer_bytes(4)["total"]


def test_variables_are_parsed_when_asked_for(monkeypatch):
    config = EPConfig(**SMALL, timeout_s=5.0)
    assert config.wait_s == 5.0
    monkeypatch.setenv("MOE_COMM_TIMEOUT_S", "2.5")
    assert config.wait_s == 2.5
    monkeypatch.setenv("MOE_COMM_TIMEOUT_S", "soon")
    with pytest.raises(
        ValueError, match="MOE_COMM_TIMEOUT_S: expected seconds above 0, got 'soon'"
    ):
        _ = config.wait_s
    monkeypatch.setenv("MOE_COMM_DEBUG", "yes")
    with pytest.raises(ValueError, match="MOE_COMM_DEBUG: expected 0 or 1, got 'yes'"):
        env.DEBUG.get()
    for text, value in (("1", True), ("off", False), ("", False)):
        monkeypatch.setenv("MOE_COMM_DEBUG", text)
        assert env.DEBUG.get() is value
    monkeypatch.setenv("MOE_COMM_RANKS_PER_NODE", "-2")
    with pytest.raises(ValueError, match="MOE_COMM_RANKS_PER_NODE"):
        env.NODE_RANKS.get()


def test_every_variable_is_in_the_table():
    names = [variable.name for variable in env.VARIABLES]
    assert len(set(names)) == len(names)
    assert all(name.startswith("MOE_COMM_") for name in names)
    declared = {v.name for v in vars(env).values() if isinstance(v, env.Variable)}
    assert declared == set(names)
