"""Random dispatch and combine calls for a long time, every one of them checked.

    torchrun --standalone --nproc-per-node 2 -m moe_comm.launch.slab_soak --out soak.json
    torchrun ... -m moe_comm.launch.slab_soak --pairs 10000 --delays 20 --out delays.json
    torchrun ... -m moe_comm.launch.slab_soak --seed-counters 2147482648 --out wrap.json
    python -m moe_comm.launch.slab_soak --virtual 8 --pairs 2000 --out virtual.json

Token counts (0 included), routing, masks and weights are drawn on the device, call by call; on CUDA
most pairs are replays of captured graphs that hold two overlapping pairs. Every pair is checked on
the device (slab_soak_calls), the last of each window against the reference (slab_soak_pairs).
Receive memory is poisoned between uses. --delays holds the ranks' streams up at random before,
between and after the halves of every call. Exit codes: 0 right, 1 wrong data, 2 usage, 3 this
environment cannot, 124 a wait timed out.
"""

from __future__ import annotations

import datetime
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

import click

from moe_comm.launch import results, spawn
from moe_comm.launch.options import (
    BadInput,
    check_outputs,
    config_of,
    device_type_of,
    known,
    many,
    one,
    shape_options,
    token_count,
)
from moe_comm.launch.slab_soak_run import Soak
from moe_comm.launch.slab_soak_world import Plan
from moe_comm.launch.worker import Ranks, run_rank
from moe_comm.wire import WIRES

DEFINITIONS = {
    "soak": "a row a communicator, all alive at once: params.pairs of dispatch and combine with "
    "random token counts and routing, each compared by a checksum of what was sent and received "
    "and by its combined rows; params.checked of them with the reference instead, bit for bit",
    "params.hangs": "ranks that waited in vain for another",
    "params.pairs_per_s": "pairs of all communicators over params.seconds, checks included",
}
_WRITE_EVERY_S = 10.0


@click.command(context_settings={"show_default": True})
@click.option("--device", default="auto", help="auto, cpu, or an accelerator's type (cuda)")
@click.option(
    "--backend", "backends", callback=many(str),
    help="comma list, a communicator each  [default: slab:low-latency,slab:high-throughput; "
    "c10d:dense on a CPU]",
)  # fmt: skip
@shape_options
@click.option("--wire", default="bf16", callback=one(known(list(WIRES))), help="of dispatch")
@click.option("--buckets", default="1,16,128", callback=many(token_count), help="a comma list")
@click.option("--pairs", type=click.IntRange(min=1), default=200_000)
@click.option("--seconds", type=float, help="end after this time, at a window's end")
@click.option("--window", type=click.IntRange(min=1), default=500, help="pairs; one is compared "
              "with the reference")  # fmt: skip
@click.option("--eager", type=click.FloatRange(0, 1), default=0.02, help="share of eager pairs")
@click.option("--cuda-graph/--no-cuda-graph", "graphs", default=True)
@click.option("--lanes", type=click.IntRange(1, 2), default=2, help="pairs that overlap in a graph")
@click.option("--split/--no-split", default=False, help="send and receive halves apart")
@click.option("--delays", type=click.FloatRange(min=0), default=0.0, help="microseconds at most")
@click.option("--seed-counters", type=int, help="count from which the slab's counters begin")
@click.option("--virtual", type=click.IntRange(min=0), default=0, help="ranks in one process")
@click.option("--timeout", type=click.FloatRange(min=0, min_open=True), default=30.0)
@click.option("--seed", type=click.IntRange(min=0), default=0)
@click.option("--out", metavar="FILE", help="the result file, written while it grows")
@click.option("--debug-flip-pair", type=int, hidden=True)
def command(**given: Any) -> int:
    """Random dispatch and combine calls for a long time, every one of them checked."""
    device_type = device_type_of(given["device"])
    check_outputs(given["out"])
    plan = _plan(given, device_type)
    if given["virtual"]:
        _alone()
    elif not spawn.is_rank():
        raise BadInput("expected RANK and WORLD_SIZE: start it with torchrun, or give --virtual")
    return run_rank(
        lambda ranks: soak(ranks, plan, given["out"]),
        device_type=device_type,
        timeout_s=given["timeout"],
    )


def _plan(given: dict[str, Any], device_type: str) -> Plan:
    config = config_of(
        given["preset"],
        num_experts=given["num_experts"],
        num_topk=given["num_topk"],
        hidden=given["hidden"],
        dispatch_wire=given["wire"],
        max_tokens_per_rank=max(given["buckets"]),
        timeout_s=given["timeout"],
    )
    if min(given["buckets"]) < 1:
        raise BadInput("--buckets: expected token buckets of at least 1")
    slab = ("slab:low-latency", "slab:high-throughput")
    default = slab if device_type == "cuda" or given["virtual"] else ("c10d:dense",)
    return Plan(
        config=config,
        backends=given["backends"] or default,
        buckets=given["buckets"],
        pairs=given["pairs"],
        seconds=given["seconds"],
        window=given["window"],
        eager=given["eager"],
        graphs=given["graphs"] and device_type == "cuda",
        lanes=given["lanes"],
        split=given["split"] or given["delays"] > 0,
        max_delay_us=given["delays"],
        seed_counters=given["seed_counters"],
        seed=given["seed"],
        virtual=given["virtual"],
        flip_pair=given["debug_flip_pair"],
    )


def _alone() -> None:
    """Be the only rank of a world of one: virtual ranks live in this process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )


def soak(ranks: Ranks, plan: Plan, out: str | None) -> int:
    """Run a plan and write its file. Collective; returns the exit code."""
    document = results.build_document(
        ranks,
        command="slab_soak",
        argv=sys.argv[1:],
        started=datetime.datetime.now(datetime.UTC),
        config=plan.config,
        seed=plan.seed,
        rows=[],
    )
    document["definitions"] |= DEFINITIONS
    write = _writer(document, out if ranks.is_first else None)
    run = Soak(plan, ranks)
    code = run.run(lambda state: write(state, False))
    write(run, True)
    if ranks.is_first:
        for row in document["rows"]:
            print(f"{row['backend']}:{row['mode']}: {row['wrong']} wrong, {row['params']}")
        print(f"{run.done} pairs in {run.seconds:.1f} s after {run.setup_s:.1f} s of setup")
    return code


def _writer(document: dict[str, Any], out: str | None) -> Callable[[Soak, bool], None]:
    """What puts a soak's state into its document, and that into its file now and then."""
    written = [0.0]

    def write(state: Soak, now: bool) -> None:
        plan = state.plan
        params = {
            "seconds": round(state.seconds, 3),
            "setup_seconds": round(state.setup_s, 3),
            "pairs_per_s": round(state.done / state.seconds, 1) if state.seconds else 0.0,
            "hangs": state.hangs,
            "errors": state.errors,
            "complete": state.complete,
            "buckets": list(plan.buckets),
            "window": plan.window,
            "lanes": plan.lanes,
            "split": state.split,
            "max_delay_us": plan.max_delay_us,
            "seed_counters": plan.seed_counters,
            "virtual": plan.virtual > 0,
        }
        document["rows"] = [
            vars(world.row(plan, state.num_ranks, params)) for world in state.worlds
        ]
        urgent = now or state.errors or state.seconds - written[0] > _WRITE_EVERY_S
        if urgent and out is not None:
            written[0] = state.seconds
            results.validate(document)
            results.write_json(out, document)
        if urgent and not now:
            state.ranks.say(f"{state.done} pairs, {state.seconds:.0f} s")

    return write


def main() -> None:
    """Entry point of a rank."""
    spawn.die_with_parent()
    spawn.run_command(command)


if __name__ == "__main__":
    main()
