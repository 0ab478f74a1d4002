"""Whether copies into a peer's symmetric memory need multiprocessors, or the copy engines alone.

    torchrun --nproc-per-node 2 -m moe_comm.launch.copy_probe OUT.json

One rank's copies of 7.3 and 29.4 MB (1,024 and 4,096 rows of 3,584 bf16) are timed while nothing
else runs, and while a kernel of long-running programs fills the GPU to a degree: by torch's copy_,
and by the driver's cuMemcpyAsync; on a stream of normal and of high priority. A copy that takes
much longer, or ends only with the programs, needed what they held. What the slab's high-throughput
mode may leave to copies depends on it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ROW_BYTES = 7168
TOKENS = (1024, 4096)
# A busy kernel lasts this many clock cycles: some milliseconds.
CYCLES = 8_000_000
REPEATS = 7


def busy(programs: int, warps: int, cycles: Tensor) -> None:
    """Occupy the GPU with this many programs for CYCLES on the current stream."""
    from moe_comm.kernels.delay import _delay_kernel

    if programs:
        _delay_kernel[(programs,)](cycles, 0, num_warps=warps)


def timed(copy: Any, side: torch.cuda.Stream, programs: int, warps: int, cycles: Tensor) -> float:
    """Microseconds of one copy on `side` beside the busy kernel."""
    torch.cuda.synchronize()
    began, start, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    busy(programs, warps, cycles)
    began.record()
    with torch.cuda.stream(side):
        start.record()
        copy()
        end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def main(path: Path) -> int:
    """Rank 0 copies; the other holds its memory still."""
    import torch.distributed._symmetric_memory as symm_mem

    from moe_comm.launch.limits import _driver_copy
    from moe_comm.launch.results import device_facts, git_facts, versions

    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    size = max(TOKENS) * ROW_BYTES
    block = symm_mem.empty((size,), dtype=torch.uint8, device=torch.device("cuda", rank))
    world = dist.group.WORLD
    assert world is not None
    handle = symm_mem.rendezvous(block, world)
    rows: list[dict[str, Any]] = []
    if rank == 0:
        source = torch.randint(255, (size,), dtype=torch.uint8, device="cuda")
        target = handle.get_buffer(1, (size,), torch.uint8, 0)
        cycles = torch.full((1,), CYCLES, dtype=torch.int64, device="cuda")
        count = torch.cuda.get_device_properties(0).multi_processor_count
        driver = _driver_copy()
        ways = {
            "torch": lambda n: target[:n].copy_(source[:n], non_blocking=True),
            "driver": lambda n: driver(target[:n], source[:n]),
        }
        loads = [("nothing", 0, 1)]
        loads += [(f"{k} a multiprocessor, {w} warps", k * count, w) for k, w in ((1, 32), (2, 32))]
        loads += [("all but 4 multiprocessors, twice", 2 * (count - 4), 32)]
        for priority in (0, -1):
            side = torch.cuda.Stream(priority=priority)
            for way, run in ways.items():
                for tokens in TOKENS:
                    for load, programs, warps in loads:
                        copy = lambda run=run, n=tokens * ROW_BYTES: run(n)  # noqa: E731
                        times = [timed(copy, side, programs, warps, cycles) for _ in range(REPEATS)]
                        row = {
                            "way": way, "priority": priority, "bytes": tokens * ROW_BYTES,
                            "beside": load, "p50_us": round(median(times), 1),
                        }  # fmt: skip
                        print(*row.values())
                        rows.append(row)
        document = {
            "command": "copy_probe", "git": git_facts(), "versions": versions(),
            "devices": [device_facts(0, torch.device("cuda", 0))], "rows": rows,
        }  # fmt: skip
        path.write_text(json.dumps(document, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
