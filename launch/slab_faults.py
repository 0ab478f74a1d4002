"""Killed and stalled ranks: who notices, when, what is said, and whether the others go on.

    python -m moe_comm.launch.slab_faults --out faults.json
    python -m moe_comm.launch.slab_faults --device cpu --nproc 3 --backend c10d:exact --out f.json

Starts its own ranks, since torchrun ends the survivors of a lost one. Cases: one rank is killed
(SIGKILL) or stalls, in eager calls and inside a replayed captured graph (CUDA). The others must end
within timeout + margin with an error that names phase and peer, and on the slab the counters seen
and wanted; they mask the killed rank and go on like the reference without its experts, also by
replaying the same graph; and they build a new communicator. A row a case; row.wrong counts what was
not so, params.failures says it. Exit codes: 0 all so, 1 not, 2 usage, 3 this environment cannot.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from typing import Any

import click
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from moe_comm.config import EPConfig
from moe_comm.launch import results, spawn
from moe_comm.launch.options import (
    BadInput,
    CannotRun,
    check_outputs,
    device_type_of,
    known,
    many,
    rank_count_of,
)
from moe_comm.launch.slab_faults_cases import CASES, serve
from moe_comm.launch.slab_faults_rank import SHAPE, Report, Settings

# Cases that share processes: nobody dies in the first.
LAUNCHES = (("stall-eager", "stall-graph"), ("kill-eager",), ("kill-graph",))
DEFINITIONS = {
    "fault": "a rank is killed or stalls; params.ranks has what each other rank saw: seconds until "
    "its call ended, the error, the next call, and wrong elements after masking the rank and of a "
    "new communicator",
    "params.failures": "expectations that were not met, in words; wrong is their number",
}
# rank -> case -> report.
Reports = dict[int, dict[str, Report]]


@click.command(context_settings={"show_default": True})
@click.option("--device", default="auto", help="auto, cpu or cuda")
@click.option("--nproc", type=click.IntRange(min=2), help="ranks  [default: all GPUs, 2 on a CPU]")
@click.option("--backend", help="[default: slab; c10d:exact on a CPU]")
@click.option("--cases", default=",".join(CASES), callback=many(known(list(CASES))))
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=0.5), default=3.0)
@click.option("--margin", "margin_s", type=click.FloatRange(min=0), default=2.0)
@click.option("--victim", type=click.IntRange(min=0), help="[default: the last rank]")
@click.option("--case-seconds", type=float, default=75.0, help="bound of a case, start included")
@click.option("--out", metavar="FILE", help="the result file, written after each launch")
def command(**given: Any) -> int:
    """Kill and stall ranks; the others must notice in time, say who, and go on."""
    device_type = device_type_of(given["device"])
    count = rank_count_of(given["nproc"], device_type)
    if count < 2:
        raise CannotRun("--nproc: expected at least 2 ranks, there is 1 accelerator")
    victim = count - 1 if given["victim"] is None else given["victim"]
    if victim >= count:
        raise BadInput(f"--victim: expected a rank below {count}, got {victim}")
    check_outputs(given["out"])
    document = _document(count)
    worst = 0
    for launch in LAUNCHES:
        cases = tuple(case for case in launch if case in given["cases"])
        if device_type == "cpu":
            cases = tuple(case for case in cases if not case.endswith("graph"))
        if not cases:
            continue
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        settings = Settings(
            cases=cases,
            num_ranks=count,
            victim=victim,
            device_type=device_type,
            backend=given["backend"] or ("slab" if device_type == "cuda" else "c10d:exact"),
            timeout_s=given["timeout_s"],
            port=store.port,
        )
        reports = run_launch(settings, limit_s=given["case_seconds"] * len(cases))
        worst = max(worst, _record(document, settings, reports, given))
    return 1 if worst or not document["rows"] else 0


def _record(
    document: dict[str, Any], settings: Settings, reports: Reports, given: dict[str, Any]
) -> int:
    """Add the rows of a launch, write the file and say what came out; the most failures."""
    if not document["devices"]:
        document["devices"] = [
            told["device"] for _, told in sorted(reports.items()) if "device" in told
        ]
    worst = 0
    for case in settings.cases:
        row = judged(settings, case, reports, margin_s=given["margin_s"])
        document["rows"].append(asdict(row))
        worst = max(worst, row.wrong or 0)
        print(f"{case}: {'; '.join(row.params['failures']) or 'as it must be'}", flush=True)
        for rank, report in row.params["ranks"].items():
            error = report.get("error") or {}
            seconds = report.get("seconds", 0.0)
            print(f"  rank {rank}: {seconds:.2f} s, {error.get('text', 'no error')}", flush=True)
    if given["out"]:
        plain = json.loads(json.dumps(document))
        results.validate(plain)
        results.write_json(given["out"], plain)
    return worst


def run_launch(settings: Settings, *, limit_s: float) -> Reports:
    """Start the ranks, and gather what they report until all have ended, at most limit_s."""
    context = multiprocessing.get_context("spawn")
    reports: Reports = {rank: {} for rank in range(settings.num_ranks)}
    processes, pipes = [], {}
    try:
        for rank in reports:
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=serve, args=(rank, settings, theirs), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes[ours] = rank
        end = time.monotonic() + limit_s
        while pipes and time.monotonic() < end:
            for ready in wait(list(pipes), timeout=0.2):
                assert isinstance(ready, Connection)
                try:
                    name, report = ready.recv()
                except EOFError:
                    del pipes[ready]
                else:
                    reports[pipes[ready]][name] = report
    finally:
        for process in processes:
            process.kill()
            process.join()
    return reports


def judged(settings: Settings, case: str, reports: Reports, *, margin_s: float) -> results.Row:
    """The row of a case: every other rank must have ended as it should."""
    failures: list[str] = []
    survivors = [rank for rank in reports if rank != settings.victim]
    for rank in survivors:
        report = reports[rank].get(case)
        if report is None:
            told = reports[rank].get("start", {}).get("traceback", "")
            failures.append(f"rank {rank}: no report; {told[-300:]}")
        elif "traceback" in report:
            failures.append(f"rank {rank}: {report['traceback'][-300:]}")
        else:
            allowed = settings.timeout_s + margin_s
            failures += [
                f"rank {rank}: {text}" for text in _unmet(report, settings, case, allowed_s=allowed)
            ]
    config = EPConfig.preset("kimi-k3", **SHAPE)
    backend, _, mode = settings.backend.partition(":")
    return results.Row(
        backend=backend,
        mode=mode,
        phase="fault",
        layout="expert",
        num_tokens=config.max_tokens_per_rank,
        hidden=config.hidden,
        num_topk=config.num_topk,
        num_experts=config.num_experts,
        ep_size=settings.num_ranks,
        wire=config.dispatch_wire,
        routing="uniform",
        cuda_graph=case.endswith("graph"),
        params={
            "case": case,
            "victim": settings.victim,
            "timeout_s": settings.timeout_s,
            "margin_s": margin_s,
            "failures": failures,
            "ranks": {str(rank): reports[rank].get(case, {}) for rank in reports},
        },
        wrong=len(failures),
    )


def _unmet(report: Report, settings: Settings, case: str, *, allowed_s: float) -> list[str]:
    """What a survivor's report says that it should not."""
    found, error = [], report["error"] or {}
    if report["seconds"] > allowed_s:
        found.append(f"ended after {report['seconds']:.2f} s, allowed {allowed_s:g}")
    if error.get("type") != "PeerTimeoutError":
        found.append(f"expected PeerTimeoutError, got {error.get('text', 'no error')}")
    elif error["peer"] != settings.victim or not error["phase"]:
        found.append(f"expected rank {settings.victim} in some phase, got {error['text']}")
    elif settings.backend.startswith("slab"):
        seen, wanted = error["seen"], error["wanted"]
        # Counters wrap.
        if None in (seen, wanted) or not 0 < (wanted - seen) % 2**32 < 2**31:
            found.append(f"expected counters seen below wanted, got {seen} and {wanted}")
    later = report.get("later")
    if later is not None and (later["seconds"] > 1.0 or later["error"] is None):
        found.append(f"the next call did not fail at once: {later}")
    for name in ("masked_wrong", "rebuilt_wrong"):
        if report.get(name):
            found.append(f"{name}: {report[name]} elements")
    if case.startswith("kill") and "masked_wrong" not in report:
        found.append("the rank was not masked")
    return found


def _document(num_ranks: int) -> dict[str, Any]:
    return results.new_document(
        command="slab_faults", argv=sys.argv[1:], devices=[],
        topology={"num_ranks": num_ranks, "num_nodes": 1, "transport": "gloo"},
        config=EPConfig.preset("kimi-k3", **SHAPE), definitions=DEFINITIONS,
    )  # fmt: skip


def main() -> None:
    """Entry point."""
    spawn.run_command(command)


if __name__ == "__main__":
    main()
