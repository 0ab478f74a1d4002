"""Two processes, of which the second stays alive and does not come: what the first says of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = str(Path(__file__).parent)


def first_rank_says(script: str, store: Path) -> list[str]:
    """Lines that rank 0 prints. Both run `script` with their rank and the store's path; rank 0 must
    end by itself while rank 1 is alive."""
    paths = [HERE, os.environ.get("PYTHONPATH", "")]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(rank), str(store)], stdout=subprocess.PIPE,
            text=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        out, _ = ranks[0].communicate(timeout=50)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return out.splitlines()
