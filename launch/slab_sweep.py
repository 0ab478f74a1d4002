"""The slab's knobs on the GPUs of one host: each setting checked bit for bit, then timed captured.

    torchrun --standalone --nproc-per-node 2 -m moe_comm.launch.slab_sweep --seconds 240 --out FILE
    torchrun ... -m moe_comm.launch.slab_sweep --sections variants,crossover --out FILE
    python -m moe_comm.launch.slab_sweep --list [--sections ...]
    python -m moe_comm.launch.slab_sweep --recommend FILE

The file is written after every setting. A run ends by itself after --seconds; run again with the
same --out, it goes on with what is not in the file yet. --list and --recommend need no GPU. What
each figure means stands in the file's definitions (slab_sweep_problem). Exit codes: 0 right, 1
wrong data, 2 usage or a file, 3 this environment cannot, 124 a lost rank.
"""

from __future__ import annotations

import dataclasses
import datetime
import faulthandler
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import torch

from moe_comm.config import EPConfig
from moe_comm.launch import results, spawn
from moe_comm.launch.options import BadInput, CannotRun, check_outputs, known, many, routings_of
from moe_comm.launch.slab_sweep_compile import compile_ahead, count_compiles
from moe_comm.launch.slab_sweep_measure import Sweep
from moe_comm.launch.slab_sweep_problem import DEFINITIONS, Plan
from moe_comm.launch.slab_sweep_settings import SECTIONS, Setting, settings_of, source_digest
from moe_comm.launch.slab_sweep_table import recommend
from moe_comm.launch.worker import UNAVAILABLE, WRONG, Ranks, run_rank

TIMEOUT_S = 20.0
# The last setting may take this much longer than --seconds, then the process ends itself.
GRACE_S = 60.0
# For compiling ahead: a share of the time, and no longer than the other ranks wait for the first.
_AHEAD, _MOST_AHEAD_S = 0.4, 90.0
# After so many settings in a row that cannot run, none can: a GPU's context is lost, for example.
_MOST_FAILED = 3


@click.command(context_settings={"show_default": True})
@click.option("--sections", default=",".join(SECTIONS), callback=many(known(list(SECTIONS))),
              help="a comma list, in this order")  # fmt: skip
@click.option("--seconds", type=click.FloatRange(min=1), default=240.0, help="of the whole run")
@click.option("--calls", type=click.IntRange(1, 32), default=8, help="in a row, and slots")
@click.option("--replays", type=click.IntRange(3), default=20, help="samples of each graph")
@click.option("--routing", default="uniform", help="see moe-bench run")
@click.option("--seed", type=click.IntRange(min=0), default=0)
@click.option("--workers", type=click.IntRange(min=0), help="processes that compile ahead  "
              "[default: one a core, less two a rank]")  # fmt: skip
@click.option("--out", metavar="FILE", help="the result file, written while it grows")
@click.option("--list", "lists", is_flag=True, help="say which settings there are")
@click.option("--recommend", "source", metavar="FILE", help="read a file, print what it says")
def command(**given: Any) -> int:
    """Time the slab's knobs."""
    settings = settings_of(given["sections"])
    if given["lists"]:
        for setting in settings:
            click.echo(f"{setting.identity}  {setting}")
        return 0
    if given["source"]:
        click.echo(recommend(_read(given["source"])["rows"]))
        return 0
    if not given["out"]:
        raise BadInput("--out: expected a file")
    check_outputs(given["out"])
    if not spawn.is_rank():
        raise BadInput("expected RANK and WORLD_SIZE: start it with torchrun")
    if not torch.cuda.is_available():
        raise CannotRun("slab_sweep times CUDA GPUs, of which there are none here")
    config = EPConfig.preset("kimi-k3", num_slots=given["calls"], timeout_s=TIMEOUT_S)
    plan = Plan(
        config=config, routing=routings_of([given["routing"]], config)[0], calls=given["calls"],
        replays=given["replays"], seed=given["seed"], source=source_digest(),
    )  # fmt: skip
    faulthandler.dump_traceback_later(given["seconds"] + GRACE_S, exit=True)

    def body(ranks: Ranks) -> int:
        began = time.monotonic()
        file = ResultFile(ranks, plan, given["out"])
        left = [setting for setting in settings if setting.identity not in file.done]
        ranks.say(f"{len(left)} of {len(settings)} settings are not in the file yet")
        most = min(_AHEAD * given["seconds"], _MOST_AHEAD_S)
        _ahead(ranks, plan, left, given["workers"], seconds=most)
        sweep = Sweep(plan=plan, ranks=ranks, compiled=count_compiles())
        return run_settings(sweep, file, left, seconds=given["seconds"], began=began)

    code = run_rank(body, device_type="cuda", timeout_s=TIMEOUT_S)
    faulthandler.cancel_dump_traceback_later()
    return code


def run_settings(
    sweep: Sweep, file: ResultFile, settings: Sequence[Setting], *, seconds: float, began: float
) -> int:
    """Measure until done or out of time. Collective; returns the exit code."""
    ranks, longest, wrong, failed = sweep.ranks, 0.0, False, 0
    for index, setting in enumerate(settings):
        at = max(ranks.gather(time.monotonic() - began))
        if index and at + longest > seconds:
            ranks.say(f"out of time: {len(settings) - index} settings left; run it again")
            break
        rows = sweep.measure(setting)
        longest = max(max(ranks.gather(time.monotonic() - began)) - at, 0.8 * longest)
        file.add(rows)
        ranks.say(f"{at:6.1f} s [{index + 1}/{len(settings)}] {setting}: {_words(rows)}")
        wrong = wrong or any(row.wrong for row in rows)
        failed = failed + 1 if "error" in rows[0].params else 0
        if failed == _MOST_FAILED:
            ranks.say(f"{failed} settings one after the other could not run: the rest is left out")
            break
    if ranks.is_first:
        print(recommend(file.document["rows"]), flush=True)
    if wrong:
        return WRONG
    return UNAVAILABLE if failed == _MOST_FAILED else 0


def _ahead(
    ranks: Ranks, plan: Plan, settings: Sequence[Setting], workers: int | None, *, seconds: float
) -> None:
    """Compile ahead, in processes of the first rank."""
    if ranks.is_first:
        spare = len(os.sched_getaffinity(0)) - 2 * ranks.num_ranks
        compile_ahead(
            settings, plan.config, num_ranks=ranks.num_ranks,
            capability=torch.cuda.get_device_capability(ranks.device),
            workers=max(spare, 0) if workers is None else workers, seconds=seconds, say=ranks.say,
        )  # fmt: skip
    ranks.gather(None, what="compiling ahead")


def _words(rows: Sequence[results.Row]) -> str:
    """A setting's figures in one line."""
    first = rows[0].params
    if "error" in first:
        return f"cannot run: {first['error']}"
    words = []
    for row in rows:
        name = " ".join(
            [row.phase, *(f"({row.params[k]})" for k in ("beside", "timing") if k in row.params)]
        ).replace(" (in a row)", "")
        us = row.slowest_rank_p50_us
        words.append(f"{name} {'-' if us is None else f'{us:.1f}'}")
    wrong = max(row.wrong or 0 for row in rows)
    return f"{', '.join(words)} us, wrong {wrong}, compiled {first['compiled']}"


def _read(path: str) -> dict[str, Any]:
    try:
        document = results.read_json(path)
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: {error}") from error
    if document["command"] != "slab_sweep":
        raise BadInput(f"{path}: expected a file of slab_sweep, got one of {document['command']!r}")
    return document


class ResultFile:
    """The file as it grows, on every rank; the first writes it. Construction is collective, and
    takes over the rows that are there.

    Attributes:
        document: the schema's.
        done: identities of settings that have their rows.
    """

    def __init__(self, ranks: Ranks, plan: Plan, path: str) -> None:
        self._path = path if ranks.is_first else None
        self.document = results.build_document(
            ranks, command="slab_sweep", argv=sys.argv[1:],
            started=datetime.datetime.now(datetime.UTC), config=plan.config, seed=plan.seed,
            rows=[],
        )  # fmt: skip
        self.document["definitions"] |= DEFINITIONS
        before: list[dict[str, Any]] = []
        refused = ""
        if self._path is not None and Path(path).exists():
            try:
                before = kept_rows(_read(path), self.document, plan)
            except BadInput as error:
                refused = error.message
        before, refused = ranks.gather((before, refused))[0]
        if refused:
            raise BadInput(refused)
        self.document["rows"] = before
        self.done = {row["params"]["setting"] for row in before}

    def add(self, rows: Sequence[results.Row]) -> None:
        """Put a setting's rows into the file."""
        self.document["rows"] += [dataclasses.asdict(row) for row in rows]
        if self._path is not None:
            results.validate(self.document)
            results.write_json(self._path, self.document)


def kept_rows(old: dict[str, Any], new: dict[str, Any], plan: Plan) -> list[dict[str, Any]]:
    """Rows of an earlier run that a run of `plan` goes on from: all but those of settings that
    could not run. Raises BadInput where the file's times are of other code, devices or data."""
    rows: list[dict[str, Any]] = old["rows"]
    ours = {"devices": _names(new), "code": {plan.source}, "calls": {plan.calls},
            "routing": {plan.routing.text}, "seed": new["seed"]}  # fmt: skip
    theirs = {"devices": _names(old), "code": {row["params"].get("source") for row in rows},
              "calls": {row["params"].get("calls") for row in rows},
              "routing": {row["routing"] for row in rows}, "seed": old["seed"]}  # fmt: skip
    for name, value in theirs.items():
        if rows and value != ours[name]:
            raise BadInput(
                f"--out: expected a file of the same {name}, {ours[name]}, got {value}; give "
                "another file"
            )
    failed = {row["params"]["setting"] for row in rows if "error" in row["params"]}
    return [row for row in rows if row["params"]["setting"] not in failed]


def _names(document: dict[str, Any]) -> list[str]:
    return [device["name"] for device in document["devices"]]


def main() -> None:
    """Entry point of a rank."""
    spawn.run_command(command, quiet_ranks=True)


if __name__ == "__main__":
    main()
