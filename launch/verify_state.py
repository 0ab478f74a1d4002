"""moe-bench verify-state: the same prompt by every way of keeping state, compared layer by layer.

Two processes, each with the whole model in its batch-invariant mode. The first runs every mode; the
second is the decode side of the migrated one. stdout: a line a mode.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from moe_comm.launch.make_checkpoint import InputFileError
from moe_comm.launch.spawn import die_with_parent, is_rank, run_ranks
from moe_comm.model.config import PRESETS, K3Config

if TYPE_CHECKING:
    from moe_comm.launch.worker import Ranks
    from moe_comm.model.serving.modes import Rig

# A whole model of another preset would not fit a temporary folder.
SYNTHETIC_PRESETS = ("k3-tiny",)
_OVERALL_S = 1200.0


@click.command("verify-state")
@click.option("--checkpoint", type=click.Path(path_type=Path), help="A checkpoint directory.")
@click.option(
    "--preset",
    type=click.Choice(PRESETS),
    help="With no checkpoint at hand: a synthetic one of this shape. Default: k3-tiny.",
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--seed", type=int, default=0, show_default=True, help="Of prompts and weights.")
@click.option(
    "--new-tokens",
    type=click.IntRange(3),
    default=3,
    show_default=True,
    help="Tokens after the prompt, the same in every mode.",
)
@click.option(
    "--transport",
    type=click.Choice(["torch.distributed", "mooncake"]),
    default="torch.distributed",
    show_default=True,
    help="Of the migrated mode.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    default=300.0,
    show_default=True,
    help="Seconds to wait for the other process.",
)
def command(
    checkpoint: Path | None,
    preset: str | None,
    device: str,
    seed: int,
    new_tokens: int,
    transport: str,
    timeout: float,
) -> int:
    """Compare whole prefill with chunked, cached, migrated and preempted, layer by layer.

    Equal means bit for bit: recurrent states, convolution windows, latent rows and logits. The
    first difference is named by layer, tensor and position, with the semantic to blame. Exit code
    1 on a difference.
    """
    if checkpoint is not None and preset is not None:
        raise click.UsageError("expected one of --checkpoint and --preset")
    if not is_rank():
        with checkpoint_directory(checkpoint, preset or "k3-tiny", seed) as directory:
            read_config(directory)
            arguments = ["verify-state", "--checkpoint", str(directory), "--device", device]
            arguments += ["--seed", str(seed), "--new-tokens", str(new_tokens)]
            arguments += ["--transport", transport, "--timeout", str(timeout)]
            return run_ranks(
                arguments, num_ranks=2, grace_s=timeout + 10, deadline_s=_OVERALL_S + timeout
            )
    die_with_parent()
    if checkpoint is None:
        raise click.UsageError("--checkpoint: expected a directory when started as ranks")
    directory = checkpoint
    from moe_comm.launch.worker import run_rank

    def body(ranks: Ranks) -> int:
        from moe_comm.launch.state_modes import Setup, as_first, as_second

        if ranks.num_ranks != 2:
            raise click.UsageError(f"expected 2 ranks, got {ranks.num_ranks}")
        setup = Setup(ranks=ranks, transport=transport, seed=seed, num_new=new_tokens)
        with _rig(ranks, directory, device) as rig:
            return as_first(rig, setup) if ranks.is_first else as_second(rig, setup)

    # Control and state bytes travel over gloo; the model's own group follows its device.
    return run_rank(body, device_type="cpu", timeout_s=timeout)


@contextlib.contextmanager
def _rig(ranks: Ranks, directory: Path, device_type: str) -> Iterator[Rig]:
    """The whole model on this rank alone, batch-invariant."""
    import torch
    import torch.distributed as dist

    from moe_comm import Group, create_communicator
    from moe_comm.model.layers.linear import Numerics
    from moe_comm.model.loading import load_model
    from moe_comm.model.serving.modes import Rig
    from moe_comm.model.transformer import ep_config
    from moe_comm.model.weights.manifest import HashMismatchError
    from moe_comm.model.weights.safetensors_file import CheckpointError

    device = torch.device("cpu")
    if device_type == "cuda":
        device = torch.device("cuda", ranks.rank % max(1, torch.cuda.device_count()))
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    alone = [dist.new_group([rank], backend=backend) for rank in range(ranks.num_ranks)][ranks.rank]
    config = read_config(directory)
    numerics = Numerics(batch_invariant=True)
    shape = ep_config(config, max_tokens_per_rank=512, numerics=numerics, timeout_s=ranks.timeout_s)
    began = time.perf_counter()
    with create_communicator(shape, Group(alone, device=device), backend="c10d") as comm:
        try:
            model = load_model(directory, config, comm=comm, numerics=numerics, device=device)
        except HashMismatchError as error:
            raise WrongCheckpointError(str(error)) from error
        except CheckpointError as error:
            raise InputFileError(str(error)) from error
        ranks.say(f"model loaded in {time.perf_counter() - began:.1f} s")
        yield Rig(model, model.layout(model_id=str(config)), device=device)


class WrongCheckpointError(click.ClickException):
    """A tensor's bytes are not the manifest's."""

    exit_code = 1


def read_config(directory: Path) -> K3Config:
    """A checkpoint's configuration; exits with 2 where there is none."""
    try:
        return K3Config.from_checkpoint(directory)
    except (ValueError, OSError) as error:
        raise InputFileError(str(error)) from error


@contextlib.contextmanager
def checkpoint_directory(checkpoint: Path | None, preset: str, seed: int) -> Iterator[Path]:
    """The checkpoint's directory; a temporary synthetic one, removed afterwards, for a preset."""
    if checkpoint is not None:
        yield checkpoint
        return
    if preset not in SYNTHETIC_PRESETS:
        raise click.UsageError(
            f"--preset: expected one of {', '.join(SYNTHETIC_PRESETS)} for a temporary checkpoint, "
            f"got {preset}; write it with make-checkpoint and give --checkpoint"
        )
    from moe_comm.model.weights.synthetic import write_checkpoint

    with tempfile.TemporaryDirectory(prefix="moe-bench-") as folder:
        print(f"writing a synthetic {preset} checkpoint, seed {seed}", file=sys.stderr)
        write_checkpoint(K3Config.preset(preset), folder, seed=seed)
        yield Path(folder)
