"""moe-bench run: dispatch, experts, combine at a preset's shape; checked, then timed."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from moe_comm.launch import report, results, spawn
from moe_comm.launch.bench import PER_EXPERT, PHASES, Bench, Outcome, Plan, report_mismatches
from moe_comm.launch.moe_layer import LayerBench, LayerPlan
from moe_comm.launch.moe_layer_rows import DEFINITIONS, MOE_LAYER, layer_lines
from moe_comm.launch.options import (
    BadInput,
    CannotRun,
    backend,
    check_outputs,
    config_of,
    device_type_of,
    known,
    layer_options,
    many,
    one,
    output_options,
    rank_count_of,
    rank_options,
    routings_of,
    shape_options,
    token_count,
)
from moe_comm.launch.worker import WRONG, Ranks, run_rank
from moe_comm.wire import WIRES


@click.command(name="run", context_settings={"show_default": True})
@click.option(
    "--backend",
    "backend_names",
    default="auto",
    callback=many(backend("auto", "all", PER_EXPERT)),
    help="comma list of auto, all, a backend, or backend:mode",
)
@click.option(
    "--baseline/--no-baseline", default=True, help="measure the per-expert baseline beside it"
)
@click.option(
    "--num-tokens", default="128", callback=many(token_count), help="tokens a rank, a comma list"
)
@shape_options
@click.option("--wire", default="bf16", callback=one(known(list(WIRES))), help="of dispatch")
@click.option("--combine-wire", default="bf16", callback=one(known(list(WIRES))))
@click.option(
    "--routing",
    default="auto",
    callback=many(str),
    help="comma list of auto, trace[:FILE][:balanced|skewed][:LAYER], uniform, zipf:S, hot:N; "
    "+masked:P on any",
)
@click.option(
    "--phase",
    default=",".join(PHASES),
    callback=many(known([*PHASES, MOE_LAYER])),
    help="comma list; moe_layer, on demand: the whole layer with MXFP4 experts, and two baselines",
)
@click.option("--layout", type=click.Choice(["expert", "rows"]), default="expert")
@click.option("--reduction", type=click.Choice(["rank", "node"]), default="rank")
@click.option(
    "--iters", type=click.IntRange(min=1), help="timed calls  [default: 20 on a CPU, 200 elsewhere]"
)
@click.option("--warmup", type=click.IntRange(min=0), help="untimed calls  [default: 3, 20]")
@click.option(
    "--cuda-graph/--no-cuda-graph",
    "graph",
    default=None,
    help="capture what is timed  [default: where the backend's mode can be captured]",
)
@click.option(
    "--calls-in-a-row",
    "calls",
    type=click.IntRange(1, 64),
    help="dispatches, then combines, between two marks of a captured graph  [default: 8, fewer "
    "where their memory is large]",
)
@click.option("--flush-l2/--no-flush-l2", default=False, help="evict L2 before each timed pair")
@click.option("--check/--no-check", default=True, help="compare with the reference first")
@click.option("--limit/--no-limit", default=True, help="time the same bytes by plainer means")
@layer_options
@rank_options
@output_options
@click.option("--debug-flip-bit", type=int, hidden=True)
def command(**given: Any) -> int:
    """The main job: dispatch, expert step, combine; checked to the bit, then timed."""
    device_type = device_type_of(given["device"])
    files = (given["json_file"], given["csv_file"], given["markdown_file"])
    check_outputs(*files)
    if given["graph"] and device_type != "cuda":
        raise CannotRun(f"--cuda-graph: expected a CUDA device, got {device_type}")
    plan = _plan(given)
    layers = _layer_plan(plan, given) if MOE_LAYER in given["phase"] else None
    if not spawn.is_rank():
        return spawn.run_ranks(
            sys.argv[1:],
            num_ranks=rank_count_of(given["nproc"], device_type),
            grace_s=given["timeout"] + 5,
        )
    return run_rank(
        lambda ranks: _body(ranks, plan, layers, given),
        device_type=device_type,
        timeout_s=given["timeout"],
    )


def _plan(given: dict[str, Any]) -> Plan:
    config = config_of(
        given["preset"],
        num_experts=given["num_experts"],
        num_topk=given["num_topk"],
        hidden=given["hidden"],
        dispatch_wire=given["wire"],
        combine_wire=given["combine_wire"],
        reduction=given["reduction"],
        max_tokens_per_rank=max(given["num_tokens"]),
        timeout_s=given["timeout"],
    )
    names = list(given["backend_names"])
    if given["baseline"] and PER_EXPERT not in names:
        names.append(PER_EXPERT)
    return Plan(
        config=config,
        backends=names,
        num_tokens=given["num_tokens"],
        routings=routings_of(given["routing"], config),
        phases=[phase for phase in given["phase"] if phase in PHASES],
        layout=given["layout"],
        iters=given["iters"],
        warmup=given["warmup"],
        graph=given["graph"],
        calls=given["calls"],
        flush_l2=given["flush_l2"],
        check=given["check"],
        limit=given["limit"],
        seed=given["seed"],
        flip_rank=given["debug_flip_bit"],
    )


def _layer_plan(plan: Plan, given: dict[str, Any]) -> LayerPlan:
    """What moe_layer needs of the model; 2 where the preset does not say it, or no router could
    choose what a routing asks for."""
    from moe_comm.model.config import PRESETS, K3Config

    if given["preset"] not in PRESETS:
        raise BadInput(
            f"--phase moe_layer: expected a preset of a whole model ({', '.join(PRESETS)}), "
            f"got {given['preset']}"
        )
    model = K3Config.preset(given["preset"])
    if plan.config.hidden % 32:
        raise BadInput(
            f"--phase moe_layer: expected 32 to divide --hidden, got {plan.config.hidden}"
        )
    if given["combine_wire"] not in ("bf16", "none"):
        raise BadInput(
            f"--phase moe_layer: expected --combine-wire bf16, got {given['combine_wire']}"
        )
    for routing in plan.routings:
        holes = routing.trace is not None and bool((routing.trace.topk_idx < 0).any())
        if routing.masked > 0 or holes:
            raise BadInput(
                f"--phase moe_layer: expected a routing without masked choices, got {routing.text}"
            )
    return LayerPlan(
        plan=plan,
        router_hidden=max(model.hidden_size, 2 * plan.config.num_experts),
        inter=model.moe_intermediate_size,
        experts_by=None if given["experts_by"] == "auto" else given["experts_by"],
        emulate=given["emulate_ep"] or (),
    )


def _body(ranks: Ranks, plan: Plan, layers: LayerPlan | None, given: dict[str, Any]) -> int:
    started = datetime.datetime.now(datetime.UTC)

    def document_of(outcome: Outcome) -> dict[str, Any]:
        document = results.build_document(
            ranks,
            command="run",
            argv=sys.argv[1:],
            started=started,
            config=plan.config,
            seed=plan.seed,
            rows=outcome.rows,
        )
        if layers is not None:
            document["definitions"] |= DEFINITIONS
        return document

    def save() -> None:
        document = document_of(outcome)
        if ranks.is_first and given["json_file"] not in (None, "-"):
            results.write_json(given["json_file"], document)

    outcome = Bench(plan, ranks, quiet=given["quiet"]).run() if plan.phases else Outcome()
    if layers is not None:
        # Long: what is there is kept, whatever comes after.
        LayerBench(layers, ranks, quiet=given["quiet"]).run(outcome, after_case=save)
    document = document_of(outcome)
    if ranks.is_first:
        report_mismatches(outcome)
        if write_files(document, given):
            report.print_table(document, summary(document["rows"]))
    return WRONG if any(row.wrong for row in outcome.rows) else 0


def write_files(document: dict[str, Any], given: dict[str, Any]) -> bool:
    """Write what was asked for; True where stdout is free for the table."""
    if given["json_file"]:
        results.write_json(given["json_file"], document)
    texts = (("csv_file", report.csv_text), ("markdown_file", report.markdown))
    for name, text in texts:
        if given[name] == "-":
            print(text(document), end="")
        elif given[name]:
            Path(given[name]).write_text(text(document))
    return "-" not in (given["json_file"], given["csv_file"], given["markdown_file"])


def summary(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What the rows say in words: gain over the baseline, distance from raw, wrong elements."""
    lines = layer_lines([row for row in rows if row["phase"] == MOE_LAYER])
    for row in rows:
        if row["phase"] == MOE_LAYER:
            continue
        base = next(
            (
                other
                for other in rows
                if other["backend"] == PER_EXPERT
                and all(other[key] == row[key] for key in ("phase", "num_tokens", "routing"))
            ),
            None,
        )
        name = f"{row['backend']}:{row['mode']}, {row['phase']}, {row['num_tokens']} tokens"
        if base is None or row["backend"] == PER_EXPERT:
            continue
        parts = []
        if row["remote_bytes"] and base["remote_bytes"]:
            parts.append(f"{base['remote_bytes'] / row['remote_bytes']:.2f}x fewer remote bytes")
        if row["slowest_rank_p50_us"] and base["slowest_rank_p50_us"]:
            ratio = base["slowest_rank_p50_us"] / row["slowest_rank_p50_us"]
            parts.append(f"{ratio:.2f}x faster" if ratio >= 1 else f"{1 / ratio:.2f}x slower")
        raw, more = row["params"].get("raw_all_to_all_us"), ""
        if raw and row["slowest_rank_p50_us"]:
            against = row["slowest_rank_p50_us"] / raw
            more = f"; {against:.2f}x the time of a raw all_to_all_single of its bytes"
        if parts:
            lines.append(f"# {name}: {', '.join(parts)} than per-expert{more}")
    checked = [row["wrong"] for row in rows if row["wrong"] is not None]
    if checked:
        lines.append(f"# wrong elements: {sum(checked)} in {len(checked)} checked rows")
    else:
        lines.append("# wrong elements: not checked")
    return lines
