"""The model and two plainer ports of it, with the same weights, for comparison.

- ours: MXFP4 grouped experts, fla-core's KDA, fused kernels, the communicator, shared experts
  overlapped with it.
- fair: the same experts and KDA, but rows travel per (token, expert) over torch.distributed and
  nothing overlaps.
- straight: as fair, with bf16 expert weights and KDA in plain torch.

Weights are random. All MoE layers share one layer's experts, so that bf16 weights fit: a layer's
experts are far larger than any cache, so this changes no time.

Shape legend: H latent, I expert width, L local experts, N rows.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
from typing import Any, cast

import torch
from torch import Tensor

from moe_comm.communicator import Communicator
from moe_comm.config import EPConfig
from moe_comm.group import Group
from moe_comm.handle import Dispatched, DispatchHandle
from moe_comm.kernels.expert_gemm import LAYOUT_OF, choose_implementation
from moe_comm.kernels.expert_gemm_weights import ExpertWeights
from moe_comm.kernels.mxfp4_format import dequantize
from moe_comm.launch.per_expert import PerExpert, PerExpertArrived
from moe_comm.model.build import Layer
from moe_comm.model.config import K3Config
from moe_comm.model.layers.experts import GroupedExperts
from moe_comm.model.layers.kda import Kda
from moe_comm.model.layers.latent_moe import Experts, LatentMoe
from moe_comm.model.layers.linear import Numerics
from moe_comm.model.layers.norm import situ_and_mul
from moe_comm.model.parallel import Parallel
from moe_comm.model.tensor_names import TensorSpec
from moe_comm.model.transformer import Transformer
from moe_comm.wire import WIRES

PORTS = ("ours", "fair", "straight")


class RandomSource:
    """Dense tensors by name and seed, made on the device; the same on every rank."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self._device, self._seed = device, seed

    def read(self, spec: TensorSpec) -> Tensor:
        """Normal values of variance 1 / inputs; norms near one; decays spread."""
        digest = hashlib.sha256(f"{self._seed} {spec.name}".encode()).digest()
        generator = torch.Generator(self._device).manual_seed(int.from_bytes(digest[:7], "little"))
        dtype = torch.float32 if spec.dtype == "F32" else torch.bfloat16
        value = torch.empty(spec.shape, dtype=dtype, device=self._device)
        value.normal_(generator=generator)
        if "norm" in spec.name:
            return value.mul_(0.1).add_(1.0)
        if spec.name.endswith(("A_log", "dt_bias")) or "embed" in spec.name:
            return value
        if spec.name.endswith("e_score_correction_bias"):
            return value.mul_(0.01)
        return value.div_(math.sqrt(spec.shape[-1]))


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


class _Done:
    """A result that is there already."""

    def __init__(self, result: Any) -> None:
        self._result = result

    def wait(self) -> Any:
        """The result."""
        return self._result


class PerExpertComm:
    """PerExpert behind the two calls that LatentMoe makes; every call blocks until it is done."""

    backend, mode = "per-expert", "torch"

    def __init__(self, config: EPConfig, group: Group) -> None:
        self.config = config
        self._inner = PerExpert(group, config.placement_for(group.num_ranks))

    def dispatch(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, *, bucket: int, async_op: bool
    ) -> _Done:
        """A row per live choice."""
        del bucket, async_op
        arrived = self._inner.dispatch(x, topk_idx)
        num = arrived.rows.shape[0]
        offsets = torch.zeros(arrived.counts.shape[0] + 1, dtype=torch.int32, device=x.device)
        offsets[1:] = arrived.counts.cumsum(0)
        return _Done(
            Dispatched(
                rows=arrived.rows.unsqueeze(0),
                scales=None,
                topk_idx=topk_idx.new_zeros((1, num, 1), dtype=torch.int32),
                topk_weights=topk_weights.new_zeros(1, num, 1),
                num_tokens_per_rank=torch.tensor([num], dtype=torch.int32),
                payloads={},
                expert_offsets=offsets,
                row_index=torch.arange(num, dtype=torch.int32, device=x.device),
                wire=WIRES["bf16"],
                handle=cast("DispatchHandle", (arrived, topk_weights)),
            )
        )

    def combine(self, y: Tensor, handle: DispatchHandle, *, async_op: bool) -> _Done:
        """The weighted sum at the source."""
        del async_op
        arrived, weights = cast("tuple[PerExpertArrived, Tensor]", handle)
        return _Done(self._inner.combine(y[: arrived.rows.shape[0]], arrived, weights))


def random_experts(
    config: K3Config, num_local: int, device: torch.device, seed: int
) -> ExpertWeights:
    """One layer's experts on one rank: uniform E2M1 codes, scales for variance 1 / inputs."""
    hidden, inter = config.routed_expert_hidden_size, config.moe_intermediate_size
    implementation = choose_implementation(device, hidden=hidden, inter=inter)
    weights = ExpertWeights.empty(
        num_local, hidden, inter, layout=LAYOUT_OF[implementation], device=device
    )
    for slot in range(num_local):
        pairs = _expert_pairs(config, slot, device, seed)
        weights.put(slot, gate=pairs["gate"], up=pairs["up"], down=pairs["down"])
    return weights


def dequantized_experts(
    config: K3Config, num_local: int, device: torch.device, seed: int
) -> Bf16Experts:
    """The same experts in bf16: exactly the values that the MXFP4 ones stand for."""
    hidden, inter = config.routed_expert_hidden_size, config.moe_intermediate_size
    w13 = torch.empty(num_local, 2 * inter, hidden, dtype=torch.bfloat16, device=device)
    w2 = torch.empty(num_local, hidden, inter, dtype=torch.bfloat16, device=device)
    for slot in range(num_local):
        pairs = _expert_pairs(config, slot, device, seed)
        w13[slot, :inter] = dequantize(*pairs["gate"])
        w13[slot, inter:] = dequantize(*pairs["up"])
        w2[slot] = dequantize(*pairs["down"])
    return Bf16Experts(
        w13,
        w2,
        beta=config.activation_situ_beta,
        linear_beta=config.activation_situ_linear_beta,
    )


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


def as_port(model: Transformer, port: str, comm: Any, experts: Experts) -> Transformer:
    """A view of the model with another communicator and other experts; weights are shared."""
    if port == "ours":
        return Transformer(
            model.config,
            [_with_experts(layer, experts, keep_stream=True) for layer in model.layers],
            model.outer,
            comm=comm,
            parallel=model.parallel,
            numerics=model.numerics,
        )
    layers = [_with_experts(layer, experts, keep_stream=False) for layer in model.layers]
    if port == "straight":
        plain = Numerics(kda="torch")
        layers = [
            dataclasses.replace(
                layer, attention=dataclasses.replace(layer.attention, numerics=plain)
            )
            if isinstance(layer.attention, Kda)
            else layer
            for layer in layers
        ]
    return Transformer(
        model.config,
        layers,
        model.outer,
        comm=cast("Communicator", comm),
        parallel=model.parallel,
        numerics=model.numerics,
    )


def _with_experts(layer: Layer, experts: Experts, *, keep_stream: bool) -> Layer:
    if not isinstance(layer.mlp, LatentMoe):
        return layer
    stream = layer.mlp.stream if keep_stream else None
    return dataclasses.replace(
        layer, mlp=dataclasses.replace(layer.mlp, experts=experts, stream=stream)
    )


def build_model(
    config: K3Config, comm: Communicator, parallel: Parallel, device: torch.device, seed: int
) -> tuple[Transformer, GroupedExperts]:
    """Our port with random weights, and its experts."""
    weights = random_experts(
        config, comm.placement.num_local_experts(comm.rank), device, seed + comm.rank
    )
    experts = GroupedExperts(weights=weights)
    model = Transformer.build(
        config,
        RandomSource(device, seed),
        lambda layer: experts,
        comm=comm,
        parallel=parallel,
        device=device,
    )
    return model, experts
