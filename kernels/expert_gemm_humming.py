"""The grouped expert MLP on humming-kernels (Hopper and later; compiled at run time with nvrtc).

Four launches: rows gathered into expert order (and read off the wire), humming's grouped product
with w13, the activation, its grouped product with w2. humming reads expert_offsets on the device,
so there is no host sync. It wants N divisible by 64 and K by 32, and its own layout of weights:
packed codes [L, K / 16, 2 N] int32 and scales [L, K / 32, N] E8M0, made expert by expert.

A kernel is compiled (1 to 2 s, kept on disk) for each product's shape and each tile that humming
chooses for an expected number of rows. Left alone it would compile every tile for every number of
rows, dozens a product, so the choice is made here. Where tiles are few, humming likes to share a
tile's reduction among programs, which add their parts to the result in bfloat16 as they finish:
faster, but the last bits change from run to run. That needs `locks`, and is off without them.

Shape legend: H hidden, I intermediate width, L local experts, C capacity; N, K of one product.
"""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_comm.kernels.expert_gemm_activate import activate_rows
from moe_comm.kernels.expert_gemm_gather import gather_rows

if TYPE_CHECKING:
    from moe_comm.kernels.expert_gemm_weights import ExpertWeights
    from moe_comm.kernels.situ import Activation

# int32 words that programs sharing a reduction need; zero before and after a launch.
LOCK_WORDS = 2048
_COMPUTE = json.dumps({"gemm_type": "grouped_contiguous"})


def buffer_specs(
    num_experts: int, hidden: int, inter: int
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of w13, its scales, w2, its scales. ValueError where humming cannot."""
    specs: list[tuple[tuple[int, ...], torch.dtype]] = []
    for name, rows, parts, k in (("inter", inter, 2, hidden), ("hidden", hidden, 1, inter)):
        if rows % 64:
            raise ValueError(f"{name}: expected 64 to divide {rows} rows of weights for humming")
        specs.append(((num_experts, k // 16, 2 * parts * rows), torch.int32))
        specs.append(((num_experts, k // 32, parts * rows), torch.float8_e8m0fnu))
    return specs


def put(
    weights: ExpertWeights,
    slot: int,
    gate: tuple[Tensor, Tensor],
    up: tuple[Tensor, Tensor],
    down: tuple[Tensor, Tensor],
) -> None:
    """Repack one expert (checkpoint form, on the weights' device) into its slot. Blocks of 64 rows
    lie side by side, so gate and up need not be one matrix; temporaries stay below half an expert.
    """
    w13, s13 = weights.w13[slot], weights.w13_scale[slot]
    inter = weights.inter
    _repack(gate, w13[:, : 2 * inter], s13[:, :inter])
    _repack(up, w13[:, 2 * inter :], s13[:, inter:])
    _repack(down, weights.w2[slot], weights.w2_scale[slot])


def _repack(pair: tuple[Tensor, Tensor], words: Tensor, word_scales: Tensor) -> None:
    """One matrix [N, K] into words [K / 16, 2 N] and word_scales [K / 32, N]."""
    from humming.transform import transform_humming_tensors

    packed, scales = pair
    made = transform_humming_tensors(
        layer_config(1, packed.shape[0], packed.shape[1] * 2, packed.device.index or 0),
        {
            "weight": packed.contiguous().view(torch.int32)[None],
            "weight_scale": scales.contiguous().view(torch.float8_e8m0fnu)[None],
        },
        # Its padding would copy everything once more, and there is nothing to pad.
        already_padded=True,
    )
    words.copy_(made["weight"][0])
    word_scales.copy_(made["weight_scale"][0])


@functools.lru_cache(maxsize=64)
def layer_config(num_experts: int, n: int, k: int, device_index: int) -> Any:
    """humming's description of one product: bfloat16 rows, MXFP4 weights [num_experts, n, k]."""
    from humming import dtypes
    from humming.schema import HummingWeightSchema
    from humming.transform import prepare_layer_config

    schema = HummingWeightSchema(
        b_dtype=dtypes.float4e2m1, bs_dtype=dtypes.float8e8m0, weight_scale_group_size=32
    )
    return prepare_layer_config(
        shape_n=n,
        shape_k=k,
        weight_schema=schema,
        num_experts=num_experts,
        torch_dtype=torch.bfloat16,
        device=torch.device("cuda", device_index),
    )


@functools.lru_cache(maxsize=256)
def tuning(num_experts: int, n: int, k: int, rows: int, device_index: int) -> dict[str, Any]:
    """humming's own choice of tiles for a product with about `rows` rows over all experts. Key
    "use_stream_k": whether programs share reductions."""
    from humming.tune import get_heuristics_config

    chosen: dict[str, Any] = get_heuristics_config(
        layer_config(num_experts, n, k, device_index),
        shape_m=rows,
        gemm_type="grouped_contiguous",
        device=device_index,
    )
    return chosen


@functools.lru_cache(maxsize=256)
def _tuning_text(
    num_experts: int, n: int, k: int, rows: int, device_index: int, share: bool
) -> str:
    chosen = dict(tuning(num_experts, n, k, rows, device_index))
    chosen["use_stream_k"] = share and chosen["use_stream_k"]
    return json.dumps(chosen)


def grouped_product(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    expert_offsets: Tensor,
    *,
    expected_rows: int,
    out: Tensor,
    locks: Tensor | None = None,
) -> Tensor:
    """out[n] = x[n] W^T of n's expert: x bfloat16 [C, K] and out [C, N] in expert order.

    Args:
        weight, scale: one product's buffers of ExpertWeights, layout "humming".
        expert_offsets: int32 [L + 1] on the device.
        expected_rows: roughly expert_offsets[-1]; chooses tiles.
        locks: int32 [LOCK_WORDS] of zeros of this product alone: lets programs share reductions
            where humming would (see above). None: the same bits on every run.
    """
    from humming.forward import humming_forward

    experts, groups, n = scale.shape
    device = x.device.index or 0
    humming_forward(
        layer_config(experts, n, groups * 32, device),
        inputs=x,
        weight=weight,
        weight_scale=scale,
        outputs=out,
        expert_layout=expert_offsets,
        locks=locks,
        valid_shape_m=expected_rows,
        compute_config=_COMPUTE,
        tuning_config=_tuning_text(
            experts, n, groups * 32, expected_rows, device, locks is not None
        ),
    )
    return out


def grouped_mlp_humming(
    rows: Tensor,
    row_index: Tensor,
    expert_offsets: Tensor,
    weights: ExpertWeights,
    scales: Tensor | None,
    activation: Activation,
    expected_rows: int,
    out: Tensor,
) -> Tensor:
    """The four launches; arguments as expert_gemm.grouped_mlp checks them."""
    x = torch.empty(row_index.shape[0], weights.hidden, dtype=torch.bfloat16, device=rows.device)
    gather_rows(rows, scales, row_index, expert_offsets[-1:], out=x)
    return mlp_in_order(
        x, expert_offsets, weights, activation=activation, expected_rows=expected_rows, out=out
    )


def mlp_in_order(
    x: Tensor,
    expert_offsets: Tensor,
    weights: ExpertWeights,
    *,
    activation: Activation,
    expected_rows: int,
    out: Tensor,
) -> Tensor:
    """The three launches behind the gather: x bfloat16 [C, H], grouped by expert already."""
    if weights.w13_bias is not None:
        raise ValueError("weights: expected no biases for humming, whose kernels place them apart")
    capacity, device = x.shape[0], x.device
    gate_up = torch.empty(capacity, 2 * weights.inter, dtype=torch.bfloat16, device=device)
    grouped_product(
        x, weights.w13, weights.w13_scale, expert_offsets, expected_rows=expected_rows, out=gate_up
    )
    hidden = torch.empty(capacity, weights.inter, dtype=torch.bfloat16, device=device)
    activate_rows(gate_up, expert_offsets[-1:], activation=activation, out=hidden)
    return grouped_product(
        hidden, weights.w2, weights.w2_scale, expert_offsets, expected_rows=expected_rows, out=out
    )
