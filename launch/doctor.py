"""moe-bench doctor: the six capabilities that decide whether a machine can run such a model.

A capability is judged for the platform at hand: CUDA, MUSA (Moore Threads), or the CPU alone.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable

import click

from moe_comm.config import EPConfig
from moe_comm.launch import capabilities
from moe_comm.launch.capabilities import FAIL, PASS, WARN, Finding
from moe_comm.launch.machine import Machine, detect
from moe_comm.launch.options import config_of, shape_options

_CANNOT = 3


@click.command(name="doctor")
@shape_options
@click.option("--ep", "ep_size", type=click.IntRange(min=1), help="ranks [default: all devices]")
@click.option("--json", "as_json", is_flag=True, help="findings as JSON on stdout")
def command(
    preset: str,
    num_experts: int | None,
    num_topk: int | None,
    hidden: int | None,
    ep_size: int | None,
    as_json: bool,
) -> int:
    """What this machine can do for such a model, and the fix for what it cannot.

    Exit code 0 without a FAIL, 3 with one.
    """
    config = config_of(preset, num_experts=num_experts, num_topk=num_topk, hidden=hidden)
    machine = detect()
    findings = examine(machine, config, ep_size or max(machine.num_devices, 1))
    if as_json:
        document = {
            "schema_version": 1,
            "machine": dataclasses.asdict(machine),
            "findings": [dataclasses.asdict(finding) for finding in findings],
        }
        print(json.dumps(document, indent=1))
    else:
        print_findings(findings)
    return _CANNOT if any(finding.verdict == FAIL for finding in findings) else 0


def examine(machine: Machine, config: EPConfig, ep_size: int) -> list[Finding]:
    """All findings, the six capabilities first."""
    checks: list[Callable[[Machine, EPConfig, int], Finding]] = [
        capabilities.accelerators,
        capabilities.operators,
        capabilities.state_pool,
        capabilities.deep_ep,
        capabilities.transports,
        capabilities.transfer_engine,
    ]
    found = [check(machine, config, ep_size) for check in checks]
    return [
        *found,
        *capabilities.backend_verdicts(machine, config, ep_size),
        capabilities.limits(machine),
        capabilities.variables(),
    ]


def print_findings(findings: list[Finding]) -> None:
    """A line a finding, and its fix below."""
    width = max(len(finding.capability) for finding in findings)
    colours = {PASS: "green", WARN: "yellow", FAIL: "red"}
    for finding in findings:
        verdict = click.style(finding.verdict, fg=colours[finding.verdict])
        if not sys.stdout.isatty():
            verdict = finding.verdict
        print(f"{verdict}  {finding.capability.ljust(width)}  {finding.detail}")
        if finding.fix and finding.verdict != PASS:
            print(f"      {' ' * width}  fix: {finding.fix}")
