"""Every tensor of a K3 text checkpoint: name, shape, dtype. Shared by the writer of synthetic
checkpoints, the checkpoint reader and the model's loader, so that they cannot disagree.

Shapes are whole (before tensor or expert parallelism), as on disk.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from moe_comm.model.config import MXFP4_GROUP, K3Config

TEXT_PREFIX = "language_model."


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One tensor on disk.

    `dtype` is what a writer writes, in safetensors' spelling ("BF16", "F32", "U8"); a reader takes
    any of `accepted`. `layer` counts from 0; None for tensors outside the layers.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "BF16"
    accepted: tuple[str, ...] = ("BF16",)
    layer: int | None = None


def layer_prefix(layer: int) -> str:
    """`language_model.model.layers.{layer}.`"""
    return f"{TEXT_PREFIX}model.layers.{layer}."


def expert_prefix(layer: int, expert: int) -> str:
    """`language_model.model.layers.{layer}.block_sparse_moe.experts.{expert}.`"""
    return f"{layer_prefix(layer)}block_sparse_moe.experts.{expert}."


def dense_tensors(config: K3Config) -> Iterator[TensorSpec]:
    """Every tensor except routed experts, in file order: layers first, then the outer ones."""
    for layer in range(config.num_hidden_layers):
        yield from dense_layer_tensors(config, layer)
    yield from outer_tensors(config)


def outer_tensors(config: K3Config) -> Iterator[TensorSpec]:
    """Embedding, final AttnRes site, final norm and head."""
    hidden, vocab = config.hidden_size, config.vocab_size
    for name, shape in (
        ("model.embed_tokens.weight", (vocab, hidden)),
        ("model.output_attn_res_norm.weight", (hidden,)),
        ("model.output_attn_res_proj.weight", (1, hidden)),
        ("model.norm.weight", (hidden,)),
        ("lm_head.weight", (vocab, hidden)),
    ):
        yield TensorSpec(name=TEXT_PREFIX + name, shape=shape)


def dense_layer_tensors(config: K3Config, layer: int) -> Iterator[TensorSpec]:
    """A layer's tensors except its routed experts."""
    hidden = config.hidden_size
    shapes: list[tuple[str, tuple[int, ...]]] = [
        ("input_layernorm.weight", (hidden,)),
        ("post_attention_layernorm.weight", (hidden,)),
        ("self_attention_res_norm.weight", (hidden,)),
        ("self_attention_res_proj.weight", (1, hidden)),
        ("mlp_res_norm.weight", (hidden,)),
        ("mlp_res_proj.weight", (1, hidden)),
    ]
    shapes += _mla(config) if config.is_mla(layer) else _kda(config)
    if config.is_moe(layer):
        shapes += _moe(config)
    else:
        shapes += [(f"mlp.{n}", s) for n, s in _mlp(hidden, config.intermediate_size)]
    for name, shape in shapes:
        full = layer_prefix(layer) + name
        leaf = name.rsplit(".", 1)[-1]
        if leaf in ("A_log", "dt_bias", "e_score_correction_bias"):
            yield TensorSpec(
                name=full, shape=shape, dtype="F32", accepted=("F32", "BF16"), layer=layer
            )
        else:
            # Convolutions are held in fp32 at run time; files of either dtype are read.
            either = ("BF16", "F32") if "_conv1d." in name else ("BF16",)
            yield TensorSpec(name=full, shape=shape, accepted=either, layer=layer)


def expert_tensors(config: K3Config, layer: int, expert: int) -> Iterator[TensorSpec]:
    """One routed expert's six tensors, in file order: w1 (gate), w2 (down), w3 (up), each packed
    (two E2M1 values a byte) and its scales (one E8M0 byte for 32 values)."""
    latent, inter = config.routed_expert_hidden_size, config.moe_intermediate_size
    for name, rows, cols in (
        ("w1", inter, latent),
        ("w2", latent, inter),
        ("w3", inter, latent),
    ):
        for part, width in (("weight_packed", cols // 2), ("weight_scale", cols // MXFP4_GROUP)):
            yield TensorSpec(
                name=f"{expert_prefix(layer, expert)}{name}.{part}",
                shape=(rows, width),
                dtype="U8",
                accepted=("U8",),
                layer=layer,
            )


def _kda(config: K3Config) -> list[tuple[str, tuple[int, ...]]]:
    hidden, heads = config.hidden_size, config.linear_num_heads
    key, value = config.linear_key_channels, config.linear_value_channels
    dim, width = config.linear_head_dim, config.linear_conv_size
    shapes: list[tuple[str, tuple[int, ...]]] = [
        ("q_proj.weight", (key, hidden)),
        ("k_proj.weight", (key, hidden)),
        ("v_proj.weight", (value, hidden)),
        ("q_conv1d.weight", (key, 1, width)),
        ("k_conv1d.weight", (key, 1, width)),
        ("v_conv1d.weight", (value, 1, width)),
        # Padded on disk to head_dim entries; the first num_heads mean something.
        ("A_log", (max(heads, dim),)),
        ("dt_bias", (key,)),
        ("f_a_proj.weight", (dim, hidden)),
        ("f_b_proj.weight", (key, dim)),
        ("b_proj.weight", (heads, hidden)),
        ("g_proj.weight", (value, hidden)),
        ("o_norm.weight", (config.linear_v_head_dim,)),
        ("o_proj.weight", (hidden, value)),
    ]
    return [(f"self_attn.{name}", shape) for name, shape in shapes]


def _mla(config: K3Config) -> list[tuple[str, tuple[int, ...]]]:
    hidden, heads = config.hidden_size, config.num_attention_heads
    latent, value = config.kv_lora_rank, heads * config.v_head_dim
    shapes: list[tuple[str, tuple[int, ...]]] = [
        ("q_a_proj.weight", (config.q_lora_rank, hidden)),
        ("q_a_layernorm.weight", (config.q_lora_rank,)),
        ("q_b_proj.weight", (heads * config.qk_head_dim, config.q_lora_rank)),
        ("kv_a_proj_with_mqa.weight", (config.mla_cache_dim, hidden)),
        ("kv_a_layernorm.weight", (latent,)),
        ("kv_b_proj.weight", (heads * (config.qk_nope_head_dim + config.v_head_dim), latent)),
        ("g_proj.weight", (value, hidden)),
        ("o_proj.weight", (hidden, value)),
    ]
    return [(f"self_attn.{name}", shape) for name, shape in shapes]


def _moe(config: K3Config) -> list[tuple[str, tuple[int, ...]]]:
    hidden, latent = config.hidden_size, config.routed_expert_hidden_size
    shapes: list[tuple[str, tuple[int, ...]]] = [
        ("gate.weight", (config.num_experts, hidden)),
        ("gate.e_score_correction_bias", (config.num_experts,)),
        ("routed_expert_down_proj.weight", (latent, hidden)),
        ("routed_expert_up_proj.weight", (hidden, latent)),
        ("routed_expert_norm.weight", (latent,)),
    ]
    shapes += [(f"shared_experts.{n}", s) for n, s in _mlp(hidden, config.shared_intermediate_size)]
    return [(f"block_sparse_moe.{name}", shape) for name, shape in shapes]


def _mlp(hidden: int, inter: int) -> list[tuple[str, tuple[int, ...]]]:
    return [
        ("gate_proj.weight", (inter, hidden)),
        ("up_proj.weight", (inter, hidden)),
        ("down_proj.weight", (hidden, inter)),
    ]
