"""Imports go downward only: launch -> model -> integrations, compat -> backends -> core -> kernels;
and importing the library does no work."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "moe_comm"
# Rooms from the bottom up; a module may import its own room and those below it.
ROOMS = ("kernels", "core", "backends", "outside", "model", "launch")
# Places where the core loads something above it by name, on purpose and when asked.
LAZY = {("moe_comm.negotiate", "moe_comm.backends")}


def room_of(module: str) -> str:
    """Room of a module of ours, by its dotted name."""
    part = module.split(".")[1] if "." in module else ""
    rooms = {
        "kernels": "kernels", "backends": "backends", "compat": "outside",
        "integrations": "outside", "model": "model", "launch": "launch",
    }  # fmt: skip
    return rooms.get(part, "core")


def modules() -> dict[str, Path]:
    """Dotted name -> file, through the links."""
    found = {}
    for path in (
        PACKAGE.rglob("*.py", recurse_symlinks=True)
        if sys.version_info >= (3, 13)
        else (
            [*PACKAGE.rglob("*.py")]
            + [p for room in ("kernels", "model", "launch") for p in (PACKAGE / room).rglob("*.py")]
        )
    ):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = path
    return found


def imports_of(name: str, path: Path) -> list[tuple[str, bool]]:
    """(module, at import time) of every import; from-imports of submodules resolved."""
    known, out = modules(), []
    tree = ast.parse(path.read_text())
    typing_only = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    in_function = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in ast.walk(node)
    }
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        now = node not in in_function
        if isinstance(node, ast.Import):
            out += [(alias.name, now) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*up, *([base] if base else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                out.append((inner if inner in known else base, now))
    return out


def test_rooms_are_found():
    names = modules()
    assert {room_of(name) for name in names} >= {"kernels", "core", "backends", "model", "launch"}
    assert "moe_comm.kernels.combine" in names
    assert "moe_comm.backends.c10d" in names


@pytest.mark.parametrize("name", sorted(modules()))
def test_imports_go_down(name):
    mine = ROOMS.index(room_of(name))
    for other, now in imports_of(name, modules()[name]):
        root = other.split(".")[0]
        assert root not in ("kernels", "model", "launch"), f"{name}: import moe_comm.{other}"
        if root != "moe_comm":
            if room_of(name) == "kernels":
                allowed = root in ("torch", "triton") or root in sys.stdlib_module_names
                # Optional kernel libraries, where one is called.
                allowed |= root == "humming" and not now
                assert allowed, f"{name} imports {other}: kernels use torch and triton alone"
            continue
        theirs = ROOMS.index(room_of(other))
        listed = any(name == above and other.startswith(below) for above, below in LAZY)
        assert theirs <= mine or listed, f"{name} ({ROOMS[mine]}) imports {other} ({ROOMS[theirs]})"


@pytest.mark.parametrize("name", sorted(n for n in modules() if room_of(n) in ("core", "backends")))
def test_triton_only_where_a_kernel_is_launched(name):
    for other, now in imports_of(name, modules()[name]):
        heavy = other.split(".")[0] in ("triton", "deep_ep", "nvshmem") or other.startswith(
            "moe_comm.kernels"
        )
        assert not (heavy and now), f"{name} imports {other} at import time"


QUIET = """
import sys, os
before = dict(os.environ)
import moe_comm
from moe_comm import backends
for name in backends.MODULES:
    backends.load(name)
import torch
assert "triton" not in sys.modules, "triton was imported"
assert not torch.cuda.is_initialized()
assert not torch.distributed.is_initialized()
assert dict(os.environ) == before, "the environment was changed"
import threading
assert threading.active_count() == 1
"""


def test_importing_does_no_work():
    done = subprocess.run([sys.executable, "-P", "-c", QUIET], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert done.stderr == ""
