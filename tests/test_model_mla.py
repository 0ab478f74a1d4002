"""Gated MLA against a float64 loop: prefill, absorbed decode, pages, the batch-invariant form."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moe_comm.model.build import Builder
from moe_comm.model.config import K3Config
from moe_comm.model.layers.gated_mla import paged_decode_torch
from moe_comm.model.layers.linear import Numerics
from moe_comm.model.layers.sequence_plan import SequencePlan
from moe_comm.model.parallel import Parallel
from moe_comm.model.tensor_names import dense_layer_tensors, layer_prefix


def load(name):
    return SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name(name))))


oracle, cases = load("model_oracle.py"), load("model_cases.py")
CONFIG = K3Config.preset("k3-tiny")
LAYER = 3


def build(numerics, *, dtype=torch.float32, parallel=None, seed=1):
    tensors = cases.random_tensors(CONFIG, seed)
    builder = Builder(
        CONFIG,
        cases.DictSource(tensors),
        parallel=Parallel() if parallel is None else parallel,
        numerics=numerics,
        device=torch.device("cpu"),
        dtype=dtype,
    )
    prefix = layer_prefix(LAYER)
    specs = {s.name.removeprefix(prefix): s for s in dense_layer_tensors(CONFIG, LAYER)}
    attention = oracle.below(tensors, prefix + "self_attn.")
    return builder._mla(specs), {n: t.double() for n, t in attention.items()}


def expected(x, weights):
    return oracle.mla(
        x.double(),
        weights,
        heads=CONFIG.num_attention_heads,
        nope=CONFIG.qk_nope_head_dim,
        rope=CONFIG.qk_rope_head_dim,
        v_dim=CONFIG.v_head_dim,
    )


def hidden(num, seed=2):
    return torch.randn(num, CONFIG.hidden_size, generator=torch.Generator().manual_seed(seed))


INVARIANT = Numerics(batch_invariant=True)


@pytest.mark.parametrize("numerics", [Numerics(), INVARIANT], ids=["fast", "invariant"])
@pytest.mark.parametrize("cuts", [(40,), (16, 24), (15, 2, 1, 1, 21), (1,) * 5])
def test_prefill_chunks_and_decode(numerics, cuts):
    """Pages of 16 rows; unwritten rows are NaN, so a read past the end shows."""
    layer, weights = build(numerics)
    x = hidden(sum(cuts))
    state, parts, at = cases.State(cases.layout_for(CONFIG)), [], 0
    for length in cuts:
        plan = SequencePlan(state.batch([("a", [0] * length)]))
        parts.append(layer.forward(x[at : at + length], plan, state.cache.rows[0], Parallel()))
        at += length
    wanted = expected(x, weights)
    torch.testing.assert_close(torch.cat(parts).double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("numerics", [Numerics(), INVARIANT], ids=["fast", "invariant"])
def test_requests_of_different_lengths(numerics):
    layer, weights = build(numerics)
    lengths = {"a": (5, 1, 20), "b": (33, 1, 1), "c": (1, 3, 1)}
    x = {n: hidden(sum(cuts), seed=i) for i, (n, cuts) in enumerate(lengths.items())}
    state, got = cases.State(cases.layout_for(CONFIG)), {n: [] for n in lengths}
    for step in range(3):
        order = ["b", "a", "c"] if step == 1 else ["c", "a", "b"]
        plan = SequencePlan(state.batch([(n, [0] * lengths[n][step]) for n in order]))
        rows = torch.cat([x[n].split(list(lengths[n]))[step] for n in order])
        out = layer.forward(rows, plan, state.cache.rows[0], Parallel())
        for n, piece in zip(order, out.split([lengths[n][step] for n in order]), strict=True):
            got[n].append(piece)
    for n in lengths:
        wanted = expected(x[n], weights)
        torch.testing.assert_close(torch.cat(got[n]).double(), wanted, rtol=1e-4, atol=1e-5)


def test_cache_row_is_normed_latent_and_unrotated_part():
    layer, weights = build(Numerics())
    x = hidden(20)
    state = cases.State(cases.layout_for(CONFIG))
    layer.forward(x, SequencePlan(state.batch([("a", [0] * 20)])), state.cache.rows[0], Parallel())
    both = x.double() @ weights["kv_a_proj_with_mqa.weight"].T
    latent = oracle.rms(both[:, :32], weights["kv_a_layernorm.weight"], 1e-6)
    rows = state.cache.gather(state.tenants["a"][1], 20)[0]
    wanted = torch.cat([latent, both[:, 32:]], dim=1)
    torch.testing.assert_close(rows.double(), wanted, rtol=1e-4, atol=1e-5)


def test_invariant_mode_bits():
    """Whole, in pieces among others, and token by token: the same bits."""
    layer, _ = build(INVARIANT, dtype=torch.bfloat16)
    x, other = hidden(21).bfloat16(), hidden(9, seed=3).bfloat16()
    layout = cases.layout_for(CONFIG, dtype=torch.bfloat16)
    alone, crowded = cases.State(layout), cases.State(layout)
    plan = SequencePlan(alone.batch([("a", [0] * 21)]))
    whole = layer.forward(x, plan, alone.cache.rows[0], Parallel())
    plan = SequencePlan(crowded.batch([("b", [0] * 8), ("a", [0] * 20)]))
    rows = torch.cat([other[:8], x[:20]])
    first = layer.forward(rows, plan, crowded.cache.rows[0], Parallel())[8:]
    plan = SequencePlan(crowded.batch([("a", [0]), ("b", [0])]))
    rows = torch.cat([x[20:], other[8:]])
    second = layer.forward(rows, plan, crowded.cache.rows[0], Parallel())[:1]
    assert torch.equal(torch.cat([first, second]), whole)


@pytest.mark.parametrize("tp", [2, 4])
def test_head_shards_add_up(tp):
    _, weights = build(Numerics())
    x = hidden(18)
    total = torch.zeros(18, CONFIG.hidden_size, dtype=torch.float64)
    for rank in range(tp):
        layer, _ = build(Numerics(), parallel=Parallel(tp_rank=rank, tp_size=tp))
        state = cases.State(cases.layout_for(CONFIG, tp=(rank, tp)))
        plan = SequencePlan(state.batch([("a", [0] * 18)]))
        total += layer.forward(x, plan, state.cache.rows[0], Parallel()).double()
    torch.testing.assert_close(total, expected(x, weights), rtol=1e-4, atol=1e-5)


def decode_case(*, heads, latent, rope, page, lengths, dtype, device, seed=5):
    """q, a cache whose unused rows are NaN, shuffled pages, lengths; and a float64 result."""
    g = torch.Generator().manual_seed(seed)
    width, pages = latent + rope, max(-(-n // page) for n in lengths)
    total = sum(-(-n // page) for n in lengths) + 1
    cache = torch.full((total, page, width), float("nan"))
    tables = torch.zeros(len(lengths), pages, dtype=torch.int32)
    order = (torch.randperm(total - 1, generator=g) + 1).tolist()
    q = torch.randn(len(lengths), heads, width, generator=g).to(dtype)
    scale, wanted = width**-0.5, []
    for s, length in enumerate(lengths):
        rows = torch.randn(length, width, generator=g).to(dtype)
        for i in range(-(-length // page)):
            tables[s, i] = order.pop()
            part = rows[i * page : (i + 1) * page]
            cache[tables[s, i], : part.shape[0]] = part.float()
        p = torch.softmax(q[s].double() @ rows.double().T * scale, dim=-1)
        wanted.append(p @ rows[:, :latent].double())
    cache = cache.to(dtype).to(device)
    lengths_t = torch.tensor(lengths, device=device)
    return q.to(device), cache, tables.to(device), lengths_t, scale, torch.stack(wanted)


TINY = {"heads": 4, "latent": 32, "rope": 8, "page": 16, "lengths": [1, 16, 17, 90]}


def test_decode_torch_form():
    q, cache, tables, lengths, scale, wanted = decode_case(
        **TINY, dtype=torch.float32, device="cpu"
    )
    got = paged_decode_torch(q, cache, tables, lengths, latent=32, scale=scale)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-6)


def interpreted_decode():
    """Run in a process of its own: TRITON_INTERPRET is read when triton is imported."""
    from moe_comm.kernels.mla_decode import mla_decode

    q, cache, tables, lengths, scale, wanted = decode_case(
        **TINY, dtype=torch.float32, device="cpu"
    )
    for splits in (1, 3, 8):
        got = mla_decode(q, cache, tables, lengths, latent=32, scale=scale, splits=splits)
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)
    print("equal")


def test_decode_kernel_interpreted():
    """Masks, pages, splits (empty ones included) of the Triton kernel, in fp32."""
    code = f"import runpy; runpy.run_path({str(Path(__file__))!r})['interpreted_decode']()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.strip() == "equal", done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [None, 1, 5])
@pytest.mark.parametrize(
    "case",
    [
        TINY,
        {"heads": 96, "latent": 512, "rope": 64, "page": 64, "lengths": [1, 64, 65, 1000, 5000]},
        {"heads": 12, "latent": 512, "rope": 64, "page": 64, "lengths": [7, 4096]},
    ],
    ids=["tiny", "k3", "k3-tp8"],
)
def test_decode_kernel_on_gpu(case, splits):
    from moe_comm.kernels.mla_decode import mla_decode

    q, cache, tables, lengths, scale, wanted = decode_case(
        **case, dtype=torch.bfloat16, device="cuda"
    )
    got = mla_decode(q, cache, tables, lengths, latent=case["latent"], scale=scale, splits=splits)
    error = (got.cpu().double() - wanted).norm() / wanted.norm()
    assert torch.isfinite(got).all()
    assert error < 5e-3, float(error)
