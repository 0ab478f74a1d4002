"""compute-sanitizer's memcheck over the slab's virtual-rank tests on one GPU, summarised as JSON.

    python -m moe_comm.launch.sanitize DIRECTORY [SECONDS] [PYTEST ARGUMENTS...]

Torch's caching of device memory is off meanwhile, so that every tensor is an allocation of its own
and a byte past its end is seen. Exit codes: 0 clean and all tests passed, 1 not, 3 no GPU or no
compute-sanitizer, or one that refuses the device, 124 over SECONDS.
"""

from __future__ import annotations

import datetime
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from moe_comm.config import EPConfig
from moe_comm.launch import results
from moe_comm.launch.gpu_check import summary_path

# Small enough for the sanitizer, and each a way of its own: both modes, quantized wires, 8 ranks,
# choices that are ranked and that are counted.
SELECTION = (
    "test_virtual_pair and (tokens1 or tokens2) or test_virtual_choices and tokens0"
    " or test_virtual_wires and 2880 or test_virtual_ranks and 8 or test_virtual_uneven"
)
DEFINITIONS = {
    "memcheck": "params.tests by outcome under compute-sanitizer --tool memcheck; wrong: errors "
    "that it reported, failed tests added",
}
# The tests end themselves after so many seconds, as if interrupted: the sanitizer, which is left
# alone, sums up then.
_LIMITED = (
    "import signal, sys, pytest; signal.signal(signal.SIGALRM, signal.default_int_handler); "
    "signal.alarm(int(sys.argv[1])); sys.exit(pytest.main(sys.argv[2:]))"
)
# For summing up.
_GRACE_S = 20
_SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error")
_REFUSED = re.compile(r"Device not supported|not supported on this|Unable to find.*injection", re.I)
_OUTCOMES = re.compile(r"^\S+::.* (PASSED|FAILED|ERROR|SKIPPED)\b", re.M)


def command_of(sanitizer: str, log: Path, seconds: int, arguments: list[str]) -> list[str]:
    """The command line of tests that end after `seconds`."""
    tests = arguments or ["tests/test_slab_gpu.py", "-k", SELECTION]
    return [
        sanitizer, "--tool", "memcheck", "--target-processes", "application-only", "--log-file",
        str(log), sys.executable, "-c", _LIMITED, str(seconds), "-v", "--tb=short", "-p",
        "no:cacheprovider", *tests,
    ]  # fmt: skip


def read_log(text: str) -> tuple[int | None, list[str]]:
    """Errors of all processes, None where no summary was written, and the first lines of what was
    found."""
    totals = [int(count) for count in _SUMMARY.findall(text)]
    found = [
        line.removeprefix("=========").strip()
        for line in text.splitlines()
        if re.search(r"Invalid|out of bounds|misaligned|Program hit|Leaked", line)
    ]
    return (sum(totals) if totals else None), found[:10]


def outcomes(text: str) -> dict[str, int]:
    """Tests by outcome, as far as pytest came."""
    return dict(Counter(name.lower() for name in _OUTCOMES.findall(text)))


def main(arguments: list[str]) -> int:
    """See the module."""
    directory, seconds = Path(arguments[0]), int(arguments[1]) if len(arguments) > 1 else 120
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None or not torch.cuda.is_available():
        print("sanitize: needs a CUDA GPU and compute-sanitizer on the PATH", file=sys.stderr)
        return 3
    directory.mkdir(parents=True, exist_ok=True)
    started = datetime.datetime.now(datetime.UTC)
    path = summary_path(directory, started)
    path = path.with_name(path.name.replace("gpu-check", "memcheck"))
    log = path.with_suffix(".log")
    output, timed_out = run_limited(command_of(sanitizer, log, seconds, arguments[2:]), seconds)
    text = log.read_text() if log.exists() else ""
    errors, found = read_log(text)
    tests = outcomes(output)
    failed = tests.get("failed", 0) + tests.get("error", 0)
    params: dict[str, Any] = {
        "tests": tests,
        "errors": errors,
        "found": found,
        "timed_out": timed_out,
        "seconds": round((datetime.datetime.now(datetime.UTC) - started).total_seconds(), 1),
        "virtual": True,
    }
    refused = bool(_REFUSED.search(text + output))
    wrong = None if errors is None or refused else errors + failed
    if wrong is None:
        # Where the sources lie tells nothing.
        params["reason"] = re.sub(r"\S*/(?=\w+\.py)", "", (text + output)[-600:])
    _write(path, started, params, wrong)
    print(f"memcheck: {errors} errors, tests {tests}, {params['seconds']} s: {path}")
    if timed_out:
        return 124
    if wrong is None:
        return 3
    return 1 if wrong or not tests.get("passed") else 0


def run_limited(command: list[str], seconds: int) -> tuple[str, bool]:
    """(output, whether it ran over its seconds). What does not end by itself is killed."""
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    began = time.monotonic()
    try:
        output, _ = process.communicate(timeout=seconds + _GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    return output, time.monotonic() - began >= seconds


def _write(
    path: Path, started: datetime.datetime, params: dict[str, Any], wrong: int | None
) -> None:
    config = EPConfig.preset("kimi-k3")
    row = results.Row(
        backend="slab", mode="virtual", phase="memcheck", layout="expert",
        num_tokens=config.max_tokens_per_rank, hidden=config.hidden, num_topk=config.num_topk,
        num_experts=config.num_experts, ep_size=1, wire="bf16", routing="random", params=params,
        wrong=wrong,
    )  # fmt: skip
    document = results.new_document(
        command="sanitize", argv=[], started=started,
        devices=[results.device_facts(0, torch.device("cuda", 0))],
        topology={"num_ranks": 1, "num_nodes": 1, "transport": "none"}, config=config,
        definitions=DEFINITIONS, rows=[row],
    )  # fmt: skip
    results.write_json(str(path), document)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -m moe_comm.launch.sanitize DIRECTORY [SECONDS] [PYTEST ARGUMENTS]")
    sys.exit(main(sys.argv[1:]))
