"""moe-bench load: stream and verify a checkpoint as one rank does, and draw the memory curve."""

from __future__ import annotations

import datetime
import functools
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moe_comm.launch.make_checkpoint import InputFileError

if TYPE_CHECKING:
    import torch

    from moe_comm.model.config import K3Config
    from moe_comm.model.weights.load_all import LoadReport


class WrongBytesError(click.ClickException):
    """A tensor's bytes are not the manifest's."""

    exit_code = 1


class EnvironmentCannotError(click.ClickException):
    """This machine cannot do what was asked."""

    exit_code = 3


@click.command("load")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--device", default=None, help="cpu, cuda, cuda:1; default: cuda where there is one.")
@click.option("--layout", type=click.Choice(["rows", "tiles", "humming"]), help="Runtime form.")
@click.option("--ep-size", type=click.IntRange(1), default=1, show_default=True)
@click.option("--rank", type=click.IntRange(0), default=0, show_default=True)
@click.option("--verify/--no-verify", default=True, help="Compare with the manifest, if any.")
@click.option("--write-manifest", is_flag=True, help="Hash every tensor and write a manifest.")
@click.option("--force", is_flag=True, help="Let --write-manifest replace a manifest.")
@click.option("--drop-cache", is_flag=True, help="Read from the disk, not from the page cache.")
@click.option(
    "--plain",
    is_flag=True,
    help="For comparison: read the same files plainly, before and after, and load once more with "
    "hashing the other way (on or off).",
)
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="PNG of the curve.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, allow_dash=True))
def command(
    directory: Path,
    device: str | None,
    layout: str | None,
    ep_size: int,
    rank: int,
    verify: bool,
    write_manifest: bool,
    force: bool,
    drop_cache: bool,
    plain: bool,
    plot: Path | None,
    json_path: str | None,
) -> None:
    """Read every tensor of the checkpoint in DIRECTORY and keep this rank's experts.

    Exits 0 when everything is right, 1 when a tensor's bytes differ from the manifest, 2 when a
    tensor or a file is missing, cut short, or of the wrong shape or dtype.
    """
    from moe_comm.model.weights.manifest import (
        MANIFEST_NAME,
        HashMismatchError,
        Manifest,
    )
    from moe_comm.model.weights.memory import draw_curve
    from moe_comm.model.weights.safetensors_file import CheckpointError

    if rank >= ep_size:
        raise click.UsageError(f"--rank: expected below --ep-size {ep_size}, got {rank}")
    if write_manifest and ep_size > 1:
        raise click.UsageError("--write-manifest: expected --ep-size 1, which reads every tensor")
    manifest_path = directory / MANIFEST_NAME
    if write_manifest and manifest_path.exists() and not force:
        raise InputFileError(f"{manifest_path}: a manifest exists; --force replaces it")
    started = datetime.datetime.now(datetime.UTC)
    try:
        result, report, seen = _run(
            directory,
            device=device,
            layout=layout,
            share=(rank, ep_size),
            verify=verify and not write_manifest,
            record=write_manifest,
            drop_cache=drop_cache,
            plain=plain,
        )
    except HashMismatchError as error:
        raise WrongBytesError(str(error)) from error
    except CheckpointError as error:
        raise InputFileError(str(error)) from error
    click.echo(draw_curve(list(report.samples)), err=json_path == "-")
    if write_manifest:
        try:
            Manifest(tensors=seen).save(directory, force=force)
        except OSError as error:
            raise InputFileError(f"{manifest_path}: {error}") from error
    if json_path is not None:
        from moe_comm.launch.load_results import document
        from moe_comm.launch.results import write_json
        from moe_comm.model.config import K3Config

        config = K3Config.from_checkpoint(directory)
        write_json(json_path, document(result, config, argv=sys.argv[1:], started=started))
    if json_path != "-":
        click.echo("\n".join(_lines(result)))
        if write_manifest:
            click.echo(f"wrote {manifest_path}, root {Manifest(tensors=seen).root()}")
    if plot is not None:
        _plot(report, plot)
        click.echo(f"wrote {plot}", err=True)


def _run(
    directory: Path,
    *,
    device: str | None,
    layout: str | None,
    share: tuple[int, int],
    verify: bool,
    record: bool,
    drop_cache: bool,
    plain: bool,
) -> tuple[dict[str, Any], LoadReport, dict[Any, Any]]:
    import torch

    from moe_comm.model.config import K3Config

    try:
        chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise click.UsageError(f"--device: {error}") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise EnvironmentCannotError(f"--device {device}: this torch sees no CUDA GPU")
    if layout == "humming" and (
        chosen.type != "cuda" or importlib.util.find_spec("humming") is None
    ):
        raise EnvironmentCannotError("--layout humming: needs a CUDA GPU and humming-kernels")
    if not directory.is_dir():
        raise InputFileError(f"{directory}: expected a checkpoint directory")
    try:
        config = K3Config.from_checkpoint(directory)
    except (ValueError, OSError) as error:
        raise InputFileError(str(error)) from error
    load = functools.partial(
        _load, directory, config, chosen, layout=layout, share=share, drop_cache=drop_cache
    )
    reads = [_read_plainly(directory, drop_cache)] if plain else []
    report, seen, hashed = load(verify=verify, record=record)
    result = _result(report, chosen.type, share, hashed)
    if plain:
        other, _, other_hashed = load(verify=False, record=not hashed)
        reads.append(_read_plainly(directory, drop_cache))
        result |= _comparison(reads, {hashed: report, other_hashed: other})
    return result, report, seen


def _load(
    directory: Path,
    config: K3Config,
    device: torch.device,
    *,
    layout: str | None,
    share: tuple[int, int],
    drop_cache: bool,
    verify: bool,
    record: bool,
) -> tuple[LoadReport, dict[Any, Any], bool]:
    """One load: what it did, the hashes seen, and whether it hashed. The weights are let go."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    from moe_comm.model.weights.checkpoint import Checkpoint
    from moe_comm.model.weights.load_all import load_all
    from moe_comm.placement import ExpertPlacement

    rank, ep_size = share
    ids = ExpertPlacement.contiguous(config.num_experts, ep_size).local_expert_ids(rank)
    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with (
        Checkpoint(directory, verify=verify, record=record, keep_cache=not drop_cache) as files,
        Progress(*columns, console=console, disable=not console.is_terminal) as bar,
    ):
        if drop_cache:
            files.drop_cache()
        task = bar.add_task("loading", total=None)
        report = load_all(
            files,
            config,
            ids,
            device=device,
            layout=layout,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )[1]
        return report, dict(files.hashes.seen), files.hashes.active


def _read_plainly(directory: Path, drop_cache: bool) -> tuple[int, float]:
    """Bytes and seconds of reading all shards in large pieces."""
    from moe_comm.model.weights.checkpoint import Checkpoint
    from moe_comm.model.weights.load_all import read_plain

    with Checkpoint(directory, verify=False, keep_cache=not drop_cache) as files:
        if drop_cache:
            files.drop_cache()
        return read_plain(files)


def _result(
    report: LoadReport, device: str, share: tuple[int, int], hashed: bool
) -> dict[str, Any]:
    return {
        "device": device,
        "rank": share[0],
        "ep_size": share[1],
        "tensors": report.tensors,
        "read_bytes": report.read_bytes,
        "seconds": report.seconds,
        "gbps": report.gbps,
        "verified": report.verified,
        "hashed": hashed,
        "resident_bytes": report.resident_bytes,
        "peak_host_extra_bytes": report.peak_host_extra,
        "peak_device_extra_bytes": report.peak_device_extra,
        "peak_extra_bytes": report.peak_extra,
        "bound_bytes": report.bound,
        "within_bound": report.peak_extra <= report.bound,
    }


def _comparison(
    reads: Sequence[tuple[int, float]], loads: Mapping[bool, LoadReport]
) -> dict[str, Any]:
    """Rates of plain reads (the faster counts), and of loads with hashing off and on."""
    rates = [count / seconds / 1e9 for count, seconds in reads]
    best = max(rates)
    return {
        "plain_bytes": reads[0][0],
        "plain_gbps": best,
        "plain_gbps_each": rates,
        "of_plain": {
            ("hashing" if hashed else "no_hashing"): {
                "gbps": report.gbps,
                "of_plain": report.gbps / best,
                "peak_extra_bytes": report.peak_extra,
            }
            for hashed, report in sorted(loads.items())
        },
    }


def _lines(result: dict[str, Any]) -> list[str]:
    verified = "verified against the manifest" if result["verified"] else "not verified"
    bound = "within" if result["within_bound"] else "OVER"
    lines = [
        f"read       {result['tensors']} tensors, {result['read_bytes']} bytes, "
        f"{result['seconds']:.2f} s, {result['gbps']:.2f} GB/s, {verified}",
        f"resident   {result['resident_bytes'] / 1e6:.1f} MB of experts on {result['device']}, "
        f"rank {result['rank']} of {result['ep_size']}",
        f"peak extra {result['peak_extra_bytes'] / 1e6:.1f} MB "
        f"(host {result['peak_host_extra_bytes'] / 1e6:.1f}, "
        f"device {result['peak_device_extra_bytes'] / 1e6:.1f}), {bound} the bound of "
        f"{result['bound_bytes'] / 1e6:.1f} MB (4 experts + 64 MiB)",
    ]
    if "plain_gbps" in result:
        loads = "; ".join(
            f"a load with {name.replace('_', ' ')} {one['gbps']:.2f} GB/s, "
            f"{100 * one['of_plain']:.0f}%"
            for name, one in result["of_plain"].items()
        )
        lines.append(f"plain      {result['plain_gbps']:.2f} GB/s, the better of two; {loads}")
    return lines


def _plot(report: LoadReport, path: Path) -> None:
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise EnvironmentCannotError("--plot: needs matplotlib (the extra 'plot')") from error
    mpl.use("Agg")
    from matplotlib import pyplot

    read = [sample.read / 1e6 for sample in report.samples]
    held = [(sample.host + sample.device) / 1e6 for sample in report.samples]
    resident = [sample.resident / 1e6 for sample in report.samples]
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    axes.plot(read, held, label="held by this process (host + device)")
    axes.plot(read, resident, label="weights in place")
    axes.plot(
        read,
        [value + report.bound / 1e6 for value in resident],
        linestyle=":",
        label="bound: weights + 4 experts + 64 MiB",
    )
    axes.set_xlabel("bytes read (MB)")
    axes.set_ylabel("memory (MB)")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
