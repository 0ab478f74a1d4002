"""The soak: it finds what is wrong, agrees over ranks, and says what it did. Its graphs need CUDA;
the slab itself runs here as virtual ranks under Triton's interpreter."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest
import torch
from rank_pool import RankContext, RankPool, run_ranks

from moe_comm import EPConfig
from moe_comm.launch.results import read_json

TINY = {"num_experts": 12, "num_topk": 4, "hidden": 24, "max_tokens_per_rank": 9}
PLAN = {"backends": ("c10d:dense", "c10d:exact"), "buckets": (1, 9), "pairs": 40, "window": 15}


def soaked(context: RankContext, wire: str, options: dict, out: str | None) -> tuple[int, int]:
    """The exit code, and the pairs done."""
    from moe_comm import Group
    from moe_comm.launch.slab_soak import soak
    from moe_comm.launch.slab_soak_world import Plan
    from moe_comm.launch.worker import Ranks

    config = EPConfig(**TINY, dispatch_wire=wire, timeout_s=5.0)
    plan = Plan(config=config, graphs=False, **{**PLAN, **options})
    ranks = Ranks(Group(), timeout_s=5.0)
    return soak(ranks, plan, out), plan.pairs


@pytest.mark.parametrize("wire", ["bf16", "fp8", "mxfp8"])
def test_right_calls_pass(tmp_path, wire) -> None:
    out = tmp_path / "soak.json"
    assert run_ranks(3, soaked, wire, {"split": wire == "fp8"}, str(out)) == [(0, 40)] * 3
    document = read_json(out)
    rows = document["rows"]
    assert [row["mode"] for row in rows] == ["dense", "exact"]
    assert sum(row["params"]["pairs"] for row in rows) == 40
    assert sum(row["params"]["checked"] for row in rows) == 3
    assert all(row["params"]["pairs"] > 5 and row["wrong"] == 0 for row in rows)
    assert rows[0]["params"]["complete"]
    assert rows[0]["params"]["hangs"] == 0
    assert rows[0]["params"]["pairs_per_s"] > 0


def test_one_flipped_bit_is_found(tmp_path) -> None:
    out = tmp_path / "soak.json"
    options = {"backends": ("c10d:dense",), "buckets": (9,), "flip_pair": 7}
    assert [code for code, _ in run_ranks(2, soaked, "bf16", options, str(out))] == [1, 1]
    (row,) = read_json(out)["rows"]
    assert row["wrong"] == row["params"]["wrong_pairs"] == 1
    assert row["params"]["first"][0].startswith("pair 7, bucket 9: checksums differ")


def test_time_ends_it(tmp_path) -> None:
    out = tmp_path / "soak.json"
    options = {"seconds": 0.01, "pairs": 10**6}
    assert run_ranks(2, soaked, "bf16", options, str(out))[0][0] == 0
    (row, _) = read_json(out)["rows"]
    assert row["params"]["complete"]
    assert 0 < row["params"]["pairs"] < 200


def lost(context: RankContext) -> tuple[int, int, list[str], int]:
    """Rank 1 dies after the first window: code, hangs, errors and pairs of the others."""
    from moe_comm import Group
    from moe_comm.launch.slab_soak_run import Soak
    from moe_comm.launch.slab_soak_world import Plan
    from moe_comm.launch.worker import Ranks

    config = EPConfig(**TINY, timeout_s=5.0)
    ranks = Ranks(Group(), timeout_s=5.0)
    run = Soak(Plan(config=config, graphs=False, **PLAN), ranks)
    code = run.run(lambda state: os._exit(9) if context.rank == 1 else None)
    return code, run.hangs, run.errors, run.done


@pytest.mark.slow
def test_a_lost_rank_is_a_hang() -> None:
    with RankPool(2) as pool:
        results = pool.outcomes(lost, timeout_s=60.0)
    assert "exit code 9" in str(results[1])
    code, hangs, errors, done = results[0]
    assert (code, hangs, done) == (124, 1, 15)
    assert "PeerTimeoutError" in errors[0]


def checksums(context: RankContext) -> None:
    """What differs in one row, id, weight, place or count differs in the sum of its source."""
    from moe_comm.launch.slab_soak_calls import Member

    config = EPConfig(**TINY, dispatch_wire="fp8")
    with context.communicator(config, "c10d:dense") as comm:
        member = Member(comm, (9,), num_lanes=1, max_delay=0)
        lane = member.lanes[9][0]
        torch.manual_seed(context.rank)
        member.draw(9, lane, 9)
        lane.ids.copy_(torch.arange(36).view(9, 4) % 12)
        lane.weights.copy_(1 + torch.arange(4.0) % 2)
        d = comm.dispatch(lane.x, lane.ids, lane.weights)
        whole = member.received(d)
        sums = comm.group.all_gather(member.sent(lane, 9).tolist())
        assert whole.tolist() == [sums[source][comm.rank] for source in range(comm.num_ranks)]
        source, token, choice = (d.topk_idx >= 0).nonzero()[0].tolist()
        other = next(t for t in range(9) if t != token and bool((d.topk_idx[source, t] >= 0).any()))

        def edited(name: str) -> torch.Tensor:
            return getattr(d, name).clone()

        rows, scales, ids, weights, counts = (
            edited(n) for n in ("rows", "scales", "topk_idx", "topk_weights", "num_tokens_per_rank")
        )
        rows[source, token].view(torch.uint8)[3] ^= 1
        scales[source, token] *= 2
        ids[source, token, choice] = (ids[source, token, choice] + 1) % 6
        weights[source, token, choice] += 1
        counts[source] -= 1
        swapped = edited("rows")
        swapped[source, [token, other]] = swapped[source, [other, token]]
        for name, tensor in {
            "rows": rows, "scales": scales, "topk_idx": ids, "topk_weights": weights,
            "num_tokens_per_rank": counts,
        }.items():  # fmt: skip
            differs = member.received(dataclasses.replace(d, **{name: tensor})) != whole
            assert differs.nonzero().flatten().tolist() == [source], name
        assert (member.received(dataclasses.replace(d, rows=swapped)) != whole).any()
        # What was not sent here does not count.
        free = edited("topk_weights")
        free[d.topk_idx < 0] = torch.nan
        assert torch.equal(member.received(dataclasses.replace(d, topk_weights=free)), whole)
        out = comm.combine(member.experts(d), d.handle)
        assert int(member.wrong(lane, out)) == 0
        out[2, 3] += 1
        assert int(member.wrong(lane, out)) == 1


def test_checksums_see_every_part() -> None:
    run_ranks(2, checksums)


def test_virtual_ranks_under_the_interpreter(tmp_path) -> None:
    out = tmp_path / "virtual.json"
    done = subprocess.run(
        [
            sys.executable, "-m", "moe_comm.launch.slab_soak", "--device", "cpu", "--virtual", "2",
            "--num-experts", "6", "--num-topk", "2", "--hidden", "48", "--pairs", "8", "--window",
            "4", "--buckets", "1,3", "--seed-counters", str(2**31 - 2), "--out", str(out),
        ],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    rows = read_json(out)["rows"]
    assert [row["mode"] for row in rows] == ["low-latency", "high-throughput"]
    assert sum(row["params"]["pairs"] for row in rows) == 8
    assert [row["wrong"] for row in rows] == [0, 0]
    assert all(row["params"]["virtual"] and row["ep_size"] == 2 for row in rows)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [(), ("--delays", "5", "--wire", "fp8")])
def test_virtual_ranks_in_graphs(tmp_path, options) -> None:
    out = tmp_path / "virtual.json"
    done = subprocess.run(
        [
            sys.executable, "-m", "moe_comm.launch.slab_soak", "--virtual", "4", "--hidden", "512",
            "--pairs", "600", "--window", "200", "--buckets", "1,16", "--seed-counters",
            str(2**31 - 100), "--out", str(out), *options,
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    rows = read_json(out)["rows"]
    assert sum(row["params"]["pairs"] for row in rows) == 600
    assert all(row["cuda_graph"] and row["wrong"] == 0 for row in rows)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled there")
def test_the_delay_compiles() -> None:
    from test_slab_compiles import compile_launch

    from moe_comm.kernels.delay import _delay_kernel

    kernel = compile_launch(_delay_kernel, (torch.zeros(6, dtype=torch.int64), 1), {"num_warps": 1})
    assert "%clock64" in kernel.asm["ptx"]


def test_it_must_know_its_ranks() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "moe_comm.launch.slab_soak", "--device", "cpu"],
        env={k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "torchrun" in done.stderr
