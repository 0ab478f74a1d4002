"""Test-wide habits: helper modules of this folder import by name, markers skip with a reason, slow
tests run only when asked for, and rank pools end with the session."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# Helpers (rank_pool, *_cases) are imported by name, also in the ranks' own processes, which find
# the tests' functions as tests.test_...: the pytest command leaves the repository off the path.
for folder in (Path(__file__).parents[1], Path(__file__).parent):
    sys.path.insert(0, str(folder))

import interpreter  # noqa: E402 - found by the paths above


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect slow tests unless the marker expression or a file's test id asks for them."""
    asked = "slow" in (config.option.markexpr or "") or any("::" in arg for arg in config.args)
    if not asked:
        slow = [item for item in items if item.get_closest_marker("slow")]
        if slow:
            config.hook.pytest_deselected(items=slow)
            items[:] = [item for item in items if not item.get_closest_marker("slow")]
    if interpreter.PART in os.environ:
        index, count = map(int, os.environ[interpreter.PART].split("/"))
        items[:] = [item for item in items if interpreter.is_inside(item)][index::count]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Cases under the interpreter begin with the session: one of two processors is idle for most of
    it."""
    if not (session.config.option.collectonly or interpreter.INTERPRETED):
        interpreter.start(session)


@pytest.fixture
def interpreted(request: pytest.FixtureRequest) -> Callable[[], None]:
    """Checks that the file's cases passed under Triton's interpreter."""
    return lambda: interpreter.check(request.path.name, interpreter.said())


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what this machine cannot run, and say why."""
    needed = 1 if item.get_closest_marker("gpu") else 0
    multi = item.get_closest_marker("multi_gpu")
    if multi is not None:
        needed = max(needed, int(multi.args[0]))
    if needed:
        import torch

        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if found < needed:
            pytest.skip(f"needs {needed} CUDA GPU(s), found {found}")
    if item.get_closest_marker("netns"):
        if os.geteuid() != 0:
            pytest.skip("needs root: network namespaces")
        if shutil.which("ip") is None:
            pytest.skip("needs iproute2: network namespaces")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """End every rank of the shared pools, and what runs beside the session."""
    del session
    interpreter.end()
    pool = sys.modules.get("rank_pool")
    if pool is not None:
        pool.kill_all()
