"""moe-bench serve-bench: a request trace through the scheduler and the hybrid model, on all ranks.

Each data-parallel group has its own pool, prefix cache and scheduler; requests are dealt out in
turn. All ranks step together, an idle one with zero tokens.
"""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from moe_comm.launch.options import (
    BadInput,
    CannotRun,
    check_outputs,
    device_type_of,
    one,
    rank_count_of,
    rank_options,
)
from moe_comm.launch.options import backend as backend_name
from moe_comm.launch.spawn import die_with_parent, is_rank, run_ranks
from moe_comm.launch.verify_state import checkpoint_directory, read_config
from moe_comm.model.config import PRESETS
from moe_comm.model.serving.trace import Arrival, poisson_trace, read_trace

if TYPE_CHECKING:
    from moe_comm.launch.worker import Ranks
    from moe_comm.model.transformer import Transformer

_IDLE_S = 0.001


def _range(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, int]:
    """LOW:HIGH, or one number for both."""
    try:
        ends = [int(part) for part in value.split(":")]
    except ValueError:
        ends = []
    if len(ends) not in (1, 2) or min(ends) < 1 or ends[0] > ends[-1]:
        raise click.BadParameter(
            f"expected a number or LOW:HIGH, both at least 1, got {value!r}", ctx=ctx, param=param
        )
    return ends[0], ends[-1]


@dataclass(frozen=True, kw_only=True)
class _Job:
    directory: Path
    trace: list[Arrival]
    tp: int
    backend: str
    token_budget: int
    max_seqs: int
    slots: int
    pages: int
    snapshot_interval: int
    prefix_cache: bool
    seed: int
    timeout_s: float
    json_file: str | None
    plot_file: str | None


@click.command("serve-bench")
@click.option("--checkpoint", type=click.Path(path_type=Path), help="A checkpoint directory.")
@click.option(
    "--preset",
    type=click.Choice(PRESETS),
    help="With no checkpoint at hand: a synthetic one of this shape. Default: k3-tiny.",
)
@rank_options
@click.option("--tp", type=click.IntRange(1), default=1, show_default=True)
@click.option(
    "--backend",
    callback=one(backend_name("auto")),
    default="auto",
    show_default=True,
    help="Of the communicator: auto, a backend, or backend:mode.",
)
@click.option("--requests", type=click.IntRange(1), default=32, show_default=True)
@click.option(
    "--rate",
    type=click.FloatRange(0),
    default=4.0,
    show_default=True,
    help="Arrivals a second, over all ranks; Poisson. 0: all at once.",
)
@click.option(
    "--arrivals",
    type=click.Path(path_type=Path),
    help="A trace in place of a drawn one: a JSON object a line with arrival_s, prompt_tokens, "
    "new_tokens and, if wanted, group and shared_tokens.",
)
@click.option(
    "--prompt-tokens", callback=_range, default="8:96", show_default=True, help="LOW:HIGH, uniform."
)
@click.option("--new-tokens", callback=_range, default="4:16", show_default=True)
@click.option(
    "--shared-prefix",
    type=click.IntRange(0),
    default=128,
    show_default=True,
    help="Tokens that requests of one group begin with.",
)
@click.option("--groups", type=click.IntRange(1), default=1, show_default=True)
@click.option("--token-budget", type=click.IntRange(1), default=256, show_default=True)
@click.option("--max-seqs", type=click.IntRange(1), default=8, show_default=True)
@click.option("--slots", type=click.IntRange(1), help="State slots a rank. Default: 3 x max-seqs.")
@click.option("--pages", type=click.IntRange(1), help="Pages a rank. Default: enough for max-seqs.")
@click.option(
    "--snapshot-interval",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Tokens between cached snapshots, a multiple of 64; 0: only at ends and branches.",
)
@click.option("--prefix-cache/--no-prefix-cache", default=True, show_default=True)
@click.option("--json", "json_file", metavar="FILE", help="Write the result file; - is stdout.")
@click.option("--plot", "plot_file", metavar="FILE", help="Write a picture (needs matplotlib).")
def command(
    checkpoint: Path | None,
    preset: str | None,
    device: str,
    nproc: int | None,
    timeout: float,
    seed: int,
    tp: int,
    backend: str,
    requests: int,
    rate: float,
    arrivals: Path | None,
    prompt_tokens: tuple[int, int],
    new_tokens: tuple[int, int],
    shared_prefix: int,
    groups: int,
    token_budget: int,
    max_seqs: int,
    slots: int | None,
    pages: int | None,
    snapshot_interval: int,
    prefix_cache: bool,
    json_file: str | None,
    plot_file: str | None,
) -> int:
    """Run a request trace: time to first token, time per token, throughput, hits, occupancy."""
    if checkpoint is not None and preset is not None:
        raise click.UsageError("expected one of --checkpoint and --preset")
    check_outputs(json_file, plot_file)
    if plot_file is not None:
        _need_matplotlib()
    device_type = device_type_of(device)
    trace = (
        _trace_from(arrivals)
        if arrivals is not None
        else poisson_trace(
            requests,
            rate=rate,
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            shared_tokens=shared_prefix,
            groups=groups,
            seed=seed,
        )
    )
    if not is_rank():
        ranks = rank_count_of(nproc, device_type)
        if ranks % tp:
            raise click.UsageError(f"--tp: expected a divisor of --nproc {ranks}, got {tp}")
        with checkpoint_directory(checkpoint, preset or "k3-tiny", seed) as directory:
            read_config(directory)
            given = {**click.get_current_context().params, "checkpoint": directory, "preset": None}
            arguments = ["serve-bench", *_arguments(command.params, given)]
            return run_ranks(arguments, num_ranks=ranks, grace_s=timeout + 10)
    die_with_parent()
    if checkpoint is None:
        raise click.UsageError("--checkpoint: expected a directory when started as ranks")
    longest = max(arrival.prompt_tokens + arrival.new_tokens for arrival in trace)
    job = _Job(
        directory=checkpoint,
        trace=trace,
        tp=tp,
        backend=backend,
        token_budget=token_budget,
        max_seqs=max_seqs,
        slots=slots or 3 * max_seqs,
        pages=pages or 2 * max_seqs * (longest // 64 + 1),
        snapshot_interval=snapshot_interval,
        prefix_cache=prefix_cache,
        seed=seed,
        timeout_s=timeout,
        json_file=json_file,
        plot_file=plot_file,
    )
    from moe_comm.launch.worker import run_rank

    return run_rank(lambda ranks: _rank(ranks, job), device_type=device_type, timeout_s=timeout)


def _rank(ranks: Ranks, job: _Job) -> int:
    from moe_comm import create_communicator
    from moe_comm.launch.results import build_document, write_json
    from moe_comm.launch.serve_report import DEFINITIONS, RankFigures, plot, rows_of, table
    from moe_comm.model.layers.linear import Numerics
    from moe_comm.model.loading import load_model
    from moe_comm.model.parallel import Parallel
    from moe_comm.model.transformer import ep_config

    started = datetime.datetime.now(datetime.UTC)
    config = read_config(job.directory)
    parallel, numerics = Parallel.create(job.tp, timeout_s=job.timeout_s), Numerics()
    shape = ep_config(
        config,
        max_tokens_per_rank=1 << (-(-job.token_budget // job.tp) - 1).bit_length(),
        numerics=numerics,
        timeout_s=job.timeout_s,
    )
    with create_communicator(shape, ranks.group, backend=job.backend) as comm:
        model = load_model(
            job.directory,
            config,
            comm=comm,
            parallel=parallel,
            numerics=numerics,
            device=ranks.device,
        )
        ranks.barrier(what="load")
        figures = _serve(ranks, job, model)
        comm.check()
        backend, mode = comm.backend, comm.mode
    everyone: list[RankFigures] = ranks.gather(figures, what="figures")
    # Ranks of one tensor-parallel group served the same requests.
    groups = everyone[:: job.tp]
    settings = {k: v for k, v in asdict(job).items() if k not in ("trace", "directory")}
    rows = rows_of(groups, shape, backend=backend, mode=mode, settings=settings)
    document = build_document(
        ranks,
        command="serve-bench",
        argv=sys.argv[1:],
        started=started,
        config=shape,
        seed=job.seed,
        rows=rows,
    )
    document["definitions"] = {**document["definitions"], **DEFINITIONS}
    if ranks.is_first:
        if job.json_file != "-":
            print(table(groups))
        if job.json_file is not None:
            write_json(job.json_file, document)
        if job.plot_file is not None:
            plot(groups, job.plot_file)
    return 0 if sum(f.finished for f in groups) == len(job.trace) else 1


def _serve(ranks: Ranks, job: _Job, model: Transformer) -> object:
    """This rank's share of the trace, to its end; collective, step by step."""
    from moe_comm.launch.serve_report import RankFigures
    from moe_comm.model.serving.engine import Engine
    from moe_comm.model.serving.paged_cache import PagedCache
    from moe_comm.model.serving.prefix_cache import PrefixCache
    from moe_comm.model.serving.scheduler import Scheduler, SchedulerConfig
    from moe_comm.model.serving.state_pool import StatePool
    from moe_comm.model.serving.trace import make_requests

    layout = model.layout(model_id=str(model.config))
    pool = StatePool(layout, job.slots, device=model.device)
    cache = PagedCache(layout, job.pages, device=model.device)
    try:
        scheduler = Scheduler(
            pool,
            cache,
            SchedulerConfig(
                token_budget=job.token_budget,
                max_seqs=job.max_seqs,
                snapshot_interval=job.snapshot_interval,
            ),
            prefixes=PrefixCache(pool, cache) if job.prefix_cache else None,
        )
        requests = make_requests(job.trace, vocab=model.config.vocab_size, seed=job.seed)
        for request in requests[model.parallel.dp_rank :: model.parallel.dp_size]:
            scheduler.submit(request)
    except ValueError as error:
        raise BadInput(str(error)) from error
    ranks.say(
        f"{job.slots} state slots of {layout.slot_bytes / 1e6:.2f} MB and {job.pages} pages of "
        f"{layout.page_bytes / 1e6:.2f} MB a rank"
    )
    engine = Engine(model, scheduler, group=model.parallel.ep_group, timeout_s=job.timeout_s)
    figures, began = RankFigures(), time.perf_counter()
    engine.clock = lambda: time.perf_counter() - began
    steps = 0
    while engine.step():
        if engine.idle:
            time.sleep(_IDLE_S)
        else:
            figures.watch(scheduler, engine.clock())
            steps += 1
            if steps % 50 == 0:
                ranks.say(f"step {steps}: {scheduler.unfinished} requests left on rank 0")
    scheduler.audit()
    figures.close(scheduler, engine.clock())
    return figures


def _trace_from(path: Path) -> list[Arrival]:
    try:
        return read_trace(path)
    except (OSError, ValueError) as error:
        raise BadInput(str(error)) from error


def _need_matplotlib() -> None:
    try:
        import matplotlib
    except ImportError as error:
        raise CannotRun(f"--plot: {error}; pip install matplotlib") from error
    del matplotlib


def _arguments(options: Sequence[click.Parameter], given: Mapping[str, object]) -> list[str]:
    """Values of this command's options as a command line for the ranks."""
    out: list[str] = []
    for option in options:
        value = given.get(option.name or "")
        if isinstance(value, bool):
            out.append(option.opts[0] if value else option.secondary_opts[0])
        elif isinstance(value, tuple):
            out += [option.opts[0], ":".join(map(str, value))]
        elif value is not None:
            out += [option.opts[0], str(value)]
    return out
