"""moe-bench generate as a user runs it, and the pieces of generation."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from moe_comm.launch.generate import command
from moe_comm.model.config import K3Config
from moe_comm.model.sampling import Sampling

CONFIG = K3Config.preset("k3-tiny")


def moe_bench(*arguments, timeout=120):
    return subprocess.run(
        [sys.executable, "-P", "-m", "moe_comm.launch.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("generate") / "checkpoint"
    # Five layers have one of each kind.
    done = moe_bench("make-checkpoint", "--num-experts", 32, "--num-layers", 5, directory)
    assert done.returncode == 0, done.stderr
    return directory


PROMPTS = ("--prompt-ids", "5,6,7,8,9", "--prompt-ids", "1 2 3", "--prompt-ids", "300")


def lines(done):
    assert done.returncode == 0, done.stderr
    rows = [[int(i) for i in line.split()] for line in done.stdout.splitlines()]
    assert all(0 <= i < CONFIG.vocab_size for row in rows for i in row)
    return rows


def test_placements_generate_the_same_tokens(checkpoint):
    """Batch-invariant numerics: two data-parallel ranks, or one group of two; the same tokens.
    Three prompts: one rank has two of them, so batches differ as well."""
    common = ("generate", "--checkpoint", checkpoint, "--device", "cpu", "--nproc", 2)
    common += ("--batch-invariant", "--max-new", 3, "--no-stop", *PROMPTS)
    apart, together = lines(moe_bench(*common)), lines(moe_bench(*common, "--tp", 2))
    assert [len(row) for row in apart] == [3, 3, 3]
    assert apart == together


@pytest.mark.slow
def test_the_default_command_twice():
    arguments = ("generate", "--preset", "k3-tiny", "--device", "cpu", "--nproc", 2)
    first, second = (moe_bench(*arguments, "--max-new", 8) for _ in range(2))
    assert len(lines(first)[0]) == 8
    assert first.stdout == second.stdout


@pytest.mark.slow
def test_sampled_tokens_follow_the_seed(checkpoint):
    common = (
        "generate",
        "--checkpoint",
        checkpoint,
        "--device",
        "cpu",
        "--max-new",
        6,
        "--no-stop",
    )
    common += ("--temperature", 1.0, "--top-p", 0.9, *PROMPTS)
    made = {seed: lines(moe_bench(*common, "--seed", seed)) for seed in (1, 2)}
    assert made[1] == lines(moe_bench(*common, "--seed", 1))
    assert made[1] != made[2]


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_a_killed_rank_ends_the_command(checkpoint, tp):
    """Exit code 124 in bounded time, no tokens on stdout, no process left."""
    options = ("generate", "--checkpoint", checkpoint, "--device", "cpu", "--nproc", 2, "--tp", tp)
    options += ("--max-new", 5000, "--no-stop", "--timeout", 5)
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "moe_comm.launch.cli", *map(str, options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        said = ""
        while "layer 9 of 9" not in said:
            line = process.stderr.readline()
            assert line, said
            said += line
        listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        ranks = [int(pid) for pid in listed]
        assert len(ranks) == 2
        time.sleep(2)
        os.kill(ranks[1], signal.SIGKILL)
        out, said = process.communicate(timeout=90)
    finally:
        process.kill()
    assert process.returncode == 124, said
    assert out == ""
    assert "rank 1 was killed" in said
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "expected one of --checkpoint and --preset"),
        (("--preset", "kimi-k3"), "expected one of k3-tiny"),
        (("--preset", "k3-tiny", "--nproc", "3", "--tp", "2"), "expected a divisor of --nproc 3"),
        (("--preset", "k3-tiny", "--prompt-ids", "1,x"), "expected token ids like 1,2,3"),
        (("--preset", "k3-tiny", "--prompt-ids", ""), "expected at least one id"),
        (("--checkpoint", "/nonexistent"), "/nonexistent/config.json"),
    ],
)
def test_usage(arguments, message, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    result = CliRunner().invoke(command, ["--device", "cpu", *arguments])
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())


def test_ids_outside_the_vocabulary(checkpoint):
    result = CliRunner().invoke(
        command, ["--checkpoint", str(checkpoint), "--device", "cpu", "--prompt-ids", "1,512"]
    )
    assert result.exit_code == 2
    assert "expected ids below 512, got 512" in result.output


class TestSampling:
    def test_greedy_takes_the_lowest_of_equals(self):
        logits = torch.tensor([[0.0, 3.0, 3.0, -1.0], [2.0, 2.0, 1.0, 2.0]])
        assert Sampling().choose(logits, [(0, 1), (1, 1)]) == [1, 0]

    def test_frequencies_and_top_p(self):
        p = torch.tensor([0.5, 0.25, 0.15, 0.1])
        draws = 4000
        rows = p.log().expand(draws, 4)
        of = [(7, i) for i in range(draws)]
        counts = Counter(Sampling(temperature=1.0, seed=3).choose(rows, of))
        for token, wanted in enumerate(p.tolist()):
            assert abs(counts[token] / draws - wanted) < 0.03, counts
        kept = Counter(Sampling(temperature=1.0, top_p=0.75, seed=3).choose(rows, of))
        assert set(kept) == {0, 1}, "the smallest set that reaches 0.75"
        assert abs(kept[0] / draws - 2 / 3) < 0.03
        cold = Counter(Sampling(temperature=0.05, seed=3).choose(rows, of))
        assert set(cold) == {0}

    def test_a_draw_depends_on_seed_request_and_count_alone(self):
        logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
        sampling = Sampling(temperature=1.0, seed=9)
        together = sampling.choose(logits, [(0, 4), (1, 4), (2, 9)])
        alone = [
            sampling.choose(logits[i : i + 1], [of])[0]
            for i, of in enumerate([(0, 4), (1, 4), (2, 9)])
        ]
        assert together == alone

    def test_bad_options(self):
        with pytest.raises(ValueError, match="top_p: expected in"):
            Sampling(top_p=0.0)
        with pytest.raises(ValueError, match="temperature: expected at least 0"):
            Sampling(temperature=-1.0)
