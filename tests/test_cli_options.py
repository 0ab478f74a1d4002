"""The command line's surface: frozen options, exit codes of bad input, hints for typos."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from moe_comm import EPConfig, Topology, backends
from moe_comm.backends import deepep_facts, slab_modes
from moe_comm.launch import check, doctor, list_, run
from moe_comm.launch.cli import COMMANDS, cli

SHAPE = ["--preset", "--num-experts", "--num-topk", "--hidden"]
RANKS = ["--device", "--nproc", "--timeout", "--seed"]
OUTPUT = ["--json", "--csv", "--markdown", "--quiet", "-q"]
# A new option needs a line here and one in the README.
OPTIONS = {
    run: [
        *SHAPE, *RANKS, *OUTPUT, "--backend", "--baseline", "--no-baseline", "--num-tokens",
        "--wire", "--combine-wire", "--routing", "--phase", "--layout", "--reduction", "--iters",
        "--warmup", "--cuda-graph", "--no-cuda-graph", "--calls-in-a-row", "--flush-l2",
        "--no-flush-l2", "--check", "--no-check", "--limit", "--no-limit", "--debug-flip-bit",
        "--experts", "--emulate-ep",
    ],
    check: [
        *SHAPE, *RANKS, *OUTPUT, "--backend", "--num-tokens", "--wire", "--combine-wire",
        "--routing", "--layout", "--debug-flip-bit",
    ],
    doctor: [*SHAPE, "--ep", "--json"],
    list_: [*SHAPE, "--ep", "--json"],
}  # fmt: skip


@pytest.mark.parametrize("module", OPTIONS, ids=lambda module: module.__name__.split(".")[-1])
def test_options_are_frozen(module):
    given = [
        name
        for parameter in module.command.params
        for name in [*parameter.opts, *parameter.secondary_opts]
    ]
    assert sorted(given) == sorted(OPTIONS[module])


def test_debug_switches_are_hidden():
    text = CliRunner().invoke(run.command, ["--help"]).output
    assert "--flush-l2" in text
    assert "debug" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--preset", "kimi-k4"], "did you mean 'kimi-k3'"),
        (["run", "--preset", "x"], "expected one of kimi-k3, kimi-k3-wide, deepseek-v3"),
        (["run", "--backend", "c10b"], "did you mean 'c10d'"),
        (["run", "--backend", "c10d:exat"], "did you mean 'c10d:exact'"),
        (["run", "--routing", "zpf:1"], "did you mean 'zipf'"),
        (["run", "--routing", "trace:/no/such.npz"], "no such file"),
        (["run", "--wire", "fp9"], "did you mean 'fp8'"),
        (["run", "--num-tokens", "-1"], "whole number >= 0"),
        (["run", "--num-tokens", "1,,2"], "separated by commas"),
        (["run", "--nproc", "0"], "0 is not in the range"),
        (["run", "--iters", "0"], "0 is not in the range"),
        (["run", "--timeout", "0"], "not in the range"),
        (["run", "--phase", "dispach"], "did you mean 'dispatch'"),
        (["run", "--num-topk", "897"], "num_topk: expected at most num_experts = 896"),
        (["run", "--device", "gpu0"], "--device"),
        (["run", "--json", "/no/such/dir/out.json"], "directory that can be written"),
        (["run", "--json", "-", "--csv", "-"], "at most one on stdout"),
        (["run", "--no-such-option"], "No such option"),
        (["check", "--routing", "uniform:2"], "without an argument"),
        (["check", "--wire", "bf61"], "did you mean 'bf16'"),
        (["generate", "--preset", "k3-tiny", "--backend", "c10"], "'c10' is not one of"),
        (["serve-bench", "--backend", "slab:low"], "expected one of slab:auto, slab:low-latency"),
        (["doctor", "--preset", "kimi"], "did you mean"),
        (["rum"], "Did you mean 'run'"),
    ],
)
def test_bad_input_exits_with_2_before_any_rank_starts(arguments, message, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 2, done.output
    assert message in done.output


def test_missing_accelerator_exits_with_3():
    done = CliRunner().invoke(cli, ["run", "--device", "mps"])
    assert done.exit_code == 3
    assert "no such accelerator" in done.output
    done = CliRunner().invoke(cli, ["run", "--device", "cpu", "--cuda-graph"])
    assert done.exit_code == 3


def test_help_is_quick_to_say_what_there_is():
    text = CliRunner().invoke(cli, ["--help"]).output
    for name, (_, line) in COMMANDS.items():
        assert name in text
        assert line in " ".join(text.split())


def test_entry_point_returns_the_exit_code():
    done = subprocess.run(
        [sys.executable, "-P", "-m", "moe_comm.launch.cli", "run", "--preset", "kimi-k4"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert "kimi-k3" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("rank", "outcome", "code", "said"),
    [
        (0, "None", 0, ""),
        (0, "7", 7, ""),
        (0, "click.UsageError('no such flag')", 2, "no such flag"),
        (1, "click.UsageError('no such flag')", 2, ""),
        (1, "KeyboardInterrupt()", 130, "interrupted"),
    ],
)
def test_a_command_ends_with_its_exit_code(rank, outcome, code, said):
    program = (
        "import click\n"
        "from moe_comm.launch import spawn\n"
        "@click.command()\n"
        "def command():\n"
        f"    outcome = {outcome}\n"
        "    if isinstance(outcome, BaseException):\n"
        "        raise outcome\n"
        "    return outcome\n"
        "spawn.run_command(command, quiet_ranks=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "RANK": str(rank)},
        timeout=60,
    )
    assert done.returncode == code
    assert done.stdout == ""
    assert said in done.stderr
    assert bool(done.stderr.strip()) == bool(said)


def test_every_mode_is_known_before_a_rank_starts():
    config = EPConfig(num_experts=16, num_topk=2, hidden=64, max_tokens_per_rank=8)
    topology = Topology(
        num_ranks=2, node_of_rank=(0, 1), device_type="cpu", device_names=("a", "b"),
        peer_access=False, transport="gloo",
    )  # fmt: skip
    found = {
        "slab": slab_modes.MODES,
        "deepep": deepep_facts.Installed(generation=2, version="2").modes,
    }
    for name in ("c10d", "reference"):
        module = backends.load(name)
        found[name] = tuple(
            mode
            for reduction in ("rank", "node")
            for mode in module.supports(config.replace(reduction=reduction), topology).modes
        )
    assert {name: set(modes) for name, modes in found.items()} == {
        name: set(modes) for name, modes in backends.MODES.items()
    }
