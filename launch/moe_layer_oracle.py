"""What the timed layer must return, in float32 from the seed alone, and how far it may stray.

For token t: out(t) = sum over k of w(t, k) E(z(t)), E the expert of choice k. Weights are exact;
products of two float32 (TF32 off) stand for exact ones.

Shape legend: N tokens, K choices, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_comm.config import EPConfig
from moe_comm.launch.expert_reference import ROUNDING, reference_mlp
from moe_comm.launch.expert_source import ExpertSource
from moe_comm.launch.moe_layer_case import LayerCase
from moe_comm.wire import dequantize, quantize


def expected_routing(case: LayerCase) -> tuple[Tensor, Tensor]:
    """[T, K] ids in ascending order and their weights, from float64 scores: what the router must
    give for x, in whatever order it gives it."""
    scores = torch.sigmoid(case.x.double() @ case.router.weight.double().T)
    best = scores.topk(case.config.num_topk, dim=1).indices.sort(dim=1).values
    chosen = scores.gather(1, best)
    return best, (chosen / chosen.sum(dim=1, keepdim=True)).float()


def wire_rows(z: Tensor, config: EPConfig) -> Tensor:
    """z as experts see it behind the dispatch wire."""
    return dequantize(*quantize(z, config.wire), config.wire)


def expected_layer(
    z: Tensor, idx: Tensor, weights: Tensor, source: ExpertSource
) -> tuple[Tensor, Tensor]:
    """The layer's result and the tolerance of each element.

    Args:
        z: [N, H] bf16 rows as experts see them.
        idx, weights: [N, K] expert ids (-1: none) and fp32 weights.
        source: of the experts' matrices.

    Returns:
        out [N, H] float32, allowed [N, H] float32: the root of squares of reference_mlp's for the
        experts' weighted rows (they err apart), and one rounding of bf16 of each partial sum and of
        the result.
    """
    out = torch.zeros(z.shape, dtype=torch.float32, device=z.device)
    squares, sizes = torch.zeros_like(out), torch.zeros_like(out)
    flat = idx.flatten()
    order = torch.argsort(flat, stable=True)
    order = order[int((flat < 0).sum()) :]
    experts, counts = flat[order].unique_consecutive(return_counts=True)
    for expert, choices in zip(experts.tolist(), order.split(counts.tolist()), strict=True):
        token = choices // idx.shape[1]
        y, error = reference_mlp(z[token].float(), *source.draw(expert))
        w = weights.flatten()[choices].unsqueeze(-1)
        out.index_add_(0, token, w * y)
        squares.index_add_(0, token, (w * error).square())
        sizes.index_add_(0, token, (w * y).abs())
    return out, squares.sqrt() + ROUNDING * (sizes + out.abs())
