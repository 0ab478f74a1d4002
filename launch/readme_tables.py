"""Tables of the README, generated from result files between markers; never typed.

    <!-- figures results/*_run.json num_tokens=128 phase=dispatch,combine -->
    ...
    <!-- /figures -->

A marker names files by a glob and filters rows; the table shows the rows of the newest file (names
begin with the date) that the glob finds. `python -m moe_comm.launch.readme_tables` rewrites the
README of this checkout, with --check it only says whether it would.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_comm.launch.results import read_json

ROOT = Path(__file__).resolve().parent.parent
_BLOCK = re.compile(r"(<!-- figures (\S+)([^>]*?) -->\n).*?(<!-- /figures -->)", re.DOTALL)
_TITLES = (
    "backend",
    "phase",
    "tokens a rank",
    "wire",
    "graph",
    "slowest rank p50, us",
    "remote MB",
    "minimum MB",
    "GB/s",
    "limit, us",
    "x limit",
    "wrong",
)
_LEFT = 5


def rewrite(text: str, root: Path) -> str:
    """The README's text with every block generated again. Raises ValueError for a marker that
    cannot be read."""

    def block(match: re.Match[str]) -> str:
        opening, glob, filters, closing = match.groups()
        return f"{opening}{table(root, glob, _filters(filters))}{closing}"

    return _BLOCK.sub(block, text)


def table(root: Path, glob: str, wanted: Mapping[str, list[str]]) -> str:
    """One generated block."""
    files = sorted(root.glob(glob))
    if not files:
        return f"\nNo result file `{glob}` yet.\n\n"
    document = read_json(files[-1])
    rows = [row for row in document["rows"] if _matches(row, wanted)]
    lines = [
        "",
        f"[{files[-1].name}]({files[-1].relative_to(root)}): {_devices(document)}, EP "
        f"{document['topology']['num_ranks']} over {document['topology']['transport']}, commit "
        f"{document['git']['commit'][:12]}, `{_command(document['argv'])}`",
        "",
        f"| {' | '.join(_TITLES)} |",
        f"| {' | '.join('---' if i < _LEFT else '---:' for i in range(len(_TITLES)))} |",
        *(f"| {' | '.join(_cells(row))} |" for row in rows),
        "",
    ]
    return "\n".join(lines) + "\n"


def _filters(text: str) -> dict[str, list[str]]:
    wanted = {}
    for part in text.split():
        name, equals, values = part.partition("=")
        if not equals:
            raise ValueError(f"figures marker: expected name=value, got {part!r}")
        wanted[name] = values.split(",")
    return wanted


def _matches(row: Mapping[str, Any], wanted: Mapping[str, list[str]]) -> bool:
    return all(str(row[name]) in values for name, values in wanted.items())


def _command(argv: Sequence[str]) -> str:
    """What to type for such a file, without where the results went."""
    text = " ".join(["moe-bench", *argv])
    return re.sub(r" --(json|csv|markdown)[ =]\S+", "", text)


def _devices(document: Mapping[str, Any]) -> str:
    names = [
        f"process on {device['name']} ({device['cores']} cores)"
        if device["type"] == "cpu"
        else device["name"]
        for device in document["devices"]
    ]
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def _cells(row: Mapping[str, Any]) -> list[str]:
    slowest, limit = row["slowest_rank_p50_us"], row["limit_us"]
    return [
        f"{row['backend']}:{row['mode']}" if row["mode"] else row["backend"],
        row["phase"],
        str(row["num_tokens"]),
        row["wire"],
        "yes" if row["cuda_graph"] else "no",
        _number(slowest, 1),
        _number(row["remote_bytes"], 3, 1e6),
        _number(row["minimum_bytes"], 3, 1e6),
        _number(row["remote_gbps"], 2),
        _number(limit, 1),
        _number(slowest / limit if slowest and limit else None, 2),
        "-" if row["wrong"] is None else str(row["wrong"]),
    ]


def _number(value: float | None, digits: int, unit: float = 1.0) -> str:
    return "-" if value is None else f"{value / unit:.{digits}f}"


def main() -> int:
    """Rewrite the README, or check it: 0 where it is up to date."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="change nothing")
    arguments = parser.parse_args()
    readme = ROOT / "README.md"
    old = readme.read_text()
    new = rewrite(old, ROOT)
    if arguments.check:
        if new != old:
            print("README.md is not what the result files say", file=sys.stderr)
        return int(new != old)
    readme.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
