"""The phase moe_layer: its routing, its shares of larger groups, its oracle, and the command."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from moe_comm import EPConfig, ExpertPlacement
from moe_comm.kernels import mxfp4_format
from moe_comm.launch.expert_source import ExpertSource
from moe_comm.launch.moe_layer import LayerBench
from moe_comm.launch.moe_layer_case import build_case
from moe_comm.launch.moe_layer_oracle import expected_layer, expected_routing
from moe_comm.launch.moe_layer_rows import layer_lines
from moe_comm.launch.results import read_json
from moe_comm.launch.routing import parse_routing
from moe_comm.traffic import RoutingTraffic

CPU = torch.device("cpu")
ENVIRONMENT = {
    **{k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
    "OMP_NUM_THREADS": "1",
}


def case(rank=0, num_ranks=2, *, tokens=9, emulated=None, text="zipf:1", experts=48, topk=5):
    config = EPConfig(num_experts=experts, num_topk=topk, hidden=64)
    routing = parse_routing(text, num_experts=experts, num_topk=topk)
    made = build_case(
        config, routing, rank=rank, num_ranks=num_ranks, num_tokens=tokens, emulated=emulated,
        router_hidden=2 * experts, seed=3, device=CPU,
    )  # fmt: skip
    return made, routing


@pytest.mark.parametrize("text", ["uniform", "zipf:1", "trace"])
def test_the_router_chooses_what_the_routing_says(text):
    experts, topk = (896, 16) if text == "trace" else (48, 5)
    made, routing = case(1, text=text, experts=experts, topk=topk)
    idx, weights = routing.draw(rank=1, num_tokens=9, seed=3, first_token=9)
    got, by = made.router.forward(made.x)
    order, wanted = got.argsort(dim=1), idx.argsort(dim=1)
    assert torch.equal(got.gather(1, order), idx.gather(1, wanted))
    # Up to the bf16 rounding of rows, and the least weight that a chosen expert is given.
    given = weights.gather(1, wanted)
    near = given > 0.03 * weights.amax(dim=1, keepdim=True)
    ratio = (by.gather(1, order) / given)[near]
    assert (ratio - 1).abs().max() < 0.05
    ids, expected = expected_routing(made)
    assert torch.equal(ids, idx.gather(1, wanted))
    torch.testing.assert_close(expected, by.gather(1, order), rtol=1e-3, atol=0)


@pytest.mark.parametrize("group", [4, 8, 12])
def test_a_share_is_what_the_first_ranks_of_the_group_receive(group):
    made = [case(rank, emulated=group)[0] for rank in (0, 1)]
    routing = case()[1]
    drawn = [routing.draw(rank=r, num_tokens=9, seed=3, first_token=9 * r)[0] for r in range(group)]
    whole = RoutingTraffic.of(drawn, ExpertPlacement.contiguous(48, group))
    for rank, mine in enumerate(made):
        assert mine.config.num_experts == 2 * 48 // group
        received = mine.traffic.rows.sum(dim=0)[rank], mine.traffic.choices.sum(dim=0)[rank]
        assert received == (whole.rows.sum(dim=0)[rank], whole.choices.sum(dim=0)[rank])
        idx, weights = mine.prepared
        # Nothing is dispatched for nothing, and choices of other ranks are masked.
        assert ((idx >= 0).any(dim=1)).all()
        assert int(idx.max()) < mine.config.num_experts
        assert mine.z.shape == (idx.shape[0], 64)
        assert weights.shape == idx.shape
        assert mine.x.shape[0] == 9
    counts = torch.bincount(torch.cat([idx.flatten() for idx in drawn]), minlength=48)[
        : made[0].config.num_experts
    ]
    held = made[0].config.num_experts // 2
    by_rank = counts.view(2, held)
    assert made[0].expert_rows == int(by_rank.sum(dim=1).max())
    assert made[0].active_experts == int((by_rank > 0).sum(dim=1).max())
    # Room for the rows, which the GEMM takes for the number to expect.
    assert made[0].expert_rows <= made[0].config.max_expert_rows


def test_a_group_that_does_not_fit_is_refused():
    for emulated in (5, 3):
        with pytest.raises(ValueError, match="emulated: expected a divisor of 48 experts and a"):
            case(emulated=emulated)


def test_the_oracle_is_the_formula_and_its_tolerance_is_small():
    source = ExpertSource(seed=5, hidden=96, inter=64, device=CPU)
    generator = torch.Generator().manual_seed(1)
    z = torch.randn(4, 96, generator=generator).to(torch.bfloat16)
    idx = torch.tensor([[2, 0, -1], [1, 2, 3], [-1, -1, -1], [3, 3, 1]])
    weights = torch.rand(4, 3, generator=generator)
    out, allowed = expected_layer(z, idx, weights, source)
    wanted = torch.zeros(4, 96, dtype=torch.float64)
    for t in range(4):
        for k in range(3):
            if idx[t, k] >= 0:
                pairs = source.draw(int(idx[t, k]))
                w1, w3, w2 = (mxfp4_format.dequantize(*pair).double() for pair in pairs)
                gate, up = w1 @ z[t].double(), w3 @ z[t].double()
                hidden = 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25)
                wanted[t] += weights[t, k].double() * (w2 @ hidden)
    assert (out[2] == 0).all()
    assert (out - wanted).abs().max() < 1e-4
    # Another expert for one choice is far outside.
    swapped, _ = expected_layer(z, torch.where(idx == 0, 1, idx), weights, source)
    assert ((swapped - out).abs() > allowed)[0].float().mean() > 0.8
    rows = [0, 1, 3]
    assert allowed[rows].mean() < 0.08 * out[rows].abs().mean()


def test_one_expert_is_the_same_wherever_it_is_built():
    source = ExpertSource(seed=2, hidden=64, inter=32, device=CPU)
    weights = source.mxfp4([7, 1], layout="rows")
    for slot, expert in enumerate([7, 1]):
        for got, wanted in zip(weights.get(slot), source.draw(expert), strict=True):
            assert torch.equal(got[0], wanted[0])
            assert torch.equal(got[1], wanted[1])
    w13, w2 = source.bf16([1])
    gate, up, down = (mxfp4_format.dequantize(*pair) for pair in source.draw(1))
    assert torch.equal(w13[0], torch.cat((gate, up)))
    assert torch.equal(w2[0], down)
    assert source.mxfp4_bytes == weights.nbytes // 2
    assert source.bf16_bytes == w13.nbytes + w2.nbytes


def moe_bench(*arguments, device="cpu", preset="k3-tiny"):
    return subprocess.run(
        [
            sys.executable, "-P", "-m", "moe_comm.launch.cli", "run", "--device", device,
            "--preset", preset, "--phase", "moe_layer", "--iters", "1", "--warmup", "0",
            *arguments,
        ],
        capture_output=True, text=True, env=ENVIRONMENT, timeout=170,
    )  # fmt: skip


def test_the_command_checks_times_and_tells_shares(tmp_path):
    out = tmp_path / "out.json"
    done = moe_bench("--num-tokens", "3", "--emulate-ep", "64", "--json", str(out))
    assert done.returncode == 0, done.stderr
    document = read_json(out)
    rows = document["rows"]
    got = [(r["backend"], r["mode"], r["params"]["emulated"]) for r in rows]
    ours = ("c10d", "exact")
    baselines = [("per-expert", "mxfp4"), ("per-expert", "bf16")]
    assert got == [(*name, size) for size in (None, 64) for name in (ours, *baselines)]
    for row in rows:
        assert (row["phase"], row["wrong"], row["samples"]) == ("moe_layer", 0, 2)
        shares = row["params"]["shares"]
        assert list(shares) == ["route", "dispatch", "experts", "combine"]
        assert sum(shares.values()) == pytest.approx(1, abs=1e-3)
        assert row["params"]["communication_share"] == pytest.approx(
            shares["dispatch"] + shares["combine"], abs=2e-4
        )
        assert 0 < row["minimum_bytes"] <= row["remote_bytes"]
    assert [row["params"]["experts_per_rank"] for row in rows] == [448] * 3 + [14] * 3
    assert "params.emulated" in document["definitions"]
    assert "than bf16 experts with per-expert traffic" in done.stdout
    assert "a share of EP64, 14 experts a rank by torch" in done.stdout
    assert "wrong elements: 0 in 6 checked rows" in done.stdout
    assert layer_lines(rows)[0] in done.stdout


def test_wrong_data_is_found_and_not_timed(tmp_path):
    out = tmp_path / "out.json"
    done = moe_bench(
        "--num-tokens", "2", "--nproc", "1", "--no-baseline", "--debug-flip-bit", "0",
        "--json", str(out),
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "rank 0: moe_layer: out: token 0, column" in done.stderr
    (row,) = read_json(out)["rows"]
    assert row["wrong"] > 0
    assert row["samples"] == 0


@pytest.mark.multi_gpu(2)
@pytest.mark.parametrize("experts_by", ["triton", "auto"])
def test_on_a_pair_of_gpus(tmp_path, experts_by):
    """K3's shape with an eighth of its experts, captured and eager."""
    out = tmp_path / "out.json"
    done = moe_bench(
        "--num-experts", "112", "--num-tokens", "33", "--routing", "zipf:1", "--nproc", "2",
        "--emulate-ep", "8", "--experts", experts_by, "--backend", "slab", "--json", str(out),
        device="cuda", preset="kimi-k3",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = read_json(out)["rows"]
    assert [row["wrong"] for row in rows] == [0] * 8
    graphs = [row["cuda_graph"] for row in rows]
    assert graphs == [True, False, False, False] * 2
    if experts_by != "auto":
        assert rows[0]["params"]["experts_by"] == experts_by


def test_the_limit_is_the_longer_of_reading_weights_and_multiplying_rows():
    """Many rows are bound by their products: 6 * rows * hidden * inter operations."""
    ours, _routing = case()
    layer = SimpleNamespace(expert_bytes=1000)
    read, work = ours.active_experts * 1000, 6 * ours.expert_rows * ours.config.hidden * 8

    def limit(read_rate, product_rate):
        def timed(rate):
            return lambda amount: None if rate is None else amount / rate

        limits = SimpleNamespace(memory_us=timed(read_rate), products_us=timed(product_rate))
        bench = SimpleNamespace(limits=limits, layers=SimpleNamespace(inter=8))
        return LayerBench.limit(bench, layer, ours)

    assert limit(read / 3, work / 2) == (3, "weights of active experts, read")
    assert limit(read / 2, work / 3) == (3, "experts' products, at the rate of a large bf16 one")
    assert limit(None, None) == (None, None)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--preset", "deepseek-v3"], "expected a preset of a whole model"),
        (["--routing", "uniform+masked:0.1"], "expected a routing without masked choices"),
        (["--combine-wire", "fp8"], "expected --combine-wire bf16, got fp8"),
        (["--emulate-ep", "1"], "expected a whole number >= 2, got '1'"),
        (["--hidden", "72"], "expected 32 to divide --hidden, got 72"),
    ],
)
def test_what_cannot_be_asked_for_exits_with_2(arguments, says):
    from moe_comm.launch.run import command

    given = ["--device", "cpu", "--phase", "moe_layer", *arguments]
    done = CliRunner().invoke(command, given)
    assert done.exit_code == 2
    assert says in done.output
