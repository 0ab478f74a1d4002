"""RankData: one rank's tokens and routing, which every rank can regenerate from a seed.

So no rank needs another's data to know the answer. Shape legend: T tokens, H hidden, K choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_comm.config import EPConfig
from moe_comm.launch.routing import Routing, parse_routing, seeded


@dataclass(frozen=True, kw_only=True, eq=False)
class RankData:
    """One rank's arguments of dispatch.

    Attributes:
        rank: whose tokens.
        x: [T, H] bf16 (or the dtype asked for), normally distributed.
        topk_idx: [T, K] int64 logical expert ids, -1 where masked.
        topk_weights: [T, K] fp32.
    """

    rank: int
    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.x.shape[0]

    @classmethod
    def create(
        cls,
        config: EPConfig,
        *,
        rank: int,
        num_tokens: Sequence[int],
        routing: Routing | str = "uniform",
        seed: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
    ) -> RankData:
        """One rank's data.

        Args:
            config: gives E, K and H.
            rank: whose.
            num_tokens: T of every rank.
            routing: a Routing, or its text.
            seed: of the run; equal on all ranks.
            device, dtype: of the tensors. Numbers are drawn on the CPU, so they are the same
                everywhere.
        """
        if isinstance(routing, str):
            routing = parse_routing(
                routing, num_experts=config.num_experts, num_topk=config.num_topk
            )
        mine = num_tokens[rank]
        idx, weights = routing.draw(
            rank=rank, num_tokens=mine, seed=seed, first_token=sum(num_tokens[:rank])
        )
        x = torch.randn(mine, config.hidden, generator=seeded(seed, rank, stream=0))
        return cls(
            rank=rank,
            x=x.to(device=device, dtype=dtype),
            topk_idx=idx.to(device),
            topk_weights=weights.to(device),
        )

    @classmethod
    def create_all(
        cls,
        config: EPConfig,
        *,
        num_tokens: Sequence[int],
        routing: Routing | str = "uniform",
        seed: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
    ) -> list[RankData]:
        """Every rank's data, in rank order."""
        if isinstance(routing, str):
            routing = parse_routing(
                routing, num_experts=config.num_experts, num_topk=config.num_topk
            )
        return [
            cls.create(
                config,
                rank=rank,
                num_tokens=num_tokens,
                routing=routing,
                seed=seed,
                device=device,
                dtype=dtype,
            )
            for rank in range(len(num_tokens))
        ]
