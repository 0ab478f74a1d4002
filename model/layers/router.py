"""The router: fp32 sigmoid scores, experts chosen by score plus bias, weighted by score alone.

Formulas: scores = sigmoid(x W^T); choice = scores + bias; the top k of choice, ties to the lowest
id; weights = scores of the chosen, divided by their sum + 1e-20, times the scaling factor. With
more than one expert group (DeepSeek's noaux_tc), a group's score is the sum of its two best
choices, and only experts of the best `topk_group` groups may be chosen.

Shapes: T tokens, E experts, K choices a token, G groups.
"""

from __future__ import annotations

import dataclasses

import torch

from moe_comm.model.layers.linear import Numerics, linear_fp32


def lowest_id_topk(values: torch.Tensor, k: int) -> torch.Tensor:
    """Ids [T, k] int64 of the k largest of values [T, E] fp32, best first, ties to the lowest id.

    torch.topk does not say which of two equal values it takes, and devices differ. Here every
    value becomes an integer that is unique in its row: the order-preserving bits, then the id.
    """
    bits = (values + 0.0).view(torch.int32).long()  # + 0.0 makes the two zeros one
    ordered = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    num = values.shape[1]
    reversed_id = torch.arange(num - 1, -1, -1, device=values.device)
    keys = ordered * num + reversed_id
    return keys.topk(k, dim=1, sorted=True).indices


@dataclasses.dataclass(frozen=True, kw_only=True)
class Router:
    """Weights [E, hidden], bias [E] fp32 (in the choice, never in the weights)."""

    weight: torch.Tensor
    bias: torch.Tensor
    top_k: int
    num_groups: int = 1
    topk_groups: int = 1
    renormalize: bool = True
    scaling: float = 1.0
    numerics: Numerics = dataclasses.field(default_factory=Numerics)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, hidden] to (topk_idx [T, K] int64, topk_weights [T, K] fp32)."""
        return self.choose(linear_fp32(x, self.weight, self.numerics))

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same from logits [T, E] fp32."""
        if logits.is_cuda and self.num_groups == 1:
            from moe_comm.kernels.router_topk import router_topk

            return router_topk(
                logits,
                self.bias,
                top_k=self.top_k,
                renormalize=self.renormalize,
                scaling=self.scaling,
            )
        scores = torch.sigmoid(logits.to(self.numerics.wide)).float()
        choice = scores + self.bias
        if self.num_groups > 1:
            choice = self._mask_groups(choice)
        idx = lowest_id_topk(choice, self.top_k)
        weights = scores.gather(1, idx)
        if self.renormalize:
            weights = weights / (weights.sum(dim=1, keepdim=True) + 1e-20)
        return idx, weights * self.scaling

    def _mask_groups(self, choice: torch.Tensor) -> torch.Tensor:
        num_tokens, num_experts = choice.shape
        grouped = choice.view(num_tokens, self.num_groups, num_experts // self.num_groups)
        best = grouped.topk(min(2, grouped.shape[2]), dim=2).values.sum(dim=2)
        kept = torch.zeros_like(best, dtype=torch.bool)
        kept.scatter_(1, lowest_id_topk(best, self.topk_groups), True)
        masked = grouped.masked_fill(~kept.unsqueeze(2), float("-inf"))
        return masked.view(num_tokens, num_experts)
