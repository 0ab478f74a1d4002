"""The whole model: against a float64 oracle, over placements, over cuts of the same tokens.

Everything is teacher-forced: the same tokens go in, logits and router decisions are compared.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moe_comm.kernels.mxfp4_format import dequantize
from moe_comm.model.config import K3Config
from moe_comm.model.tensor_names import dense_tensors, expert_prefix
from moe_comm.model.weights.checkpoint import Checkpoint
from moe_comm.model.weights.dense import read_dense
from moe_comm.model.weights.synthetic import write_checkpoint

HERE = Path(__file__).parent


def load(name):
    before = list(sys.path)
    sys.path.insert(0, str(HERE))
    try:
        return SimpleNamespace(**runpy.run_path(str(HERE / name)))
    finally:
        sys.path[:] = before


oracle, worker = load("model_oracle.py"), load("model_worker.py")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    write_checkpoint(worker.tiny(), path / "checkpoint", seed=3)
    return path


def run(case: str, directory: Path, size: int) -> list:
    """Start `size` ranks of a case, wait for all, return what each saved."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                str(HERE / "model_worker.py"),
                case,
                str(directory),
                str(r),
                str(size),
            ],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for r in range(size)
    ]
    try:
        errors = [rank.communicate(timeout=240)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(errors)
    return [torch.load(directory / f"{case}-{r}.pt") for r in range(size)]


@pytest.fixture(scope="module")
def fast(directory):
    return run("fast", directory, 4)


@pytest.fixture(scope="module")
def invariant(directory):
    return run("invariant", directory, 4)


@pytest.fixture(scope="module")
def splits(directory):
    return run("splits", directory, 1)[0]


def logits_of(results, layout, name):
    """A request's logits under a layout; all ranks of its group must hold the same bits."""
    size, _ = layout
    held = [r[layout]["logits"][name] for r in results[:size] if name in r[layout]["logits"]]
    assert held, (layout, name)
    assert all(torch.equal(held[0], other) for other in held[1:])
    return held[0]


def routes_of(results, layout, name):
    """{(position, layer): ids}; every token is routed on exactly one rank."""
    merged = {}
    for result in results[: layout[0]]:
        for position, layer, ids in result[layout]["routes"].get(name, []):
            assert (position, layer) not in merged, "a token was dispatched twice"
            merged[position, layer] = ids
    return merged


def error(got, wanted):
    """Relative error of all logits together."""
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.fixture(scope="module")
def truth(directory):
    """Float64 logits of each request, with the experts that the fast single rank chose, and the
    oracle's own choices."""
    config = K3Config.from_checkpoint(directory / "checkpoint")
    with Checkpoint(directory / "checkpoint") as checkpoint:
        dense = {s.name: read_dense(checkpoint, config, s) for s in dense_tensors(config)}
        held = {}

        def experts(layer, expert):
            if (layer, expert) not in held:
                prefix = expert_prefix(layer, expert)
                held[layer, expert] = tuple(
                    dequantize(
                        checkpoint.read(f"{prefix}{w}.weight_packed"),
                        checkpoint.read(f"{prefix}{w}.weight_scale"),
                    ).double()
                    for w in ("w1", "w3", "w2")
                )
            return held[layer, expert]

        def of(tokens, routes):
            given = {
                layer: torch.tensor([routes[t, layer] for t in range(len(tokens))])
                for layer in config.moe_layers
            }
            return oracle.model(config, dense, experts, tokens, given=given)

        yield config, of


def test_against_float64(truth, fast):
    config, of = truth
    agreed = total = 0
    for name in worker.REQUESTS:
        routes = routes_of(fast, (1, 1), name)
        tokens = worker.tokens_of(config, name)
        assert len(routes) == len(tokens) * len(config.moe_layers)
        wanted, chosen, states = of(tokens, routes)
        got = logits_of(fast, (1, 1), name)
        assert error(got, wanted) < 0.03, name
        for layer, rows in chosen.items():
            agreed += sum(ids == routes[t, layer] for t, ids in enumerate(rows))
            total += len(rows)
        final = fast[0][1, 1]["recurrent"][name]
        for i, layer in enumerate(config.kda_layers):
            assert error(final[i], states[layer]) < 0.03, (name, layer)
    # bf16 activations decide near ties of the router otherwise than float64 does; few.
    assert agreed > 0.8 * total, (agreed, total)


@pytest.mark.parametrize("layout", worker.LAYOUTS[1:])
def test_invariant_placements_are_the_same_bits(invariant, layout):
    for name in worker.REQUESTS:
        assert routes_of(invariant, layout, name) == routes_of(invariant, (1, 1), name)
        assert torch.equal(logits_of(invariant, layout, name), logits_of(invariant, (1, 1), name))


@pytest.mark.parametrize("layout", worker.LAYOUTS[1:])
def test_fast_placements_agree(fast, layout):
    """Partial sums are rounded by rank, so bits differ; every token is still routed once."""
    for name in worker.REQUESTS:
        base = routes_of(fast, (1, 1), name)
        routes = routes_of(fast, layout, name)
        assert routes.keys() == base.keys()
        same = sum(routes[key] == ids for key, ids in base.items())
        assert same > 0.9 * len(base), (same, len(base))
        assert error(logits_of(fast, layout, name), logits_of(fast, (1, 1), name)) < 0.03


def test_recurrent_state_shards(invariant):
    """Head shards of a tensor-parallel group, side by side, are the single rank's state."""
    for size, tp in ((2, 2), (4, 4)):
        for name in worker.REQUESTS:
            shards = sorted(
                (r[size, tp] for r in invariant[:size]), key=lambda result: result["tp_rank"]
            )
            whole = torch.cat([shard["recurrent"][name] for shard in shards], dim=1)
            assert torch.equal(whole, invariant[0][1, 1]["recurrent"][name])


@pytest.mark.parametrize("cut", [63, 64, 65])
@pytest.mark.parametrize("mode", ["fast", "chunked", "recurrent"])
def test_prefill_then_decode_is_whole_prefill(splits, mode, cut):
    whole, got = splits[mode, 68], splits[mode, cut]
    # Before the cut, the same kernels on the same tokens: no bit differs where rows are invariant.
    difference = error(got["logits"]["a"], whole["logits"]["a"])
    state = error(got["recurrent"]["a"], whole["recurrent"]["a"])
    if mode == "recurrent":
        assert torch.equal(got["logits"]["a"], whole["logits"]["a"])
        assert torch.equal(got["recurrent"]["a"], whole["recurrent"]["a"])
    elif mode == "chunked":
        assert torch.equal(got["logits"]["a"][:cut], whole["logits"]["a"][:cut])
        assert difference < 0.02, difference
        assert state < 0.02, state
    else:
        assert difference < 0.04, difference
        assert state < 0.04, state


@pytest.mark.parametrize("mode", ["chunked", "recurrent"])
def test_a_request_does_not_see_its_neighbours(splits, mode):
    """Alone and whole, or cut at 64 among others: the same bits."""
    alone, crowd = splits[mode, 68], splits[mode, "crowd"]
    assert torch.equal(crowd["logits"]["a"], alone["logits"]["a"])
    assert torch.equal(crowd["recurrent"]["a"], alone["recurrent"]["a"])
