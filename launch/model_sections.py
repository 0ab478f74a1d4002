"""Sections of bench_model: a port's times; decode by context. Another: model_overlap."""

from __future__ import annotations

from typing import Any

import torch

from moe_comm.launch.model_checks import check_graph, check_port
from moe_comm.launch.model_experts import dequantized_experts
from moe_comm.launch.model_inputs import decoding, first_kda_state, prompt
from moe_comm.launch.model_measure import Bench, Setup
from moe_comm.launch.model_ports import PerExpertComm, as_port
from moe_comm.model.layers.gated_mla import GatedMla
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
