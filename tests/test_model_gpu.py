"""Attention layers at K3's head widths on a GPU: fla-core's KDA, our paged MLA decode and the fused
kernels, against the float64 formulas and against the torch path on the same device."""

from __future__ import annotations

import dataclasses
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moe_comm.model.build import Builder
from moe_comm.model.config import K3Config
from moe_comm.model.layers.kda import KdaState
from moe_comm.model.layers.linear import Numerics
from moe_comm.model.layers.sequence_plan import SequencePlan
from moe_comm.model.parallel import Parallel
from moe_comm.model.serving.batch import SequenceSlice, make_batch
from moe_comm.model.serving.layout import StateLayout
from moe_comm.model.serving.paged_cache import PagedCache
from moe_comm.model.serving.state_pool import StatePool
from moe_comm.model.tensor_names import dense_layer_tensors, layer_prefix


def load(name):
    return SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name(name))))


oracle, cases = load("model_oracle.py"), load("model_cases.py")
# K3's head widths, fewer heads, a narrow hidden.
CONFIG = dataclasses.replace(
    K3Config.preset("k3-tiny"),
    hidden_size=256,
    num_attention_heads=4,
    q_lora_rank=96,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    linear_num_heads=4,
    linear_head_dim=128,
    linear_v_head_dim=128,
)
CUTS = [(130,), (64, 66), (63, 67), (64, 2, 64), (70, 1, 1, 58), (1, 2, 127)]
pytestmark = pytest.mark.gpu


# Heads whose two widths differ: square ones hide a state whose axes are swapped.
OBLONG = dataclasses.replace(CONFIG, linear_head_dim=64)


def build(layer, numerics, seed=7, config=CONFIG):
    tensors = cases.random_tensors(config, seed)
    builder = Builder(
        config,
        cases.DictSource(tensors),
        parallel=Parallel(),
        numerics=numerics,
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
    )
    prefix = layer_prefix(layer)
    specs = {s.name.removeprefix(prefix): s for s in dense_layer_tensors(config, layer)}
    made = builder._mla(specs) if config.is_mla(layer) else builder._kda(specs)
    attention = oracle.below(tensors, prefix + "self_attn.")
    return made, {n: t.double() for n, t in attention.items()}


def run(layer, cuts, x, config=CONFIG):
    """The sequence in chunks, another request of random tokens beside it in every batch. Returns
    (out on the CPU, final recurrent state of the first KDA layer)."""
    layout = StateLayout.from_config(config, page_size=64)
    pool = StatePool(layout, 4, device="cuda", debug=True)
    cache = PagedCache(layout, 12, device="cuda", debug=True)
    slots = [handle.slot for handle in pool.allocate(2)]
    pages = [cache.allocate(4), cache.allocate(4)]
    noise = torch.randn(len(cuts) * 2, CONFIG.hidden_size, device="cuda", dtype=torch.bfloat16)
    state = KdaState(
        recurrent=pool.recurrent[0],
        conv_q=pool.conv["q"][0],
        conv_k=pool.conv["k"][0],
        conv_v=pool.conv["v"][0],
    )
    parts, at = [], 0
    for step, length in enumerate(cuts):
        other = 1 + step % 2
        slices = [
            SequenceSlice(
                token_ids=(0,) * other, start=step + step // 2, slot=slots[1], pages=pages[1]
            ),
            SequenceSlice(token_ids=(0,) * length, start=at, slot=slots[0], pages=pages[0]),
        ]
        plan = SequencePlan(make_batch(slices, pool=pool, cache=cache.rows))
        rows = torch.cat([noise[:other], x[at : at + length]])
        if hasattr(layer, "kv_b"):
            out = layer.forward(rows, plan, cache.rows[0], Parallel())
        else:
            out = layer.forward(rows, plan, state, Parallel())
        parts.append(out[other:])
        at += length
    return torch.cat(parts).double().cpu(), pool.recurrent[0, slots[0]].double().cpu()


def error(got, wanted):
    assert torch.isfinite(got).all()
    return float((got - wanted).norm() / wanted.norm())


def hidden():
    x = torch.randn(130, CONFIG.hidden_size, generator=torch.Generator().manual_seed(8))
    return x.bfloat16()


@pytest.mark.parametrize("cuts", CUTS)
def test_kda(cuts):
    pytest.importorskip("fla", reason="fla-core is not installed")
    x = hidden()
    layer, weights = build(1, Numerics())
    wanted, wanted_state = oracle.kda(
        x.double(), weights, heads=4, dim=128, v_dim=128, lower_bound=-5.0, eps=1e-5
    )
    out, state = run(layer, cuts, x.cuda())
    assert error(out, wanted) < 0.02
    assert error(state, wanted_state) < 0.02
    plain, plain_state = run(build(1, Numerics(kda="torch"))[0], cuts, x.cuda())
    assert error(out, plain) < 0.02
    assert error(state, plain_state) < 0.02


def test_kda_of_oblong_heads():
    pytest.importorskip("fla", reason="fla-core is not installed")
    x = hidden()
    layer, weights = build(1, Numerics(), config=OBLONG)
    wanted, wanted_state = oracle.kda(
        x.double(), weights, heads=4, dim=64, v_dim=128, lower_bound=-5.0, eps=1e-5
    )
    out, state = run(layer, (70, 1, 59), x.cuda(), OBLONG)
    assert error(out, wanted) < 0.02
    assert error(state, wanted_state) < 0.02


def test_kda_state_at_the_grid_is_the_same_bits():
    """Kernel calls end at absolute multiples of 64, with fp32 final states: cut there or not."""
    pytest.importorskip("fla", reason="fla-core is not installed")
    layer, _ = build(1, Numerics())
    x = hidden().cuda()
    whole, cut = run(layer, (128,), x), run(layer, (64, 64), x)
    assert torch.equal(whole[1], cut[1])


@pytest.mark.parametrize("cuts", CUTS)
def test_mla(cuts):
    x = hidden()
    layer, weights = build(3, Numerics())
    wanted = oracle.mla(x.double(), weights, heads=4, nope=128, rope=64, v_dim=128)
    out, _ = run(layer, cuts, x.cuda())
    assert error(out, wanted) < 0.02
