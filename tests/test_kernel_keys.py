"""Keys of compiled kernels, which must not depend on what a process did before."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

# Keys of a slab's largest kernels, after others have got theirs.
_PROGRAM = """
import importlib, sys
import torch
from moe_comm.backends.kernel_keys import settle_keys
settled, first = sys.argv[1] == "settled", sys.argv[2:]
if settled:
    settle_keys()
for name in [*first, "dispatch._dispatch_kernel", "combine._combine_kernel"]:
    module, function = name.split(".")
    key = getattr(importlib.import_module(f"moe_comm.kernels.{module}"), function).cache_key
    if name not in first:
        print(key)
"""


def _keys(*args: str) -> list[str]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, *args], env=env, capture_output=True, text=True, check=True
    )  # fmt: skip
    keys = done.stdout.split()
    assert len(keys) == 2
    return keys


def test_keys_do_not_depend_on_what_was_launched_before() -> None:
    first = "slot_signals._free_slot_kernel"
    assert _keys("settled") == _keys("settled", first)
    # What this is for. Once Triton's own keys agree, there is nothing left to settle.
    assert _keys("plain") != _keys("plain", first)
