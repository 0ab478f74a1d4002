"""The README's promises that can be run: its example, its option and variable tables."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from moe_comm import env
from moe_comm.launch import run
from moe_comm.launch.cli import COMMANDS

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text()


def test_the_example_runs_under_torchrun(tmp_path):
    block = re.search(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert block is not None
    script = tmp_path / "example.py"
    script.write_text(block.group(1))
    done = subprocess.run(
        [
            sys.executable, "-P", "-m", "torch.distributed.run", "--standalone",
            "--nproc-per-node", "2", str(script),
        ],
        capture_output=True,
        text=True,
        # Two ranks may be more than there are GPUs.
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_every_option_of_run_has_a_line():
    for parameter in run.command.params:
        if getattr(parameter, "hidden", False):
            continue
        assert any(f"`{name}`" in TEXT for name in parameter.opts), parameter.opts


def test_every_command_has_a_line():
    table = TEXT[TEXT.index("| command | does |") :].split("\n\n", 1)[0]
    assert re.findall(r"`([a-z-]+)`", table) == list(COMMANDS)


def test_every_variable_has_a_line():
    for variable in env.VARIABLES:
        assert f"| `{variable.name}` | {variable.kind} |" in TEXT


def test_set_up_is_the_two_commands():
    assert "\npip install -e . && moe-bench run\n" in TEXT
    test_command = "pip install -e '.[test]' && pytest"
    assert f"\n{test_command}\n" in TEXT
    assert (ROOT / ".ci" / "run").read_text().rstrip().endswith(test_command)


def test_paths_and_commands_that_it_names_exist():
    for path in re.findall(r"`((?:launch|results|moe_comm|kernels|tests)/[\w./]*\w)`", TEXT):
        assert (ROOT / path).exists(), path
    for command in re.findall(r"moe-bench ([a-z-]+)", TEXT):
        assert command in COMMANDS, command
