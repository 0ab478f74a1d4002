"""The model benchmark, small, on two CPU ranks: the ports agree, the result file is valid and there
before the end, time limits leave things out by name."""

from __future__ import annotations

import subprocess
import sys

import pytest

from moe_comm.launch.model_summary import fit, summary
from moe_comm.launch.results import read_json

OPTIONS = ["--preset", "k3-tiny", "--device", "cpu", "--iters", 3]


def run(target, *more):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    command += ["-m", "moe_comm.launch.bench_model", *OPTIONS, "--json", target, *more]
    return subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=120, check=False
    )


def test_every_section(tmp_path):
    target, picture = tmp_path / "model.json", tmp_path / "context.png"
    done = run(
        target, "--layers", 4, "--ep-shapes", "32,64", "--prompt-tokens", 32, "--batches", 4,
        "--contexts", "64,256", "--overlap-tokens", 8, "--context-requests", 2, "--plot", picture,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # Raises where a port's layers differ from ours, so an exit of 0 says that they agree.
    rows = read_json(target)["rows"]
    for ep, ports in ((32, ("ours", "straight", "fair")), (64, ("ours", "fair"))):
        here = [row for row in rows if row["params"]["per_rank_shape_of_ep"] == ep]
        found = [(row["phase"], row["params"]["port"]) for row in here if "port" in row["params"]]
        assert found == [(phase, port) for port in ports for phase in ("ttft", "decode_step")]
    assert [row["phase"] for row in rows].count("kda_decode") == 2
    assert [row["phase"] for row in rows].count("mla_decode") == 2
    (layer,) = (row for row in rows if row["phase"] == "moe_layer")
    others = [row["params"] for row in rows if row["phase"] == "overlap"]
    assert layer["params"]["order"] == "halves"
    assert {params["order"] for params in others} == {"sequence", "products-aside"}
    for params in (layer["params"], *others):
        assert params["comm_us"] <= params["own_comm_us"]
        assert params["shared_us"] <= params["own_shared_us"]
        exposed = (params["both_us"] - params["shared_us"]) / params["comm_us"]
        assert params["hidden"] == pytest.approx(1 - exposed)
        added = (params["layer_us"] - params["without_us"]) / params["comm_us"]
        assert params["hidden_in_layer"] == pytest.approx(1 - added)
    assert picture.stat().st_size > 1000
    # Two rates at each shape, what is hidden by the model's way and the others, and two lines by
    # context.
    assert len(done.stdout.splitlines()) == 4 + 1 + len(others) + 2, done.stdout
    assert done.stdout.count("\noverlapped by ") == len(others)


@pytest.mark.slow
def test_no_time(tmp_path):
    """A budget that is used up when the weights are there: exit 0, a valid file, names left out."""
    target = tmp_path / "model.json"
    done = run(target, "--ep-shapes", "64", "--layers", 1, "--budget", 0.01)
    assert done.returncode == 0, done.stderr
    document = read_json(target)
    assert document["rows"] == []
    assert "EP64" in document["definitions"]["left out for lack of time"]


@pytest.mark.slow
def test_overlap_alone(tmp_path):
    """No port is built where none is timed."""
    target = tmp_path / "model.json"
    done = run(
        target, "--ep-shapes", "64", "--layers", 2, "--sections", "overlap",
        "--overlap-tokens", "4,8",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = {(row["phase"], row["num_tokens"]) for row in read_json(target)["rows"]}
    assert found == {(phase, num) for phase in ("moe_layer", "overlap") for num in (4, 8)}
    assert "== overlap" in done.stderr
    assert "== ours" not in done.stderr


def test_summary():
    def row(phase, us, **params):
        return {
            "phase": phase,
            "num_tokens": 128,
            "num_experts": 896,
            "slowest_rank_p50_us": us,
            "params": params,
        }

    lines = summary(
        [
            row("decode_step", 1000.0, port="ours"),
            row("decode_step", 4000.0, port="straight"),
            row("mla_decode", 3.0, context=1),
            row("mla_decode", 2.0, context=0),
            row("mla_decode", 4.0, context=2),
        ]
    )
    assert lines[0] == "decode_step T=128: 1.00 ms; straight 4.00 ms, 4.00x, 75% less"
    assert "2.0 us + 1024.000 us a 1K tokens, off by 0.0% at most" in lines[1]
    ways = [
        row(
            "overlap", 900.0, variant=name, both_us=110.0 - 29 * hidden, shared_us=81.0,
            comm_us=29.0, hidden=hidden, layer_us=900.0, one_stream_us=whole,
        )
        for name, hidden, whole in (("halves", 0.3, 929.0), ("aside", 0.7, None))
    ]  # fmt: skip
    aside = "overlapped by aside: 89.7 us instead of 81.0 + 29.0, hidden 70%; the layer 900.0 us"
    assert summary(ways) == [aside]
    halves, same = summary(ways, every_overlap=True)
    assert same == aside
    assert halves.endswith("hidden 30%; the layer 900.0 us instead of 929.0")
    base, slope, worst = fit([(0, 2.0), (1, 3.0), (2, 4.0)])
    assert (base, slope) == pytest.approx((2, 1))
    assert worst < 1e-9
