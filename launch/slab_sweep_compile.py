"""Kernels of a slab sweep's settings, compiled ahead by many processes at once.

A kernel takes a core a second or more to compile, while GPUs wait. So processes make the settings'
calls on memory of the CPU, with a driver that knows the GPU's architecture and launches nothing:
Triton compiles what the calls would launch and puts it where the real ones find it, into its cache
on disk. Anything that differs is only compiled again.
"""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from moe_comm.backends.slab_modes import SlabTuning
from moe_comm.config import EPConfig
from moe_comm.launch.slab_sweep_settings import CALLS, PROGRAM_KNOBS, Setting


def count_compiles() -> Callable[[], int]:
    """Kernels that Triton has compiled in this process from now on, those found on disk aside."""
    from triton import knobs

    count = [0]

    def listen(*, cache_hit: bool, **rest: Any) -> None:
        del rest
        count[0] += not cache_hit

    knobs.compilation.listener = listen
    return lambda: count[0]


def distinct(settings: Sequence[Setting]) -> list[Setting]:
    """Settings whose kernels differ, as far as can be told without making their calls: numbers of
    programs and streams make no other kernel."""
    plain = SlabTuning()
    same = {name: getattr(plain, name) for name in PROGRAM_KNOBS}
    found: dict[str, Setting] = {}
    for setting in settings:
        one = dataclasses.replace(
            setting, tuning=dataclasses.replace(setting.tuning, **same), side_priority=None
        )
        found.setdefault(one.identity, one)
    return list(found.values())


def compile_ahead(
    settings: Sequence[Setting], config: EPConfig, *, num_ranks: int, capability: tuple[int, int],
    workers: int, seconds: float, say: Callable[[str], None],
) -> None:  # fmt: skip
    """Compile with `workers` processes, for at most `seconds`. Those that fail are told.

    Args:
        config: with the slots of the sweep's communicators.
        capability: of the GPU.
    """
    jobs, began = distinct(settings), time.monotonic()
    arch = 10 * capability[0] + capability[1]
    count = min(workers, len(jobs))
    if count < 1:
        return
    kernels = done = 0
    pool = multiprocessing.get_context("spawn").Pool(count, _begin, (arch,))
    with pool:
        results = pool.imap_unordered(_compile, [(job, config, num_ranks) for job in jobs])
        for _ in jobs:
            left = seconds - (time.monotonic() - began)
            try:
                compiled, error = results.next(timeout=max(left, 0.01))
            except multiprocessing.TimeoutError:
                break
            kernels, done = kernels + compiled, done + 1
            if error:
                say(f"compiling ahead: {error}")
    say(
        f"compiled {kernels} kernels of {done} of {len(jobs)} settings ahead, {count} processes, "
        f"{time.monotonic() - began:.1f} s"
    )


class _Driver:
    """Stands for a GPU that is not there."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        del device
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)


def _begin(arch: int) -> None:
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    torch.set_num_threads(1)
    driver.set_active(_Driver(arch))
    run = JITFunction.run

    def only_compile(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        del warmup
        run(self, *args, grid=grid, warmup=True, **options)

    JITFunction.run = only_compile


def _compile(job: tuple[Setting, EPConfig, int]) -> tuple[int, str]:
    """Kernels compiled, and what kept the others from it."""
    setting, config, num_ranks = job
    compiled, error = count_compiles(), ""
    try:
        make_calls(setting, config, num_ranks)
    except Exception as found:  # noqa: BLE001 - a compiler's own errors: the sweep meets them again
        error = f"{setting}: {type(found).__name__}: {found}"[:400]
    return compiled(), error


def make_calls(setting: Setting, config: EPConfig, num_ranks: int) -> None:
    """The launches of a setting's dispatch and combine on rank 0, on memory of the CPU that nobody
    has written, as they would be made on a GPU."""
    from moe_comm.backends.slab_engine import SlabEngine, region_sizes
    from moe_comm.backends.slab_launch import Form
    from moe_comm.calls import check_combine, check_dispatch
    from moe_comm.symmetric import Regions, VirtualSymmetricMemory

    cpu, num_tokens = torch.device("cpu"), setting.num_tokens
    config = config.replace(
        max_tokens_per_rank=num_tokens, dispatch_wire=setting.wires[0],
        combine_wire=setting.wires[1],
    )  # fmt: skip
    placement = config.placement_for(num_ranks)
    regions = Regions(region_sizes(config, num_ranks))
    blocks = torch.empty(num_ranks, regions.total_bytes, dtype=torch.uint8)
    engine = SlabEngine(
        config, rank=0, num_ranks=num_ranks, num_local_experts=placement.num_local_experts(0),
        memory=VirtualSymmetricMemory(blocks, 0, regions), copy_table=placement.copy_table,
        num_copies=placement.num_copies, tuning=setting.tuning,
    )  # fmt: skip
    # As on a GPU, although the memory is not.
    engine._interpret = engine._common["INTERPRET"] = False
    for kept in vars(engine).values():
        if isinstance(kept, Form) and "INTERPRET" in kept.options:
            kept.options["INTERPRET"] = False
    x = torch.empty(num_tokens, config.hidden, dtype=torch.bfloat16)
    ids = torch.zeros(num_tokens, config.num_topk, dtype=torch.int64)
    halves = [((True, True),)] + ([((True, False), (False, True))] if setting.kind != CALLS else [])
    # What a later slot has need not be aligned as the first one's is, which makes other kernels.
    for parts, slot in itertools.product(halves, range(min(2, config.num_slots))):
        dispatch = check_dispatch(
            config, cpu, x, ids, torch.empty(ids.shape), num_tokens=None, bucket=num_tokens,
            payloads=None, handle=None,
        )  # fmt: skip
        dispatch.slot = slot
        for send, receive in parts:
            arrived = engine.dispatch(dispatch, send=send, receive=receive)
        assert arrived is not None
        rows = arrived.row_index.shape[0]
        combine = check_combine(
            config, cpu, num_ranks, torch.empty(rows, config.hidden, dtype=torch.bfloat16),
            arrived.handle, layout="expert", weights_applied=False, bias=None, out=x,
            num_expert_rows=rows,
        )  # fmt: skip
        for send, receive in parts:
            engine.combine(combine, send=send, receive=receive)
