"""The slab over NVSHMEM's puts on the GPUs of one host: set up step by step, checked, then timed.

    torchrun --standalone --nproc-per-node 2 -m moe_comm.launch.put_check OUT.json [TOKENS[,...]]

TOKENS: tokens a rank, default 128,4096,1. Every wait is bounded, and the process ends itself after
LIMIT_S seconds with the stack of every thread. Where NVSHMEM cannot be set up, the step that failed
and what is known of its parts are printed, and the exit code is 3. The file is written after every
step. Exit code 1 where a row differs from the reference.
"""

from __future__ import annotations

import datetime
import faulthandler
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from moe_comm import env
from moe_comm.config import EPConfig
from moe_comm.errors import BackendUnavailableError
from moe_comm.launch import results, spawn
from moe_comm.launch.bench import Bench, Plan
from moe_comm.launch.options import routings_of
from moe_comm.launch.results import Row
from moe_comm.launch.worker import WRONG, Ranks, run_rank

LIMIT_S = 85.0
# A case is not begun later than this.
LAST_START_S = 60.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run on this rank; rank 0 writes the file."""
    path, *rest = sys.argv[1:] if argv is None else argv
    tokens = [int(text) for text in (rest[0] if rest else "128,4096,1").split(",")]
    os.environ[env.SLAB_FORCE_PUT.name] = "1"
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    return run_rank(lambda ranks: _body(ranks, path, tokens), device_type="cuda", timeout_s=20.0)


def _body(ranks: Ranks, path: str, tokens: Sequence[int]) -> int:
    began, started = time.monotonic(), datetime.datetime.now(datetime.UTC)
    config = EPConfig.preset("kimi-k3", max_tokens_per_rank=max(tokens), timeout_s=20.0)
    steps: list[dict[str, Any]] = []
    rows: list[Row] = []

    def write() -> None:
        # Collective.
        document = results.build_document(
            ranks, command="put-check", argv=sys.argv[1:], started=started, config=config, seed=0,
            rows=rows,
        )  # fmt: skip
        if ranks.is_first:
            results.write_json(path, {**document, "steps": steps})

    for name, step in (("parts", _parts), ("memory", _memory)):
        at = time.monotonic()
        try:
            found = step(ranks)
        except Exception as error:
            # The other ranks may still wait inside the step, so nobody is asked.
            steps.append({"step": name, "error": f"{type(error).__name__}: {error}"})
            print(f"rank {ranks.rank}: {json.dumps(steps, indent=1)}", file=sys.stderr, flush=True)
            if ranks.is_first:
                Path(path).write_text(json.dumps({"steps": steps}, indent=1) + "\n")
            raise BackendUnavailableError(f"step {name!r}: {error}") from error
        steps.append({"step": name, "seconds": round(time.monotonic() - at, 2), **found})
        ranks.say(json.dumps(steps[-1]))
        write()
    for num_tokens in tokens:
        if max(ranks.gather(time.monotonic() - began)) > LAST_START_S:
            ranks.say(f"no time left for {num_tokens} tokens")
            break
        plan = Plan(
            config=config, backends=["slab"], num_tokens=[num_tokens],
            routings=routings_of(["uniform"], config), iters=50, warmup=5, limit=False,
        )  # fmt: skip
        outcome = Bench(plan, ranks).run()
        rows += outcome.rows
        for text in outcome.mismatches:
            ranks.say(text)
        for row in outcome.rows:
            ranks.say(
                f"{time.monotonic() - began:5.1f} s  T={row.num_tokens} {row.mode} {row.phase}: "
                f"{row.slowest_rank_p50_us} us, {row.remote_gbps} GB/s, wrong {row.wrong}"
            )
        write()
    faulthandler.cancel_dump_traceback_later()
    return WRONG if any(row.wrong for row in rows) else 0


def _parts(ranks: Ranks) -> dict[str, Any]:
    """What NVSHMEM's parts say of themselves; nothing is initialized."""
    from importlib import metadata

    import torch.distributed._symmetric_memory as symm_mem

    def text(read: Callable[[], Any]) -> str:
        try:
            return str(read())
        except Exception as error:  # noqa: BLE001 - whatever a part answers is what is looked for
            return f"{type(error).__name__}: {error}"

    def library() -> str:
        from torch.distributed._symmetric_memory._nvshmem_triton import NvshmemLibFinder

        # The folder is this machine's business.
        return Path(NvshmemLibFinder.find_device_library()).name

    return {
        "torch": torch.__version__,
        "triton": text(lambda: metadata.version("triton")),
        "nvshmem": text(lambda: metadata.version("nvidia-nvshmem-cu13")),
        "nvshmem4py": text(lambda: metadata.version("nvshmem4py-cu13")),
        "torch_has_nvshmem": text(symm_mem.is_nvshmem_available),
        "device_library": text(library),
        "torch_backend": text(lambda: symm_mem.get_backend(ranks.device)),
        "variables": results.without_directories(
            [f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith("NVSHMEM_")]
        ),
    }


def _memory(ranks: Ranks) -> dict[str, Any]:
    """The heap, and a put to every rank."""
    from moe_comm.symmetric_nvshmem import NvshmemSymmetricMemory

    memory = NvshmemSymmetricMemory(ranks.group, {"a": 1 << 20}, puts=True)
    try:
        return {
            "reached_by_stores": [address != 0 for address in memory.peers.tolist()],
            "numbers": memory.pes.tolist() if memory.pes is not None else [],
        }
    finally:
        memory.close()


if __name__ == "__main__":
    spawn.leave(main())
