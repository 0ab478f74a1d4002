"""moe-bench list: what can be named on the command line, and why any of it is unavailable here."""

from __future__ import annotations

import json
from typing import Any

import click

from moe_comm import backends
from moe_comm.config import PRESETS, EPConfig
from moe_comm.launch.capabilities import topology_of
from moe_comm.launch.machine import detect
from moe_comm.launch.modes import modes_of, verdicts
from moe_comm.launch.options import config_of, shape_options
from moe_comm.wire import WIRES

ROUTINGS: dict[str, str] = {
    "auto": "the shipped trace where experts and top-k match it, else zipf:1",
    "trace[:FILE][:balanced|skewed][:LAYER]": "recorded routing; default the shipped file, "
    "balanced, layer 0",
    "uniform": "distinct experts, all alike",
    "zipf:S": "popularity 1 / position^S",
    "hot:N": "all choices among the first N experts, or those N and others where N < top-k",
    "...+masked:P": "each choice is -1 with probability P, on top of any",
}


@click.command(name="list")
@shape_options
@click.option("--ep", "ep_size", type=click.IntRange(min=1), help="ranks [default: all devices]")
@click.option("--json", "as_json", is_flag=True, help="as JSON on stdout")
def command(
    preset: str,
    num_experts: int | None,
    num_topk: int | None,
    hidden: int | None,
    ep_size: int | None,
    as_json: bool,
) -> int:
    """Backends with their modes, presets, routings and wires."""
    config = config_of(preset, num_experts=num_experts, num_topk=num_topk, hidden=hidden)
    document = catalogue(config, ep_size)
    if as_json:
        print(json.dumps(document, indent=1))
        return 0
    for title, lines in (
        ("backends", [_backend_line(name, b) for name, b in document["backends"].items()]),
        (
            "presets",
            [
                f"{name:<14} {p['num_experts']} experts, top-{p['num_topk']}, hidden {p['hidden']}"
                for name, p in document["presets"].items()
            ],
        ),
        ("routings", [f"{name:<40} {text}" for name, text in document["routings"].items()]),
        ("wires", [f"{name:<6} {text}" for name, text in document["wires"].items()]),
    ):
        print(f"{title}:")
        for line in lines:
            print(f"  {line}")
    return 0


def catalogue(config: EPConfig, ep_size: int | None) -> dict[str, Any]:
    """Everything that can be named, as plain values."""
    machine = detect()
    topology = topology_of(machine, ep_size or max(machine.num_devices, 1))
    answers = {name: verdicts(name, config, topology) for name in backends.MODULES}
    return {
        "backends": {
            name: {
                "available": any(verdict.ok for verdict in given.values()),
                "in_auto": name in backends.AUTO_ORDER,
                "modes": list(modes_of(name, config, topology)),
                "capabilities": list(
                    dict.fromkeys(c for verdict in given.values() for c in verdict.capabilities)
                ),
                "remark": next(iter(given.values())).reason,
            }
            for name, given in answers.items()
        },
        "presets": {
            name: {"num_experts": shape[0], "num_topk": shape[1], "hidden": shape[2]}
            for name, shape in PRESETS.items()
        },
        "routings": ROUTINGS,
        "wires": {
            name: f"{wire.row_bytes(config.hidden)} bytes a row of {config.hidden}"
            + (f", a scale a group of {wire.group}" if wire.group else "")
            for name, wire in WIRES.items()
        },
    }


def _backend_line(name: str, found: dict[str, Any]) -> str:
    modes = ", ".join(f"{name}:{mode}" for mode in found["modes"])
    state = modes or name
    if not found["available"]:
        return f"{name:<10} unavailable: {found['remark']}"
    auto = "" if found["in_auto"] else " (by name alone)"
    can = f"; can {', '.join(found['capabilities'])}" if found["capabilities"] else ""
    remark = f"; {found['remark']}" if found["remark"] else ""
    return f"{name:<10} {state}{auto}{can}{remark}"
