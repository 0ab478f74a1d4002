"""KDA against a float64 loop: the delta rule's two forms, convolutions, the layer, its state.

K != V in every case: with square heads a swap of the state's axes would not show.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moe_comm.model.build import Builder
from moe_comm.model.config import K3Config
from moe_comm.model.layers import kda_ops
from moe_comm.model.layers.kda import KdaState
from moe_comm.model.layers.linear import Numerics
from moe_comm.model.layers.sequence_plan import SequencePlan
from moe_comm.model.layers.short_conv import short_conv
from moe_comm.model.parallel import Parallel
from moe_comm.model.tensor_names import dense_layer_tensors, layer_prefix


def load(name):
    return SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name(name))))


oracle, cases = load("model_oracle.py"), load("model_cases.py")
CONFIG = K3Config.preset("k3-tiny")
LAYER = 1
FORMS = ["recurrent", "chunked", "auto", "torch"]


def rule_inputs(num, heads=3, width=12, v_width=20, seed=0):
    g = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    q, k = oracle.l2(randn(num, heads, width)), oracle.l2(randn(num, heads, width))
    v, beta = randn(num, heads, v_width), torch.sigmoid(randn(num, heads))
    decay = -5 * torch.sigmoid(randn(num, heads, width) * 3)
    return q, k, v, decay, beta, randn(heads, width, v_width)


class TestDeltaRule:
    @pytest.mark.parametrize("form", [kda_ops.recurrent, kda_ops.chunked])
    @pytest.mark.parametrize("num", [1, 2, 63, 64, 65, 150])
    def test_against_the_loop(self, form, num):
        inputs = rule_inputs(num, seed=num)
        wanted, wanted_state = oracle.delta_rule(*inputs)
        out, state = form(*(x.float() for x in inputs))
        torch.testing.assert_close(out.double(), wanted, rtol=1e-4, atol=2e-6)
        torch.testing.assert_close(state.double(), wanted_state, rtol=1e-4, atol=2e-6)

    def test_strongest_decay_does_not_overflow(self):
        """At -5 a token, e^{-G} passes fp32's range after 18 tokens."""
        q, k, v, g, beta, state = rule_inputs(128, seed=1)
        g = torch.full_like(g, -4.999)
        wanted, wanted_state = oracle.delta_rule(q, k, v, g, beta, state)
        out, got = kda_ops.chunked(*(x.float() for x in (q, k, v, g, beta, state)))
        torch.testing.assert_close(out.double(), wanted, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(got.double(), wanted_state, rtol=1e-4, atol=1e-6)

    def test_splits(self):
        """Token by token any split gives the same bits; chunk by chunk, splits at 64 do."""
        *tokens, state = (x.float() for x in rule_inputs(150, seed=2))
        for form, cuts in ((kda_ops.recurrent, (1, 50, 64)), (kda_ops.chunked, (64, 128))):
            whole, final = form(*tokens, state)
            for cut in cuts:
                first, middle = form(*(x[:cut] for x in tokens), state)
                second, last = form(*(x[cut:] for x in tokens), middle)
                assert torch.equal(torch.cat([first, second]), whole), (form, cut)
                assert torch.equal(last, final), (form, cut)

    def test_decay_range_and_formula(self):
        g = torch.Generator().manual_seed(3)
        raw = torch.randn(5, 3, 4, generator=g) * 4
        a_log, bias = torch.randn(3, generator=g), torch.randn(12, generator=g)
        got = kda_ops.log_decay(raw, a_log, bias, -5.0)
        x = torch.exp(a_log.double()).view(3, 1) * (raw.double() + bias.double().view(3, 4))
        torch.testing.assert_close(got.double(), -5 / (1 + torch.exp(-x)), rtol=1e-5, atol=1e-6)
        assert got.min() >= -5
        assert got.max() <= 0

    def test_flas_reference(self):
        """fla's naive recurrence, where the package is installed (it needs no GPU)."""
        naive = pytest.importorskip("fla.ops.kda.naive", reason="fla-core is not installed")
        q, k, v, g, beta, state = (x.float() for x in rule_inputs(70, seed=4))
        wanted, wanted_state = naive.naive_recurrent_kda(
            *(x.unsqueeze(0) for x in (q, k, v, g, beta)),
            scale=1.0,
            initial_state=state.unsqueeze(0),
            output_final_state=True,
        )
        for form in (kda_ops.recurrent, kda_ops.chunked):
            out, got = form(q, k, v, g, beta, state)
            torch.testing.assert_close(out, wanted[0], rtol=1e-4, atol=2e-6)
            torch.testing.assert_close(got, wanted_state[0], rtol=1e-4, atol=2e-6)


class TestShortConv:
    @pytest.mark.parametrize("cuts", [(9,), (1,) * 9, (2, 7), (3, 6), (5, 1, 2, 1), (4, 5)])
    def test_any_cut_is_the_whole(self, cuts):
        """Chunks shorter than the width (3 remembered inputs) included; bits equal."""
        config = K3Config.preset("k3-tiny")
        channels = config.linear_key_channels
        g = torch.Generator().manual_seed(5)
        x, weight = torch.randn(9, channels, generator=g), torch.randn(channels, 4, generator=g)
        wanted = oracle.conv_silu(x.double(), weight.double().unsqueeze(1))
        state = cases.State(cases.layout_for(config))
        parts, at = [], 0
        for length in cuts:
            batch = state.batch([("a", [0] * length)])
            conv = state.pool.conv["q"][0]
            parts.append(short_conv(x[at : at + length], weight, conv, SequencePlan(batch)))
            at += length
        torch.testing.assert_close(torch.cat(parts).double(), wanted, rtol=1e-5, atol=1e-6)
        slot = state.tenants["a"][0]
        assert torch.equal(state.pool.conv["q"][0, slot], x[-3:].T), "oldest first, raw inputs"

    def test_neighbours_keep_out(self):
        config = K3Config.preset("k3-tiny")
        channels = config.linear_key_channels
        g = torch.Generator().manual_seed(6)
        weight = torch.randn(channels, 4, generator=g)
        inputs = {n: torch.randn(7, channels, generator=g) for n in "abc"}
        state = cases.State(cases.layout_for(config))
        got = {n: [] for n in inputs}
        at = dict.fromkeys(inputs, 0)
        for step in ((("b", 2), ("a", 1)), (("a", 3), ("c", 7), ("b", 1)), (("b", 4), ("a", 3))):
            batch = state.batch([(n, [0] * length) for n, length in step])
            x = torch.cat([inputs[n][at[n] : at[n] + length] for n, length in step])
            out = short_conv(x, weight, state.pool.conv["q"][0], SequencePlan(batch))
            for (n, length), piece in zip(step, out.split([s[1] for s in step]), strict=True):
                got[n].append(piece)
                at[n] += length
        for n, x in inputs.items():
            wanted = oracle.conv_silu(x.double(), weight.double().unsqueeze(1))
            torch.testing.assert_close(torch.cat(got[n]).double(), wanted, rtol=1e-5, atol=1e-6)


def build(numerics, *, dtype=torch.float32, parallel=None, seed=7):
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
    return builder._kda(specs), {n: t.double() for n, t in attention.items()}


def state_of(state, at=0):
    pool = state.pool
    return KdaState(
        recurrent=pool.recurrent[at],
        conv_q=pool.conv["q"][at],
        conv_k=pool.conv["k"][at],
        conv_v=pool.conv["v"][at],
    )


def expected(x, weights):
    return oracle.kda(
        x.double(),
        weights,
        heads=CONFIG.linear_num_heads,
        dim=CONFIG.linear_head_dim,
        v_dim=CONFIG.linear_v_head_dim,
        lower_bound=CONFIG.linear_gate_lower_bound,
        eps=CONFIG.rms_norm_eps,
    )


def hidden(num, seed=8):
    return torch.randn(num, CONFIG.hidden_size, generator=torch.Generator().manual_seed(seed))


class TestLayer:
    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("cuts", [(70,), (63, 7), (64, 1, 5), (2, 65, 1, 1, 1), (1, 69)])
    def test_prefill_chunks_and_decode(self, form, cuts):
        layer, weights = build(Numerics(kda=form))
        x = hidden(sum(cuts))
        wanted, wanted_state = expected(x, weights)
        state = cases.State(cases.layout_for(CONFIG))
        parts, at = [], 0
        for length in cuts:
            plan = SequencePlan(state.batch([("a", [0] * length)]))
            parts.append(layer.forward(x[at : at + length], plan, state_of(state), Parallel()))
            at += length
        torch.testing.assert_close(torch.cat(parts).double(), wanted, rtol=2e-4, atol=2e-5)
        got = state.pool.recurrent[0, state.tenants["a"][0]]
        assert got.shape == wanted_state.shape == (4, 16, 32)
        torch.testing.assert_close(got.double(), wanted_state, rtol=2e-4, atol=2e-5)

    @pytest.mark.parametrize("form", FORMS)
    def test_requests_of_different_lengths(self, form):
        layer, weights = build(Numerics(kda=form))
        lengths = {"a": (5, 1, 60), "b": (66, 1, 1), "c": (1, 3, 1)}
        x = {n: hidden(sum(cuts), seed=i) for i, (n, cuts) in enumerate(lengths.items())}
        state, got = cases.State(cases.layout_for(CONFIG)), {n: [] for n in lengths}
        for step in range(3):
            order = ["b", "a", "c"] if step == 1 else ["c", "a", "b"]
            plan = SequencePlan(state.batch([(n, [0] * lengths[n][step]) for n in order]))
            rows = torch.cat([x[n].split(list(lengths[n]))[step] for n in order])
            out = layer.forward(rows, plan, state_of(state), Parallel())
            for n, piece in zip(order, out.split([lengths[n][step] for n in order]), strict=True):
                got[n].append(piece)
        for n in lengths:
            wanted, wanted_state = expected(x[n], weights)
            torch.testing.assert_close(torch.cat(got[n]).double(), wanted, rtol=2e-4, atol=2e-5)
            final = state.pool.recurrent[0, state.tenants[n][0]].double()
            torch.testing.assert_close(final, wanted_state, rtol=2e-4, atol=2e-5)
        assert state.pool.recurrent[1:, 1:4].abs().sum() == 0, "another layer's state was touched"

    def test_bf16_is_near(self):
        layer, weights = build(Numerics(), dtype=torch.bfloat16)
        x = hidden(70).bfloat16()
        wanted, _ = expected(x, weights)
        state = cases.State(cases.layout_for(CONFIG, dtype=torch.bfloat16))
        plan = SequencePlan(state.batch([("a", [0] * 70)]))
        got = layer.forward(x, plan, state_of(state), Parallel())
        assert got.dtype == torch.bfloat16
        error = (got.double() - wanted).norm() / wanted.norm()
        assert error < 0.02, float(error)

    @pytest.mark.parametrize("form", ["recurrent", "chunked"])
    def test_invariant_mode_does_not_see_the_batch(self, form):
        """A request's bits, alone and among others, for chunks cut at 64."""
        layer, _ = build(Numerics(batch_invariant=True, kda=form), dtype=torch.bfloat16)
        x, other = hidden(70).bfloat16(), hidden(33, seed=9).bfloat16()
        layout = cases.layout_for(CONFIG, dtype=torch.bfloat16)
        alone, crowded = cases.State(layout), cases.State(layout)
        plan = SequencePlan(alone.batch([("a", [0] * 70)]))
        whole = layer.forward(x, plan, state_of(alone), Parallel())
        plan = SequencePlan(crowded.batch([("b", [0] * 33), ("a", [0] * 64), ("c", [0])]))
        rows = torch.cat([other, x[:64], other[:1]])
        first = layer.forward(rows, plan, state_of(crowded), Parallel())[33:97]
        plan = SequencePlan(crowded.batch([("a", [0] * 6), ("b", [0])]))
        rows = torch.cat([x[64:], other[:1]])
        second = layer.forward(rows, plan, state_of(crowded), Parallel())[:6]
        assert torch.equal(torch.cat([first, second]), whole)
        slots = alone.tenants["a"][0], crowded.tenants["a"][0]
        assert torch.equal(alone.pool.recurrent[0, slots[0]], crowded.pool.recurrent[0, slots[1]])

    @pytest.mark.parametrize("tp", [2, 4])
    def test_head_shards_add_up(self, tp):
        """Each rank's heads, run apart; o_proj's partial sums added here."""
        whole, weights = build(Numerics())
        x = hidden(70)
        wanted, wanted_state = expected(x, weights)
        total, states = torch.zeros(70, CONFIG.hidden_size, dtype=torch.float64), []
        for rank in range(tp):
            parallel = Parallel(tp_rank=rank, tp_size=tp)
            layer, _ = build(Numerics(), parallel=parallel)
            state = cases.State(cases.layout_for(CONFIG, tp=(rank, tp)))
            plan = SequencePlan(state.batch([("a", [0] * 70)]))
            total += layer.forward(x, plan, state_of(state), Parallel()).double()
            states.append(state.pool.recurrent[0, state.tenants["a"][0]])
        torch.testing.assert_close(total, wanted, rtol=2e-4, atol=2e-5)
        torch.testing.assert_close(torch.cat(states).double(), wanted_state, rtol=2e-4, atol=2e-5)
        assert whole.a_log.shape == (4,), "A_log's padding was read"


class TestPlan:
    def test_pieces_end_on_the_absolute_grid(self):
        state = cases.State(cases.layout_for(CONFIG), num_pages=64)
        state.batch([("a", [0] * 70)])
        batch = state.batch([("a", [0] * 80), ("b", [0] * 65), ("c", [0])])
        single, passes = SequencePlan(batch).passes(split_single=True)
        assert [(p.seq, p.start, p.end) for p in single] == [(2, 145, 146)]
        assert [[(p.seq, p.start, p.end) for p in pieces] for pieces in passes] == [
            [(0, 0, 58), (1, 80, 145)],
            [(0, 58, 80)],
        ]
