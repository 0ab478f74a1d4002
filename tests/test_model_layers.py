"""Router, AttnRes, norms, SiTU, the batch-invariant product: against float64 formulas."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moe_comm.model.layers.attn_res import AttnResSite, AttnResState
from moe_comm.model.layers.linear import Numerics, linear, linear_fp32
from moe_comm.model.layers.norm import Mlp, l2_norm, rms_norm, situ_and_mul
from moe_comm.model.layers.router import Router, lowest_id_topk
from moe_comm.model.parallel import Parallel

oracle = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("model_oracle.py"))))
F64 = torch.float64


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class TestRouter:
    def test_choice_by_bias_weights_without_it(self):
        logits, bias = randn(7, 896, seed=1) * 2, randn(896, seed=2) * 0.3
        router = Router(weight=torch.empty(0), bias=bias, top_k=16)
        idx, weights = router.choose(logits)
        for t in range(7):
            order, wanted = oracle.choose(logits[t].double(), bias.double(), 16)
            assert idx[t].tolist() == order
            torch.testing.assert_close(weights[t].double(), wanted, rtol=3e-6, atol=0)
        without = Router(weight=torch.empty(0), bias=torch.zeros(896), top_k=16).choose(logits)
        assert not torch.equal(without[0], idx)

    def test_product_is_fp32(self):
        x, weight = randn(5, 64, seed=3).bfloat16(), (randn(896, 64, seed=4) / 8).bfloat16()
        idx, weights = Router(weight=weight, bias=torch.zeros(896), top_k=16).forward(x)
        logits = x.double() @ weight.double().T
        for t in range(5):
            order, wanted = oracle.choose(logits[t], torch.zeros(896, dtype=F64), 16)
            assert idx[t].tolist() == order
            torch.testing.assert_close(weights[t].double(), wanted, rtol=1e-5, atol=0)

    def test_ties_go_to_the_lowest_id(self):
        logits = torch.zeros(3, 896)
        logits[1, 800:] = 1.0
        logits[2, ::2] = -1.0
        idx, weights = Router(weight=torch.empty(0), bias=torch.zeros(896), top_k=16).choose(logits)
        assert idx[0].tolist() == list(range(16))
        assert idx[1].tolist() == list(range(800, 816))
        assert idx[2].tolist() == list(range(1, 32, 2))
        torch.testing.assert_close(weights, torch.full((3, 16), 1 / 16))

    def test_topk_order_across_signs_and_zeros(self):
        values = torch.tensor([[0.0, -0.0, -1.5, 2.0, 2.0, -float("inf"), -1.4, 1e-40]])
        assert lowest_id_topk(values, 8).tolist() == [[3, 4, 7, 0, 1, 6, 2, 5]]

    def test_scaling_and_no_renormalization(self):
        logits = randn(2, 32, seed=5)
        plain = Router(weight=torch.empty(0), bias=torch.zeros(32), top_k=4, renormalize=False)
        scaled = Router(
            weight=torch.empty(0), bias=torch.zeros(32), top_k=4, renormalize=False, scaling=2.5
        )
        idx, weights = plain.choose(logits)
        torch.testing.assert_close(weights, torch.sigmoid(logits).gather(1, idx))
        torch.testing.assert_close(scaled.choose(logits)[1], weights * 2.5)

    def test_group_limit(self):
        """Groups of 8; the two groups with the best sum of two choices stay, by a plain loop."""
        logits, bias = randn(20, 32, seed=6), randn(32, seed=7) * 0.1
        router = Router(weight=torch.empty(0), bias=bias, top_k=6, num_groups=4, topk_groups=2)
        idx, _ = router.choose(logits)
        choice = torch.sigmoid(logits) + bias
        limited = 0
        for t in range(20):
            sums = [sum(sorted(choice[t, g * 8 : g * 8 + 8].tolist())[-2:]) for g in range(4)]
            groups = sorted(range(4), key=lambda g, s=sums: (-s[g], g))[:2]
            allowed = [e for e in range(32) if e // 8 in groups]
            wanted = sorted(allowed, key=lambda e, t=t: (-float(choice[t, e]), e))[:6]
            assert idx[t].tolist() == wanted
            limited += sorted(wanted) != sorted(choice[t].topk(6).indices.tolist())
        assert limited, "the limit never mattered: the case shows nothing"

    def test_no_tokens(self):
        router = Router(weight=torch.zeros(896, 8), bias=torch.zeros(896), top_k=16)
        idx, weights = router.forward(torch.zeros(0, 8))
        assert idx.shape == weights.shape == (0, 16)


class TestNorms:
    def test_rms_and_l2(self):
        x, weight = randn(5, 48, seed=8) * 3, randn(48, seed=9)
        wanted = oracle.rms(x.double(), weight.double(), 1e-5)
        torch.testing.assert_close(rms_norm(x, weight, 1e-5).double(), wanted, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(l2_norm(x).double(), oracle.l2(x.double()), rtol=1e-5, atol=1e-7)
        tiny = x * 1e-5
        assert l2_norm(tiny).norm(dim=-1).max() < 0.5, "eps is inside the root"

    def test_situ_is_bounded_and_right(self):
        gate, up = randn(6, 40, seed=10) * 20, randn(6, 40, seed=11) * 200
        got = situ_and_mul(gate, up, beta=4.0, linear_beta=25.0)
        wanted = oracle.situ(gate.double(), up.double(), 4.0, 25.0)
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)
        assert got.abs().max() <= 100
        assert got.abs().max() > 90, "the bounds were not reached: the case shows nothing"

    def test_mlp(self):
        tensors = {
            "gate_proj.weight": randn(24, 16, seed=12),
            "up_proj.weight": randn(24, 16, seed=13),
            "down_proj.weight": randn(16, 24, seed=14),
        }
        layer = Mlp(
            gate_up=torch.cat([tensors["gate_proj.weight"], tensors["up_proj.weight"]]),
            down=tensors["down_proj.weight"],
            beta=4.0,
            linear_beta=25.0,
            numerics=Numerics(),
        )
        x = randn(5, 16, seed=15)
        wanted = oracle.mlp(x.double(), {n: t.double() for n, t in tensors.items()}, 4.0, 25.0)
        got = layer.forward(x, Parallel()).double()
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


class TestAttnRes:
    def test_bank_grows_at_block_starts(self):
        """Nine layers in blocks of 4, against a loop over the rule with float64 aggregation."""
        dim, eps = 24, 1e-5
        weights = [(randn(dim, seed=s), randn(1, dim, seed=s + 1)) for s in range(0, 38, 2)]
        norm = randn(dim, seed=49)
        embedded = randn(6, dim, seed=50)
        updates = [randn(6, dim, seed=60 + i) for i in range(18)]
        state = AttnResState(embedded, 4)
        bank, running = [], embedded.double()

        def check(got, at, *, mix=True):
            wanted = running
            if mix:
                rows = [*bank, running]
                wanted = oracle.aggregate(rows, *(w.double() for w in weights[at]), eps)
            wanted = oracle.rms(wanted, norm.double(), 1e-6)
            torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-5)

        def site(at):
            return AttnResSite.create(*weights[at], eps)

        for layer in range(9):
            got = state.enter(layer, site(2 * layer), norm, 1e-6)
            check(got, 2 * layer, mix=bool(bank))
            if layer % 4 == 0:
                bank.append(running)
                running = None
            state.add(updates[2 * layer])
            step = updates[2 * layer].double()
            running = step if running is None else running + step
            check(state.aggregate(site(2 * layer + 1), norm, 1e-6), 2 * layer + 1)
            state.add(updates[2 * layer + 1])
            running = running + updates[2 * layer + 1].double()
        assert state.num_rows == len(bank) == 3
        check(state.aggregate(site(18), norm, 1e-6), 18)


class TestBatchInvariant:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("product", [linear, linear_fp32])
    def test_a_row_does_not_see_its_neighbours(self, dtype, product):
        numerics = Numerics(batch_invariant=True)
        x, weight = randn(40, 136, seed=20).to(dtype), randn(72, 136, seed=21).to(dtype)
        whole = product(x, weight, numerics)
        for start, end in ((0, 1), (3, 40), (15, 17), (39, 40)):
            assert torch.equal(product(x[start:end], weight, numerics), whole[start:end])
        order = torch.randperm(40, generator=torch.Generator().manual_seed(22))
        assert torch.equal(product(x[order], weight, numerics), whole[order])
        exact = (x.double() @ weight.double().T).to(whole.dtype)
        torch.testing.assert_close(
            whole, exact, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-6
        )
        assert product(x[:0], weight, numerics).shape == (0, 72)

    def test_bad_options(self):
        with pytest.raises(ValueError, match="row_tile: expected at least 1, got 0"):
            Numerics(row_tile=0)
        with pytest.raises(ValueError, match="kda: expected one of auto"):
            Numerics(kda="fast")


class TestTokenSlices:
    @pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
    @pytest.mark.parametrize("num", [0, 1, 2, 7, 8, 65])
    def test_disjoint_and_complete(self, size, num):
        taken = []
        for rank in range(size):
            parallel = Parallel(tp_rank=rank, tp_size=size)
            first, last = parallel.token_slice(num)
            assert last - first <= parallel.slice_size(num)
            taken += range(first, last)
        assert taken == list(range(num))

    def test_shards(self):
        assert Parallel(tp_rank=2, tp_size=4).shard(96, "heads") == (48, 72)
        with pytest.raises(ValueError, match="tp: expected a divisor of heads=96, got 5"):
            Parallel(tp_rank=0, tp_size=5).shard(96, "heads")
