"""From tensors on disk to one rank's layers: which rows and columns of which tensor it holds.

Attention is sharded over the tensor-parallel group by heads; the dense MLP and the head by rows.
Embedding, router, latent projections, shared experts and norms are whole on every rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

import torch

from moe_comm.model.config import K3Config
from moe_comm.model.layers.attn_res import AttnResSite
from moe_comm.model.layers.gated_mla import GatedMla
from moe_comm.model.layers.kda import Kda
from moe_comm.model.layers.latent_moe import Experts, LatentMoe
from moe_comm.model.layers.linear import Numerics
from moe_comm.model.layers.norm import Mlp
from moe_comm.model.layers.overlap import Overlap
from moe_comm.model.layers.router import Router
from moe_comm.model.parallel import Parallel
from moe_comm.model.tensor_names import (
    TEXT_PREFIX,
    TensorSpec,
    dense_layer_tensors,
    layer_prefix,
    outer_tensors,
)

ExpertsOfLayer = Callable[[int], Experts]


class TensorSource(Protocol):
    """Where dense tensors come from: a checkpoint, or a dictionary in tests."""

    def read(self, spec: TensorSpec) -> torch.Tensor:
        """One whole tensor on the CPU; an error that names it where shape or dtype differ. Entries
        past what the model has (A_log's padding) may be there or not."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer: its norms and sites, its attention (kda or mla) and its MLP (moe or dense)."""

    input_norm: torch.Tensor
    post_norm: torch.Tensor
    attn_site: AttnResSite
    mlp_site: AttnResSite
    attention: Kda | GatedMla
    mlp: LatentMoe | Mlp


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outer:
    """What lies outside the layers: embedding [vocab, D], final site and norm, and this rank's rows
    of the head, [vocab / tp, D]."""

    embedding: torch.Tensor
    site: AttnResSite
    norm: torch.Tensor
    head: torch.Tensor


class Builder:
    """Builds layers from a source, one tensor at a time; each is sharded before it is moved, so the
    extra memory is one whole tensor."""

    def __init__(
        self,
        config: K3Config,
        source: TensorSource,
        *,
        parallel: Parallel,
        numerics: Numerics,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        # One for all layers: its stream then takes the calls of all in one order.
        self._overlap = Overlap.default(device)
        self.config, self.source = config, source
        self.parallel, self.numerics = parallel, numerics
        self.device, self.dtype = device, dtype

    def outer(self) -> Outer:
        """Embedding, final site, final norm and head."""
        specs = {s.name.removeprefix(TEXT_PREFIX): s for s in outer_tensors(self.config)}
        first, last = self.parallel.shard(self.config.vocab_size, "vocab_size")
        return Outer(
            embedding=self._get(specs["model.embed_tokens.weight"]),
            site=self._site(
                specs["model.output_attn_res_norm.weight"],
                specs["model.output_attn_res_proj.weight"],
            ),
            norm=self._get(specs["model.norm.weight"]),
            head=self._get(specs["lm_head.weight"], rows=(first, last)),
        )

    def layer(self, layer: int, experts: ExpertsOfLayer) -> Layer:
        """Layer `layer`, counted from 0."""
        prefix = layer_prefix(layer)
        specs = {s.name.removeprefix(prefix): s for s in dense_layer_tensors(self.config, layer)}
        attention = self._mla(specs) if self.config.is_mla(layer) else self._kda(specs)
        mlp: LatentMoe | Mlp
        if self.config.is_moe(layer):
            mlp = self._moe(specs, experts(layer))
        else:
            shard = self.parallel.shard(self.config.intermediate_size, "intermediate_size")
            mlp = self._mlp(specs, "mlp.", shard)
        return Layer(
            input_norm=self._get(specs["input_layernorm.weight"]),
            post_norm=self._get(specs["post_attention_layernorm.weight"]),
            attn_site=self._site(
                specs["self_attention_res_norm.weight"], specs["self_attention_res_proj.weight"]
            ),
            mlp_site=self._site(specs["mlp_res_norm.weight"], specs["mlp_res_proj.weight"]),
            attention=attention,
            mlp=mlp,
        )

    def _get(
        self,
        spec: TensorSpec,
        *,
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        whole = self.source.read(spec)
        if rows is not None:
            whole = whole[rows[0] : rows[1]]
        if columns is not None:
            whole = whole[:, columns[0] : columns[1]]
        wanted = self.dtype if dtype is None else dtype
        return whole.to(device=self.device, dtype=wanted, copy=True).contiguous()

    def _site(self, norm: TensorSpec, proj: TensorSpec) -> AttnResSite:
        return AttnResSite.create(self._get(norm), self._get(proj), self.config.rms_norm_eps)

    def _kda(self, specs: dict[str, TensorSpec]) -> Kda:
        config = self.config
        heads = self.parallel.shard(config.linear_num_heads, "linear_attn_config.num_heads")
        key = (heads[0] * config.linear_head_dim, heads[1] * config.linear_head_dim)
        value = (heads[0] * config.linear_v_head_dim, heads[1] * config.linear_v_head_dim)

        def get(
            name: str,
            *,
            rows: tuple[int, int] | None = None,
            columns: tuple[int, int] | None = None,
            dtype: torch.dtype | None = None,
        ) -> torch.Tensor:
            return self._get(specs[f"self_attn.{name}"], rows=rows, columns=columns, dtype=dtype)

        fp32 = torch.float32
        return Kda(
            q=get("q_proj.weight", rows=key),
            k=get("k_proj.weight", rows=key),
            v=get("v_proj.weight", rows=value),
            g=get("g_proj.weight", rows=value),
            f_a=get("f_a_proj.weight"),
            f_b=get("f_b_proj.weight", rows=key),
            b=get("b_proj.weight", rows=heads),
            conv_q=get("q_conv1d.weight", rows=key, dtype=fp32).squeeze(1),
            conv_k=get("k_conv1d.weight", rows=key, dtype=fp32).squeeze(1),
            conv_v=get("v_conv1d.weight", rows=value, dtype=fp32).squeeze(1),
            # Heads come first on disk, padding after the last: a row range narrows it.
            a_log=get("A_log", rows=heads, dtype=fp32),
            dt_bias=get("dt_bias", rows=key, dtype=fp32),
            o_norm=get("o_norm.weight"),
            o=get("o_proj.weight", columns=value),
            head_dim=config.linear_head_dim,
            v_head_dim=config.linear_v_head_dim,
            lower_bound=config.linear_gate_lower_bound,
            eps=config.rms_norm_eps,
            numerics=self.numerics,
        )

    def _mla(self, specs: dict[str, TensorSpec]) -> GatedMla:
        config = self.config
        first, last = self.parallel.shard(config.num_attention_heads, "num_attention_heads")
        both = config.qk_nope_head_dim + config.v_head_dim
        value = (first * config.v_head_dim, last * config.v_head_dim)

        def get(name: str, rows: tuple[int, int] | None = None) -> torch.Tensor:
            return self._get(specs[f"self_attn.{name}.weight"], rows=rows)

        kv_b = get("kv_b_proj", (first * both, last * both))
        return GatedMla(
            q_a=get("q_a_proj"),
            q_a_norm=get("q_a_layernorm"),
            q_b=get("q_b_proj", (first * config.qk_head_dim, last * config.qk_head_dim)),
            kv_a=get("kv_a_proj_with_mqa"),
            kv_a_norm=get("kv_a_layernorm"),
            kv_b=kv_b.view(last - first, both, config.kv_lora_rank),
            g=get("g_proj", value),
            o=self._get(specs["self_attn.o_proj.weight"], columns=value),
            nope_dim=config.qk_nope_head_dim,
            rope_dim=config.qk_rope_head_dim,
            v_dim=config.v_head_dim,
            numerics=self.numerics,
        )

    def _mlp(self, specs: dict[str, TensorSpec], prefix: str, shard: tuple[int, int]) -> Mlp:
        gate = self._get(specs[f"{prefix}gate_proj.weight"], rows=shard)
        up = self._get(specs[f"{prefix}up_proj.weight"], rows=shard)
        return Mlp(
            gate_up=torch.cat([gate, up]),
            down=self._get(specs[f"{prefix}down_proj.weight"], columns=shard),
            beta=self.config.activation_situ_beta,
            linear_beta=self.config.activation_situ_linear_beta,
            numerics=self.numerics,
        )

    def _moe(self, specs: dict[str, TensorSpec], experts: Experts) -> LatentMoe:
        config, prefix = self.config, "block_sparse_moe."
        router = Router(
            weight=self._get(specs[f"{prefix}gate.weight"]),
            bias=self._get(specs[f"{prefix}gate.e_score_correction_bias"], dtype=torch.float32),
            top_k=config.num_experts_per_token,
            num_groups=config.num_expert_group,
            topk_groups=config.topk_group,
            renormalize=config.moe_renormalize,
            scaling=config.routed_scaling_factor,
            numerics=self.numerics,
        )
        return LatentMoe(
            router=router,
            down=self._get(specs[f"{prefix}routed_expert_down_proj.weight"]),
            up=self._get(specs[f"{prefix}routed_expert_up_proj.weight"]),
            norm_weight=self._get(specs[f"{prefix}routed_expert_norm.weight"]),
            shared=self._mlp(
                specs, f"{prefix}shared_experts.", (0, config.shared_intermediate_size)
            ),
            experts=experts,
            eps=config.rms_norm_eps,
            numerics=self.numerics,
            overlap=self._overlap,
        )
