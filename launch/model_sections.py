"""The sections of bench_model: one port's check and times; overlap; decode by context."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from moe_comm.errors import WrongDataError
from moe_comm.launch.bench_model import DECODE_CONTEXT, PAGE, Bench
from moe_comm.launch.model_ports import PerExpertComm, as_port, dequantized_experts
from moe_comm.model.layers.gated_mla import GatedMla
from moe_comm.model.layers.kda import KdaState
from moe_comm.model.layers.latent_moe import Experts, LatentMoe
from moe_comm.model.layers.linear import linear
from moe_comm.model.layers.norm import rms_norm
from moe_comm.model.layers.sequence_plan import SequencePlan
from moe_comm.model.parallel import Parallel
from moe_comm.model.serving.batch import ForwardBatch, SequenceSlice, make_batch
from moe_comm.model.serving.paged_cache import PagedCache
from moe_comm.model.serving.state_pool import StatePool

if TYPE_CHECKING:
    from moe_comm.model.transformer import Transformer

CHECK_TOKENS = 100
# Relative error of the first MoE layer's output between two ports: bf16 rounding in other places.
CHECK_BOUND = 0.03


def run_port(bench: Bench, model: Transformer, experts: Experts, port: str) -> None:
    """Build the port, hold it against ours, then time it. Frees what it built."""
    plain = PerExpertComm(bench.comm.config, bench.ranks.group)
    comm: Any = bench.comm if port == "ours" else plain
    used = experts
    if port == "straight":
        bench.ranks.say("dequantizing experts to bf16")
        used = dequantized_experts(
            bench.options.config,
            bench.comm.placement.num_local_experts(bench.comm.rank),
            bench.ranks.device,
            bench.options.seed + bench.comm.rank,
        )
    ported = as_port(model, port, comm, used)
    if port != "ours":
        error = _check(bench, as_port(model, "ours", bench.comm, experts), ported)
        bench.ranks.say(f"{port}: first MoE layer within {error:.1e} of ours")
    backend = None if port == "ours" else comm.backend
    graph = bench.options.graph and port == "ours" and bench.comm.backend == "slab"
    if "ttft" in bench.options.sections and bench.in_time():
        _ttft(bench, ported, port, backend)
    for batch in bench.options.batches:
        if "decode" in bench.options.sections and bench.in_time():
            _decode(bench, ported, port, backend, batch, graph=graph)


def _check(bench: Bench, ours: Transformer, other: Transformer) -> float:
    """Relative error of the first MoE layer's output on the same tokens. Raises WrongDataError.

    Later layers follow the router's near ties, which rounding decides, so they are not compared.
    """
    outputs = []
    first = ours.config.moe_layers[0]
    for model in (ours, other):
        seen: list[torch.Tensor] = []

        def observe(
            layer: int, name: str, tensor: torch.Tensor, kept: list[torch.Tensor] = seen
        ) -> None:
            if (layer, name) == (first, "mlp"):
                kept.append(tensor.float())

        batch = _prompt(model, bench, CHECK_TOKENS)
        logits = model.forward(batch, observer=observe)
        if not bool(torch.isfinite(logits).all()):
            raise WrongDataError("logits: expected finite values")
        outputs.append(seen[0])
    error = float((outputs[0] - outputs[1]).norm() / outputs[0].norm())
    worst = max(bench.ranks.gather(error, what="check"))
    if not worst < CHECK_BOUND:
        raise WrongDataError(
            f"first MoE layer: expected within {CHECK_BOUND} of ours, got {worst:.3g}"
        )
    return float(worst)


def _state(model: Transformer, requests: int, context: int) -> tuple[StatePool, PagedCache]:
    layout = model.layout(page_size=PAGE)
    pool = StatePool(layout, requests, device=model.device)
    cache = PagedCache(layout, requests * layout.pages_for(context + 1), device=model.device)
    return pool, cache


def _prompt(model: Transformer, bench: Bench, num_tokens: int) -> ForwardBatch:
    """One request of random tokens, another on each rank."""
    pool, cache = _state(model, 1, num_tokens)
    handles, pages = pool.allocate(1), cache.allocate(model.layout().pages_for(num_tokens))
    assert handles is not None
    assert pages is not None
    generator = torch.Generator().manual_seed(bench.options.seed + bench.ranks.rank)
    tokens = torch.randint(0, model.config.vocab_size, (num_tokens,), generator=generator)
    piece = SequenceSlice(
        token_ids=tuple(tokens.tolist()), start=0, slot=handles[0].slot, pages=pages
    )
    return make_batch([piece], pool=pool, cache=cache.rows, bucket=num_tokens)


def _decoding(model: Transformer, bench: Bench, requests: int, context: int) -> ForwardBatch:
    """`requests` requests with `context` tokens behind them; random state and cache rows."""
    pool, cache = _state(model, requests, context)
    generator = torch.Generator(model.device).manual_seed(bench.options.seed)
    for tensor in pool.tensors.values():
        tensor.normal_(generator=generator).mul_(0.1)
    cache.rows.normal_(generator=generator)
    handles = pool.allocate(requests)
    assert handles is not None
    slices = []
    for i, handle in enumerate(handles):
        pages = cache.allocate(model.layout().pages_for(context + 1))
        assert pages is not None
        token = (7919 * (i + 1) + 31 * bench.ranks.rank) % model.config.vocab_size
        slices.append(
            SequenceSlice(token_ids=(token,), start=context, slot=handle.slot, pages=pages)
        )
    return make_batch(slices, pool=pool, cache=cache.rows, bucket=requests)


def _ttft(bench: Bench, model: Transformer, port: str, backend: str | None) -> None:
    batch = _prompt(model, bench, bench.options.prompt_tokens)
    samples = bench.time(
        lambda: model.forward(batch), graph=False, iters=min(5, bench.options.iters)
    )
    bench.add(
        "ttft",
        samples,
        num_tokens=bench.options.prompt_tokens,
        graph=False,
        backend=backend,
        port=port,
    )


def _decode(
    bench: Bench, model: Transformer, port: str, backend: str | None, requests: int, *, graph: bool
) -> None:
    batch = _decoding(model, bench, requests, DECODE_CONTEXT)
    samples = bench.time(lambda: model.forward(batch), graph=graph, iters=bench.options.iters)
    row = bench.add(
        "decode_step",
        samples,
        num_tokens=requests,
        graph=graph,
        backend=backend,
        port=port,
        context=DECODE_CONTEXT,
    )
    assert row.slowest_rank_p50_us is not None
    row.params["tokens_per_s_per_gpu"] = requests / row.slowest_rank_p50_us * 1e6


def overlap(bench: Bench, model: Transformer) -> None:
    """How much of dispatch and combine the shared experts hide, in one MoE layer."""
    layer = next(la.mlp for la in model.layers if isinstance(la.mlp, LatentMoe))
    num = bench.options.overlap_tokens
    generator = torch.Generator(model.device).manual_seed(bench.ranks.rank)
    x = torch.randn(num, model.config.hidden_size, device=model.device, generator=generator)
    x = x.to(model.dtype)
    graph = bench.options.graph and bench.comm.backend == "slab"
    alone = Parallel()

    def whole(which: LatentMoe) -> None:
        which.forward(x, bench.comm, alone, bucket=num)

    idx, weights = layer.router.forward(x)
    z = linear(x, layer.down, layer.numerics)

    def transfers() -> None:
        arrived = bench.comm.dispatch(z, idx, weights, bucket=num)
        bench.comm.combine(rows, arrived.handle)

    arrived = bench.comm.dispatch(z, idx, weights, bucket=num)
    rows = layer.experts(arrived)

    def without() -> None:
        """The layer's launches, its rows taken from a dispatch that was done before."""
        layer.router.forward(x)
        linear(x, layer.down, layer.numerics)
        hidden = layer.shared.hidden(x)
        layer.experts(arrived)
        shared = linear(hidden, layer.shared.down, layer.numerics)
        latent = rms_norm(z, layer.norm_weight, layer.eps)
        linear(latent, layer.up, layer.numerics).add_(shared)

    iters = bench.options.iters
    base = bench.time(without, graph=graph, iters=iters)
    bench.comm.combine(rows, arrived.handle)
    comm = bench.time(transfers, graph=graph, iters=iters)
    one_stream = dataclasses.replace(layer, stream=None)
    serial = bench.time(lambda: whole(one_stream), graph=graph, iters=iters)
    layered = bench.time(lambda: whole(layer), graph=graph, iters=iters)
    from moe_comm.launch.timing import Statistics

    figures = {
        name: Statistics.of(samples).slowest_rank_p50_us
        for name, samples in (
            ("layer_us", layered),
            ("one_stream_us", serial),
            ("without_us", base),
            ("comm_us", comm),
        )
    }
    hidden = 1 - (figures["layer_us"] - figures["without_us"]) / figures["comm_us"]
    row = bench.add("moe_hidden", layered, num_tokens=num, graph=graph, hidden=hidden)
    row.params.update(figures)


def context(bench: Bench, model: Transformer) -> None:
    """One KDA and one MLA layer, decoding one token, by context."""
    kda = next(i for i in range(len(model.layers)) if not model.config.is_mla(i))
    mla = next((i for i in range(len(model.layers)) if model.config.is_mla(i)), None)
    x = torch.randn(1, model.config.hidden_size, device=model.device).to(model.dtype)
    for tokens in bench.options.contexts:
        batch = _decoding(model, bench, 1, tokens)
        for name, index in (("kda_decode", kda), ("mla_decode", mla)):
            if index is None or not bench.in_time():
                continue
            attention = model.layers[index].attention

            def call(attention: Any = attention, batch: ForwardBatch = batch) -> None:
                plan, pool = SequencePlan(batch), batch.pool
                if isinstance(attention, GatedMla):
                    attention.forward(x, plan, batch.cache[0], Parallel())
                    return
                state = KdaState(
                    recurrent=pool.recurrent[0],
                    conv_q=pool.conv["q"][0],
                    conv_k=pool.conv["k"][0],
                    conv_v=pool.conv["v"][0],
                )
                attention.forward(x, plan, state, Parallel())

            samples = bench.time(call, graph=bench.options.graph, iters=bench.options.iters)
            bench.add(name, samples, num_tokens=1, graph=bench.options.graph, context=tokens)
