"""One MoE layer's random experts for bench_model: MXFP4, and the same values in bf16.

Shape legend: H latent, I expert width, L local experts, N rows.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import torch
from torch import Tensor

from moe_comm.handle import Dispatched
from moe_comm.kernels.expert_gemm import LAYOUT_OF, choose_implementation
from moe_comm.kernels.expert_gemm_weights import ExpertWeights
from moe_comm.kernels.mxfp4_format import dequantize
from moe_comm.model.config import K3Config
from moe_comm.model.layers.norm import situ_and_mul

# Experts of a layer with values of their own.
DISTINCT = 8


class Bf16Experts:
    """Experts with bf16 weights [L, 2 I, H] and [L, H, I], by torch's grouped matmul on a GPU and a
    loop elsewhere."""

    def __init__(self, w13: Tensor, w2: Tensor, *, beta: float, linear_beta: float) -> None:
        self.w13, self.w2 = w13, w2
        self.beta, self.linear_beta = beta, linear_beta

    def __call__(self, arrived: Dispatched) -> Tensor:
        """Rows [N, H] bf16, grouped by local expert. Synchronizes for N."""
        total = int(arrived.expert_offsets[-1])
        rows = arrived.rows.flatten(0, 1)[arrived.row_index[:total].long()]
        both = self._grouped(rows, self.w13, arrived.expert_offsets)
        gate, up = both.chunk(2, dim=-1)
        hidden = situ_and_mul(gate, up, beta=self.beta, linear_beta=self.linear_beta)
        return self._grouped(hidden, self.w2, arrived.expert_offsets)

    @staticmethod
    def _grouped(rows: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
        if rows.is_cuda:
            product: Tensor = torch._grouped_mm(
                rows, weights.transpose(1, 2), offs=offsets[1:].contiguous()
            )
            return product
        out = rows.new_empty(rows.shape[0], weights.shape[1])
        for e, (start, end) in enumerate(itertools.pairwise(offsets.tolist())):
            out[start:end] = rows[start:end] @ weights[e].T
        return out


def random_experts(
    config: K3Config,
    num_local: int,
    device: torch.device,
    seed: int,
    *,
    implementation: str | None = None,
) -> ExpertWeights:
    """One layer's experts on one rank: uniform E2M1 codes, scales for variance 1 / inputs. DISTINCT
    are made, the others are copies of them elsewhere in memory, where reading them costs the same.
    """
    hidden, inter = config.routed_expert_hidden_size, config.moe_intermediate_size
    if implementation is None:
        implementation = choose_implementation(device, hidden=hidden, inter=inter)
    weights = ExpertWeights.empty(
        num_local, hidden, inter, layout=LAYOUT_OF[implementation], device=device
    )
    for slot in range(min(DISTINCT, num_local)):
        pairs = _expert_pairs(config, slot, device, seed)
        weights.put(slot, gate=pairs["gate"], up=pairs["up"], down=pairs["down"])
    for tensor in (weights.w13, weights.w13_scale, weights.w2, weights.w2_scale):
        _repeat(tensor)
    return weights


def dequantized_experts(
    config: K3Config, num_local: int, device: torch.device, seed: int
) -> Bf16Experts:
    """The same experts in bf16: exactly the values that the MXFP4 ones stand for."""
    hidden, inter = config.routed_expert_hidden_size, config.moe_intermediate_size
    w13 = torch.empty(num_local, 2 * inter, hidden, dtype=torch.bfloat16, device=device)
    w2 = torch.empty(num_local, hidden, inter, dtype=torch.bfloat16, device=device)
    for slot in range(min(DISTINCT, num_local)):
        pairs = _expert_pairs(config, slot, device, seed)
        w13[slot, :inter] = dequantize(*pairs["gate"])
        w13[slot, inter:] = dequantize(*pairs["up"])
        w2[slot] = dequantize(*pairs["down"])
    _repeat(w13)
    _repeat(w2)
    return Bf16Experts(
        w13,
        w2,
        beta=config.activation_situ_beta,
        linear_beta=config.activation_situ_linear_beta,
    )


def first_experts(weights: ExpertWeights, num_local: int) -> ExpertWeights:
    """The first experts of a layer, in the same memory."""
    return dataclasses.replace(
        weights,
        num_experts=num_local,
        w13=weights.w13[:num_local],
        w13_scale=weights.w13_scale[:num_local],
        w2=weights.w2[:num_local],
        w2_scale=weights.w2_scale[:num_local],
    )


def _repeat(tensor: Tensor) -> None:
    """Copy the first DISTINCT entries over the others, in turn."""
    for start in range(DISTINCT, tensor.shape[0], DISTINCT):
        part = tensor[start : start + DISTINCT]
        part.view(torch.uint8).copy_(tensor[: part.shape[0]].view(torch.uint8))


def _expert_pairs(
    config: K3Config, slot: int, device: torch.device, seed: int
) -> dict[str, tuple[Tensor, Tensor]]:
    hidden, inter = config.routed_expert_hidden_size, config.moe_intermediate_size
    generator = torch.Generator(device).manual_seed(seed * 100_003 + slot)

    def pair(rows: int, inputs: int) -> tuple[Tensor, Tensor]:
        packed = torch.randint(
            0, 256, (rows, inputs // 2), dtype=torch.uint8, device=device, generator=generator
        )
        # 2.926: root mean square of E2M1 over uniform codes.
        exponent = 127 + round(-math.log2(2.926 * math.sqrt(inputs)))
        return packed, torch.full((rows, inputs // 32), exponent, dtype=torch.uint8, device=device)

    return {"gate": pair(inter, hidden), "up": pair(inter, hidden), "down": pair(hidden, inter)}
