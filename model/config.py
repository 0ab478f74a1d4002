"""K3Config: the text model of Kimi K3 as its checkpoint's config.json states it.

Layer lists in config.json count from 1; everything in this code counts layers from 0 and asks
`is_mla(layer)` and `is_moe(layer)`. Field names follow config.json, except the fields of
`linear_attn_config`, which carry the prefix `linear_`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PRESETS = ("kimi-k3", "k3-tiny", "kimi-k3-4l")
MXFP4_GROUP = 32
# What this code implements; another value in config.json would be a different model.
_REQUIRED_VALUES: dict[str, Any] = {
    "hidden_act": "situ",
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "moe_router_activation_func": "sigmoid",
    "topk_method": "noaux_tc",
    "latent_moe_use_norm": True,
    "tie_word_embeddings": False,
}
_QUANT_METHOD, _QUANT_FORMAT = "compressed-tensors", "mxfp4-pack-quantized"
# Dense modules that stay bf16. Router and latent projections are not on the shipped list, and are
# bf16 all the same: only routed experts are packed.
_QUANT_IGNORE = (
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    "re:.*lm_head.*",
    "re:.*vision_tower.*",
    "re:.*mm_projector.*",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class K3Config:
    """Shapes and constants of the text model. Frozen; validates itself.

    `full_attn_layers` counts from 1, as on disk; the layers left over are KDA layers.
    `linear_v_head_dim` is the value width of a KDA head. K3 has no such key and uses `head_dim`
    for both; a state whose two axes differ shows an axis swap, so k3-tiny sets it.
    """

    hidden_size: int = 7168
    num_hidden_layers: int = 93
    vocab_size: int = 163840
    max_position_embeddings: int = 1_048_576
    bos_token_id: int = 163584
    eos_token_id: int = 163586
    pad_token_id: int = 163839
    rms_norm_eps: float = 1e-5
    # Gated MLA
    full_attn_layers: tuple[int, ...] = (*range(4, 93, 4), 93)
    num_attention_heads: int = 96
    q_lora_rank: int = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    # KDA
    linear_num_heads: int = 96
    linear_head_dim: int = 128
    linear_v_head_dim: int = 128
    linear_conv_size: int = 4
    linear_gate_lower_bound: float = -5.0
    # Dense MLP, experts and router
    first_k_dense_replace: int = 1
    intermediate_size: int = 33792
    num_experts: int = 896
    num_experts_per_token: int = 16
    num_shared_experts: int = 2
    moe_intermediate_size: int = 3072
    routed_expert_hidden_size: int = 3584
    num_expert_group: int = 1
    topk_group: int = 1
    moe_renormalize: bool = True
    routed_scaling_factor: float = 1.0
    activation_situ_beta: float = 4.0
    activation_situ_linear_beta: float = 25.0
    attn_res_block_size: int = 12

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and field.name not in ("bos_token_id", "eos_token_id"):
                low = 0 if field.name in ("first_k_dense_replace", "pad_token_id") else 1
                if not isinstance(value, int) or isinstance(value, bool) or value < low:
                    raise ValueError(f"{field.name}: expected an integer >= {low}, got {value!r}")
        full = self.full_attn_layers
        if sorted(set(full)) != list(full) or any(
            not 1 <= n <= self.num_hidden_layers for n in full
        ):
            raise ValueError(
                "full_attn_layers: expected ascending layer numbers counted from 1, at most "
                f"{self.num_hidden_layers}, got {full}"
            )
        if self.num_experts % self.num_expert_group:
            raise ValueError(
                f"num_expert_group: expected a divisor of num_experts={self.num_experts}, "
                f"got {self.num_expert_group}"
            )
        if not self.topk_group <= self.num_expert_group:
            raise ValueError(
                f"topk_group: expected at most num_expert_group={self.num_expert_group}, "
                f"got {self.topk_group}"
            )
        reachable = self.num_experts // self.num_expert_group * self.topk_group
        if not self.num_experts_per_token <= reachable:
            raise ValueError(
                f"num_experts_per_token: expected at most {reachable}, "
                f"got {self.num_experts_per_token}"
            )
        for name in ("moe_intermediate_size", "routed_expert_hidden_size"):
            if getattr(self, name) % MXFP4_GROUP:
                raise ValueError(
                    f"{name}: expected a multiple of {MXFP4_GROUP} (an MXFP4 group), "
                    f"got {getattr(self, name)}"
                )
        if not self.linear_gate_lower_bound < 0:
            raise ValueError(
                f"linear_gate_lower_bound: expected below 0, got {self.linear_gate_lower_bound}"
            )

    # -- what follows from the fields ------------------------------------------------------------
    def is_mla(self, layer: int) -> bool:
        """Whether `layer` (from 0) is a Gated MLA layer; else it is a KDA layer."""
        return layer + 1 in self.full_attn_layers

    def is_moe(self, layer: int) -> bool:
        """Whether `layer` (from 0) has experts; else it has a dense MLP."""
        return layer >= self.first_k_dense_replace

    @property
    def mla_layers(self) -> tuple[int, ...]:
        """Gated MLA layers, counted from 0."""
        return tuple(n - 1 for n in self.full_attn_layers)

    @property
    def kda_layers(self) -> tuple[int, ...]:
        """KDA layers, counted from 0."""
        return tuple(n for n in range(self.num_hidden_layers) if not self.is_mla(n))

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Layers with experts, counted from 0."""
        return tuple(n for n in range(self.num_hidden_layers) if self.is_moe(n))

    @property
    def qk_head_dim(self) -> int:
        """Width of an MLA query head: the part matched with k_nope and the unrotated part."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def mla_cache_dim(self) -> int:
        """Elements a token leaves in the MLA cache: normed latent, then the unrotated part."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def linear_key_channels(self) -> int:
        """Channels of a KDA layer's q (and k) before sharding."""
        return self.linear_num_heads * self.linear_head_dim

    @property
    def linear_value_channels(self) -> int:
        """Channels of a KDA layer's v before sharding."""
        return self.linear_num_heads * self.linear_v_head_dim

    @property
    def shared_intermediate_size(self) -> int:
        """Width of the one fused MLP that stands for all shared experts."""
        return self.num_shared_experts * self.moe_intermediate_size

    def truncate(self, num_layers: int, *, dense_layers: int | None = None) -> K3Config:
        """The first `num_layers` layers at full width; `dense_layers` replaces
        first_k_dense_replace (0: every layer has experts)."""
        if not 1 <= num_layers <= self.num_hidden_layers:
            raise ValueError(
                f"num_layers: expected 1 to {self.num_hidden_layers}, got {num_layers}"
            )
        dense = self.first_k_dense_replace if dense_layers is None else dense_layers
        return dataclasses.replace(
            self,
            num_hidden_layers=num_layers,
            full_attn_layers=tuple(n for n in self.full_attn_layers if n <= num_layers),
            first_k_dense_replace=dense,
        )

    # -- reading and writing -----------------------------------------------------------------------
    @classmethod
    def preset(cls, name: str) -> K3Config:
        """`kimi-k3`: the published model. `kimi-k3-4l`: 3 KDA and 1 MLA layers of it at full width,
        all with experts. `k3-tiny`: 9 layers, MLA at 4, 8 and 9 counted from 1, layer 1 dense,
        AttnRes block 4, all 896 experts and top-16, everything else small."""
        if name == "kimi-k3":
            return cls()
        if name == "kimi-k3-4l":
            return cls().truncate(4, dense_layers=0)
        if name == "k3-tiny":
            return cls(**_TINY)
        raise ValueError(f"preset: expected one of {', '.join(PRESETS)}, got {name!r}")

    @classmethod
    def from_checkpoint(cls, directory: str | Path) -> K3Config:
        """Reads `config.json` in `directory`. ValueError names the file and the key."""
        path = Path(directory) / "config.json"
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: not JSON: {error}") from error
        try:
            return cls.from_dict(data)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}: {error}") from error

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> K3Config:
        """From a parsed config.json: the nested `text_config` where there is one, else the dict
        itself. A missing key, a layer in neither list, or a value that stands for another model
        raises ValueError; a value that should be an object and is not, TypeError."""
        text = data.get("text_config", data)
        if not isinstance(text, Mapping):
            raise TypeError(f"text_config: expected an object, got {text!r}")
        linear = _get(text, "linear_attn_config")
        if not isinstance(linear, Mapping):
            raise TypeError(f"linear_attn_config: expected an object, got {linear!r}")
        for key, wanted in _REQUIRED_VALUES.items():
            if (got := text.get(key, wanted)) != wanted:
                raise ValueError(f"{key}: expected {wanted!r}, got {got!r}")
        if not linear.get("use_full_rank_gate", True):
            raise ValueError("linear_attn_config.use_full_rank_gate: expected true, got false")
        if (freq := text.get("moe_layer_freq", 1)) != 1:
            raise ValueError(f"moe_layer_freq: expected 1, got {freq!r}")
        _check_quantization(text.get("quantization_config"))
        values = {
            field.name: _get(text, field.name)
            for field in dataclasses.fields(cls)
            if not field.name.startswith("linear_") and field.name != "full_attn_layers"
        }
        kv_heads = text.get("num_key_value_heads", values["num_attention_heads"])
        if kv_heads != values["num_attention_heads"]:
            raise ValueError(
                f"num_key_value_heads: expected num_attention_heads="
                f"{values['num_attention_heads']}, got {kv_heads!r}"
            )
        prefix = "linear_attn_config."
        head_dim = _get(linear, "head_dim", prefix)
        config = cls(
            **values,
            full_attn_layers=tuple(_get(linear, "full_attn_layers", prefix)),
            linear_num_heads=_get(linear, "num_heads", prefix),
            linear_head_dim=head_dim,
            linear_v_head_dim=linear.get("v_head_dim", head_dim),
            linear_conv_size=_get(linear, "short_conv_kernel_size", prefix),
            linear_gate_lower_bound=_get(linear, "gate_lower_bound", prefix),
        )
        listed = list(_get(linear, "kda_layers", prefix))
        if listed != (wanted_kda := [n + 1 for n in config.kda_layers]):
            raise ValueError(f"{prefix}kda_layers: expected {wanted_kda}, got {listed}")
        return config

    def to_hf_dict(self) -> dict[str, Any]:
        """The nested config.json that `from_dict` reads, with K3's keys."""
        text: dict[str, Any] = {"architectures": ["KimiLinearForCausalLM"]}
        text["model_type"] = "kimi_linear"
        for field in dataclasses.fields(self):
            if not field.name.startswith("linear_") and field.name != "full_attn_layers":
                text[field.name] = getattr(self, field.name)
        text["num_key_value_heads"] = self.num_attention_heads
        text["moe_layer_freq"] = 1
        text["use_grouped_topk"] = True
        text["num_nextn_predict_layers"] = 0
        text.update(_REQUIRED_VALUES)
        linear: dict[str, Any] = {
            "num_heads": self.linear_num_heads,
            "head_dim": self.linear_head_dim,
            "short_conv_kernel_size": self.linear_conv_size,
            "gate_lower_bound": self.linear_gate_lower_bound,
            "use_full_rank_gate": True,
            "full_attn_layers": list(self.full_attn_layers),
            "kda_layers": [n + 1 for n in self.kda_layers],
        }
        if self.linear_v_head_dim != self.linear_head_dim:
            linear["v_head_dim"] = self.linear_v_head_dim
        text["linear_attn_config"] = linear
        text["quantization_config"] = {
            "quant_method": _QUANT_METHOD,
            "format": _QUANT_FORMAT,
            "quantization_status": "compressed",
            "ignore": list(_QUANT_IGNORE),
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "input_activations": None,
                    "weights": {
                        "num_bits": 4,
                        "type": "float",
                        "group_size": MXFP4_GROUP,
                        "symmetric": True,
                        "strategy": "group",
                        "scale_dtype": "torch.uint8",
                        "dynamic": False,
                        "observer": "minmax",
                    },
                }
            },
        }
        return {
            "architectures": ["KimiK3ForConditionalGeneration"],
            "model_type": "kimi_k3",
            "text_config": text,
        }


_TINY: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 9,
    "vocab_size": 512,
    "max_position_embeddings": 65536,
    "bos_token_id": 508,
    "eos_token_id": 510,
    "pad_token_id": 511,
    "full_attn_layers": (4, 8, 9),
    "num_attention_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "linear_v_head_dim": 32,
    "intermediate_size": 256,
    "moe_intermediate_size": 32,
    "routed_expert_hidden_size": 64,
    "attn_res_block_size": 4,
}


def _get(data: Mapping[str, Any], key: str, prefix: str = "") -> Any:
    if key in data:
        return data[key]
    hint = ""
    if key == "num_experts_per_token" and "num_experts_per_tok" in data:
        hint = " (this config has num_experts_per_tok, which is another model family's key)"
    raise ValueError(f"{prefix}{key}: expected a value, the key is missing{hint}")


def _check_quantization(quant: Any) -> None:
    """Experts are read as MXFP4 in groups of 32 with uint8 scales; anything else is refused."""
    if not isinstance(quant, Mapping):
        raise TypeError(f"quantization_config: expected an object, got {quant!r}")
    for key, wanted in (("quant_method", _QUANT_METHOD), ("format", _QUANT_FORMAT)):
        if (got := quant.get(key)) != wanted:
            raise ValueError(f"quantization_config.{key}: expected {wanted!r}, got {got!r}")
    for name, group in dict(quant.get("config_groups", {})).items():
        weights = group.get("weights", {})
        for key, wanted_value in (("num_bits", 4), ("group_size", MXFP4_GROUP), ("type", "float")):
            if (got := weights.get(key)) != wanted_value:
                raise ValueError(
                    f"quantization_config.config_groups.{name}.weights.{key}: "
                    f"expected {wanted_value!r}, got {got!r}"
                )
