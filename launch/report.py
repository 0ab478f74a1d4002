"""Tables of result rows: for people (stdout), CSV and Markdown."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from moe_comm.launch.results import ROW

# Title, unit, and how a row's cell reads. Decimal MB and GB.
COLUMNS: tuple[tuple[str, str], ...] = (
    ("backend", ""),
    ("phase", ""),
    ("tokens", "a rank"),
    ("wire", ""),
    ("graph", ""),
    ("p50", "us"),
    ("p99", "us"),
    ("slowest", "us p50"),
    ("remote", "MB"),
    ("minimum", "MB"),
    ("ratio", "x min."),
    ("rate", "GB/s"),
    ("limit", "us"),
    ("of limit", "x"),
    ("wrong", ""),
)
_LEFT = 5


def cells(row: Mapping[str, Any]) -> list[str]:
    """One row as text, in the order of COLUMNS."""
    remote, least, limit = row["remote_bytes"], row["minimum_bytes"], row["limit_us"]
    slowest = row["slowest_rank_p50_us"]
    return [
        f"{row['backend']}:{row['mode']}" if row["mode"] else row["backend"],
        row["phase"],
        str(row["num_tokens"]),
        row["wire"],
        "yes" if row["cuda_graph"] else "no",
        _number(row["p50_us"]),
        _number(row["p99_us"]),
        _number(slowest),
        _number(None if remote is None else remote / 1e6, 3),
        _number(least / 1e6, 3),
        _number(remote / least if remote and least else None, 3),
        _number(row["remote_gbps"], 2),
        _number(limit),
        _number(slowest / limit if slowest and limit else None, 2),
        "-" if row["wrong"] is None else str(row["wrong"]),
    ]


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def header(document: Mapping[str, Any]) -> list[str]:
    """Comment lines above the table: what ran, where, and what was compared."""
    config, git = document["config"], document["git"]
    devices = [f"rank {d['rank']}: {d['name']}" for d in document["devices"][:8]]
    more = len(document["devices"]) - len(devices)
    state = " with changes" if git["dirty"] else ""
    routings = ", ".join(dict.fromkeys(row["routing"] for row in document["rows"]))
    return [
        f"# moe-bench {document['command']}, {document['started']}, commit "
        f"{git['commit'][:12]}{state}",
        f"# {config['num_experts']} experts, top-{config['num_topk']}, hidden {config['hidden']}, "
        f"{document['topology']['num_ranks']} ranks over {document['topology']['transport']}, "
        f"{document['topology']['num_nodes']} node(s), seed {document['seed']}",
        f"# routing {routings}; dispatch wire {config['dispatch_wire']}, combine wire "
        f"{config['combine_wire']}, reduction by {config['reduction']}",
        f"# {'; '.join(devices)}{f'; and {more} more' if more > 0 else ''}",
    ]


def print_table(document: Mapping[str, Any], footer: Sequence[str] = ()) -> None:
    """Write header, table and footer to stdout; in colour on a terminal, plain elsewhere."""
    lines = [cells(row) for row in document["rows"]]
    for line in header(document):
        print(line)
    if sys.stdout.isatty():
        _print_rich(lines)
    else:
        print(plain_table(lines))
    for line in footer:
        print(line)
    sys.stdout.flush()


def plain_table(lines: Sequence[Sequence[str]]) -> str:
    """Aligned columns with a row of units."""
    titles = [title for title, _ in COLUMNS]
    units = [unit for _, unit in COLUMNS]
    widths = [max(len(line[i]) for line in (titles, units, *lines)) for i in range(len(COLUMNS))]
    text = []
    for line in (titles, units, *lines):
        aligned = (
            cell.ljust(width) if i < _LEFT else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        text.append("  ".join(aligned).rstrip())
    return "\n".join(text)


def check_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Comparisons and wrong elements of each backend, wire and phase."""
    totals: dict[tuple[str, str, str], list[int]] = {}
    for row in rows:
        key = (f"{row['backend']}:{row['mode']}", row["wire"], row["phase"])
        total = totals.setdefault(key, [0, 0])
        total[0] += 1
        total[1] += row["wrong"] or 0
    titles = ("backend", "wire", "phase", "comparisons", "wrong")
    lines = [titles, *((*key, str(n), str(wrong)) for key, (n, wrong) in totals.items())]
    widths = [max(len(line[i]) for line in lines) for i in range(len(titles))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _print_rich(lines: Sequence[Sequence[str]]) -> None:
    # Imported by rank 0 alone, and only where somebody looks.
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for index, (title, unit) in enumerate(COLUMNS):
        label = f"{title}\n[dim]{unit}[/dim]" if unit else title
        table.add_column(label, justify="left" if index < _LEFT else "right", no_wrap=True)
    for line in lines:
        bad = line[-1] not in ("0", "-")
        table.add_row(*line, style="red" if bad else None)
    console = Console()
    # Figures are never cut: a narrow terminal wraps the lines instead.
    console.width = max(console.width, max(map(len, plain_table(lines).splitlines())))
    console.print(table)


def markdown(document: Mapping[str, Any]) -> str:
    """A Markdown table with the header lines above it."""
    titles = [f"{title} ({unit})" if unit else title for title, unit in COLUMNS]
    rule = ["---" if index < _LEFT else "---:" for index in range(len(COLUMNS))]
    body = [titles, rule, *(cells(row) for row in document["rows"])]
    table = "\n".join(f"| {' | '.join(line)} |" for line in body)
    notes = "\n".join(line.removeprefix("# ") + "  " for line in header(document))
    return f"{notes}\n\n{table}\n"


def csv_text(document: Mapping[str, Any]) -> str:
    """All fields of all rows, one line a row; `params` as name=value pairs."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(list(ROW))
    for row in document["rows"]:
        writer.writerow([_csv_cell(row[name]) for name in ROW])
    return out.getvalue()


def _csv_cell(value: Any) -> Any:
    if isinstance(value, dict):
        return ";".join(f"{key}={item}" for key, item in value.items())
    return "" if value is None else value
