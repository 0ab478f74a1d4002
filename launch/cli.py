"""moe-bench: one click group; each subcommand is a module of its own, imported when called."""

from __future__ import annotations

import difflib
import importlib

import click

from moe_comm.launch.spawn import die_with_parent, run_command

# name -> (module, one line for --help). Modules are imported only when their command is called or
# asked for help, so that `moe-bench --help` and a typo answer at once.
COMMANDS: dict[str, tuple[str, str]] = {
    "doctor": ("doctor", "what this machine can do, and the fix for what it cannot"),
    "list": ("list_", "backends, presets, routings and wires, and why any is unavailable"),
    "run": ("run", "the main job: dispatch, experts, combine; checked, then timed"),
    "check": ("check", "correctness only, against the reference"),
    "make-checkpoint": ("make_checkpoint", "write a synthetic MXFP4 checkpoint"),
    "load": ("load", "stream and verify a checkpoint, and draw the memory curve"),
    "generate": ("generate", "run the hybrid model; tokens on stdout"),
    "verify-state": ("verify_state", "whole prefill against chunked, cached, migrated, preempted"),
    "serve-bench": ("serve_bench", "a request trace through the scheduler"),
}


class LazyGroup(click.Group):
    """A group whose commands are imported by name from `moe_comm.launch`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"moe_comm.launch.{COMMANDS[cmd_name][0]}")
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            ctx.fail(f"no such command {args[0]!r}.{hint} Commands: {', '.join(COMMANDS)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="moe_comm", prog_name="moe-bench")
def cli() -> None:
    """Expert-parallel communication for very sparse MoE models: check it, time it, run it."""


def main() -> None:
    """Entry point. Exit codes: 0 right, 1 wrong data, 2 usage or an input file, 3 this
    environment cannot, 124 a timeout or a lost rank, 130 interrupted."""
    die_with_parent()
    run_command(cli)


if __name__ == "__main__":
    main()
