"""Direct launches of the slab's kernels: every one uses the compiled kernel, and passes the values,
that Triton itself would have for the same arguments. Nothing runs: Triton's own specialization is
computed beside, for sm_90."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled under the interpreter"
)
CPU = torch.device("cpu")


class Compiled:
    """Stands for what Triton compiled for one specialization; notes how it is launched."""

    def __init__(self, traits: Any, launches: list[tuple[Any, Any]]) -> None:
        self.traits, self._launches = traits, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args: self._launches.append((self.traits, (grid, args)))


class Watched:
    """Launches since the last look: those by Triton, and the direct ones."""

    def __init__(self, monkeypatch: Any) -> None:
        from triton.backends.compiler import GPUTarget
        from triton.compiler import make_backend
        from triton.runtime.jit import JITFunction, create_function_from_signature

        from moe_comm.backends import (
            slab_combine_kernel,
            slab_dispatch_kernel,
            slab_launch,
            slab_state,
        )

        backend = make_backend(GPUTarget("cuda", 90, 32))
        binders: dict[Any, Any] = {}
        self.by_triton = 0
        self.direct: list[tuple[Any, Any]] = []

        def specialization(kernel: Any, args: Any, options: Any) -> Any:
            if kernel not in binders:
                binders[kernel] = create_function_from_signature(
                    kernel.signature, kernel.params, backend
                )
            _, traits, flags = binders[kernel](*args, **options)
            return kernel, tuple(map(str, traits)), tuple(sorted(flags.items()))

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Compiled:
            self.by_triton += 1
            return Compiled(specialization(kernel, args, options), self.direct)

        real = slab_launch.launch

        def checked(kernel: Any, programs: int, places: Any, form: Any, given: Any) -> None:
            args = list(places.args)
            for at, value in zip(places.given, given, strict=True):
                args[at] = value
            before = self.by_triton
            real(kernel, programs, places, form, given)
            assert len(self.direct) + self.by_triton - before == 1
            if not self.direct:
                return
            traits, (grid, passed) = self.direct.pop()
            assert traits == specialization(kernel, args, form.options)
            assert grid == (programs, 1, 1)
            plain = [arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in args]
            constants = [form.options[name] for name in kernel.arg_names[len(args) :]]
            assert list(passed) == plain + constants
            self.num_direct += 1

        self.num_direct = 0
        monkeypatch.setattr(JITFunction, "run", run)
        for module in (slab_dispatch_kernel, slab_combine_kernel, slab_state):
            monkeypatch.setattr(module, "launch", checked)


def _tensor(*shape: int, dtype: torch.dtype, skip: int) -> Tensor:
    """Zeros that begin `skip` elements into their memory."""
    count = 1
    for size in shape:
        count *= size
    return torch.zeros(count + skip, dtype=dtype)[skip:].view(shape)


@pytest.mark.parametrize("mode", ["low-latency", "high-throughput"])
@pytest.mark.parametrize("wire", ["bf16", "fp8", "none"])
def test_direct_launches_are_tritons(mode, wire, monkeypatch) -> None:
    from moe_comm import EPConfig
    from moe_comm.backends.slab import SlabCommunicator, region_sizes
    from moe_comm.backends.slab_modes import SlabTuning
    from moe_comm.symmetric import VirtualSymmetricMemory

    config = EPConfig(
        num_experts=12, num_topk=3, hidden=40, max_tokens_per_rank=33, dispatch_wire=wire,
        combine_wire=wire, max_payload_bytes=16,
    )  # fmt: skip
    memory = VirtualSymmetricMemory.create(2, region_sizes(config, 2), CPU)[1]
    group: Any = SimpleNamespace(rank=1, num_ranks=2, device=CPU)
    tuning = SlabTuning(mode=mode, combine_lag=16)
    comm = SlabCommunicator(config, group, tuning=tuning, memory=memory)
    watched = Watched(monkeypatch)
    generator = torch.Generator().manual_seed(1)

    def any_of(*choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    held = []
    for _ in range(1500):
        bucket = any_of(1, 16, 33)
        rows = any_of(0, 1, bucket // 2, bucket)
        dtype = any_of(torch.bfloat16, torch.float32) if wire == "none" else torch.bfloat16
        x = _tensor(rows, any_of(40, 48, 64, 41), dtype=dtype, skip=any_of(0, 0, 1, 8))[:, :40]
        kind = any_of(torch.int16, torch.int32, torch.int64)
        count = any_of(None, 0, torch.tensor(rows), torch.tensor([rows], dtype=torch.int32))
        payloads = {"a": torch.zeros(rows, dtype=torch.int64)} if any_of(0, 0, 1) else None
        async_op = any_of(False, True)
        d = comm.dispatch(
            x, _tensor(rows, 3, dtype=kind, skip=any_of(0, 1)),
            _tensor(rows, 3, dtype=torch.float32, skip=any_of(0, 4, 1)), num_tokens=count,
            bucket=bucket, payloads=payloads, async_op=async_op,
        )  # fmt: skip
        held.append((d.wait() if async_op else d, dtype))
        if len(held) >= any_of(1, 2):
            while held:
                d, dtype = held.pop(0)
                long, short = d.row_index.shape[0], d.handle.num_rows
                y = _tensor(any_of(long, long // 2), 40, dtype=dtype, skip=any_of(0, 1))
                layout = any_of("expert", "expert", "rows")
                if layout == "rows":
                    y = _tensor(2, d.handle.bucket, 40, dtype=dtype, skip=any_of(0, 1))
                bias = any_of(None, None, _tensor(short, 40, dtype=dtype, skip=0))
                out = any_of(None, _tensor(short, 40, dtype=dtype, skip=any_of(0, 1)))
                async_op = any_of(False, True)
                z = comm.combine(
                    y, d.handle, layout=layout, weights_applied=any_of(False, True), bias=bias,
                    out=out, async_op=async_op,
                )  # fmt: skip
                if async_op:
                    z.wait()
    assert watched.num_direct > 1000


@pytest.mark.parametrize("hidden", [1, 64, 161, 2880, 3584])
@pytest.mark.parametrize("wire", ["bf16", "fp8", "mxfp8"])
def test_no_two_threads_read_the_same_of_what_others_write(hidden, wire) -> None:
    """Where a block has fewer elements than a program has threads, several hold the same element,
    each as it read it."""
    from slab_world import VirtualWorld

    from moe_comm import EPConfig

    config = EPConfig(
        num_experts=8, num_topk=2, hidden=hidden, max_tokens_per_rank=8, combine_wire=wire
    )
    engine = VirtualWorld(config, 2, CPU).engines[0]
    for bucket in (1, 32, 33, 256, 257, 512, 513, 4096):
        block, warps = engine._combine_block(bucket)
        assert block >= 32 * warps >= 32


def test_a_direct_launch_does_not_hash_the_kernel(monkeypatch) -> None:
    """Triton hashes a kernel by its source text, which takes longer than all the rest."""
    from triton.runtime.jit import JITFunction

    from moe_comm.backends.slab_launch import Form, Places, launch
    from moe_comm.kernels.slot_signals import _wait_kernel

    ints = torch.zeros(4, dtype=torch.int32)
    names = [p.name for p in _wait_kernel.params if not p.is_constexpr]
    places = Places(_wait_kernel, 0, **dict.fromkeys(names, ints))
    form = Form({}, blocks=1)
    ran: list[Any] = []
    places.compiled[form,] = (lambda grid, args: ran.append((grid, args))), (7,)

    def refused(kernel: Any) -> int:
        raise AssertionError("hashed")

    monkeypatch.setattr(JITFunction, "__hash__", refused)
    launch(_wait_kernel, 3, places, form, ())
    assert ran == [((3, 1), (*[ints.data_ptr()] * len(names), 7))]
