"""A model from a checkpoint directory: dense tensors one by one, experts through the streaming
reader, only those that this rank's placement needs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from moe_comm.communicator import Communicator
from moe_comm.kernels.expert_gemm_weights import ExpertWeights
from moe_comm.kernels.situ import Activation
from moe_comm.model.config import K3Config
from moe_comm.model.layers.experts import GroupedExperts
from moe_comm.model.layers.invariant_experts import InvariantExperts
from moe_comm.model.layers.latent_moe import Experts
from moe_comm.model.layers.linear import Numerics
from moe_comm.model.parallel import Parallel
from moe_comm.model.tensor_names import TensorSpec
from moe_comm.model.transformer import Transformer
from moe_comm.model.weights.checkpoint import Checkpoint
from moe_comm.model.weights.dense import read_dense
from moe_comm.model.weights.load_experts import load_experts


class CheckpointSource:
    """Dense tensors of an open checkpoint, verified as they are read."""

    def __init__(self, checkpoint: Checkpoint, config: K3Config) -> None:
        self._checkpoint, self._config = checkpoint, config

    def read(self, spec: TensorSpec) -> torch.Tensor:
        """One whole tensor on the CPU. CheckpointError names file and tensor."""
        return read_dense(self._checkpoint, self._config, spec)


def load_model(
    directory: str | Path,
    config: K3Config,
    *,
    comm: Communicator,
    parallel: Parallel | None = None,
    numerics: Numerics | None = None,
    device: torch.device | str = "cpu",
    on_layer: Callable[[int], None] | None = None,
) -> Transformer:
    """This rank's share of the checkpoint in `directory`, in bf16. The communicator's placement
    says which experts it holds. Raises CheckpointError, HashMismatchError."""
    numerics = Numerics() if numerics is None else numerics
    placement = comm.placement
    ids = [int(expert) for expert in placement.slots[comm.rank]]
    with Checkpoint(directory) as checkpoint:

        def experts(layer: int) -> Experts:
            weights = load_experts(
                checkpoint,
                config,
                ids,
                layers=[layer],
                device=device,
                layout="rows" if numerics.batch_invariant else None,
            )
            return make_experts(config, weights[layer], numerics)

        return Transformer.build(
            config,
            CheckpointSource(checkpoint, config),
            experts,
            comm=comm,
            parallel=parallel,
            numerics=numerics,
            device=device,
            on_layer=on_layer,
        )


def make_experts(config: K3Config, weights: ExpertWeights, numerics: Numerics) -> Experts:
    """The expert step of one layer: grouped, or batch invariant."""
    if numerics.batch_invariant:
        return InvariantExperts(
            weights=weights,
            beta=config.activation_situ_beta,
            linear_beta=config.activation_situ_linear_beta,
            numerics=numerics,
        )
    activation = Activation(
        kind="situ",
        beta=config.activation_situ_beta,
        linear_beta=config.activation_situ_linear_beta,
    )
    return GroupedExperts(weights=weights, activation=activation)
