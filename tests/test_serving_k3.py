"""The serving parts on the real transformer (k3-tiny), and the two commands."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from moe_comm.launch.cli import cli
from moe_comm.launch.results import read_json
from moe_comm.model.config import K3Config
from moe_comm.model.serving.modes import MODES
from moe_comm.model.serving.state_pool import StatePool
from moe_comm.model.weights.synthetic import write_checkpoint

sys.path.append(str(Path(__file__).parent))
from serving_cases import VOCAB, SmallHybrid, small_layout


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("k3-tiny")
    write_checkpoint(K3Config.preset("k3-tiny"), folder, seed=0)
    return folder


def run(*command: str, timeout: float, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == code, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def check_ranks(checkpoint: Path, num: int, timeout: float) -> None:
    script = Path(__file__).with_name("serving_ranks.py")
    reports = json.loads(
        run(str(script), str(num), str(checkpoint), timeout=timeout).splitlines()[-1]
    )
    assert sum(report["finished"] for report in reports) == num - 1
    for report in reports:
        assert report["unequal"] == []
        assert report["finished"] == report["requests"]
        assert report["rows"] >= report["requests"]
        assert report["hits"] > 0
        print(f"rank {report['rank']}: hit rate {report['hit_rate']:.2f}")


def test_requests_on_two_ranks_equal_those_of_one_at_a_time(tmp_path):
    config = dataclasses.replace(K3Config.preset("k3-tiny"), num_experts=128)
    write_checkpoint(config, tmp_path / "checkpoint", seed=0)
    check_ranks(tmp_path / "checkpoint", 9, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("num", [101, 1001])
def test_many_requests_on_two_ranks_equal_those_of_one_at_a_time(checkpoint, num):
    check_ranks(checkpoint, num, timeout=60 * num)


@pytest.mark.slow
def test_verify_state_finds_every_mode_equal(checkpoint):
    out = run(
        *("-m", "moe_comm.launch.cli", "verify-state", "--device", "cpu"),
        *("--checkpoint", str(checkpoint)),
        timeout=600,
    )
    lines = out.splitlines()
    assert [line.split()[0] for line in lines] == list(MODES)
    assert all(line.split()[1] == "equal:" for line in lines)


@pytest.mark.slow
def test_serve_bench_finishes_a_trace_and_writes_figures(checkpoint, tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        "".join(
            json.dumps(
                {
                    "arrival_s": i * 0.1,
                    "prompt_tokens": 70 + i,
                    "new_tokens": 2 + i % 3,
                    "shared_tokens": 66,
                }
            )
            + "\n"
            for i in range(8)
        )
    )
    out = run(
        *("-m", "moe_comm.launch.cli", "serve-bench", "--device", "cpu", "--nproc", "2"),
        *("--checkpoint", str(checkpoint), "--arrivals", str(trace), "--max-seqs", "2"),
        *("--snapshot-interval", "64", "--token-budget", "128"),
        *("--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png")),
        timeout=600,
    )
    assert "requests finished" in out
    rows = {row["phase"]: row for row in read_json(tmp_path / "out.json")["rows"]}
    assert rows["ttft"]["samples"] == rows["tpot"]["samples"] == 8
    assert 0 < rows["ttft"]["p50_us"] <= rows["ttft"]["p99_us"]
    totals = rows["occupancy"]["params"]
    assert totals["requests"] == 8
    assert totals["new_tokens"] == sum(2 + i % 3 for i in range(8))
    assert 0 < totals["hit_rate"] < 1
    assert 0 < totals["slots_peak"] <= 1
    assert (tmp_path / "out.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt-tokens", "9:3"], "LOW:HIGH"),
        (["--arrivals", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--checkpoint", "x", "--preset", "k3-tiny"], "one of --checkpoint and --preset"),
        (["--nproc", "2", "--tp", "3"], "divisor"),
        (["--json", "/nowhere/x.json"], "/nowhere/x.json"),
        (["--preset", "kimi-k3"], "make-checkpoint"),
    ],
)
def test_serve_bench_refuses_bad_options(arguments, message):
    done = CliRunner().invoke(cli, ["serve-bench", "--device", "cpu", *arguments])
    assert done.exit_code == 2
    assert message in done.output


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1]", "expected an object"),
        ("{", "Expecting"),
        ('{"arrival_s": 1, "prompt_tokens": 0, "new_tokens": 1}', "prompt_tokens"),
        ('{"arrival_s": -1, "prompt_tokens": 1, "new_tokens": 1}', "arrival_s"),
        ('{"arrival_s": 1, "prompt_tokens": 1, "new_tokens": 1, "x": 1}', "fields"),
        ('{"arrival_s": 1, "prompt_tokens": 1}', "new_tokens"),
        ('{"arrival_s": 0.5, "prompt_tokens": 1, "new_tokens": 1}', "ascending"),
    ],
)
def test_bad_trace_lines_are_named(tmp_path, line, message):
    trace = tmp_path / "t.jsonl"
    good = '{"arrival_s": 0.75, "prompt_tokens": 3, "new_tokens": 1}'
    trace.write_text(f"{good}\n\n{line}\n")
    done = CliRunner().invoke(cli, ["serve-bench", "--device", "cpu", "--arrivals", str(trace)])
    assert done.exit_code == 2
    assert f"{trace}:3: " in done.output
    assert message in done.output


def test_verify_state_refuses_what_is_no_checkpoint(tmp_path):
    done = CliRunner().invoke(cli, ["verify-state", "--checkpoint", str(tmp_path)])
    assert done.exit_code == 2
    assert str(tmp_path) in done.output


def test_a_difference_ends_with_a_named_place_and_a_failing_verdict(monkeypatch, capsys):
    """The verdicts of verify-state, over the small model with a fault in the pool."""
    from moe_comm.launch.state_modes import judge_all
    from moe_comm.model.serving.modes import RUNNERS, Case, Rig

    layout = small_layout()
    rig, case = Rig(SmallHybrid(layout), layout), Case.random(VOCAB, grid=8, num_new=3, seed=1)
    right = judge_all(rig, case, RUNNERS, lambda _: None)
    assert [verdict.equal for verdict in right] == [True] * 5
    copy = StatePool._copy

    def rounded(self, source, target):
        copy(self, source, target)
        self.recurrent[:, target] = self.recurrent[:, target].bfloat16().float()

    monkeypatch.setattr(StatePool, "_copy", rounded)
    capsys.readouterr()
    verdicts = judge_all(rig, case, RUNNERS, lambda _: None)
    wrong = {verdict.mode: str(verdict) for verdict in verdicts if not verdict.equal}
    assert set(wrong) == {"cached"}
    assert "cached     DIFFERENT: layer 0, recurrent, position 8" in wrong["cached"]
    assert "bf16 snapshot" in wrong["cached"]
    assert capsys.readouterr().out.splitlines() == [str(verdict) for verdict in verdicts]


FAULT = """
from moe_comm.model.serving.state_pool import StatePool

copy = StatePool._copy

def rounded(self, source, target):
    copy(self, source, target)
    self.recurrent[:, target] = self.recurrent[:, target].bfloat16().float()

StatePool._copy = rounded
"""


@pytest.mark.slow
def test_verify_state_ends_with_1_on_a_fault(checkpoint, tmp_path):
    """The whole command, with the fault in every process that it starts."""
    (tmp_path / "sitecustomize.py").write_text(FAULT)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "moe_comm.launch.cli", "verify-state", "--device", "cpu"),
            *("--checkpoint", str(checkpoint)),
        ],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 1, done.stdout + done.stderr[-2000:]
    lines = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert list(lines) == list(MODES)
    assert [mode for mode, line in lines.items() if "DIFFERENT" in line] == ["cached"]
    assert "layer 0, recurrent, position 64" in lines["cached"]
    assert "bf16 snapshot" in lines["cached"]
