r"""What one rank of R does in dispatch and combine, timed on two GPUs; R may be any number.

    python -m moe_comm.launch.slab_stand_in --out FILE --ranks 2,4,8 --num-tokens 1,128,4096
    python -m moe_comm.launch.slab_stand_in --out FILE --ranks 8 --modes low-latency,high-throughput
    python -m moe_comm.launch.slab_stand_in --out FILE --ranks 8 --knob combine_block=2048,4096 \
        --knob combine_warps=8,16

Rank 0 has a GPU to itself and the other ranks' memory is the second GPU's, twice at once, the other
way round (stand_in_world). What is timed is what a rank computes and what its link carries among R
GPUs behind one switch; waiting for ranks that begin later is not in it. The same for two ranks,
beside a run of two, says what that waiting is: launch/matrix_predict.py adds it. Every case is
checked against the reference before and after it is timed. The file is written after every case;
run again with the same file, it goes on. Exit codes: 0 right, 1 wrong data, 2 usage, 3 fewer than
two GPUs that reach each other, 124 time is up and cases are left.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import torch

from moe_comm.backends.slab_modes import MODES, SlabTuning
from moe_comm.config import PRESETS, EPConfig
from moe_comm.launch import results, spawn
from moe_comm.launch.options import (
    BadInput,
    CannotRun,
    check_outputs,
    known,
    many,
    routings_of,
    token_count,
)
from moe_comm.launch.slab_sweep_compile import compile_ahead, count_compiles
from moe_comm.launch.stand_in_measure import DEFINITIONS, TIMEOUT_S, Case, Kept, measure
from moe_comm.launch.stand_in_world import Meeting
from moe_comm.wire import WIRES


def changes_of(text: str) -> list[tuple[str, int]]:
    """(name, value) of NAME=VALUE[,VALUE...], a knob of SlabTuning that is a number."""
    name, _, values = text.partition("=")
    numbers = [f.name for f in dataclasses.fields(SlabTuning) if f.name != "mode"]
    known(numbers)(name)
    try:
        return [(name, int(value)) for value in values.split(",")]
    except ValueError as error:
        raise click.BadParameter(f"expected NAME=NUMBER[,NUMBER...], got {text!r}") from error


def _each_knob(
    ctx: click.Context, param: click.Parameter, texts: Sequence[str]
) -> list[list[tuple[str, int]]]:
    del ctx, param
    return [changes_of(text) for text in texts]


def _above_one(text: str) -> int:
    count = token_count(text)
    if count < 2:
        raise click.BadParameter(f"expected ranks >= 2, got {text!r}")
    return int(count)


@click.command(context_settings={"show_default": True})
@click.option("--out", metavar="FILE", required=True, help="the result file, gone on with")
@click.option("--ranks", default="2,4,8", callback=many(_above_one))
@click.option("--presets", default="kimi-k3", callback=many(known(list(PRESETS))))
@click.option("--num-tokens", default="1,8,32,128,512,4096", callback=many(token_count))
@click.option("--wires", default="bf16,fp8", callback=many(known(list(WIRES))),
              help="of dispatch; combine's is bf16")  # fmt: skip
@click.option("--routing", default="uniform", help="see moe-bench run")
@click.option("--modes", default="auto", callback=many(known(list(MODES))))
@click.option("--knob", "knobs", multiple=True, callback=_each_knob, metavar="NAME=N[,N...]",
              help="a case for each value of a SlabTuning knob; of several, for each "
              "combination")  # fmt: skip
@click.option("--calls", type=click.IntRange(1, 32), default=8, help="in a row, and slots")
@click.option("--replays", type=click.IntRange(3), default=15, help="samples of each graph")
@click.option("--seconds", type=click.FloatRange(min=1), default=300.0, help="of the whole run")
@click.option("--seed", type=click.IntRange(min=0), default=0)
def command(**given: Any) -> int:
    """Time one rank of many."""
    check_outputs(given["out"])
    cases = list(_cases(given))
    began = time.monotonic()
    devices = _two_gpus()
    path = Path(given["out"])
    document = _opened(path, cases[0], given["seed"], devices)
    done = {row["params"]["case"] for row in document["rows"]}
    left = [case for case in cases if case.identity not in done]
    _ahead(left, devices[0], seconds=0.4 * given["seconds"])
    meeting, kept, longest = Meeting(devices, TIMEOUT_S), Kept(given["seed"]), 0.0
    compiled = count_compiles()
    for index, case in enumerate(left):
        started, before = time.monotonic(), compiled()
        if index and started - began + longest > given["seconds"]:
            print(f"out of time: {len(left) - index} cases left; run it again", file=sys.stderr)
            return spawn.LOST
        rows = measure(case, kept, devices, meeting, given["replays"])
        longest = max(time.monotonic() - started, 0.8 * longest)
        facts = {"compiled": compiled() - before, "seconds": round(time.monotonic() - started, 2)}
        for row in rows:
            row.params |= facts
        document["rows"] += [dataclasses.asdict(row) for row in rows]
        results.validate(document)
        results.write_json(str(path), document)
        words = ", ".join(
            f"{row.phase} {row.slowest_rank_p50_us:.1f} (copies {row.limit_us or 0:.1f})"
            for row in rows
            if row.slowest_rank_p50_us is not None
        )
        print(f"{case.identity}: {words} us, wrong {rows[0].wrong}; {facts}", flush=True)
    return 1 if any(row["wrong"] for row in document["rows"]) else 0


def _cases(given: dict[str, Any]) -> Iterator[Case]:
    """Large ones last; what a knob changes next to each other."""
    changes = [dict(combination) for combination in itertools.product(*given["knobs"])]
    for preset, count, tokens, wire in itertools.product(
        given["presets"], given["ranks"], given["num_tokens"], given["wires"]
    ):
        routing = routings_of([given["routing"]], EPConfig.preset(preset))[0]
        for mode, change in itertools.product(given["modes"], changes):
            yield Case(
                preset=preset, num_ranks=count, num_tokens=tokens, wires=(wire, "bf16"),
                routing=routing, tuning=SlabTuning(mode=mode, **change), calls=given["calls"],
            )  # fmt: skip


def _two_gpus() -> list[torch.device]:
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < 2 or not torch.cuda.can_device_access_peer(0, 1):
        raise CannotRun(f"slab_stand_in: needs two GPUs that reach each other, found {found}")
    return [torch.device("cuda", 0), torch.device("cuda", 1)]


def _opened(path: Path, case: Case, seed: int, devices: Sequence[torch.device]) -> dict[str, Any]:
    """The document gone on with, or a fresh one."""
    if path.exists():
        try:
            document = results.read_json(path)
        except (OSError, ValueError) as error:
            raise BadInput(f"{path.name}: {error}") from error
        if document["command"] != "slab_stand_in" or document["seed"] != seed:
            raise BadInput(f"{path.name}: expected a file of slab_stand_in with seed {seed}")
        return document
    return results.new_document(
        command="slab_stand_in", argv=sys.argv[1:],
        devices=[results.device_facts(i, device) for i, device in enumerate(devices)],
        topology={"num_ranks": 1, "num_nodes": 1, "transport": "stores, copies"},
        config=case.config, seed=seed, definitions=DEFINITIONS,
    )  # fmt: skip


def _ahead(cases: Sequence[Case], device: torch.device, *, seconds: float) -> None:
    """Compile the cases' kernels in many processes at once."""
    kinds = {(case.preset, case.num_ranks) for case in cases}
    workers = max(1, (len(os.sched_getaffinity(0)) - 2) // max(1, len(kinds)))

    def compile_kind(kind: tuple[str, int]) -> None:
        of_kind = [case for case in cases if (case.preset, case.num_ranks) == kind]
        compile_ahead(
            [case.setting for case in of_kind], of_kind[0].config,
            num_ranks=kind[1], capability=torch.cuda.get_device_capability(device),
            workers=workers, seconds=seconds, say=lambda text: print(text, file=sys.stderr),
        )  # fmt: skip

    with concurrent.futures.ThreadPoolExecutor(max(1, len(kinds))) as pool:
        list(pool.map(compile_kind, sorted(kinds)))


def main() -> None:
    """Entry point."""
    spawn.run_command(command)


if __name__ == "__main__":
    main()
