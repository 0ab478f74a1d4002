"""moe-bench check: correctness only, every backend's modes against the reference.

The expected rows come from launch/oracle.py, the reference in a form that scales.
"""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click

from moe_comm.communicator import Communicator
from moe_comm.config import EPConfig
from moe_comm.launch import report, results, spawn
from moe_comm.launch.bench import Outcome, report_mismatches
from moe_comm.launch.modes import config_for, expand
from moe_comm.launch.options import (
    backend,
    check_outputs,
    config_of,
    device_type_of,
    known,
    many,
    output_options,
    rank_count_of,
    rank_options,
    routings_of,
    shape_options,
    token_count,
)
from moe_comm.launch.rank_data import RankData
from moe_comm.launch.results import Row
from moe_comm.launch.routing import Routing
from moe_comm.launch.run import write_files
from moe_comm.launch.subjects import Case, CommunicatorSubject
from moe_comm.launch.worker import WRONG, Ranks, run_rank
from moe_comm.negotiate import create_communicator
from moe_comm.topology import Topology
from moe_comm.traffic import RoutingTraffic
from moe_comm.wire import WIRES

# Routings that between them reach every corner: real text, even, skewed, one rank only, holes.
ROUTINGS = "auto,uniform,zipf:1.2,hot:{num_topk},uniform+masked:0.5"


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What `check` was asked for; `wires` are (dispatch, combine) pairs."""

    config: EPConfig
    backends: Sequence[str]
    wires: Sequence[tuple[str, str]]
    routings: Sequence[Routing]
    num_tokens: Sequence[int]
    layouts: Sequence[str]
    seed: int
    flip_rank: int | None


@click.command(name="check", context_settings={"show_default": True})
@click.option(
    "--backend",
    "backend_names",
    default="all",
    callback=many(backend("auto", "all")),
    help="comma list of auto, all (every mode that runs here), a backend, or backend:mode",
)
@click.option(
    "--num-tokens",
    default="0,1,7,128",
    callback=many(token_count),
    help="tokens a rank; the largest is also tried with a different T on every rank",
)
@shape_options
@click.option(
    "--wire", default=",".join(WIRES), callback=many(known(list(WIRES))), help="of dispatch"
)
@click.option(
    "--combine-wire",
    callback=many(known(list(WIRES))),
    help="crossed with --wire  [default: the same wire both ways]",
)
@click.option(
    "--routing", default=None, callback=many(str), help=f"comma list  [default: {ROUTINGS}]"
)
@click.option("--layout", default="expert", callback=many(known(["expert", "rows"])))
@rank_options
@output_options
@click.option("--debug-flip-bit", type=int, hidden=True)
def command(**given: Any) -> int:
    """Compare dispatch and combine with the reference, bit for bit, over a grid of cases."""
    device_type = device_type_of(given["device"])
    check_outputs(given["json_file"], given["csv_file"], given["markdown_file"])
    grid = _grid(given)
    if not spawn.is_rank():
        return spawn.run_ranks(
            sys.argv[1:],
            num_ranks=rank_count_of(given["nproc"], device_type),
            grace_s=given["timeout"] + 5,
        )
    return run_rank(
        lambda ranks: _body(ranks, grid, given),
        device_type=device_type,
        timeout_s=given["timeout"],
    )


def _grid(given: dict[str, Any]) -> Grid:
    config = config_of(
        given["preset"],
        num_experts=given["num_experts"],
        num_topk=given["num_topk"],
        hidden=given["hidden"],
        max_tokens_per_rank=max(given["num_tokens"]),
        timeout_s=given["timeout"],
    )
    back = given["combine_wire"]
    texts = given["routing"] or ROUTINGS.format(num_topk=config.num_topk).split(",")
    return Grid(
        config=config,
        backends=given["backend_names"],
        wires=[(w, b) for w in given["wire"] for b in (back or [w])],
        routings=routings_of(texts, config),
        num_tokens=given["num_tokens"],
        layouts=given["layout"],
        seed=given["seed"],
        flip_rank=given["debug_flip_bit"],
    )


def _body(ranks: Ranks, grid: Grid, given: dict[str, Any]) -> int:
    started, clock = datetime.datetime.now(datetime.UTC), time.monotonic()
    outcome = run_grid(grid, ranks, quiet=given["quiet"])
    document = results.build_document(
        ranks,
        command="check",
        argv=sys.argv[1:],
        started=started,
        config=grid.config,
        seed=grid.seed,
        rows=outcome.rows,
    )
    wrong = sum(row.wrong or 0 for row in outcome.rows)
    if ranks.is_first:
        report_mismatches(outcome)
        if write_files(document, given):
            for line in report.header(document)[:2]:
                print(line)
            print(report.check_table(document["rows"]))
            seconds = time.monotonic() - clock
            print(
                f"# {len(outcome.rows)} comparisons, {wrong} wrong elements, {seconds:.0f} s; "
                f"{'FAILED' if wrong else 'all equal to the reference, bit for bit'}"
            )
    return WRONG if wrong else 0


def run_grid(grid: Grid, ranks: Ranks, *, quiet: bool) -> Outcome:
    """Every case of the grid. Collective."""
    outcome = Outcome()
    topology = Topology.detect(ranks.group)
    names = expand(list(grid.backends), grid.config, ranks)
    patterns = token_patterns(grid.num_tokens, ranks.num_ranks)
    for wire, back in grid.wires:
        wired = grid.config.replace(dispatch_wire=wire, combine_wire=back)
        for name in names:
            config = config_for(name, wired, topology)
            if not quiet:
                ranks.say(f"{name}, wire {wire}, combine wire {back}")
            with create_communicator(config, ranks.group, name) as comm:
                for routing in grid.routings:
                    for tokens in patterns:
                        _check_case(comm, config, routing, tokens, grid, ranks, outcome)
    return outcome


def token_patterns(num_tokens: Sequence[int], num_ranks: int) -> list[list[int]]:
    """T of every rank: each count on all ranks, and the largest spread from none to all of it."""
    patterns = [[count] * num_ranks for count in num_tokens]
    most = max(num_tokens)
    if num_ranks > 1 and most > 0:
        patterns.append([most * rank // (num_ranks - 1) for rank in range(num_ranks)])
        patterns.append([most if rank == 0 else 1 for rank in range(num_ranks)])
    return patterns


def _check_case(
    comm: Communicator,
    config: EPConfig,
    routing: Routing,
    tokens: Sequence[int],
    grid: Grid,
    ranks: Ranks,
    outcome: Outcome,
) -> None:
    data = RankData.create_all(
        config, num_tokens=tokens, routing=routing, seed=grid.seed, device=ranks.device
    )
    traffic = RoutingTraffic.of(
        [given.topk_idx for given in data],
        comm.placement,
        node_of_rank=ranks.group.node_of_rank,
    )
    # The bucket of this case, not the capacity: the communicator serves both.
    sized = config.replace(max_tokens_per_rank=max(tokens))
    for layout in grid.layouts:
        case = Case(config=sized, data=data, traffic=traffic, routing=routing.text, layout=layout)
        subject = CommunicatorSubject(comm, case, ranks, can_capture=False)
        flip = grid.flip_rank == ranks.rank and int(traffic.rows[:, ranks.rank].sum()) > 0
        found = subject.prepare(check=True, flip=flip)
        gathered = ranks.gather({p: (f.wrong, f.first[:1]) for p, f in found.items()})
        for phase, wire in (("dispatch", config.dispatch_wire), ("combine", config.combine_wire)):
            wrong = sum(mine[phase][0] for mine in gathered)
            outcome.mismatches += [
                f"{comm.backend}:{comm.mode}, wire {wire}, {routing.text}, T {list(tokens)}: {text}"
                for mine in gathered
                for text in mine[phase][1]
            ]
            outcome.rows.append(
                Row(
                    backend=comm.backend,
                    mode=comm.mode,
                    phase=phase,
                    layout=layout,
                    num_tokens=max(tokens),
                    hidden=config.hidden,
                    num_topk=config.num_topk,
                    num_experts=config.num_experts,
                    ep_size=ranks.num_ranks,
                    wire=wire,
                    routing=routing.text,
                    params={"num_tokens": list(tokens), "reduction": config.reduction},
                    minimum_bytes=traffic.minimum_bytes(
                        phase,
                        dispatch_row_bytes=config.wire.row_bytes(config.hidden),
                        combine_row_bytes=config.return_wire.row_bytes(config.hidden),
                    ),
                    wrong=wrong,
                )
            )
