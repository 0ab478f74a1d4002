"""Run the GPU tests with a JSON summary that grows with every test; see gpu_check.sh."""

from __future__ import annotations

import datetime
import json
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_comm.launch.results import SCHEMA_VERSION, device_facts, git_facts, versions

COMMAND = "gpu_check"


class Summary:
    """A pytest plugin: the outcome of each test, written after each."""

    def __init__(self, path: Path, started: datetime.datetime) -> None:
        self.path = path
        count = torch.cuda.device_count()
        self.document: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "command": COMMAND,
            "started": started.isoformat(timespec="seconds"),
            "git": git_facts(),
            "versions": versions(),
            "devices": [device_facts(i, torch.device("cuda", i)) for i in range(count)],
            "complete": False,
            "counts": {},
            "tests": [],
        }

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One entry a test: its call, or the phase that kept it from being called."""
        if report.when != "call" and report.outcome == "passed":
            return
        outcome = "error" if report.when != "call" and report.failed else report.outcome
        entry = {
            "id": report.nodeid,
            "outcome": outcome,
            "seconds": round(report.duration, 3),
            "reason": _reason(report),
        }
        self.document["tests"].append(entry)
        self.write()

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """The end: complete unless it was interrupted."""
        del session
        self.document["complete"] = int(exitstatus) in (0, 1)
        self.write()

    def write(self) -> None:
        """Replace the file."""
        counts = Counter(test["outcome"] for test in self.document["tests"])
        self.document["counts"] = dict(sorted(counts.items()))
        beside = self.path.with_suffix(".part")
        beside.write_text(json.dumps(self.document, indent=1) + "\n")
        beside.replace(self.path)


def _reason(report: pytest.TestReport) -> str:
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    if report.failed:
        return str(report.longrepr)[-2000:]
    return ""


def summary_path(directory: Path, started: datetime.datetime) -> Path:
    """<date>_<device>x<n>_gpu-check.json."""
    count = torch.cuda.device_count()
    name = torch.cuda.get_device_name(0) if count else "none"
    short = name.lower().replace(" ", "-")
    return directory / f"{started:%Y-%m-%d}_{short}x{count}_gpu-check.json"


def main(arguments: list[str]) -> int:
    """DIRECTORY SECONDS [PYTEST ARGUMENTS...]; pytest's exit code, or 124 past SECONDS."""
    directory, seconds = Path(arguments[0]), int(arguments[1])
    directory.mkdir(parents=True, exist_ok=True)
    started = datetime.datetime.now(datetime.UTC)
    summary = Summary(summary_path(directory, started), started)
    summary.write()

    def out_of_time(number: int, frame: object) -> None:
        del number, frame
        pytest.exit(f"over {seconds} s", returncode=124)

    signal.signal(signal.SIGALRM, out_of_time)
    signal.alarm(seconds)
    code = pytest.main(
        ["-m", "gpu or multi_gpu", "-p", "no:cacheprovider", *arguments[2:]], plugins=[summary]
    )
    print(f"{summary.path}: {summary.document['counts']}", file=sys.stderr)
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
