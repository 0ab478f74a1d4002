"""Times the grouped expert MLP at Kimi K3's shapes on one GPU: humming, Triton, bf16 weights.

    python -m moe_comm.launch.bench_gemm --out results/x.json
    python -m moe_comm.launch.bench_gemm --only triton --cases 448x2048 --tune --out tuned.json

A case is EXPERTSxROWS: the experts one rank holds of 896, and the expert rows it gets. Every
implementation is compared with float32 products on several experts before it is timed; a time is
the replay of a CUDA graph that holds one call. Limits are measured in the same run. The file is
written after every row. --seconds bounds the run: what would begin later is left out and named.
Exit codes: 0 right, 1 wrong data, 2 usage, 3 no CUDA GPU.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.util
import sys
import time
from collections.abc import Iterator
from typing import Any

import click
import torch

from moe_comm.config import EPConfig
from moe_comm.kernels.expert_gemm import LAYOUT_OF
from moe_comm.kernels.expert_gemm_config import choose_tiles
from moe_comm.launch import results
from moe_comm.launch.bench_gemm_calls import bf16_call, humming_parts, whole
from moe_comm.launch.bench_gemm_case import EXPERTS, Case, make_case, make_weights
from moe_comm.launch.bench_gemm_measure import (
    Limits,
    checked,
    row,
    time_graph,
    time_in_turn,
    triton_part,
    triton_row,
)
from moe_comm.launch.bench_gemm_tune import tune

# Decode and prefill at EP2, then one rank's experts at EP64, EP16 and EP8.
DEFAULT_CASES = "448x2048,448x65536,14x2048,56x2048,112x2048,14x65536,56x65536,112x65536"
DEFINITIONS = {
    "p50_us": "median time of one CUDA graph replay of the phase, microseconds; humming: whole and "
    "parts are replayed in turn",
    "limit_us": "the longer of: weights of active experts and rows read at the measured read rate; "
    "products at the measured dense bf16 rate (8192^3)",
    "params.of_limit": "limit_us / p50_us",
    "params.weight_gbps": "bytes of the active experts' weights and scales / p50, decimal GB/s",
    "params.tflops": "2 * 3 * rows * 3584 * 3072 / p50",
    "params.part": "all: every launch from received rows to y; else one launch of it; +shared: "
    "with programs sharing reductions, humming's own choice, whose last bits change between runs",
    "wrong": "elements beyond 6 roundings of bf16 (root of squares over the reduction) in up to 8 "
    "experts compared with float32 products",
}


def case_rows(
    case: Case, limits: Limits, only: set[str], *, iters: int, tune_seconds: float | None
) -> Iterator[results.Row]:
    """Every implementation on one case, one after another, so that weights take turns."""
    if "humming" in only:
        weights = make_weights(case, LAYOUT_OF["humming"])
        call = whole(case, weights)
        wrong = checked(case, call)
        parts = [("all", call), *humming_parts(case, weights)]
        for _, launch in parts:
            # In order: each reads what the one before left.
            launch()
        times = time_in_turn([launch for _, launch in parts], iters=iters)
        for (part, _), samples in zip(parts, times, strict=True):
            counted = wrong if part == "all" else None
            yield row(case, limits, samples, backend="humming", part=part, wrong=counted)
        del weights, call, parts
    if "triton" in only:
        weights = make_weights(case, LAYOUT_OF["triton"])
        config = choose_tiles(case.count / case.experts)
        tiles = dataclasses.asdict(config)
        yield triton_row(case, weights, limits, config, iters=iters)
        for gated in (True, False):
            launch = triton_part(case, weights, config, gated=gated)
            samples = time_graph(launch, iters=iters)
            part = "w13" if gated else "w2"
            yield row(case, limits, samples, backend="triton", part=part, wrong=None, tiles=tiles)
        if tune_seconds is not None:
            yield from tune(case, weights, limits, iters=max(3, iters // 4), seconds=tune_seconds)
        del weights
    if "bf16" in only:
        call = bf16_call(case)
        wrong = checked(case, call)
        samples = time_graph(call, iters=iters)
        yield row(case, limits, samples, backend="bf16", part="all", wrong=wrong)


def document(
    rows: list[results.Row], limits: Limits, started: datetime.datetime, seed: int
) -> dict[str, Any]:
    """The result document of section 10, for one process and one GPU."""
    plain = results.new_document(
        command="bench_gemm", argv=sys.argv[1:], started=started,
        devices=[results.device_facts(0, torch.device("cuda"))],
        topology={"num_nodes": 1, "num_ranks": 1}, config=EPConfig.preset("kimi-k3"), seed=seed,
        definitions=DEFINITIONS, rows=rows,
    )  # fmt: skip
    plain["versions"]["humming"] = _version("humming-kernels")
    plain["config"] |= {"read_gbps": limits.read / 1e3, "dense_bf16_tflops": limits.dense / 1e6}
    return plain


def _version(name: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _line(one: results.Row) -> str:
    figures = one.params
    share = f"{100 * figures['of_limit']:5.1f}%" if "of_limit" in figures else "     -"
    tiles = figures.get("tiles")
    wrong = "-" if one.wrong is None else str(one.wrong)
    p50 = one.p50_us if one.p50_us is not None else 0.0
    return (
        f"{figures['experts_per_rank']:4d} {figures['rows']:6d} {one.backend:8} "
        f"{figures['part']:10} {p50:10.1f} {share} {figures.get('weight_gbps', 0):7.0f} "
        f"{figures.get('tflops', 0):6.0f} {wrong:>5} {'' if tiles is None else tiles}"
    )


@click.command("bench-gemm")
@click.option("--cases", default=DEFAULT_CASES, show_default=True, help="EXPERTSxROWS, commas.")
@click.option("--only", default="humming,triton,bf16", show_default=True)
@click.option("--tune", "tuning", is_flag=True, help="Search the Triton kernel's tiles.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=1),
    default=150,
    show_default=True,
    help="Of the whole run.",
)
@click.option("--iters", type=click.IntRange(3), default=20, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--out", type=click.Path(dir_okay=False), required=True)
def command(
    cases: str, only: str, tuning: bool, seconds: float, iters: int, seed: int, out: str
) -> None:
    """Time the grouped expert MLP and write a result file."""
    if not torch.cuda.is_available():
        click.echo("bench_gemm: needs a CUDA GPU", err=True)
        sys.exit(3)
    chosen = set(only.split(","))
    unknown = chosen - {"humming", "triton", "bf16"}
    if unknown:
        raise click.BadParameter(f"expected humming, triton, bf16, got {sorted(unknown)}")
    if "humming" in chosen and importlib.util.find_spec("humming") is None:
        click.echo("humming is not installed: left out", err=True)
        chosen.discard("humming")
    shapes = [_shape(text) for text in cases.split(",")]
    torch.backends.cuda.matmul.allow_tf32 = False
    started = datetime.datetime.now(datetime.UTC)
    end = time.monotonic() + seconds
    limits = Limits.measure(iters)
    click.echo(f"# read {limits.read / 1e3:.0f} GB/s, dense {limits.dense / 1e6:.0f} TFLOP/s")
    click.echo("# experts rows backend part us of-limit weight-GB/s TFLOP/s wrong tiles")
    rows: list[results.Row] = []
    for index, (experts, count) in enumerate(shapes):
        left = end - time.monotonic()
        if left <= 0:
            named = ", ".join(f"{e}x{n}" for e, n in shapes[index:])
            click.echo(f"out of time ({seconds:g} s): left out {named}", err=True)
            break
        case = make_case(experts, count, seed=seed)
        share = left / (len(shapes) - index) if tuning else None
        for one in case_rows(case, limits, chosen, iters=iters, tune_seconds=share):
            rows.append(one)
            click.echo(_line(one))
            results.write_json(out, document(rows, limits, started, seed))
        torch.cuda.empty_cache()
    if any(one.wrong for one in rows):
        click.echo("wrong data: see the rows above", err=True)
        sys.exit(1)


def _shape(text: str) -> tuple[int, int]:
    experts, _, count = text.partition("x")
    if not (experts.isdigit() and count.isdigit()) or int(experts) < 1 or EXPERTS % int(experts):
        raise click.BadParameter(
            f"--cases: expected EXPERTSxROWS with EXPERTS a divisor of {EXPERTS}, got {text!r}"
        )
    return int(experts), int(count)


if __name__ == "__main__":
    command()
