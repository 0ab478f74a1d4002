"""moe-bench generate: run the hybrid model end to end; the tokens on stdout, all else on stderr."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moe_comm.backends import MODES
from moe_comm.launch.make_checkpoint import InputFileError
from moe_comm.launch.spawn import die_with_parent, is_rank, run_ranks
from moe_comm.model.config import PRESETS, K3Config

if TYPE_CHECKING:
    from moe_comm.launch.worker import Ranks

DEFAULT_PROMPT_LENGTH = 12
BACKENDS = ("auto", *MODES, *(f"{name}:{mode}" for name, modes in MODES.items() for mode in modes))
# A whole model of another preset would not fit a temporary folder, or a machine.
SYNTHETIC_PRESETS = ("k3-tiny",)


def _parse_prompts(
    ctx: click.Context, param: click.Parameter, values: tuple[str, ...]
) -> tuple[list[int], ...]:
    """Token ids separated by commas or blanks, one list a prompt."""
    del ctx
    prompts = []
    for value in values:
        try:
            ids = [int(part) for part in value.replace(",", " ").split()]
        except ValueError as error:
            raise click.BadParameter(
                f"expected token ids like 1,2,3, got {value!r}", param=param
            ) from error
        if not ids or min(ids) < 0:
            raise click.BadParameter(
                f"expected at least one id, none below 0, got {value!r}", param=param
            )
        prompts.append(ids)
    return tuple(prompts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Job:
    directory: Path
    prompts: tuple[list[int], ...]
    max_new: int
    tp: int
    backend: str
    batch_invariant: bool
    temperature: float
    top_p: float
    seed: int
    stop: bool
    step_tokens: int
    timeout_s: float


@click.command("generate")
@click.option("--checkpoint", type=click.Path(path_type=Path), help="A checkpoint directory.")
@click.option(
    "--preset",
    type=click.Choice(PRESETS),
    help="With no checkpoint at hand: make a synthetic one of this shape in a temporary folder.",
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Default: cuda where there is.")
@click.option("--nproc", type=click.IntRange(1), help="Ranks to start. Default 2, or all GPUs.")
@click.option(
    "--tp",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Ranks of one attention group; it divides the number of ranks.",
)
@click.option(
    "--prompt-ids",
    callback=_parse_prompts,
    multiple=True,
    help="A prompt's token ids, comma-separated; once a prompt. Default: a fixed one.",
)
@click.option("--max-new", type=click.IntRange(0), default=16, show_default=True)
@click.option(
    "--temperature", type=click.FloatRange(0), default=0.0, show_default=True, help="0: greedy."
)
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), default=1.0, show_default=True)
@click.option(
    "--seed",
    type=int,
    default=0,
    show_default=True,
    help="Of sampling, and of a synthetic checkpoint.",
)
@click.option(
    "--stop/--no-stop",
    default=True,
    show_default=True,
    help="End a request at the end-of-sequence token.",
)
@click.option(
    "--backend",
    type=click.Choice(BACKENDS),
    metavar="NAME",
    default="auto",
    show_default=True,
    help="Of the communicator: auto, a backend, or backend:mode.",
)
@click.option(
    "--batch-invariant/--no-batch-invariant",
    default=False,
    show_default=True,
    help="Results that do not depend on what else is in the batch. Slow.",
)
@click.option(
    "--step-tokens",
    type=click.IntRange(64),
    default=4096,
    show_default=True,
    help="Prompt tokens of one step, at most.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    default=60.0,
    show_default=True,
    help="Seconds to wait for a rank.",
)
def command(
    checkpoint: Path | None,
    preset: str | None,
    device: str | None,
    nproc: int | None,
    tp: int,
    prompt_ids: tuple[list[int], ...],
    max_new: int,
    temperature: float,
    top_p: float,
    seed: int,
    stop: bool,
    backend: str,
    batch_invariant: bool,
    step_tokens: int,
    timeout: float,
) -> int:
    """Generate tokens with the hybrid model; one line of token ids a prompt on stdout.

    Prompts are dealt out over the data-parallel groups; a group without one takes part idle.
    """
    if (checkpoint is None) == (preset is None):
        raise click.UsageError("expected one of --checkpoint and --preset")
    device = device or _default_device()
    if not is_rank():
        ranks = nproc or _default_nproc(device)
        if ranks % tp:
            raise click.UsageError(f"--tp: expected a divisor of --nproc {ranks}, got {tp}")
        with _directory(checkpoint, preset, seed) as directory:
            _read_config(directory, prompt_ids)
            # The ranks get the directory in place of the preset.
            arguments = ["generate", "--checkpoint", str(directory), "--device", device]
            arguments += _arguments(
                tp=tp,
                prompt_ids=prompt_ids,
                max_new=max_new,
                temperature=temperature,
                top_p=top_p,
                seed=seed,
                stop=stop,
                backend=backend,
                batch_invariant=batch_invariant,
                step_tokens=step_tokens,
                timeout=timeout,
            )
            return run_ranks(arguments, num_ranks=ranks, grace_s=timeout + 10)
    die_with_parent()
    from moe_comm.launch.worker import run_rank

    def body(ranks: Ranks) -> int:
        with _shared_directory(ranks, checkpoint, preset, seed) as directory:
            return _generate(
                ranks,
                _Job(
                    directory=directory,
                    prompts=prompt_ids,
                    max_new=max_new,
                    tp=tp,
                    backend=backend,
                    batch_invariant=batch_invariant,
                    temperature=temperature,
                    top_p=top_p,
                    seed=seed,
                    stop=stop,
                    step_tokens=step_tokens,
                    timeout_s=timeout,
                ),
            )

    return run_rank(body, device_type=device, timeout_s=timeout)


def _generate(ranks: Ranks, job: _Job) -> int:
    from moe_comm import create_communicator
    from moe_comm.model.generation import generate
    from moe_comm.model.layers.linear import Numerics
    from moe_comm.model.loading import load_model
    from moe_comm.model.parallel import Parallel
    from moe_comm.model.sampling import Sampling
    from moe_comm.model.transformer import ep_config
    from moe_comm.model.weights.manifest import HashMismatchError
    from moe_comm.model.weights.safetensors_file import CheckpointError

    config = _read_config(job.directory, job.prompts)
    if ranks.num_ranks % job.tp:
        raise click.UsageError(
            f"--tp: expected a divisor of the {ranks.num_ranks} ranks, got {job.tp}"
        )
    prompts = list(job.prompts) or [default_prompt(config)]
    numerics = Numerics(batch_invariant=job.batch_invariant)
    parallel = Parallel.create(job.tp, timeout_s=job.timeout_s)
    mine = {n: ids for n, ids in enumerate(prompts) if n % parallel.dp_size == parallel.dp_rank}
    began = time.perf_counter()
    shape = ep_config(
        config,
        max_tokens_per_rank=_capacity(job, prompts, parallel.dp_size),
        numerics=numerics,
        timeout_s=job.timeout_s,
    )
    with create_communicator(shape, ranks.group, backend=job.backend) as comm:
        try:
            model = load_model(
                job.directory,
                config,
                comm=comm,
                parallel=parallel,
                numerics=numerics,
                device=ranks.device,
                on_layer=lambda n: ranks.say(f"layer {n + 1} of {config.num_hidden_layers} loaded"),
            )
        except HashMismatchError as error:
            raise WrongCheckpointError(str(error)) from error
        except CheckpointError as error:
            raise InputFileError(str(error)) from error
        ranks.barrier(what="load")
        loaded = time.perf_counter()
        made = generate(
            model,
            mine,
            max_new=job.max_new,
            sampling=Sampling(temperature=job.temperature, top_p=job.top_p, seed=job.seed),
            stop_ids=(config.eos_token_id,) if job.stop else (),
            step_tokens=job.step_tokens,
        )
        comm.check()
        ended = time.perf_counter()
    everyone: dict[int, list[int]] = {}
    for part in ranks.gather(made, what="results"):
        everyone.update(part)
    if ranks.is_first:
        for number in range(len(prompts)):
            print(" ".join(str(i) for i in everyone[number]))
    total = sum(len(ids) for ids in everyone.values())
    ranks.say(
        f"{total} tokens, {ranks.num_ranks} ranks, tp {job.tp}, backend {comm.backend} "
        f"{comm.mode}: load {loaded - began:.1f} s, generate {ended - loaded:.1f} s"
    )
    return 0


def _read_config(directory: Path, prompts: tuple[list[int], ...]) -> K3Config:
    """The checkpoint's configuration; the prompts are checked against it."""
    try:
        config = K3Config.from_checkpoint(directory)
    except (ValueError, OSError) as error:
        raise InputFileError(str(error)) from error
    for ids in prompts:
        if max(ids) >= config.vocab_size:
            raise click.UsageError(
                f"--prompt-ids: expected ids below {config.vocab_size}, got {max(ids)}"
            )
    return config


def default_prompt(config: K3Config) -> list[int]:
    """A fixed prompt: multiples of a prime, spread over the vocabulary."""
    return [(7919 * (i + 1)) % config.vocab_size for i in range(DEFAULT_PROMPT_LENGTH)]


class WrongCheckpointError(click.ClickException):
    """A tensor's bytes are not the manifest's."""

    exit_code = 1


def _capacity(job: _Job, prompts: list[list[int]], dp_size: int) -> int:
    """Tokens of the largest step of any rank's slice, rounded up to a power of two."""
    most = max(
        min(sum(len(ids) for ids in prompts[first::dp_size]), job.step_tokens)
        + len(prompts[first::dp_size])
        for first in range(min(dp_size, len(prompts)))
    )
    return 1 << (-(-most // job.tp) - 1).bit_length()


@contextlib.contextmanager
def _directory(checkpoint: Path | None, preset: str | None, seed: int) -> Iterator[Path]:
    """The checkpoint's directory; a temporary synthetic one, removed afterwards, for a preset."""
    if checkpoint is not None:
        yield checkpoint
        return
    assert preset is not None, "one of checkpoint and preset was checked"
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


@contextlib.contextmanager
def _shared_directory(
    ranks: Ranks, checkpoint: Path | None, preset: str | None, seed: int
) -> Iterator[Path]:
    """The same inside a rank (under torchrun): rank 0 makes a synthetic one for all of the host."""
    with contextlib.ExitStack() as stack:
        directory = None
        if ranks.is_first or checkpoint is not None:
            directory = stack.enter_context(_directory(checkpoint, preset, seed))
        if checkpoint is not None:
            yield checkpoint
            return
        yield Path(ranks.gather(str(directory), what="checkpoint")[0])
        ranks.barrier(what="end of the checkpoint")


def _arguments(
    *,
    prompt_ids: tuple[list[int], ...],
    stop: bool,
    batch_invariant: bool,
    **plain: Any,
) -> list[str]:
    """The options of this command as a command line for the ranks."""
    out = ["--stop" if stop else "--no-stop"]
    out.append("--batch-invariant" if batch_invariant else "--no-batch-invariant")
    for name, value in plain.items():
        out += [f"--{name.replace('_', '-')}", str(value)]
    for ids in prompt_ids:
        out += ["--prompt-ids", ",".join(map(str, ids))]
    return out


def _default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _default_nproc(device: str) -> int:
    import torch

    return torch.cuda.device_count() if device == "cuda" else 2
