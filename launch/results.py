"""Result files: rows, facts about the run, and the schema that both must satisfy."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import moe_comm
from moe_comm import env, traffic
from moe_comm.config import EPConfig
from moe_comm.launch.worker import Ranks
from moe_comm.topology import Topology

SCHEMA_VERSION = 1
_NUMBER = (int, float)
_MAYBE_NUMBER = (int, float, type(None))

# Field -> types of the document and of one row.
DOCUMENT: dict[str, tuple[type, ...]] = {
    "schema_version": (int,),
    "command": (str,),
    "argv": (list,),
    "started": (str,),
    "git": (dict,),
    "versions": (dict,),
    "devices": (list,),
    "topology": (dict,),
    "config": (dict,),
    "seed": (int,),
    "definitions": (dict,),
    "rows": (list,),
}
ROW: dict[str, tuple[type, ...]] = {
    "backend": (str,),
    "mode": (str,),
    "phase": (str,),
    "layout": (str, type(None)),
    "num_tokens": (int,),
    "hidden": (int,),
    "num_topk": (int,),
    "num_experts": (int,),
    "ep_size": (int,),
    "wire": (str,),
    "routing": (str,),
    "cuda_graph": (bool,),
    "programs": (int, type(None)),
    "params": (dict,),
    "samples": (int,),
    # None where nothing was timed (samples 0), and where no limit was measured.
    "p50_us": _MAYBE_NUMBER,
    "p99_us": _MAYBE_NUMBER,
    "slowest_rank_p50_us": _MAYBE_NUMBER,
    "remote_bytes": (int, type(None)),
    "minimum_bytes": (int,),
    "remote_gbps": _MAYBE_NUMBER,
    "limit_us": _MAYBE_NUMBER,
    "limit_kind": (str, type(None)),
    "wrong": (int, type(None)),
}


@dataclass(kw_only=True)
class Row:
    """One line of a result file; see traffic.DEFINITIONS for what the figures mean."""

    backend: str
    mode: str
    phase: str
    layout: str | None
    num_tokens: int
    hidden: int
    num_topk: int
    num_experts: int
    ep_size: int
    wire: str
    routing: str
    cuda_graph: bool = False
    programs: int | None = None
    params: dict[str, Any] = field(default_factory=dict)
    samples: int = 0
    p50_us: float | None = None
    p99_us: float | None = None
    slowest_rank_p50_us: float | None = None
    remote_bytes: int | None = None
    minimum_bytes: int = 0
    remote_gbps: float | None = None
    limit_us: float | None = None
    limit_kind: str | None = None
    wrong: int | None = None


def validate(document: Mapping[str, Any]) -> None:
    """Raise ValueError where a result document breaks the schema, naming the place."""
    _validate_fields(document, DOCUMENT, "result")
    if document["schema_version"] != SCHEMA_VERSION:
        raise ValueError(
            f"schema_version: expected {SCHEMA_VERSION}, got {document['schema_version']}"
        )
    for name in ("commit", "dirty"):
        if name not in document["git"]:
            raise ValueError(f"git: expected a field {name!r}")
    for index, row in enumerate(document["rows"]):
        where = f"rows[{index}]"
        _validate_fields(row, ROW, where)
        if row["samples"] > 0 and row["p50_us"] is None:
            raise ValueError(f"{where}: expected p50_us where samples > 0, got None")
        for name, value in row.items():
            if isinstance(value, float) and not 0 <= value < float("inf"):
                raise ValueError(f"{where}.{name}: expected a finite number >= 0, got {value}")


def _validate_fields(
    given: Mapping[str, Any], fields: Mapping[str, tuple[type, ...]], where: str
) -> None:
    missing, unknown = set(fields) - set(given), set(given) - set(fields)
    if missing or unknown:
        raise ValueError(
            f"{where}: expected the schema's fields; missing {sorted(missing)}, unknown "
            f"{sorted(unknown)}"
        )
    for name, types in fields.items():
        value = given[name]
        # bool is an int to Python, not to the schema.
        wrong_bool = isinstance(value, bool) and bool not in types
        if wrong_bool or not isinstance(value, types):
            names = " or ".join(kind.__name__ for kind in types)
            raise ValueError(f"{where}.{name}: expected {names}, got {value!r}")


def build_document(
    ranks: Ranks,
    *,
    command: str,
    argv: Sequence[str],
    started: datetime.datetime,
    config: EPConfig,
    seed: int,
    rows: Sequence[Row],
) -> dict[str, Any]:
    """The whole result document. Collective: ranks tell what they run on."""
    topology = Topology.detect(ranks.group)
    devices = ranks.gather(device_facts(ranks.rank, ranks.device))
    described = dataclasses.asdict(topology)
    described["num_nodes"] = topology.num_nodes
    return new_document(
        command=command, argv=argv, started=started, devices=devices, topology=described,
        config=config, seed=seed, definitions=traffic.DEFINITIONS, rows=rows,
    )  # fmt: skip


def new_document(
    *,
    command: str,
    argv: Sequence[str],
    devices: Sequence[Mapping[str, Any]],
    topology: Mapping[str, Any],
    config: EPConfig,
    definitions: Mapping[str, str],
    seed: int = 0,
    rows: Sequence[Row] = (),
    started: datetime.datetime | None = None,
) -> dict[str, Any]:
    """A result document of this process, validated; `started`: default now."""
    began = started or datetime.datetime.now(datetime.UTC)
    document = {
        "schema_version": SCHEMA_VERSION,
        "command": command,
        "argv": without_directories(argv),
        "started": began.isoformat(timespec="seconds"),
        "git": git_facts(),
        "versions": versions(),
        "devices": devices,
        "topology": topology,
        "config": config.describe(),
        "seed": seed,
        "definitions": definitions,
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    # Tuples become lists, as a reader of the file will see them.
    plain: dict[str, Any] = json.loads(json.dumps(document))
    validate(plain)
    return plain


def without_directories(argv: Sequence[str]) -> list[str]:
    """Arguments with files by name alone: where they lay on a machine is nobody's business."""
    return [re.sub(r"(^|[:=,])[^:=,]*/", r"\1", argument) for argument in argv]


def write_json(path: str, document: Mapping[str, Any]) -> None:
    """Write a document to a file at once, or to stdout for "-"."""
    text = json.dumps(document, indent=1) + "\n"
    if path == "-":
        sys.stdout.write(text)
        return
    target = Path(path)
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    beside.write_text(text)
    beside.replace(target)


def read_json(path: str | Path) -> dict[str, Any]:
    """Read and validate a result file. Raises ValueError, OSError."""
    document = json.loads(Path(path).read_text())
    if not isinstance(document, dict):
        raise ValueError(f"{path}: expected an object")  # noqa: TRY004 - a broken file, not a type
    validate(document)
    return document


def git_facts() -> dict[str, Any]:
    """Commit and state of the source tree that is running: MOE_COMM_COMMIT's where it is given (a
    copied tree may lie in another one's git directory), else git's; commit "unknown" where neither
    tells."""
    given = env.COMMIT.get()
    if given:
        return {"commit": given, "dirty": None}
    root = Path(moe_comm.__file__).resolve().parent.parent
    if (root / ".git").exists():
        commit = _git(root, "rev-parse", "HEAD")
        if commit:
            # Result files themselves do not make the code a different one.
            state = _git(root, "status", "--porcelain", "--", ".", ":!results")
            return {"commit": commit, "dirty": state != ""}
    return {"commit": "unknown", "dirty": None}


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def versions() -> dict[str, str | None]:
    """Versions of what decides a figure; None where it is not there."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("moe_comm", "torch", "triton", "numpy"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = moe_comm.__version__ if name == "moe_comm" else None
    found["torch"] = torch.__version__
    found["cuda"] = torch.version.cuda
    found["nccl"] = (
        ".".join(str(part) for part in torch.cuda.nccl.version())
        if torch.cuda.is_available() and torch.distributed.is_nccl_available()
        else None
    )
    found["platform"] = f"{platform.system()} {platform.machine()}"
    return found


def device_facts(rank: int, device: torch.device) -> dict[str, Any]:
    """What one rank runs on."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {
            "rank": rank,
            "type": "cuda",
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
        }
    name = cpu_name() if device.type == "cpu" else device.type
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"rank": rank, "type": device.type, "name": name, "cores": cores}


def cpu_name() -> str:
    """Model name of the processor, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model"):
            return value.strip()
    return platform.processor() or platform.machine()
