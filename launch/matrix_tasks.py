"""What the matrix consists of: tasks, each one command in its own process with a bound in time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_comm.config import EPConfig
from moe_comm.launch.routing import parse_routing

SECTIONS = ("copies", "run", "layer", "unused", "faults", "soak")
# What a task's command says instead of the file that it must write.
OUT = "{out}"
_CLI = ("-m", "moe_comm.launch.cli", "run")


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What was asked for.

    Attributes:
        num_ranks, device_type: of this host.
        presets, num_tokens, wires: of section run; wires are dispatch's, combine's is bf16.
        backends: names of one call each; a call that fails takes only its own names along.
        routings: None: uniform and both traces, or uniform and zipf:1 where no trace fits.
        iters: None: the command's own.
        seed: of all data.
        soak_seconds: of section soak.
        seconds: bound of one task.
    """

    num_ranks: int
    device_type: str
    presets: tuple[str, ...]
    num_tokens: tuple[int, ...]
    wires: tuple[str, ...]
    backends: tuple[tuple[str, ...], ...]
    routings: tuple[str, ...] | None = None
    iters: int | None = None
    seed: int = 0
    soak_seconds: float = 300.0
    seconds: float = 240.0

    def routings_for(self, preset: str) -> tuple[str, ...]:
        """Texts of a preset's routings."""
        if self.routings is not None:
            return self.routings
        config = EPConfig.preset(preset)
        if (config.num_experts, config.num_topk) == (896, 16):
            return ("uniform", "trace:balanced", "trace:skewed")
        return ("uniform", "zipf:1")


@dataclass(frozen=True, kw_only=True)
class Task:
    """One command.

    Attributes:
        name: unique, also over runs that are resumed.
        section: of SECTIONS.
        command: for the interpreter; one part is or holds OUT.
        seconds: bound. least: what must be left of a call to begin it.
        preset, wire, backends, num_tokens, routings, phases: what `moe-bench run` is asked, empty
            for other commands.
    """

    name: str
    section: str
    command: tuple[str, ...]
    seconds: float
    preset: str = ""
    wire: str = ""
    backends: tuple[str, ...] = ()
    num_tokens: tuple[int, ...] = ()
    routings: tuple[str, ...] = ()
    phases: tuple[str, ...] = ("dispatch", "combine", "round_trip")
    least: float = 60.0


def tasks_of(section: str, grid: Grid) -> list[Task]:
    """The tasks of a section, in order."""
    ranks = str(grid.num_ranks)
    if section == "copies":
        command = ("-m", "moe_comm.launch.matrix_copies", OUT, ranks)
        return [Task(name="copies", section=section, command=command, seconds=grid.seconds)]
    if section == "run":
        return [
            _run(grid, section, preset, wire, _served(names, wire))
            for preset in grid.presets
            for wire in grid.wires
            for names in grid.backends
            if _served(names, wire)
        ]
    if section == "layer":
        names: tuple[str, ...] = ("slab",) if grid.device_type == "cuda" else ("c10d:exact",)
        wide = [preset for preset in grid.presets if EPConfig.preset(preset).num_experts == 896]
        return [
            _run(grid, section, preset, wire, names, phases=("moe_layer",))
            for preset in wide[:1]
            for wire in grid.wires
        ]
    if section == "unused":
        names = ("c10d:exact", "c10d:dense")
        if grid.device_type == "cuda":
            names = ("slab:low-latency", "slab:high-throughput", *names)
        return [_run(grid, section, grid.presets[0], grid.wires[0], names, uniform_only=True)]
    if section == "faults":
        faults = (
            "-m", "moe_comm.launch.slab_faults", "--nproc", ranks, "--device", grid.device_type,
            "--out", OUT,
        )  # fmt: skip
        return [Task(name="faults", section=section, command=faults, seconds=grid.seconds)]
    soak = (
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks,
        "-m", "moe_comm.launch.slab_soak", "--device", grid.device_type, "--pairs", str(10**9),
        "--seconds", f"{grid.soak_seconds:g}", "--seed", str(grid.seed), "--preset",
        grid.presets[0], "--out", OUT,
    )  # fmt: skip
    bound = grid.soak_seconds + 180
    least = grid.soak_seconds + 60
    return [Task(name="soak", section="soak", command=soak, seconds=bound, least=least)]


def _served(names: tuple[str, ...], wire: str) -> tuple[str, ...]:
    """per-expert sends bf16 alone: once is enough."""
    return tuple(name for name in names if name != "per-expert" or wire == "bf16")


def _run(
    grid: Grid,
    section: str,
    preset: str,
    wire: str,
    names: tuple[str, ...],
    *,
    phases: tuple[str, ...] = ("dispatch", "combine", "round_trip"),
    uniform_only: bool = False,
) -> Task:
    routings = ("uniform",) if uniform_only else grid.routings_for(preset)
    tokens = grid.num_tokens
    if section == "unused":
        # Below that a slab is a few rows.
        tokens = tuple(n for n in tokens if n >= 128) or tokens[-1:]
    command = [
        *_CLI, "--preset", preset, "--backend", ",".join(names), "--no-baseline", "--num-tokens",
        ",".join(map(str, tokens)), "--wire", wire, "--combine-wire", "bf16", "--routing",
        ",".join(routings), "--phase", ",".join(phases), "--device", grid.device_type, "--nproc",
        str(grid.num_ranks), "--seed", str(grid.seed), "--json", OUT,
    ]  # fmt: skip
    if grid.iters is not None:
        command += ["--iters", str(grid.iters), "--warmup", "3"]
    if not any(name.startswith("slab") for name in names) and grid.device_type == "cuda":
        # The slab's task measures what the machine needs.
        command.append("--no-limit")
    return Task(
        name=f"{section} {preset} {wire} {','.join(names)}",
        section=section,
        command=tuple(command),
        seconds=grid.seconds,
        preset=preset,
        wire=wire,
        backends=names,
        num_tokens=tokens,
        routings=tuple(canonical(routing, preset) for routing in routings),
        phases=phases,
    )


def canonical(routing: str, preset: str) -> str:
    """The text that result rows have."""
    config = EPConfig.preset(preset)
    parsed = parse_routing(routing, num_experts=config.num_experts, num_topk=config.num_topk)
    return parsed.text


def label_of(row: Mapping[str, Any], asked: Sequence[str]) -> str:
    """The name under which a row's backend was asked for: with its mode where modes are apart."""
    backend, mode = row["backend"], row["mode"]
    full = f"{backend}:{mode}" if mode else backend
    return backend if backend in asked and backend != "deepep" else full


def cell_of(row: Mapping[str, Any], asked: Sequence[str]) -> str:
    """What tells a row from the others of its task."""
    if row["phase"] == "copy":
        params = row["params"]
        return f"{row['mode']} {params['from']}>{params['to']} {params['bytes']}"
    if row["phase"] == "fault":
        return str(row["params"]["case"])
    return f"{label_of(row, asked)} {row['phase']} {row['num_tokens']} {row['routing']}"
