"""Time the hybrid model against two plainer ports of it, and its attention layers by context.

Not a moe-bench subcommand but a run of its own:
  torchrun --nproc-per-node 2 -m moe_comm.launch.bench_model --json results/x.json
and the ways to hide communication behind shared experts alone, with a timeline of kernels:
  ... --sections overlap --layers 1 --ep-shapes 0 --prompt-tokens 128 --iters 50 --timeline
Ranks must agree, so all options are given to all of them alike. The result file is written after
each section, so that what a time limit leaves unfinished costs nothing else.
"""

from __future__ import annotations

import datetime
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moe_comm.launch import spawn
from moe_comm.launch.spawn import is_rank
from moe_comm.model.config import PRESETS, K3Config

if TYPE_CHECKING:
    from moe_comm.config import EPConfig
    from moe_comm.launch.model_measure import Bench, Options
    from moe_comm.launch.worker import Ranks
    from moe_comm.model.transformer import Transformer

SECTIONS = ("ttft", "decode", "overlap", "context")
DEFINITIONS = {
    "ttft": "one forward over num_tokens prompt tokens a rank, logits of the last token included",
    "decode_step": (
        "one forward of num_tokens requests a rank, one token each, context 1024; "
        "tokens_per_s_per_gpu is num_tokens / slowest_rank_p50_us"
    ),
    "moe_layer, overlap": (
        "one MoE layer; moe_layer: as the model launches it, overlap: in the other ways, said by "
        "variant. All times are the median of the slowest rank; where captured, a sample is the "
        "tenth of the time between events around ten calls in a row in one graph. layer_us: the "
        "layer; one_stream_us: the layer in sequence on one stream; without_us: its launches but "
        "dispatch and combine, in sequence; own_comm_us: dispatch and combine in this variant's "
        "halves and streams, without the shared experts; own_shared_us: the shared experts on "
        "one stream, leaving as many multiprocessors free as in this variant; both_us: the two "
        "together, without the routed experts; comm_us, shared_us: the shortest own_comm_us and "
        "own_shared_us of all variants, so that what a variant slows down counts against it. "
        "hidden = 1 - (both_us - shared_us) / comm_us; saved_in_layer = "
        "(one_stream_us - layer_us) / comm_us, in which waits for another rank's routed experts "
        "count as well; hidden_in_layer = 1 - (layer_us - without_us) / comm_us, where without_us "
        "has no such waits, so that the difference of the ranks' times counts as not hidden"
    ),
    "timeline": (
        "kernels of both_us on the first rank in a captured call of their own, not of the timed "
        "ones; beside: the share of communicating kernels' time in which another kernel ran"
    ),
    "kda_decode, mla_decode": "one attention layer, a token of each request, at params.context",
    "ports": (
        "ours: MXFP4 experts, fla-core KDA, this communicator, overlap, decode steps captured; "
        "fair: the same experts and KDA, a row per (token, expert) over torch.distributed, no "
        "overlap; straight: as fair with bf16 expert weights and KDA in plain torch, in chunks for "
        "prompts"
    ),
    "shared weights": (
        "all MoE layers use one layer's routed experts, copies of a few, so that bf16 fits"
    ),
    "fla tiles": "fla-core's kernels with one pinned tile configuration each, not autotuned",
    "per_rank_shape_of_ep": (
        "experts a rank as at that EP size, exchanged between the ranks of this run"
    ),
}


@click.command("bench-model")
@click.option("--preset", type=click.Choice(PRESETS), default="kimi-k3-4l", show_default=True)
@click.option(
    "--ep-shapes",
    default="0,16,64",
    show_default=True,
    help="Experts a rank as at these EP sizes; 0: all of them. The largest shape has every section "
    "and port, others leave out `straight`, overlap and context.",
)
@click.option("--layers", type=click.IntRange(1), help="First layers of the preset alone.")
@click.option("--sections", default=",".join(SECTIONS), show_default=True)
@click.option("--ports", default="ours,straight,fair", show_default=True)
@click.option("--prompt-tokens", type=click.IntRange(1), default=8192, show_default=True)
@click.option("--batches", default="1,32,128", show_default=True)
@click.option("--contexts", default="1024,4096,16384,65536,262144", show_default=True)
@click.option("--context-requests", type=click.IntRange(1), default=8, show_default=True)
@click.option("--overlap-tokens", default="128", show_default=True, help="Comma list.")
@click.option("--timeline/--no-timeline", default=False, show_default=True, help="Of overlaps.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cuda", show_default=True)
@click.option("--backend", default="auto", show_default=True)
@click.option(
    "--experts",
    type=click.Choice(["auto", "humming", "triton", "torch"]),
    default="auto",
    show_default=True,
)
@click.option("--cuda-graph/--no-cuda-graph", "graph", default=True, show_default=True)
@click.option("--iters", type=click.IntRange(1), default=10, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--seconds", type=float, default=120.0, show_default=True, help="For a section.")
@click.option("--budget", type=float, default=300.0, show_default=True, help="Seconds in all.")
@click.option("--timeout", type=float, default=60.0, show_default=True)
@click.option("--json", "json_path", default="-", show_default=True)
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="PNG of `context`.")
def command(**given: Any) -> int:
    """Check the ports against each other, then time them."""
    if not is_rank():
        raise click.UsageError(
            "expected ranks: torchrun --nproc-per-node N -m moe_comm.launch.bench_model ..."
        )
    from moe_comm.launch.worker import run_rank

    options = _options(given)
    started = datetime.datetime.now(datetime.UTC)
    return run_rank(
        lambda ranks: _run(ranks, options, started, given),
        device_type=given["device"],
        timeout_s=given["timeout"],
    )


def _options(given: dict[str, Any]) -> Options:
    from moe_comm.launch.model_measure import Options
    from moe_comm.launch.model_ports import PORTS

    experts, config = given["experts"], K3Config.preset(given["preset"])
    if given["layers"] is not None:
        config = config.truncate(given["layers"])
    return Options(
        config=config,
        ep_shapes=_numbers(given["ep_shapes"], "--ep-shapes"),
        sections=_names(given["sections"], SECTIONS, "--sections"),
        ports=_names(given["ports"], PORTS, "--ports"),
        prompt_tokens=given["prompt_tokens"],
        batches=_numbers(given["batches"], "--batches"),
        contexts=_numbers(given["contexts"], "--contexts"),
        context_requests=given["context_requests"],
        overlap_tokens=_numbers(given["overlap_tokens"], "--overlap-tokens"),
        timeline=given["timeline"],
        backend=given["backend"],
        implementation=None if experts == "auto" else experts,
        graph=given["graph"] and given["device"] == "cuda",
        iters=given["iters"],
        seed=given["seed"],
        section_s=given["seconds"],
        budget_s=given["budget"],
    )


def _names(text: str, known: tuple[str, ...], option: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    wrong = [name for name in names if name not in known]
    if wrong:
        raise click.UsageError(f"{option}: expected of {', '.join(known)}, got {wrong[0]!r}")
    return names


def _numbers(text: str, option: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise click.UsageError(f"{option}: expected whole numbers, got {text!r}") from error


def _run(ranks: Ranks, options: Options, started: datetime.datetime, given: dict[str, Any]) -> int:
    from moe_comm.launch.model_measure import Bench
    from moe_comm.launch.model_summary import summary
    from moe_comm.launch.results import write_json
    from moe_comm.model.layers.linear import Numerics
    from moe_comm.model.transformer import ep_config

    path = given["json_path"]

    def shape_of(ep: int) -> EPConfig:
        return ep_config(
            options.config_at(ep, ranks.num_ranks),
            max_tokens_per_rank=options.most_tokens,
            numerics=Numerics(),
            timeout_s=given["timeout"],
        )

    # The shape with the most experts first: the others use a part of them.
    shapes = sorted(options.ep_shapes, key=lambda ep: -shape_of(ep).num_experts)

    def save(bench: Bench) -> dict[str, Any]:
        document = _document(bench, shape_of(shapes[0]), started)
        if ranks.is_first and path != "-":
            write_json(path, document)
        return document

    bench = Bench(ranks=ranks, options=options, save=save)
    held: tuple[Transformer, Any] | None = None
    for ep in shapes:
        if bench.in_time(f"the shape of EP{ep or ranks.num_ranks}"):
            held = _run_shape(bench, shape_of(ep), ep, held)
    document = save(bench)
    if ranks.is_first:
        if path == "-":
            write_json(path, document)
        else:
            print("\n".join(summary(document["rows"], every_overlap=True)))
        if given["plot"] is not None:
            from moe_comm.launch.model_summary import plot_context

            plot_context(document, given["plot"])
    return 0


def _run_shape(
    bench: Bench, shape: EPConfig, ep: int, held: tuple[Transformer, Any] | None
) -> tuple[Transformer, Any]:
    """All that is measured on one communicator; returns the model and experts that were built."""
    from moe_comm import create_communicator
    from moe_comm.launch import model_sections as sections
    from moe_comm.launch.model_measure import Setup
    from moe_comm.launch.model_overlap import overlap
    from moe_comm.launch.model_ports import build_model, narrowed
    from moe_comm.model.parallel import Parallel

    options, ranks, is_first = bench.options, bench.ranks, held is None
    with create_communicator(shape, ranks.group, backend=options.backend) as comm:
        ranks.say(f"{shape.num_experts} experts, {comm.backend} {comm.mode}")
        if held is None:
            with bench.section("weights"):
                held = build_model(
                    options.config_at(ep, ranks.num_ranks),
                    comm,
                    Parallel.create(1, timeout_s=ranks.timeout_s),
                    ranks.device,
                    options.seed,
                    implementation=options.implementation,
                )
        whole, all_experts = held
        config = options.config_at(ep, ranks.num_ranks)
        model, experts = narrowed(whole, all_experts, config, comm)
        setup = Setup(comm=comm, model=model, experts=experts, ep=ep)
        ports = options.ports if {"ttft", "decode"} & set(options.sections) else ()
        for port in ports:
            if (is_first or port != "straight") and bench.in_time(f"{port} of EP{ep}"):
                with bench.section(f"{port}, {shape.num_experts} experts"):
                    sections.run_port(bench, setup, port)
        for name, section in (("overlap", overlap), ("context", sections.context)):
            if is_first and name in options.sections and bench.in_time(name):
                with bench.section(name):
                    section(bench, setup)
        comm.check()
    return held


def _document(bench: Bench, shape: EPConfig, started: datetime.datetime) -> dict[str, Any]:
    from moe_comm.launch.results import build_document

    document = build_document(
        bench.ranks,
        command="bench-model",
        argv=sys.argv[1:],
        started=started,
        config=shape,
        seed=bench.options.seed,
        rows=bench.rows,
    )
    document["definitions"] = {**document["definitions"], **DEFINITIONS}
    if bench.left_out:
        document["definitions"]["left out for lack of time"] = ", ".join(bench.left_out)
    return document


def main() -> None:
    """Entry point of a rank."""
    spawn.run_command(command)


if __name__ == "__main__":
    main()
