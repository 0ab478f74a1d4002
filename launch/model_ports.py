"""The model and two plainer ports of it, with the same weights, for comparison.

- ours: MXFP4 grouped experts, fla-core's KDA, fused kernels, the communicator, shared experts
  overlapped with it.
- fair: the same experts and KDA, but rows travel per (token, expert) over torch.distributed and
  nothing overlaps.
- straight: as fair, with bf16 expert weights and KDA in plain torch.

Weights are random, made on the device, and shared by the ports. All MoE layers share one layer's
experts, so that bf16 weights fit, and few of those have values of their own, so that they are there
at once: a layer's experts are far larger than any cache, so neither changes a time.

Shape legend: H latent, I expert width, L local experts, N rows.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from typing import Any, cast

import torch
from torch import Tensor

from moe_comm.communicator import Communicator
from moe_comm.config import EPConfig
from moe_comm.group import Group
from moe_comm.handle import Dispatched, DispatchHandle
from moe_comm.launch.model_experts import first_experts, random_experts
from moe_comm.launch.per_expert import PerExpert, PerExpertArrived
from moe_comm.model.build import Layer
from moe_comm.model.config import K3Config
from moe_comm.model.layers.experts import GroupedExperts
from moe_comm.model.layers.kda import Kda
from moe_comm.model.layers.latent_moe import Experts, LatentMoe
from moe_comm.model.layers.linear import Numerics
from moe_comm.model.layers.overlap import Order, Overlap
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


class _Done:
    """A result that is there already."""

    def __init__(self, result: Any) -> None:
        self._result = result

    def wait(self) -> Any:
        """The result."""
        return self._result


class PerExpertComm:
    """PerExpert behind the two calls that LatentMoe makes, whole or in halves; every call blocks
    until it is done."""

    backend, mode = "per-expert", "torch"

    def __init__(self, config: EPConfig, group: Group) -> None:
        self.config = config
        self._inner = PerExpert(group, config.placement_for(group.num_ranks))

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        *,
        bucket: int,
        async_op: bool = False,
    ) -> Dispatched | _Done:
        """A row per live choice."""
        del bucket
        arrived = self._inner.dispatch(x, topk_idx)
        num = arrived.rows.shape[0]
        offsets = torch.zeros(arrived.counts.shape[0] + 1, dtype=torch.int32, device=x.device)
        offsets[1:] = arrived.counts.cumsum(0)
        dispatched = Dispatched(
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
        return _Done(dispatched) if async_op else dispatched

    def combine(
        self, y: Tensor, handle: DispatchHandle, *, async_op: bool = False
    ) -> Tensor | _Done:
        """The weighted sum at the source."""
        arrived, weights = cast("tuple[PerExpertArrived, Tensor]", handle)
        combined = self._inner.combine(y[: arrived.rows.shape[0]], arrived, weights)
        return _Done(combined) if async_op else combined


def as_port(model: Transformer, port: str, comm: Any, experts: Experts) -> Transformer:
    """A view of the model with another communicator and other experts; weights are shared."""
    layers = [_with_experts(la, experts, overlaps=port == "ours") for la in model.layers]
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
    return _of_layers(model, model.config, layers, comm)


def narrowed(
    model: Transformer, experts: GroupedExperts, config: K3Config, comm: Communicator
) -> tuple[Transformer, GroupedExperts]:
    """A view of the model for another communicator, whose routers know the first
    `config.num_experts` experts alone; and of the experts, those that this rank has then."""

    def narrow(layer: Layer) -> Layer:
        if not isinstance(layer.mlp, LatentMoe):
            return layer
        router = dataclasses.replace(
            layer.mlp.router,
            weight=layer.mlp.router.weight[: config.num_experts],
            bias=layer.mlp.router.bias[: config.num_experts],
        )
        mlp = dataclasses.replace(layer.mlp, router=router, experts=few)
        return dataclasses.replace(layer, mlp=mlp)

    few = dataclasses.replace(
        experts,
        weights=first_experts(experts.weights, comm.placement.num_local_experts(comm.rank)),
    )
    return _of_layers(model, config, [narrow(layer) for layer in model.layers], comm), few


def _of_layers(model: Transformer, config: K3Config, layers: list[Layer], comm: Any) -> Transformer:
    return Transformer(
        config,
        layers,
        model.outer,
        comm=cast("Communicator", comm),
        parallel=model.parallel,
        numerics=model.numerics,
    )


def _with_experts(layer: Layer, experts: Experts, *, overlaps: bool) -> Layer:
    if not isinstance(layer.mlp, LatentMoe):
        return layer
    overlap = layer.mlp.overlap if overlaps else Overlap(order=Order.SEQUENCE)
    return dataclasses.replace(
        layer, mlp=dataclasses.replace(layer.mlp, experts=experts, overlap=overlap)
    )


def build_model(
    config: K3Config,
    comm: Communicator,
    parallel: Parallel,
    device: torch.device,
    seed: int,
    *,
    implementation: str | None = None,
) -> tuple[Transformer, GroupedExperts]:
    """Our port with random weights, and its experts."""
    weights = random_experts(
        config,
        comm.placement.num_local_experts(comm.rank),
        device,
        seed + comm.rank,
        implementation=implementation,
    )
    experts = GroupedExperts(weights=weights, implementation=implementation)
    model = Transformer.build(
        config,
        RandomSource(device, seed),
        lambda layer: experts,
        comm=comm,
        parallel=parallel,
        device=device,
    )
    return model, experts
