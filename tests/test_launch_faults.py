"""Killed and stalled ranks, on gloo processes here; what a survivor must report; and the memcheck
summary. The slab's own cases and the sanitizer itself need GPUs."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest

from moe_comm.launch import sanitize
from moe_comm.launch.results import read_json
from moe_comm.launch.slab_faults import judged
from moe_comm.launch.slab_faults_rank import Settings

SETTINGS = Settings(
    cases=("kill-graph",), num_ranks=3, victim=2, device_type="cuda", backend="slab",
    timeout_s=3.0, port=1,
)  # fmt: skip
REPORT = {
    "seconds": 3.4,
    "error": {
        "type": "PeerTimeoutError", "text": "rank 2 ...", "phase": "dispatch", "peer": 2,
        "seen": 2**31 - 1, "wanted": -(2**31),
    },
    "masked_wrong": 0,
    "rebuilt_wrong": 0,
}  # fmt: skip


def reports(**changes):
    one = copy.deepcopy(REPORT)
    for name, value in changes.items():
        (one["error"] if name in one["error"] else one)[name] = value
    return {0: {"kill-graph": copy.deepcopy(REPORT)}, 1: {"kill-graph": one}, 2: {}}


def test_what_must_be_so_passes() -> None:
    row = judged(SETTINGS, "kill-graph", reports(), margin_s=2.0)
    assert (row.wrong, row.params["failures"], row.cuda_graph) == (0, [], True)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"seconds": 5.1}, "ended after 5.10 s, allowed 5"),
        ({"type": "PhaseError"}, "expected PeerTimeoutError"),
        ({"peer": 0}, "expected rank 2 in some phase"),
        ({"phase": ""}, "expected rank 2 in some phase"),
        ({"seen": None}, "counters seen below wanted, got None"),
        ({"seen": -(2**31)}, "counters seen below wanted"),
        ({"masked_wrong": 3}, "masked_wrong: 3 elements"),
        ({"rebuilt_wrong": 1}, "rebuilt_wrong: 1 elements"),
        ({"later": {"seconds": 2.0, "error": {}}}, "the next call did not fail at once"),
    ],
)
def test_each_expectation_can_fail(change, text) -> None:
    row = judged(SETTINGS, "kill-graph", reports(**change), margin_s=2.0)
    assert row.wrong == 1
    assert row.params["failures"][0].startswith("rank 1: ")
    assert text in row.params["failures"][0]


def test_silence_and_tracebacks_are_failures() -> None:
    told = reports()
    told[0] = {"start": {"traceback": "no store"}}
    told[1]["kill-graph"] = {"traceback": "it broke"}
    row = judged(SETTINGS, "kill-graph", told, margin_s=2.0)
    assert row.params["failures"] == ["rank 0: no report; no store", "rank 1: it broke"]


@pytest.mark.parametrize(
    "case", ["kill-eager", pytest.param("stall-eager", marks=pytest.mark.slow)]
)
def test_a_rank_is_lost_and_the_others_go_on(tmp_path, case) -> None:
    out = tmp_path / "faults.json"
    done = subprocess.run(
        [
            sys.executable, "-m", "moe_comm.launch.slab_faults", "--device", "cpu", "--nproc", "2",
            "--timeout", "1.5", "--margin", "4", "--cases", f"{case},kill-graph", "--out", str(out),
        ],
        capture_output=True,
        text=True,
        timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = read_json(out)["rows"]
    assert (row["phase"], row["wrong"], row["params"]["case"]) == ("fault", 0, case)
    survivor = row["params"]["ranks"]["0"]
    assert survivor["error"]["peer"] == 1
    assert survivor["error"]["phase"] == "dispatch"
    assert survivor["rebuilt_wrong"] == 0
    assert survivor.get("masked_wrong", 0) == 0


def test_the_sanitizer_is_read() -> None:
    log = (
        "========= COMPUTE-SANITIZER\n========= Invalid __global__ write of size 16 bytes\n"
        "=========     at _put+0x30\n========= ERROR SUMMARY: 2 errors\n"
        "========= ERROR SUMMARY: 1 error\n"
    )
    assert sanitize.read_log(log) == (3, ["Invalid __global__ write of size 16 bytes"])
    assert sanitize.read_log("killed before") == (None, [])
    output = (
        "tests/test_slab_gpu.py::test_virtual_pair[tokens1-low-latency] PASSED [ 10%]\n"
        "tests/test_slab_gpu.py::test_a PASSED [20%]\ntests/test_slab_gpu.py::test_b FAILED [30%]\n"
        "FAILED tests/test_slab_gpu.py::test_b - assert\n"
    )
    assert sanitize.outcomes(output) == {"passed": 2, "failed": 1}
    command = sanitize.command_of("compute-sanitizer", sanitize.Path("x.log"), 9, ["a.py"])
    assert "--tool" in command
    assert command[-1] == "a.py"


def test_tests_under_the_sanitizer_end_in_time_and_are_summed_up(tmp_path) -> None:
    """A stand-in for the sanitizer runs what follows its log's name and writes a summary after it:
    that must still come when the tests are cut short."""
    log = tmp_path / "x.log"
    stand_in = tmp_path / "sanitizer"
    stand_in.write_text(
        '#!/usr/bin/env bash\nlog=$6\nshift 6\n"$@"\n'
        'echo "========= ERROR SUMMARY: 0 errors" > $log\n'
    )
    stand_in.chmod(0o755)
    slow = tmp_path / "test_slow.py"
    slow.write_text("import time\ndef test_a(): pass\ndef test_b(): time.sleep(60)\n")
    command = sanitize.command_of(str(stand_in), log, 4, [str(slow)])
    output, timed_out = sanitize.run_limited(command, 4)
    assert timed_out
    assert sanitize.outcomes(output) == {"passed": 1}
    assert sanitize.read_log(log.read_text()) == (0, [])
