"""Time the hybrid model against two plainer ports of it, and its attention layers by context.

Not a moe-bench subcommand's main path but a run of its own:
  torchrun --nproc-per-node 2 -m moe_comm.launch.bench_model --json results/x.json
Ranks must agree, so all options are given to all of them alike.
"""

from __future__ import annotations

import dataclasses
import datetime
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import torch

from moe_comm.launch.spawn import is_rank
from moe_comm.model.config import PRESETS, K3Config

if TYPE_CHECKING:
    from moe_comm.communicator import Communicator
    from moe_comm.launch.results import Row
    from moe_comm.launch.worker import Ranks

SECTIONS = ("ttft", "decode", "overlap", "context")
PAGE = 64
DECODE_CONTEXT = 1024
DEFINITIONS = {
    "ttft": "one forward over num_tokens prompt tokens a rank, logits of the last token included",
    "decode_step": (
        "one forward of num_tokens requests a rank, one token each, context 1024; "
        "tokens_per_s_per_gpu is num_tokens / slowest_rank_p50_us"
    ),
    "moe_hidden": (
        "layer_us: a MoE layer; without_us: the same launches without dispatch and combine; "
        "comm_us: dispatch and combine alone; hidden = 1 - (layer_us - without_us) / comm_us"
    ),
    "kda_decode, mla_decode": "one attention layer, one token a request, at params.context",
    "ports": (
        "ours: MXFP4 experts, fla-core KDA, this communicator, overlap; fair: the same experts and "
        "KDA, a row per (token, expert) over torch.distributed, no overlap; straight: as fair with "
        "bf16 expert weights and KDA in plain torch"
    ),
    "shared experts' weights": "all MoE layers use one layer's routed experts, so that bf16 fits",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What to run; equal on all ranks."""

    config: K3Config
    sections: tuple[str, ...]
    ports: tuple[str, ...]
    prompt_tokens: int
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    overlap_tokens: int
    backend: str
    graph: bool
    iters: int
    seed: int
    budget_s: float


@dataclasses.dataclass(kw_only=True)
class Bench:
    """One rank's run: the models, and the rows measured so far."""

    ranks: Ranks
    options: Options
    comm: Communicator
    rows: list[Row] = dataclasses.field(default_factory=list)
    began: float = dataclasses.field(default_factory=time.monotonic)

    def in_time(self) -> bool:
        """Whether the budget leaves room for another measurement; the first rank decides."""
        left = time.monotonic() - self.began < self.options.budget_s
        return bool(self.ranks.gather(left, what="budget")[0])

    def time(self, call: Callable[[], object], *, graph: bool, iters: int) -> list[list[float]]:
        """Microseconds of each sample, rank by rank."""
        from moe_comm.launch.timing import time_calls

        with torch.inference_mode():
            mine = time_calls(call, self.ranks, iters=iters, warmup=2, graph=graph)
        return self.ranks.gather(mine, what="samples")

    def add(
        self,
        phase: str,
        samples: list[list[float]],
        *,
        num_tokens: int,
        graph: bool,
        backend: str | None = None,
        **params: Any,
    ) -> Row:
        """Record a row; `num_tokens` a rank."""
        from moe_comm.launch.results import Row
        from moe_comm.launch.timing import Statistics

        config = self.options.config
        figures = Statistics.of(samples)
        row = Row(
            backend=backend or self.comm.backend,
            mode=self.comm.mode if backend is None else "torch",
            phase=phase,
            layout="expert",
            num_tokens=num_tokens,
            hidden=config.routed_expert_hidden_size,
            num_topk=config.num_experts_per_token,
            num_experts=config.num_experts,
            ep_size=self.ranks.num_ranks,
            wire="bf16",
            routing="model",
            cuda_graph=graph,
            params={"layers": config.num_hidden_layers, **params},
            **dataclasses.asdict(figures),
        )
        self.rows.append(row)
        self.ranks.say(
            f"{phase} T={num_tokens} {params}: {row.slowest_rank_p50_us:.1f} us"
            f"{' (graph)' if graph else ''}"
        )
        return row


@click.command("bench-model")
@click.option("--preset", type=click.Choice(PRESETS), default="kimi-k3-4l", show_default=True)
@click.option("--ep-shape", type=click.IntRange(1), help="Experts a rank as at this EP size.")
@click.option("--sections", default=",".join(SECTIONS), show_default=True)
@click.option("--ports", default="ours,fair,straight", show_default=True)
@click.option("--prompt-tokens", type=click.IntRange(1), default=8192, show_default=True)
@click.option("--batches", default="1,32,128", show_default=True)
@click.option("--contexts", default="1024,4096,16384,65536,262144", show_default=True)
@click.option("--overlap-tokens", type=click.IntRange(1), default=128, show_default=True)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cuda", show_default=True)
@click.option("--backend", default="auto", show_default=True)
@click.option("--cuda-graph/--no-cuda-graph", "graph", default=True, show_default=True)
@click.option("--iters", type=click.IntRange(1), default=20, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--budget", type=float, default=480.0, show_default=True, help="Seconds in all.")
@click.option("--timeout", type=float, default=60.0, show_default=True)
@click.option("--json", "json_path", default="-", show_default=True)
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="PNG of `context`.")
def command(
    preset: str,
    ep_shape: int | None,
    sections: str,
    ports: str,
    prompt_tokens: int,
    batches: str,
    contexts: str,
    overlap_tokens: int,
    device: str,
    backend: str,
    graph: bool,
    iters: int,
    seed: int,
    budget: float,
    timeout: float,
    json_path: str,
    plot: Path | None,
) -> int:
    """Check the ports against each other, then time them."""
    if not is_rank():
        raise click.UsageError(
            "expected ranks: torchrun --nproc-per-node N -m moe_comm.launch.bench_model ..."
        )
    from moe_comm.launch.model_ports import PORTS
    from moe_comm.launch.results import write_json
    from moe_comm.launch.worker import run_rank

    started = datetime.datetime.now(datetime.UTC)

    def body(ranks: Ranks) -> int:
        config = K3Config.preset(preset)
        if ep_shape is not None:
            local = config.num_experts // ep_shape
            config = dataclasses.replace(config, num_experts=local * ranks.num_ranks)
        options = Options(
            config=config,
            sections=_names(sections, SECTIONS, "--sections"),
            ports=_names(ports, PORTS, "--ports"),
            prompt_tokens=prompt_tokens,
            batches=tuple(int(b) for b in batches.split(",")),
            contexts=tuple(int(c) for c in contexts.split(",")),
            overlap_tokens=overlap_tokens,
            backend=backend,
            graph=graph and device == "cuda",
            iters=iters,
            seed=seed,
            budget_s=budget,
        )
        document = _run(ranks, options, started, timeout, ep_shape)
        if ranks.is_first:
            write_json(json_path, document)
            if plot is not None:
                plot_context(document, plot)
        return 0

    return run_rank(body, device_type=device, timeout_s=timeout)


def _names(text: str, known: tuple[str, ...], option: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    wrong = [name for name in names if name not in known]
    if wrong:
        raise click.UsageError(f"{option}: expected of {', '.join(known)}, got {wrong[0]!r}")
    return names


def _run(
    ranks: Ranks,
    options: Options,
    started: datetime.datetime,
    timeout_s: float,
    ep_shape: int | None,
) -> dict[str, Any]:
    from moe_comm import create_communicator
    from moe_comm.launch import model_sections as sections
    from moe_comm.launch.model_ports import build_model
    from moe_comm.launch.results import build_document
    from moe_comm.model.layers.linear import Numerics
    from moe_comm.model.parallel import Parallel
    from moe_comm.model.transformer import ep_config

    largest = max(options.prompt_tokens, *options.batches, options.overlap_tokens)
    shape = ep_config(
        options.config, max_tokens_per_rank=largest, numerics=Numerics(), timeout_s=timeout_s
    )
    with create_communicator(shape, ranks.group, backend=options.backend) as comm:
        bench = Bench(ranks=ranks, options=options, comm=comm)
        ranks.say(f"building {options.config.num_hidden_layers} layers, {comm.backend} {comm.mode}")
        model, experts = build_model(
            options.config, comm, Parallel.create(1), ranks.device, options.seed
        )
        for port in options.ports:
            sections.run_port(bench, model, experts, port)
        if "overlap" in options.sections and bench.in_time():
            sections.overlap(bench, model)
        if "context" in options.sections and bench.in_time():
            sections.context(bench, model)
        comm.check()
        if ep_shape is not None:
            for row in bench.rows:
                row.params["per_rank_shape_of_ep"] = ep_shape
        document = build_document(
            ranks,
            command="bench-model",
            argv=sys.argv[1:],
            started=started,
            config=shape,
            seed=options.seed,
            rows=bench.rows,
        )
    document["definitions"] = {**document["definitions"], **DEFINITIONS}
    return document


def plot_context(document: dict[str, Any], path: Path) -> None:
    """Decode cost of one layer by context, a line for KDA and one for MLA, both axes logarithmic.
    Needs matplotlib (the extra `plot`)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    for phase, label in (("kda_decode", "KDA layer"), ("mla_decode", "Gated MLA layer")):
        rows = [row for row in document["rows"] if row["phase"] == phase]
        points = sorted((r["params"]["context"], r["slowest_rank_p50_us"]) for r in rows)
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=label)
    axes.set(xscale="log", yscale="log", xlabel="context, tokens", ylabel="one decode token, us")
    axes.legend()
    axes.grid(visible=True, which="both", alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    command()
