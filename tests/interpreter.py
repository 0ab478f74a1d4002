"""Cases that run under Triton's interpreter: all that a session has, in two processes.

The interpreter is chosen when triton is imported, hence processes of their own. A file marks such
cases `inside`, and asks for them in a test that is `outside` and takes the fixture `interpreted`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_REASON = "runs inside test_under_the_interpreter"
inside = pytest.mark.skipif(not INTERPRETED, reason=_REASON)
outside = pytest.mark.skipif(INTERPRETED, reason="the outer process starts the inner one")
# In the inner processes: which of how many.
PART = "MOE_COMM_TESTS_PART"
_PARTS = 2
_said: dict[Path, list[str]] = {}


def is_inside(item: pytest.Item) -> bool:
    """Whether it is one of the cases."""
    return any(mark.kwargs.get("reason") == _REASON for mark in item.iter_markers("skipif"))


def said_of(path: Path, session: pytest.Session) -> list[str]:
    """What the inner processes wrote, each with its exit code first; the first call starts them,
    for all files whose cases the session wants."""
    if path not in _said:
        files = {item.path for item in session.items if "interpreted" in item.fixturenames}
        _said.update(dict.fromkeys(files, _run(sorted(files - _said.keys()))))
    return _said[path]


def _run(files: list[Path]) -> list[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", *files]
    given = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            command, env=given | {PART: f"{part}/{_PARTS}"}, cwd=Path(__file__).parents[1],
            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for part in range(_PARTS)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=500)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [f"exit code {p.returncode}\n{text}" for p, text in zip(started, said, strict=True)]


def check(name: str, said: list[str]) -> None:
    """All cases of a file passed, and there were some."""
    lines = [line.split() for text in said for line in text.splitlines()]
    mine = [line[0] for line in lines if len(line) > 1 and f"{name}::" in line[1]]
    assert all(text.startswith(("exit code 0", "exit code 1")) for text in said), said
    bad = [text[-6000:] for text in said if text.startswith("exit code 1")]
    assert not {"FAILED", "ERROR"} & {*mine}, "\n".join(bad)
    assert "PASSED" in mine, [text[-2000:] for text in said]
