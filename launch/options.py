"""Options that commands share, and the checks that need no rank: a bad value exits with 2 before
anything starts."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
import torch

from moe_comm import backends
from moe_comm.config import PRESETS, EPConfig
from moe_comm.launch.routing import Routing, RoutingError, parse_routing

F = TypeVar("F", bound=Callable[..., Any])


class CannotRun(click.ClickException):
    """This environment cannot do what was asked for."""

    exit_code = 3


class BadInput(click.ClickException):
    """An input file or value that cannot be used."""

    exit_code = 2


Item = Callable[[str], Any]
Callback = Callable[[click.Context, click.Parameter, Any], Any]


def one(item: Item) -> Callback:
    """An option's callback: one value through `item`, which raises click.BadParameter."""

    def parse(ctx: click.Context, param: click.Parameter, value: str | None) -> Any:
        del ctx, param
        return None if value is None else item(value)

    return parse


def many(item: Item) -> Callback:
    """An option's callback: a comma-separated list, repetitions dropped."""

    def parse(ctx: click.Context, param: click.Parameter, value: str | None) -> Any:
        del ctx, param
        if value is None:
            return None
        parts = [part.strip() for part in value.split(",")]
        if not all(parts):
            raise click.BadParameter(f"expected items separated by commas, got {value!r}")
        return tuple(dict.fromkeys(item(part) for part in parts))

    return parse


def known(names: Sequence[str]) -> Item:
    """A name out of a list, with the nearest one suggested for a typo."""

    def parse(text: str) -> str:
        if text not in names:
            near = difflib.get_close_matches(text, names, n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise click.BadParameter(f"expected one of {', '.join(names)}, got {text!r}{hint}")
        return text

    return parse


def backend(*extra: str) -> Item:
    """A backend's name, with or without ":mode"."""
    name_of = known([*extra, *backends.MODULES])

    def parse(text: str) -> str:
        name, _, mode = text.partition(":")
        name_of(name)
        if mode and name in backends.MODES:
            known([f"{name}:{each}" for each in backends.MODES[name]])(text)
        return text

    return parse


def token_count(text: str) -> int:
    """A whole number >= 0; k and K stand for 1024."""
    scale = 1024 if text[-1:] in ("k", "K") else 1
    digits = text[:-1] if scale > 1 else text
    if not (digits.isascii() and digits.isdigit()):
        raise click.BadParameter(f"expected a whole number >= 0 (4K is 4096), got {text!r}")
    return int(digits) * scale


def _add(function: F, options: Sequence[Callable[[F], F]]) -> F:
    for option in reversed(options):
        function = option(function)
    return function


def rank_options(function: F) -> F:
    """--device, --nproc, --timeout, --seed: how ranks start."""
    return _add(
        function,
        [
            click.option(
                "--device",
                default="auto",
                show_default=True,
                help="auto, cpu, or an accelerator's type (cuda)",
            ),
            click.option(
                "--nproc",
                type=click.IntRange(min=1),
                help="ranks to start [default: 2 on a CPU, all accelerators elsewhere]; under "
                "torchrun its own count stands",
            ),
            click.option(
                "--timeout",
                type=click.FloatRange(min=0, min_open=True),
                default=60.0,
                show_default=True,
                help="seconds a rank waits for another",
            ),
            click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True),
        ],
    )


def shape_options(function: F) -> F:
    """--preset and what replaces parts of it."""
    at_least_one = click.IntRange(min=1)
    return _add(
        function,
        [
            click.option(
                "--preset",
                callback=one(known(list(PRESETS))),
                default="kimi-k3",
                show_default=True,
                help=f"model shape: {', '.join(PRESETS)}",
            ),
            click.option("--num-experts", type=at_least_one, help="instead of the preset's"),
            click.option("--num-topk", type=at_least_one, help="instead of the preset's"),
            click.option("--hidden", type=at_least_one, help="instead of the preset's"),
        ],
    )


def group_size(text: str) -> int:
    """A whole number >= 2."""
    if not (text.isascii() and text.isdigit()) or int(text) < 2:
        raise click.BadParameter(f"expected a whole number >= 2, got {text!r}")
    return int(text)


def layer_options(function: F) -> F:
    """--experts, --emulate-ep: of the phase moe_layer."""
    return _add(
        function,
        [
            click.option(
                "--experts",
                "experts_by",
                type=click.Choice(["auto", "torch", "triton", "humming"]),
                default="auto",
                show_default=True,
                help="what computes the experts of moe_layer",
            ),
            click.option(
                "--emulate-ep",
                callback=many(group_size),
                help="sizes of larger groups, a comma list: moe_layer also takes the share of one "
                "of their ranks (its experts, and the rows it would receive)",
            ),
        ],
    )


def output_options(function: F) -> F:
    """--json, --csv, --markdown, --quiet: where results go."""
    return _add(
        function,
        [
            click.option(f"--{kind}", f"{kind}_file", metavar="FILE", help=text)
            for kind, text in (
                ("json", "write the result file (results/README.md); - is stdout"),
                ("csv", "write all fields as CSV; - is stdout"),
                ("markdown", "write the table as Markdown; - is stdout"),
            )
        ]
        + [click.option("--quiet", "-q", is_flag=True, help="no progress on stderr")],
    )


def config_of(
    preset: str,
    *,
    num_experts: int | None,
    num_topk: int | None,
    hidden: int | None,
    **fields: Any,
) -> EPConfig:
    """The EPConfig of shape options; a shape that cannot be exits with 2."""
    shape = {"num_experts": num_experts, "num_topk": num_topk, "hidden": hidden}
    given = {name: value for name, value in shape.items() if value is not None}
    try:
        return EPConfig.preset(preset, **given, **fields)
    except ValueError as error:
        raise BadInput(str(error)) from error


def routings_of(texts: Sequence[str], config: EPConfig) -> list[Routing]:
    """Parsed routings; a bad one, or a bad trace file, exits with 2."""
    try:
        return [
            parse_routing(text, num_experts=config.num_experts, num_topk=config.num_topk)
            for text in texts
        ]
    except RoutingError as error:
        raise BadInput(str(error)) from error


def device_type_of(text: str) -> str:
    """The device type that --device asks for; 3 where it is not here."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    here = accelerator.type if accelerator is not None else None
    if text == "auto":
        return here or "cpu"
    if text in ("cpu", here):
        return text
    try:
        torch.device(text)
    except RuntimeError as error:
        raise BadInput(f"--device: expected auto, cpu or a device type, got {text!r}") from error
    found = here or "none; this may be a CPU build of torch"
    raise CannotRun(
        f"--device {text}: no such accelerator here (found: {found}). moe-bench doctor says more"
    )


def rank_count_of(nproc: int | None, device_type: str) -> int:
    """Ranks to start; 3 where there are fewer accelerators."""
    if device_type == "cpu":
        return nproc or 2
    count = torch.accelerator.device_count()
    if nproc is not None and nproc > count:
        raise CannotRun(
            f"--nproc {nproc}: expected at most {count}, the {device_type} devices here"
        )
    return nproc or count


def check_outputs(*files: str | None) -> None:
    """Refuse a file that cannot be written, before a run that would be lost with it."""
    if sum(file == "-" for file in files) > 1:
        raise BadInput("--json, --csv, --markdown: expected at most one on stdout (-)")
    for file in files:
        if file is None or file == "-":
            continue
        path = Path(file)
        if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
            raise BadInput(f"{file}: expected a file in a directory that can be written")
