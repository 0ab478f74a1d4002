"""K3Config and the list of tensors, against the published figures."""

from __future__ import annotations

import json
import math

import pytest

from moe_comm.model.config import PRESETS, K3Config
from moe_comm.model.tensor_names import dense_tensors, expert_tensors, layer_prefix

SIZES = {"BF16": 2, "F32": 4, "U8": 1}


def nbytes(specs) -> int:
    return sum(math.prod(spec.shape) * SIZES[spec.dtype] for spec in specs)


def test_published_layer_lists():
    config = K3Config.preset("kimi-k3")
    assert config.mla_layers == (*range(3, 92, 4), 92)
    assert len(config.kda_layers) == 69
    assert len(config.mla_layers) == 24
    assert config.moe_layers == tuple(range(1, 93))
    assert not config.is_moe(0)
    assert config.is_mla(91)
    assert config.is_mla(92)
    assert config.mla_cache_dim == 576
    assert config.qk_head_dim == 192


def test_bytes_and_keys_equal_the_published_index():
    """497,220 keys less 165 of vision and 3 of its projector; 17,547,264 bytes an expert; and
    with the vision part (0.9 GB) the index's 1,560,860,324,864 bytes."""
    config = K3Config.preset("kimi-k3")
    expert = nbytes(expert_tensors(config, 1, 0))
    assert expert == 17_547_264
    dense = list(dense_tensors(config))
    num_experts = 92 * 896
    assert len(dense) + num_experts * 6 == 497_220 - 165 - 3
    total = nbytes(dense) + num_experts * expert
    assert 0.85e9 < 1_560_860_324_864 - total < 0.95e9
    names = [spec.name for spec in dense]
    assert len(set(names)) == len(names)


def test_tiny_is_what_it_says():
    config = K3Config.preset("k3-tiny")
    assert config.full_attn_layers == (4, 8, 9)
    assert config.num_hidden_layers == 9
    assert (config.num_experts, config.num_experts_per_token) == (896, 16)
    assert config.attn_res_block_size == 4
    assert config.linear_head_dim != config.linear_v_head_dim
    assert layer_prefix(0) == "language_model.model.layers.0."


@pytest.mark.parametrize("name", PRESETS)
def test_round_trip_through_config_json(name, tmp_path):
    config = K3Config.preset(name)
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf_dict()), encoding="utf-8")
    assert K3Config.from_checkpoint(tmp_path) == config
    assert "quantization_config" in config.to_hf_dict()["text_config"]
    assert "quantization_config" not in config.to_hf_dict()


def test_truncated_keeps_the_width():
    config = K3Config.preset("kimi-k3-4l")
    assert config.mla_layers == (3,)
    assert config.moe_layers == (0, 1, 2, 3)
    assert config.hidden_size == 7168
    with pytest.raises(ValueError, match="num_layers: expected 1 to 4, got 5"):
        config.truncate(5)


def text_of(data):
    return data["text_config"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: text_of(d).pop("hidden_size"), "hidden_size: expected a value"),
        (lambda d: text_of(d).update(hidden_act="silu"), "hidden_act: expected 'situ'"),
        (lambda d: text_of(d).update(mla_use_nope=False), "mla_use_nope: expected True"),
        (
            lambda d: text_of(d)["linear_attn_config"].update(kda_layers=[1, 2, 3]),
            "kda_layers: expected",
        ),
        (
            lambda d: text_of(d)["linear_attn_config"].update(use_full_rank_gate=False),
            "use_full_rank_gate: expected true",
        ),
        (
            lambda d: text_of(d)["quantization_config"].update(format="pack-quantized"),
            "format: expected 'mxfp4-pack-quantized'",
        ),
        (lambda d: text_of(d).update(quantization_config=None), "quantization_config: expected"),
        (lambda d: text_of(d).update(num_hidden_layers=0), "num_hidden_layers: expected an int"),
        (lambda d: text_of(d).update(num_expert_group=9), "num_expert_group: expected a divisor"),
        (lambda d: text_of(d).update(num_experts_per_token=900), "expected at most 896"),
        (
            lambda d: text_of(d).update(
                num_experts_per_tok=text_of(d).pop("num_experts_per_token")
            ),
            "another model family",
        ),
    ],
)
def test_a_different_model_is_refused_by_name(change, message, tmp_path):
    data = K3Config.preset("k3-tiny").to_hf_dict()
    change(data)
    (tmp_path / "config.json").write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(ValueError, match=message) as caught:
        K3Config.from_checkpoint(tmp_path)
    assert "config.json" in str(caught.value)


def test_not_json(tmp_path):
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match="not JSON"):
        K3Config.from_checkpoint(tmp_path)
