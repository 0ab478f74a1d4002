"""What bench_model looks at before it times: a port against ours, a captured step against an eager
one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_comm.errors import WrongDataError
from moe_comm.launch.model_inputs import decoding, first_kda_state, prompt
from moe_comm.launch.model_measure import CHECK_BUCKET, CHECK_TOKENS, Bench, Setup
from moe_comm.launch.model_ports import as_port
from moe_comm.model.layers.kda import Kda
from moe_comm.model.layers.latent_moe import LatentMoe
from moe_comm.model.layers.sequence_plan import SequencePlan
from moe_comm.model.parallel import Parallel
from moe_comm.model.transformer import Transformer

# Relative error of a layer's output between two ports: bf16 rounding in other places.
CHECK_BOUND = 0.03


@torch.inference_mode()
def check_port(bench: Bench, setup: Setup, ported: Transformer, comm: Any, port: str) -> None:
    """Finite logits; and of another port than ours, a MoE and a KDA layer against ours on the same
    input. Raises WrongDataError.

    Whole models are not compared: the router's near ties, which rounding decides, part them.
    """
    logits = ported.forward(prompt(ported, bench, CHECK_TOKENS, bucket=CHECK_BUCKET))
    if not all(bench.ranks.gather(bool(torch.isfinite(logits).all()), what="check")):
        raise WrongDataError(f"{port}: expected finite logits")
    if port == "ours":
        return
    ours = as_port(setup.model, "ours", setup.comm, setup.experts)
    generator = torch.Generator(ours.device).manual_seed(17 + bench.ranks.rank)
    x = torch.randn(CHECK_TOKENS, ours.config.hidden_size, device=ours.device, generator=generator)
    x = x.to(ours.dtype)
    for kind in (LatentMoe, Kda):
        outputs = [
            _layer_output(bench, model, used, x, kind)
            for model, used in ((ours, setup.comm), (ported, comm))
        ]
        what = f"{port}, the first {kind.__name__} layer against ours"
        compare(bench, outputs[1], outputs[0], what)
    setup.comm.check()


def _layer_output(bench: Bench, model: Transformer, comm: Any, x: Tensor, kind: type) -> Tensor:
    """x [CHECK_TOKENS, hidden] through the first layer of a kind, from an empty state."""
    if kind is LatentMoe:
        mlp = next(la.mlp for la in model.layers if isinstance(la.mlp, LatentMoe))
        return mlp.forward(x, comm, Parallel(), bucket=CHECK_BUCKET)
    attention = next(la.attention for la in model.layers if isinstance(la.attention, Kda))
    batch = prompt(model, bench, CHECK_TOKENS)
    return attention.forward(x, SequencePlan(batch), first_kda_state(batch.pool), Parallel())


@torch.inference_mode()
def check_graph(bench: Bench, model: Transformer, requests: int, context: int) -> None:
    """A decode step replayed from a CUDA graph against the same step run eagerly, from the same
    state. Raises WrongDataError."""
    batch = decoding(model, bench, requests, context)
    tensors = [batch.pool.recurrent, *batch.pool.conv.values(), batch.cache]
    before = [tensor.clone() for tensor in tensors]

    def restore() -> None:
        for tensor, old in zip(tensors, before, strict=True):
            tensor.copy_(old)

    eager = model.forward(batch).clone()
    graph, captured = bench.capture(lambda: model.forward(batch))
    for _ in range(2):
        restore()
        bench.replay(graph)
    compare(bench, captured, eager, "a captured decode step against an eager one", by_row=True)


def compare(bench: Bench, got: Tensor, wanted: Tensor, what: str, *, by_row: bool = False) -> None:
    """The relative error of everything; or of the median row, where a product whose order of
    summation is free may turn a near tie of the router, and that token's row with it. Raises
    WrongDataError from CHECK_BOUND on. Collective."""
    difference, size = got.float() - wanted.float(), wanted.float()
    error = difference.norm() / size.norm()
    if by_row:
        error = (difference.norm(dim=-1) / size.norm(dim=-1)).median()
    worst = max(bench.ranks.gather(float(error), what="check"))
    bench.ranks.say(f"{what}: within {worst:.1e}")
    if not worst < CHECK_BOUND:
        raise WrongDataError(f"{what}: expected within {CHECK_BOUND}, got {worst:.3g}")


def compare_bits(bench: Bench, got: Tensor, wanted: Tensor, what: str) -> None:
    """Raises WrongDataError where any element of any rank differs. Collective."""
    wrong = sum(bench.ranks.gather(int((got != wanted).sum()), what="check"))
    bench.ranks.say(f"{what}: {wrong} other elements")
    if wrong:
        raise WrongDataError(f"{what}: expected the same bits, got {wrong} other elements")
