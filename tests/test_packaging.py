"""One import root: links inside moe_comm, no __init__ in the root folders, data in place."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("kernels", "model", "launch")


@pytest.mark.parametrize("room", ROOMS)
def test_links_are_relative_and_inside(room):
    link = ROOT / "moe_comm" / room
    assert link.is_symlink()
    assert str(link.readlink()) == f"../{room}"
    assert link.resolve() == ROOT / room


@pytest.mark.parametrize("room", ROOMS)
def test_no_init_in_the_root_folders(room):
    """With one, the folder would shadow other packages of its name."""
    assert not list((ROOT / room).rglob("__init__.py"))


IMPORTS = (
    "import moe_comm, moe_comm.kernels.mxfp4_format, moe_comm.model.config, moe_comm.launch.cli; "
    "print(moe_comm.__file__)"
)


@pytest.mark.parametrize("where", ["root", "elsewhere"])
@pytest.mark.parametrize("flags", [[], ["-P"]])
def test_everything_imports_as_moe_comm(where, flags, tmp_path):
    folder = ROOT if where == "root" else tmp_path
    done = subprocess.run(
        [sys.executable, *flags, "-c", IMPORTS], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).resolve() == ROOT / "moe_comm" / "__init__.py"


def test_the_command_is_installed():
    (script,) = entry_points(group="console_scripts", name="moe-bench")
    assert script.value == "moe_comm.launch.cli:main"


def test_pyproject_says_what_is_needed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    meta, setup = project["project"], project["tool"]["setuptools"]
    assert meta["requires-python"] == ">=3.11"
    assert {"torch>=2.11", "numpy"} <= set(meta["dependencies"])
    assert any(need.startswith("triton>=3.6") for need in meta["dependencies"])
    extras = set(meta["optional-dependencies"])
    assert {"nvshmem", "deepep", "model", "gemm", "mooncake", "plot", "test"} <= extras
    assert setup["packages"]["find"]["include"] == ["moe_comm*"]
    markers = " ".join(project["tool"]["pytest"]["ini_options"]["markers"])
    assert all(name in markers for name in ("gpu:", "multi_gpu(n):", "netns:", "slow:"))


def test_the_trace_ships_inside():
    from importlib.resources import files

    data = files("moe_comm.launch") / "data" / "routing_trace.npz"
    assert data.is_file()
    assert (ROOT / "moe_comm" / "py.typed").is_file()


def test_the_command_line_starts_without_torch() -> None:
    """A typo is answered, and Ctrl-C heard, before seconds of imports."""
    code = "import sys, moe_comm.launch.cli; print('torch' in sys.modules, 'triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_every_public_name_is_there() -> None:
    import moe_comm

    assert set(moe_comm.__all__) <= set(dir(moe_comm))
    for name in moe_comm.__all__:
        assert getattr(moe_comm, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = moe_comm.no_such_name
