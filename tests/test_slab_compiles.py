"""Every launch of the slab compiles for sm_90, without a GPU: Triton's compiler and assembler need
none. What they refuse (a constant that has no dtype, barriers in a wrong place, spills) would
otherwise be found on a GPU only."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled under the interpreter"
)

POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    torch.float8_e4m3fn: "*fp8e4nv",
}


def compile_launch(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Compile what a launch with these arguments would run, specialized as Triton does."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    given = dict(zip((p.name for p in kernel.params), args, strict=False))
    flags = {}
    for name, value in options.items():
        (given if name in kernel.arg_names else flags)[name] = value
    signature, constants, attributes = {}, {}, {}
    for i, param in enumerate(kernel.params):
        value = given[param.name]
        if param.is_constexpr or (_specialized(param, value) and value == 1):
            signature[param.name], constants[(i,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[param.name] = POINTERS[value.dtype]
            attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[param.name] = "i64" if abs(value) >= 2**31 else "i32"
            if value % 16 == 0 and _specialized(param, value):
                attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=flags)


def _specialized(param: Any, value: Any) -> bool:
    return isinstance(value, int) and not param.do_not_specialize


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Launches compile instead of running; yields what they compiled, by kernel name."""
    from triton.runtime.jit import JITFunction

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found: dict[str, list[Any]] = {}

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        del grid, warmup
        found.setdefault(self.__name__, []).append(compile_launch(self, args, options))

    monkeypatch.setattr(JITFunction, "run", run)
    return found


_BLOCKED = re.compile(
    r"(#\w+) = #ttg\.blocked<\{sizePerThread = \[([\d, ]+)\], threadsPerWarp = \[([\d, ]+)\], "
    r"warpsPerCTA = \[([\d, ]+)\]"
)
_VOLATILE = re.compile(
    r"tt\.load [^\n]*isVolatile = true\} : tensor<([\dx]+)x!tt\.ptr<\w+>, ([^\n]*?)> loc"
)
_ACQUIRED = re.compile(r"ld\.acquire[^\n]*-> tensor<([\dx]+)x\w+, ([^\n]*?)> loc")


def shared_reads(text: str) -> tuple[list[str], list[str]]:
    """(all, those of which several threads hold the same element) of a kernel's reads of memory
    that others write, by the compiler's own layouts. Each thread reads for itself, so threads would
    hold what was there at different times, and only one of them would be judged."""
    layouts = {
        name: [[int(n) for n in group.split(",")] for group in groups]
        for name, *groups in _BLOCKED.findall(text)
    }
    found = _VOLATILE.findall(text) + _ACQUIRED.findall(text)
    shared = []
    for shape, layout in found:
        tile = [a * b * c for a, b, c in zip(*layouts[layout], strict=True)]
        sizes = [int(size) for size in shape.split("x")]
        if any(size < least for size, least in zip(sizes, tile, strict=True)):
            shared.append(f"tensor<{shape}> over {tile}")
    return [shape for shape, _ in found], shared


def launch(
    num_ranks: int, tokens: int, bucket: int, mode: str, *, puts: bool = False,
    nvshmem: bool = False, **shape: Any,
) -> None:  # fmt: skip
    """A dispatch and a combine of one rank, halves together and apart, and a release."""
    from moe_comm import EPConfig
    from moe_comm.backends.slab_engine import SlabEngine, region_sizes
    from moe_comm.backends.slab_modes import SlabTuning
    from moe_comm.calls import check_combine, check_dispatch
    from moe_comm.symmetric import VirtualSymmetricMemory

    cpu = torch.device("cpu")
    config = EPConfig(
        **{"num_experts": 896, "num_topk": 16, "hidden": 3584, "max_tokens_per_rank": bucket}
        | shape
    )
    placement = config.placement_for(num_ranks)
    sizes = region_sizes(config, num_ranks, puts=puts)
    memory = VirtualSymmetricMemory.create(num_ranks, sizes, cpu, puts=puts)[1]
    if nvshmem:
        memory.pes = torch.zeros(num_ranks, dtype=torch.int32)
    engine = SlabEngine(
        config,
        rank=1,
        num_ranks=num_ranks,
        num_local_experts=placement.num_local_experts(1),
        memory=memory,
        copy_table=placement.copy_table,
        num_copies=placement.num_copies,
        tuning=SlabTuning(mode=mode),
    )
    # Compiled as for a GPU.
    engine._interpret = False
    engine._common["INTERPRET"] = False
    x = torch.zeros(tokens, config.hidden, dtype=torch.bfloat16)
    idx = torch.zeros(tokens, config.num_topk, dtype=torch.int64)
    call = check_dispatch(
        config, cpu, x, idx, torch.zeros(tokens, config.num_topk), num_tokens=torch.tensor(1),
        bucket=bucket, payloads=None, handle=None,
    )  # fmt: skip
    call.slot = 0
    d = engine.dispatch(call, send=True, receive=True)
    assert d is not None
    engine.dispatch(call, send=True, receive=False)
    y = torch.zeros(d.row_index.shape[0], config.hidden, dtype=torch.bfloat16)
    combine = check_combine(
        config, cpu, num_ranks, y, d.handle, layout="expert", weights_applied=False, bias=(x, x),
        out=None, num_expert_rows=d.row_index.shape[0],
    )  # fmt: skip
    engine.combine(combine, send=True, receive=True)
    engine.signal_release(0)


@pytest.mark.parametrize(
    ("num_ranks", "tokens", "bucket", "mode", "shape"),
    [
        (2, 128, 128, "low-latency", {}),
        (2, 1, 1, "low-latency", {"dispatch_wire": "fp8", "combine_wire": "mxfp8"}),
        (2, 600, 600, "low-latency", {"dispatch_wire": "fp8"}),
        (2, 600, 600, "high-throughput", {"hidden": 2880}),
        (2, 600, 600, "high-throughput", {"dispatch_wire": "fp8"}),
        (4, 40, 40, "low-latency", {"num_experts": 16, "num_topk": 4, "combine_wire": "fp8"}),
        (9, 3, 5, "low-latency", {"num_experts": 10, "num_topk": 3, "hidden": 64}),
    ],
)
def test_every_launch_compiles(compiled, num_ranks, tokens, bucket, mode, shape) -> None:
    launch(num_ranks, tokens, bucket, mode, **shape)
    assert {"_dispatch_kernel", "_combine_kernel", "_free_slot_kernel"} <= set(compiled)
    reads: dict[str, int] = {}
    for name, kernels in compiled.items():
        for kernel in kernels:
            # Rows are stored 16 bytes a thread where they can be: an address that Triton does not
            # know to be aligned would be stored 2 bytes at a time.
            assert ".target sm_90" in kernel.asm["ptx"], name
            read, shared = shared_reads(kernel.asm["ttgir"])
            assert not shared, name
            reads[name] = reads.get(name, 0) + len(read)
            if name == "_combine_kernel" and shape == {}:
                assert "st.global.v4" in kernel.asm["ptx"]
                assert "st.global.b16" not in kernel.asm["ptx"]
    assert reads["_combine_kernel"]
    assert reads["_free_slot_kernel"]
