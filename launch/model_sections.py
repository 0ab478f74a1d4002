"""The sections of bench_model: a port's times; overlap; decode by context."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from moe_comm.launch.model_checks import check_graph, check_port
from moe_comm.launch.model_experts import dequantized_experts
from moe_comm.launch.model_inputs import decoding, first_kda_state, prompt
from moe_comm.launch.model_measure import Bench, Setup
from moe_comm.launch.model_ports import PerExpertComm, as_port
from moe_comm.launch.timing import Statistics
from moe_comm.model.layers.gated_mla import GatedMla
from moe_comm.model.layers.latent_moe import LatentMoe, receive_on, send_on
from moe_comm.model.layers.linear import linear
from moe_comm.model.layers.norm import rms_norm
from moe_comm.model.layers.sequence_plan import SequencePlan
from moe_comm.model.parallel import Parallel
from moe_comm.model.serving.batch import ForwardBatch
from moe_comm.model.transformer import Transformer

DECODE_CONTEXT = 1024


def run_port(bench: Bench, setup: Setup, port: str) -> None:
    """Build the port, check it, time it. Frees what it built."""
    comm: Any = setup.comm
    if port != "ours":
        comm = PerExpertComm(setup.comm.config, bench.ranks.group)
    experts = setup.experts
    if port == "straight":
        experts = dequantized_experts(
            setup.model.config,
            setup.comm.placement.num_local_experts(setup.comm.rank),
            bench.ranks.device,
            bench.options.seed + setup.comm.rank,
        )
    ported = as_port(setup.model, port, comm, experts)
    check_port(bench, setup, ported, comm, port)
    backend = None if port == "ours" else comm.backend
    graph = port == "ours" and _captures(bench, setup)
    if graph:
        check_graph(bench, ported, min(32, max(bench.options.batches)), DECODE_CONTEXT)
    if "ttft" in bench.options.sections and bench.in_time(f"ttft of {port}"):
        _ttft(bench, setup, ported, port, backend)
    for batch in bench.options.batches:
        wanted = "decode" in bench.options.sections
        if wanted and bench.in_time(f"decode of {port} at batch {batch}"):
            _decode(bench, setup, ported, port, backend, batch, graph=graph)


def _captures(bench: Bench, setup: Setup) -> bool:
    return bench.options.graph and "capture" in setup.comm.capabilities


def _ttft(bench: Bench, setup: Setup, model: Transformer, port: str, backend: str | None) -> None:
    tokens = bench.options.prompt_tokens
    batch = prompt(model, bench, tokens)
    samples = bench.time(lambda: model.forward(batch), graph=False)
    bench.add(
        setup, "ttft", samples, num_tokens=tokens, graph=False, backend=backend, port=port
    )  # fmt: skip


def _decode(
    bench: Bench,
    setup: Setup,
    model: Transformer,
    port: str,
    backend: str | None,
    requests: int,
    *,
    graph: bool,
) -> None:
    batch = decoding(model, bench, requests, DECODE_CONTEXT)
    samples = bench.time(lambda: model.forward(batch), graph=graph)
    row = bench.add(
        setup,
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


class _MoeParts:
    """One MoE layer taken apart: its transfers and its shared experts, alone and together."""

    def __init__(self, bench: Bench, setup: Setup) -> None:
        self.comm, self.model = setup.comm, setup.model
        self.layer = next(la.mlp for la in self.model.layers if isinstance(la.mlp, LatentMoe))
        self.num = bench.options.overlap_tokens
        device = self.model.device
        generator = torch.Generator(device).manual_seed(bench.ranks.rank)
        x = torch.randn(self.num, self.model.config.hidden_size, device=device, generator=generator)
        self.x = x.to(self.model.dtype)
        self.idx, self.weights = self.layer.router.forward(self.x)
        self.z = linear(self.x, self.layer.down, self.layer.numerics)
        # Its slot is held, so its rows stay readable, until `done`.
        self.arrived = self.comm.dispatch(self.z, self.idx, self.weights, bucket=self.num)
        self.rows = self.layer.experts(self.arrived)

    def done(self) -> None:
        """Give the held slot back."""
        self.comm.combine(self.rows, self.arrived.handle)

    def whole(self, *, side_stream: bool) -> None:
        """The layer as the model runs it, or with everything on one stream."""
        stream = self.layer.stream if side_stream else None
        dataclasses.replace(self.layer, stream=stream).forward(
            self.x, self.comm, Parallel(), bucket=self.num
        )

    def without(self) -> None:
        """The layer's launches but dispatch and combine; rows of a dispatch done before."""
        layer = self.layer
        layer.router.forward(self.x)
        linear(self.x, layer.down, layer.numerics)
        hidden = layer.shared.hidden(self.x)
        layer.experts(self.arrived)
        shared = linear(hidden, layer.shared.down, layer.numerics)
        latent = rms_norm(self.z, layer.norm_weight, layer.eps)
        torch.add(linear(latent, layer.up, layer.numerics), shared)

    def transfers(self) -> None:
        """Dispatch and combine in one piece each, on one stream: their shortest time."""
        arrived = self.comm.dispatch(self.z, self.idx, self.weights, bucket=self.num)
        self.comm.combine(self.rows, arrived.handle)

    def shared(self) -> None:
        """The shared experts' two products and their activation."""
        hidden = self.layer.shared.hidden(self.x)
        linear(hidden, self.layer.shared.down, self.layer.numerics)

    def both(self) -> None:
        """Transfers beside shared experts, in halves, as the layer has them."""
        layer = self.layer
        with send_on(layer.stream):
            sending = self.comm.dispatch(
                self.z, self.idx, self.weights, bucket=self.num, async_op=True
            )
        hidden = layer.shared.hidden(self.x)
        with receive_on(layer.stream):
            arrived = sending.wait()
        with send_on(layer.stream):
            returning = self.comm.combine(self.rows, arrived.handle, async_op=True)
        linear(hidden, layer.shared.down, layer.numerics)
        with receive_on(layer.stream):
            returning.wait()


def overlap(bench: Bench, setup: Setup) -> None:
    """How much of dispatch and combine the shared experts hide, in one MoE layer."""
    graph = _captures(bench, setup)
    with torch.inference_mode():
        parts = _MoeParts(bench, setup)
    calls = {
        "without_us": parts.without,
        "shared_us": parts.shared,
        "comm_us": parts.transfers,
        "both_us": parts.both,
        "one_stream_us": lambda: parts.whole(side_stream=False),
        "layer_us": lambda: parts.whole(side_stream=True),
    }
    samples = {name: bench.time(call, graph=graph) for name, call in calls.items()}
    with torch.inference_mode():
        parts.done()
    figures = {name: Statistics.of(s).slowest_rank_p50_us for name, s in samples.items()}
    comm = figures["comm_us"]
    row = bench.add(setup, "moe_layer", samples["layer_us"], num_tokens=parts.num, graph=graph)
    row.params.update(
        figures,
        hidden=1 - (figures["both_us"] - figures["shared_us"]) / comm,
        hidden_in_layer=1 - (figures["layer_us"] - figures["without_us"]) / comm,
    )
    bench.ranks.say(f"overlap: {row.params}")


def context(bench: Bench, setup: Setup) -> None:
    """One KDA and one MLA layer, decoding a token of each request, by context."""
    model, requests = setup.model, bench.options.context_requests
    kda = next(i for i in range(len(model.layers)) if not model.config.is_mla(i))
    mla = next((i for i in range(len(model.layers)) if model.config.is_mla(i)), None)
    x = torch.randn(requests, model.config.hidden_size, device=model.device).to(model.dtype)
    for tokens in bench.options.contexts:
        if not bench.in_time(f"context {tokens}"):
            return
        batch = decoding(model, bench, requests, tokens)
        for name, index in (("kda_decode", kda), ("mla_decode", mla)):
            if index is None:
                continue
            attention = model.layers[index].attention

            def call(attention: Any = attention, batch: ForwardBatch = batch) -> None:
                plan = SequencePlan(batch)
                if isinstance(attention, GatedMla):
                    attention.forward(x, plan, batch.cache[0], Parallel())
                else:
                    attention.forward(x, plan, first_kda_state(batch.pool), Parallel())

            samples = bench.time(call, graph=bench.options.graph)
            bench.add(
                setup,
                name,
                samples,
                num_tokens=requests,
                graph=bench.options.graph,
                backend="none",
                context=tokens,
            )
