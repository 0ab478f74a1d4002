"""Cases that run under Triton's interpreter: all that a session has, in two processes beside it.

The interpreter is chosen when triton is imported, hence processes of their own. A file marks such
cases `inside`, and asks for them in a test that is `outside` and takes the fixture `interpreted`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_REASON = "runs inside test_under_the_interpreter"
inside = pytest.mark.skipif(not INTERPRETED, reason=_REASON)
outside = pytest.mark.skipif(INTERPRETED, reason="the outer process starts the inner one")
# In the inner processes: which of how many.
PART = "MOE_COMM_TESTS_PART"
_PARTS = 2
_inner: list[tuple[subprocess.Popen[str], IO[str]]] = []


def is_inside(item: pytest.Item) -> bool:
    """Whether it is one of the cases."""
    return any(mark.kwargs.get("reason") == _REASON for mark in item.iter_markers("skipif"))


def start(session: pytest.Session) -> None:
    """Begin the inner processes for all files whose cases the session wants, behind its other
    tests: these go first wherever there is something for both to do."""
    files = sorted({item.path for item in session.items if "interpreted" in item.fixturenames})
    if not files or _inner:
        return
    gently = ["nice", "-n", "19"] if shutil.which("nice") else []
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", *files]
    given = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    for part in range(_PARTS):
        written = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115 - read when they have ended
        process = subprocess.Popen(
            [*gently, *command], env=given | {PART: f"{part}/{_PARTS}"},
            cwd=Path(__file__).parents[1], text=True, stdout=written, stderr=subprocess.STDOUT,
        )  # fmt: skip
        _inner.append((process, written))


def said() -> list[str]:
    """What the inner processes wrote, each with its exit code first."""
    texts = []
    for process, written in _inner:
        process.wait(timeout=500)
        written.seek(0)
        texts.append(f"exit code {process.returncode}\n{written.read()}")
    return texts


def end() -> None:
    """Nothing of the inner processes is left."""
    while _inner:
        process, written = _inner.pop()
        process.kill()
        process.wait()
        written.close()


def check(name: str, said: list[str]) -> None:
    """All cases of a file passed, and there were some."""
    lines = [line.split() for text in said for line in text.splitlines()]
    mine = [line[0] for line in lines if len(line) > 1 and f"{name}::" in line[1]]
    assert all(text.startswith(("exit code 0", "exit code 1")) for text in said), said
    bad = [text[-6000:] for text in said if text.startswith("exit code 1")]
    assert not {"FAILED", "ERROR"} & {*mine}, "\n".join(bad)
    assert "PASSED" in mine, [text[-2000:] for text in said]
