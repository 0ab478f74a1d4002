"""The routed experts of one layer on this rank, over what dispatch brought.

Shape legend: R source ranks, B bucket, H hidden (K3: the 3584-wide latent), K choices a token,
C capacity of expert rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moe_comm.handle import Dispatched
from moe_comm.kernels.expert_gemm import grouped_mlp
from moe_comm.kernels.expert_gemm_weights import ExpertWeights
from moe_comm.kernels.situ import SITU, Activation


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupedExperts:
    """One layer's experts: a callable from Dispatched to expert rows.

    Attributes:
        weights: slot i is the expert that the placement gives local id i.
        activation: between the products.
        implementation: "torch", "triton", "humming", or None for the one that reads the weights'
            layout.
    """

    weights: ExpertWeights
    activation: Activation = SITU
    implementation: str | None = None

    def __call__(self, arrived: Dispatched) -> Tensor:
        """y [C, H] bfloat16, grouped by local expert in the order of `arrived.row_index`; rows from
        the last offset on are undefined. Reads rows through row_index, without a copy where they
        are bfloat16 (except with "humming"), and without a host sync (except with "torch")."""
        return run_experts(
            arrived,
            self.weights,
            activation=self.activation,
            implementation=self.implementation,
        )


def run_experts(
    arrived: Dispatched,
    weights: ExpertWeights,
    *,
    activation: Activation = SITU,
    implementation: str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """As GroupedExperts; `out` [C, H] bfloat16 is written where given.

    The number of expert rows is the device's secret; tile sizes follow what even routing would
    give, B * K, which all ranks know alike.
    """
    if weights.num_experts != arrived.num_local_experts:
        raise ValueError(
            f"weights: expected {arrived.num_local_experts} experts as dispatched, "
            f"got {weights.num_experts}"
        )
    _, bucket, topk = arrived.topk_idx.shape
    return grouped_mlp(
        arrived.rows,
        arrived.row_index,
        arrived.expert_offsets,
        weights,
        scales=arrived.scales,
        activation=activation,
        implementation=implementation,
        expected_rows=bucket * topk,
        out=out,
    )
