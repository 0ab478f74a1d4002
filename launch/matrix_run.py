"""One task of the matrix: a process of its own, ended in time, its rows taken over."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from moe_comm.launch import results
from moe_comm.launch.matrix_store import Store
from moe_comm.launch.matrix_tasks import OUT, Task

# Of a call's time, what it takes to end a process and write the file.
_SPARE_S = 5.0


def run_task(task: Task, store: Store, left: float) -> bool:
    """Run a task and take its rows, or keep why there are none; False where this call's time ends
    before the task's own bound."""
    bound, began = min(task.seconds, left - _SPARE_S), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "part.json"
        code, said = run_process([part.replace(OUT, str(out)) for part in task.command], bound)
        seconds = time.monotonic() - began
        if code is None and bound < task.seconds:
            return False
        if out.exists() and code is not None:
            store.measured(task, results.read_json(out))
            verdict = "done"
        else:
            what = f"exit code {code}" if code is not None else f"over {bound:g} s"
            store.failed(task, f"{what}: {said}"[:400])
            verdict = f"nothing ({what}: {said[:160]})"
    print(f"{task.name}: {verdict}, {seconds:.0f} s", file=sys.stderr, flush=True)
    return True


def run_process(command: list[str], seconds: float) -> tuple[int | None, str]:
    """(exit code, None past the bound; the last thing it said on stderr)."""
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            [sys.executable, *command], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=said, start_new_session=True,
        )  # fmt: skip
        code: int | None = None
        try:
            code = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            # A launcher takes its ranks along.
            os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        said.seek(0)
        lines = [line.strip() for line in said if line.strip()]
    telling = [line for line in lines if "rror" in line]
    return code, (telling or lines or ["it said nothing"])[-1]
