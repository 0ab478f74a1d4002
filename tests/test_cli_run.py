"""moe-bench with real processes: results, wrong data, lost ranks, interrupts."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moe_comm.launch.results import read_json

CLI = [sys.executable, "-P", "-m", "moe_comm.launch.cli"]
SMALL = ["--device", "cpu", "--preset", "k3-tiny", "--timeout", "30"]
ENVIRONMENT = {
    **{k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
    "OMP_NUM_THREADS": "1",
}


def moe_bench(*arguments, timeout=120):
    return subprocess.run(
        [*CLI, *arguments], capture_output=True, text=True, env=ENVIRONMENT, timeout=timeout
    )


def test_run_writes_checked_rows_beside_the_baseline(tmp_path):
    out, table, csv = tmp_path / "out.json", tmp_path / "out.md", tmp_path / "out.csv"
    done = moe_bench(
        "run", *SMALL, "--preset", "kimi-k3", "--num-tokens", "0,16", "--iters", "3", "--warmup",
        "1", "--json", str(out), "--markdown", str(table), "--csv", str(csv),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = read_json(out)["rows"]
    got = {(r["backend"], r["mode"], r["phase"], r["num_tokens"]) for r in rows}
    for phase in ("dispatch", "combine", "round_trip"):
        for tokens in (0, 16):
            assert ("c10d", "exact", phase, tokens) in got
            assert ("per-expert", "", phase, tokens) in got
    assert all(row["wrong"] == 0 and row["samples"] == 6 for row in rows)
    for row in rows:
        if (row["backend"], row["phase"], row["num_tokens"]) == ("c10d", "dispatch", 16):
            assert 0 < row["minimum_bytes"] <= row["remote_bytes"] <= 1.03 * row["minimum_bytes"]
            assert row["limit_kind"] == "all_to_all_single"
            assert row["limit_us"] > 0
    assert "wrong elements: 0 in 12 checked rows" in done.stdout
    assert "fewer remote bytes" in done.stdout
    assert "c10d:exact" in table.read_text()
    assert csv.read_text().count("\n") == 13
    # Progress belongs to stderr.
    assert "[1/4]" in done.stderr
    assert "[1/4]" not in done.stdout


def test_json_on_stdout_is_nothing_but_json():
    done = moe_bench(
        "run", *SMALL, "--num-tokens", "4", "--iters", "2", "--json", "-", "--layout", "rows",
        "--nproc", "3", "--wire", "fp8", "--combine-wire", "mxfp8", "--phase", "combine",
        "--no-limit", "--routing", "hot:16", "-q",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["topology"]["num_ranks"] == 3
    ours = [row for row in document["rows"] if row["backend"] == "c10d"]
    assert [(r["phase"], r["layout"], r["wire"], r["wrong"]) for r in ours] == [
        ("combine", "rows", "mxfp8", 0)
    ]
    assert ours[0]["limit_us"] is None


@pytest.mark.parametrize("command", [pytest.param("run", marks=pytest.mark.slow), "check"])
def test_a_flipped_bit_exits_with_1_and_is_named(command):
    extra = ["--iters", "2", "--no-baseline"] if command == "run" else ["--wire", "bf16"]
    done = moe_bench(
        command, *SMALL, "--num-tokens", "5", "--routing", "uniform", "--backend", "c10d:exact",
        "--debug-flip-bit", "1", *extra,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert re.search(
        r"rank 1: dispatch: rows: source rank 0, token 0, column 32: expected [-\d.e]+, got "
        r"[-\d.e]+",
        done.stderr,
    )
    assert "rank 0: combine: out: token 0, column 32" in done.stderr


def test_check_covers_the_grid(tmp_path):
    out = tmp_path / "check.json"
    done = moe_bench(
        "check", *SMALL, "--nproc", "3", "--num-tokens", "0,3", "--routing",
        "uniform,hot:16+masked:0.5", "--json", str(out), "-q",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    rows = read_json(out)["rows"]
    assert {row["wire"] for row in rows} == {"bf16", "fp8", "mxfp8", "none"}
    assert {row["mode"] for row in rows} >= {"exact", "dense", "hierarchical"}
    assert [0, 1, 3] in [row["params"]["num_tokens"] for row in rows]
    assert all(row["wrong"] == 0 for row in rows)


def start(*arguments):
    """A run that goes on until it is ended, and the ids of its ranks."""
    launcher = subprocess.Popen(
        [*CLI, "run", *SMALL, "--iters", "1000000", "--no-baseline", "--no-limit", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    assert launcher.stderr is not None
    # The first progress line comes once all ranks have met.
    line = launcher.stderr.readline()
    assert "[1/1]" in line, line + launcher.stderr.read()
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    time.sleep(1.0)
    return launcher, [int(child) for child in children]


def wait_gone(processes, seconds=10.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        left = [pid for pid in processes if _runs(pid)]
        if not left:
            return
        time.sleep(0.1)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    raise AssertionError(f"orphans: {left}")


def _runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_killed_rank_is_named_by_the_others(victim):
    launcher, ranks = start("--nproc", "3", "--timeout", "10")
    os.kill(ranks[victim], signal.SIGKILL)
    began = time.monotonic()
    _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 124, errors
    # The timeout, the moment that naming takes, and a busy machine.
    assert time.monotonic() - began < 10 + 20
    assert f"rank {victim} was killed (SIGKILL)" in errors
    survivors = [rank for rank in range(3) if rank != victim]
    for rank in survivors:
        assert re.search(rf"PeerTimeoutError: .*on rank {rank}: rank {victim} did not", errors)
    assert "Traceback" not in errors
    wait_gone(ranks)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_an_interrupt_is_one_line_and_leaves_nothing(number):
    launcher, ranks = start("--nproc", "2")
    launcher.send_signal(number)
    output, errors = launcher.communicate(timeout=30)
    assert launcher.returncode == 130
    assert output == ""
    assert errors.strip() == "moe-bench: interrupted; all ranks were stopped"
    wait_gone(ranks)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_die_with_a_killed_launcher():
    launcher, ranks = start("--nproc", "2")
    launcher.kill()
    launcher.communicate(timeout=30)
    wait_gone(ranks)


def test_under_torchrun_its_ranks_are_used():
    done = subprocess.run(
        [
            sys.executable, "-P", "-m", "torch.distributed.run", "--standalone",
            "--nproc-per-node", "2", "-m", "moe_comm.launch.cli", "run", *SMALL, "--num-tokens",
            "4", "--iters", "2", "--json", "-",
        ],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["topology"]["num_ranks"] == 2
    assert all(row["wrong"] == 0 for row in document["rows"])


def test_the_end_of_a_rank_tears_nothing_down() -> None:
    """A thread of gloo's may still hold Python objects then, and would abort the process. What
    was printed is kept; a process that never was a rank ends as usual."""
    script = (
        "import atexit, sys; from moe_comm.launch import spawn; "
        "atexit.register(lambda: print('torn down')); print('said', end=' '); "
        "spawn.note_rank() if sys.argv[1] == 'rank' else None; spawn.leave(3)"
    )
    for kind, expected in (("rank", "said "), ("launcher", "said torn down\n")):
        done = subprocess.run(
            [sys.executable, "-c", script, kind], capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stdout) == (3, expected), done.stderr
