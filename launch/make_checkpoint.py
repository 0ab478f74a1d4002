"""moe-bench make-checkpoint: a synthetic K3 checkpoint of any size."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import click

from moe_comm.model.config import PRESETS, K3Config


class InputFileError(click.ClickException):
    """A file or directory that was given is not what the command can use."""

    exit_code = 2


@click.command("make-checkpoint")
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.option("--preset", type=click.Choice(PRESETS), default="k3-tiny", show_default=True)
@click.option("--num-layers", type=click.IntRange(1), help="Only the first layers of the preset.")
@click.option("--num-experts", type=click.IntRange(1), help="Experts a layer, instead of 896.")
@click.option("--dense-layers", type=click.IntRange(0), help="Leading layers without experts.")
@click.option("--vocab-size", type=click.IntRange(1), help="Rows of embedding and head.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--force", is_flag=True, help="Replace an earlier checkpoint in DIRECTORY.")
def command(
    directory: Path,
    preset: str,
    num_layers: int | None,
    num_experts: int | None,
    dense_layers: int | None,
    vocab_size: int | None,
    seed: int,
    force: bool,
) -> None:
    """Write a synthetic checkpoint with K3's names, packing and shards into DIRECTORY.

    Refuses a directory that is not empty, unless --force.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    from moe_comm.model.weights.synthetic import write_checkpoint

    try:
        config = _config(preset, num_layers, num_experts, dense_layers, vocab_size)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    began = time.perf_counter()
    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("writing", total=None)
        try:
            paths = write_checkpoint(
                config,
                directory,
                seed=seed,
                force=force,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )
        except (FileExistsError, NotADirectoryError, PermissionError) as error:
            raise InputFileError(str(error)) from error
    size = sum(path.stat().st_size for path in paths)
    click.echo(
        f"{directory}: {len(paths)} shards, {size / 1e9:.3f} GB, preset {preset}, "
        f"{config.num_hidden_layers} layers, {config.num_experts} experts a layer, seed {seed}, "
        f"{time.perf_counter() - began:.1f} s"
    )


def _config(
    preset: str,
    num_layers: int | None,
    num_experts: int | None,
    dense_layers: int | None,
    vocab_size: int | None,
) -> K3Config:
    config = K3Config.preset(preset)
    if num_layers is not None:
        config = config.truncate(num_layers)
    changes: dict[str, Any] = {
        "num_experts": num_experts,
        "first_k_dense_replace": dense_layers,
        "vocab_size": vocab_size,
    }
    changes = {name: value for name, value in changes.items() if value is not None}
    return dataclasses.replace(config, **changes)
