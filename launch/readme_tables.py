"""Tables of the README, generated from result files between markers; never typed.

    <!-- figures results/*_run.json num_tokens=128,4096 phase=dispatch,combine -->
    ...
    <!-- /figures -->

A marker names files by a glob and filters rows by fields (params.x: of a row's params, params.x.0:
the first of several); the table shows the rows of the newest file (names begin with the date) that
the glob finds. Kinds of markers:

    figures   a line a row; columns=a,b instead of the usual ones: fields, x_limit, params.x
    ports     of launch/bench_model: ours beside the other ports, then what else the rows say
    stock     of launch/deepep_stock: the adapted DeepEP beside itself, and its own errors

`python -m moe_comm.launch.readme_tables` rewrites the README of this checkout, with --check it only
says whether it would.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from moe_comm.launch import readme_blocks

ROOT = Path(__file__).resolve().parent.parent
_BLOCK = re.compile(r"(<!-- (figures|ports|stock) (\S+)([^>]*?) -->\n).*?(<!-- /\2 -->)", re.DOTALL)
_KINDS = {
    "figures": readme_blocks.figures,
    "ports": readme_blocks.ports,
    "stock": readme_blocks.stock,
}


def rewrite(text: str, root: Path) -> str:
    """The README's text with every block generated again. Raises ValueError for a marker that
    cannot be read."""

    def block(match: re.Match[str]) -> str:
        opening, kind, glob, filters, closing = match.groups()
        wanted = _filters(filters)
        files = sorted(root.glob(glob))
        lines = [f"No result file `{glob}` yet."]
        if files:
            link = f"[{files[-1].name}]({files[-1].relative_to(root).as_posix()})"
            lines = _KINDS[kind](files[-1], link, wanted)
        return "\n".join([opening, *lines, "", closing])

    return _BLOCK.sub(block, text)


def _filters(text: str) -> dict[str, list[str]]:
    wanted = {}
    for part in text.split():
        name, equals, values = part.partition("=")
        if not equals:
            raise ValueError(f"figures marker: expected name=value, got {part!r}")
        wanted[name] = values.split(",")
    return wanted


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
