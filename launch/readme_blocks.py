"""What the README's generated blocks show of a result file: its rows, the model's ports beside
each other, DeepEP beside itself. readme_tables says how they are asked for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_comm.launch.model_summary import summary
from moe_comm.launch.results import validate

Row = Mapping[str, Any]
_DEFAULT = (
    "backend,phase,num_tokens,wire,cuda_graph,slowest_rank_p50_us,remote_bytes,minimum_bytes,"
    "remote_gbps,limit_us,x_limit,wrong"
)


def read(path: Path) -> dict[str, Any]:
    """A result document, validated. `steps` of put_check, which lie beside the schema, stay."""
    document: dict[str, Any] = json.loads(path.read_text())
    validate({name: value for name, value in document.items() if name != "steps"})
    return document


def figures(path: Path, link: str, wanted: Mapping[str, list[str]]) -> list[str]:
    """Rows as they are."""
    document = read(path)
    filters = {name: values for name, values in wanted.items() if name != "columns"}
    columns = wanted.get("columns", _DEFAULT.split(","))
    shown = [_COLUMNS.get(name) or _param(name) for name in columns]
    return [
        f"{link}: {_origin(document)}",
        "",
        *_table(
            [title for title, _, _ in shown],
            [left for _, left, _ in shown],
            [
                [cell(row) for _, _, cell in shown]
                for row in document["rows"]
                if all(str(_value(row, name)) in values for name, values in filters.items())
            ],
        ),
    ]


def ports(path: Path, link: str, wanted: Mapping[str, list[str]]) -> list[str]:
    """Our port's rows, the same rows of the others beside them; other phases in words."""
    del wanted
    document = read(path)
    times = {_case(row): row["slowest_rank_p50_us"] for row in document["rows"]}
    lines = []
    for row in document["rows"]:
        if row["params"].get("port") != "ours":
            continue
        ours = row["slowest_rank_p50_us"]
        rate = row["params"].get("tokens_per_s_per_gpu")
        ep = row["params"].get("per_rank_shape_of_ep", row["ep_size"])
        line = [row["phase"], str(row["num_tokens"])]
        line += [f"{row['num_experts'] // row['ep_size']} (EP {ep})"]
        line += [_number(ours, 2, 1e3), _number(rate, 0)]
        for port in ("straight", "fair"):
            theirs = times.get((port, *_case(row)[1:]))
            line += [_number(theirs, 2, 1e3), _number(theirs and theirs / ours, 2)]
        lines.append(line)
    titles = ["phase", "tokens a rank", "experts a rank", "ours, ms", "tokens/s a GPU"]
    titles += ["straight, ms", "x ours", "fair, ms", "x ours"]
    return [
        f"{link}: {_origin(document)}",
        "",
        *_table(titles, [True] * 3 + [False] * 6, lines),
        "",
        *(f"- {line}" for line in summary([r for r in document["rows"] if not _case(r)[0]])),
    ]


def stock(path: Path, link: str, wanted: Mapping[str, list[str]]) -> list[str]:
    """DeepEP by itself, adapted, and what it refuses."""
    del wanted
    document = json.loads(path.read_text())
    own, adapted, ratio = (document[name] for name in ("stock", "adapted", "of_stock"))
    back = _number(adapted["combine_transport_us"], 1)
    parts = _number(adapted["partial_sums_us"], 1)
    lines = [
        [
            "by itself, 256 experts, top-8",
            _number(own["dispatch_us"], 1), _number(own["combine_us"], 1),
            _number(own["dispatch_us"] + own["combine_us"], 1), "1.00",
        ],
        [
            "adapted, 896 experts, top-16: transport alone",
            _number(adapted["dispatch_transport_us"], 1), back,
            _number(adapted["dispatch_transport_us"] + adapted["combine_transport_us"], 1),
            _number(ratio["transport"], 2),
        ],
        [
            "adapted, packing and index with it",
            _number(adapted["dispatch_us"], 1), back,
            _number(adapted["dispatch_us"] + adapted["combine_transport_us"], 1),
            _number(ratio["with_packing_and_index"], 2),
        ],
        [
            f"adapted, whole, with partial sums ({parts} us alone) and unpacking",
            "-", "-", _number(adapted["round_trip_us"], 1), _number(ratio["whole"], 2),
        ],
    ]  # fmt: skip
    return [
        f"{link}: {document['num_ranks']} x {document['device']}, DeepEP {document['version']}, "
        f"{document['num_tokens']} tokens a rank, hidden {document['hidden']}, bf16, high "
        f"throughput, eager; {adapted['wrong_elements']} wrong elements; `torchrun --nproc-per-node"
        f" {document['num_ranks']} -m moe_comm.launch.deepep_stock {path.name}`",
        "",
        *_table(
            ["DeepEP V1", "dispatch, us", "combine, us", "both, us", "x itself"],
            [True] + [False] * 4,
            lines,
        ),
        "",
        *_table(
            ["asked of DeepEP by itself", "its error"],
            [True, True],
            [
                # Where its sources lay when it was built tells nothing.
                [case, "`" + re.sub(r"\S*/(?=\w+\.cu)", "", error).replace("|", "\\|") + "`"]
                for case, error in document["refusals"].items()
            ],
        ),
    ]


def _case(row: Row) -> tuple[Any, ...]:
    """(port, what must be equal to compare ports)."""
    params = row["params"]
    return params.get("port"), row["phase"], row["num_tokens"], row["num_experts"]


def _table(titles: Sequence[str], left: Sequence[bool], lines: Sequence[list[str]]) -> list[str]:
    rules = ["---" if is_left else "---:" for is_left in left]
    return [f"| {' | '.join(line)} |" for line in (titles, rules, *lines)]


def _value(row: Row, name: str) -> Any:
    prefix, dot, param = name.partition(".")
    if not (dot and prefix == "params"):
        return row[name]
    param, _, index = param.partition(".")
    found = row["params"].get(param)
    return found[int(index)] if index and found is not None else found


def _origin(document: Mapping[str, Any]) -> str:
    """On what, by which tree and command."""
    ranks, git = document["topology"]["num_ranks"], document["git"]
    group = f", EP {ranks} over {document['topology']['transport']}" if ranks > 1 else ""
    changed = " with changes" if git["dirty"] else ""
    return (
        f"{_devices(document)}{group}, commit {git['commit'][:12]}{changed}, "
        f"`{_command(document['command'], document['argv'], ranks)}`"
    )


def _command(command: str, argv: Sequence[str], ranks: int) -> str:
    """What to type for such a file, without where the results went."""
    if command == "matrix":
        argv, name = argv[2:], "launch/matrix.sh FILE"
        return " ".join([name, *argv])
    starter = "python" if ranks == 1 else f"torchrun --nproc-per-node {ranks}"
    name = f"{starter} -m moe_comm.launch.{command.replace('-', '_')}"
    text = " ".join(["moe-bench" if argv[:1] == [command] else name, *argv])
    return re.sub(r" --(json|csv|markdown|plot|out)[ =]\S+", "", text)


def _devices(document: Mapping[str, Any]) -> str:
    names = [
        f"process on {device['name']} ({device['cores']} cores)"
        if device["type"] == "cpu"
        else device["name"]
        for device in document["devices"]
    ]
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def _number(value: float | None, digits: int, unit: float = 1.0) -> str:
    return "-" if value is None else f"{value / unit:.{digits}f}"


def _over_limit(row: Row) -> str:
    slowest, limit = row["slowest_rank_p50_us"], row["limit_us"]
    return _number(slowest / limit if slowest and limit else None, 2)


# field -> (title, whether text, cell)
_COLUMNS: dict[str, tuple[str, bool, Callable[[Row], str]]] = {
    "backend": (
        "backend",
        True,
        lambda row: f"{row['backend']}:{row['mode']}" if row["mode"] else row["backend"],
    ),
    "phase": ("phase", True, lambda row: row["phase"]),
    "ep_size": ("ranks", True, lambda row: str(row["ep_size"])),
    "num_tokens": ("tokens a rank", True, lambda row: str(row["num_tokens"])),
    "wire": ("wire", True, lambda row: row["wire"]),
    "cuda_graph": ("graph", True, lambda row: "yes" if row["cuda_graph"] else "no"),
    "slowest_rank_p50_us": (
        "slowest rank p50, us",
        False,
        lambda row: _number(row["slowest_rank_p50_us"], 1),
    ),
    "remote_bytes": ("remote MB", False, lambda row: _number(row["remote_bytes"], 3, 1e6)),
    "minimum_bytes": ("minimum MB", False, lambda row: _number(row["minimum_bytes"], 3, 1e6)),
    "remote_gbps": ("GB/s", False, lambda row: _number(row["remote_gbps"], 2)),
    "limit_us": ("limit, us", False, lambda row: _number(row["limit_us"], 1)),
    "x_limit": ("x limit", False, _over_limit),
    "wrong": ("wrong", False, lambda row: "-" if row["wrong"] is None else str(row["wrong"])),
}


def _param(name: str) -> tuple[str, bool, Callable[[Row], str]]:
    """A column of a row's params, named as the field is."""
    if not name.startswith("params."):
        raise ValueError(f"figures marker: expected one of {sorted(_COLUMNS)}, got {name!r}")

    def cell(row: Row) -> str:
        value = _value(row, name)
        if name.endswith("_bytes"):
            return _number(value, 1, 1e6)
        return _number(value, 2) if isinstance(value, float | None) else str(value)

    title = name.removeprefix("params.").replace("_", " ")
    return title.replace(" bytes", " MB").replace("gbps", "GB/s"), False, cell
