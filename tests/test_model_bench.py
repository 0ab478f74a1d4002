"""The model benchmark, small, on two CPU ranks: the ports agree, and the result file is valid."""

from __future__ import annotations

import subprocess
import sys

import pytest

from moe_comm.launch.results import read_json


@pytest.mark.slow
def test_small_run(tmp_path):
    target, picture = tmp_path / "model.json", tmp_path / "context.png"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    command += ["-m", "moe_comm.launch.bench_model", "--preset", "k3-tiny", "--device", "cpu"]
    command += ["--ep-shape", 28, "--prompt-tokens", 64, "--batches", "1,4", "--iters", 3]
    command += ["--contexts", "64,256", "--overlap-tokens", 8]
    command += ["--json", target, "--plot", picture]
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    # Raises where a port's first MoE layer differs from ours, so an exit of 0 says they agree.
    document = read_json(target)
    rows = document["rows"]
    for port in ("ours", "fair", "straight"):
        phases = [row["phase"] for row in rows if row["params"].get("port") == port]
        assert phases == ["ttft", "decode_step", "decode_step"]
    assert sum(row["phase"] == "kda_decode" for row in rows) == 2
    assert all(row["params"]["per_rank_shape_of_ep"] == 28 for row in rows)
    assert picture.stat().st_size > 1000
