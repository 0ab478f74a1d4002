"""The model's Triton kernels, and those of fla-core that KDA calls, compile for sm_90 at K3's
shapes without a GPU: no spills, and shared memory that a multiprocessor has."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed")


def _ptxas() -> Path:
    """The one that Triton itself compiles with: from 3.9 on it comes with two."""
    from triton.backends.nvidia.compiler import get_ptxas

    return Path(get_ptxas(90).path)


PTXAS = _ptxas()
pytestmark = [
    pytest.mark.skipif(not PTXAS.exists(), reason="this Triton has no ptxas"),
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled when interpreted"
    ),
]

F32, BF16, I64 = torch.float32, torch.bfloat16, torch.int64
POINTERS = {F32: "*fp32", BF16: "*bf16", torch.int32: "*i32", I64: "*i64"}
# Of one program on sm_90.
SHARED_BYTES = 227 * 1024


def compile_launch(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Compile what a launch with these arguments would run, specialized as Triton does."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    given = dict(zip((p.name for p in kernel.params), args, strict=False)) | options
    flags = {name: value for name, value in options.items() if name in ("num_warps", "num_stages")}
    signature, constants, attributes = {}, {}, {}
    for i, param in enumerate(kernel.params):
        value = given[param.name]
        free = isinstance(value, int) and not param.do_not_specialize
        if param.is_constexpr or value is None or (free and value == 1):
            signature[param.name], constants[(i,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[param.name] = POINTERS[value.dtype]
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[param.name] = "fp32"
        else:
            signature[param.name] = param.annotation_type or "i32"
            if free and value % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=flags)


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Launches compile instead of running; yields what they compiled, by kernel name."""
    from triton.runtime.jit import JITFunction

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found: dict[str, list[Any]] = {}

    def run(self: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
        del grid, warmup
        found.setdefault(self.__name__, []).append(compile_launch(self, args, options))

    monkeypatch.setattr(JITFunction, "run", run)
    return found


def check(compiled: dict[str, list[Any]], tmp_path: Path) -> None:
    for name, kernels in compiled.items():
        for kernel in kernels:
            assert kernel.metadata.shared <= SHARED_BYTES, name
            source = tmp_path / f"{name}.ptx"
            source.write_text(kernel.asm["ptx"])
            said = subprocess.run(
                [PTXAS, "-v", "--gpu-name=sm_90a", source, "-o", tmp_path / "out"],
                capture_output=True,
                text=True,
                check=True,
            ).stderr
            assert re.search(r"\b0 bytes spill stores, 0 bytes spill loads", said), (name, said)


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype)


def test_ours(compiled, tmp_path):
    from moe_comm.kernels.attn_res_norm import attn_res_norm
    from moe_comm.kernels.mla_decode import mla_decode
    from moe_comm.kernels.rms_norm import gated_rms_norm, rms_norm
    from moe_comm.kernels.router_topk import router_topk
    from moe_comm.kernels.short_conv import short_conv

    num = 8
    for requests, pages in ((1, 4097), (128, 17)):
        mla_decode(
            empty(requests, 96, 576),
            empty(2, 64, 576),
            empty(requests, pages, dtype=torch.int32),
            empty(requests, dtype=I64),
            latent=512,
            scale=192**-0.5,
        )
    rms_norm(empty(num, 7168), empty(7168), 1e-5)
    gated_rms_norm(empty(num, 96, 128), empty(128), empty(num, 96, 128), 1e-5)
    x = empty(num, 7168)
    for rows, running, update in ((0, x, None), (1, None, x), (8, x, x)):
        attn_res_norm(
            empty(rows, num, 7168), rows, running, update, empty(7168, dtype=F32), empty(7168),
            site_eps=1e-5, norm_eps=1e-5,
        )  # fmt: skip
    for single in (True, False):
        short_conv(
            empty(num, 12288), empty(12288, 4, dtype=F32), empty(9, 12288, 3),
            empty(num, dtype=I64), empty(num + 1, dtype=I64), empty(num, dtype=I64),
            all_single=single,
        )  # fmt: skip
    router_topk(empty(num, 896, dtype=F32), empty(896, dtype=F32), top_k=16)
    assert len(compiled) == 7
    check(compiled, tmp_path)


@pytest.mark.slow
def test_kernels_of_fla(compiled, tmp_path):
    """Our calls go through fla's own code to its kernels, whose candidates are all found."""
    pytest.importorskip("fla", reason="fla-core is not installed")
    from moe_comm.model.layers import kda_fla

    num, heads, width = 128, 96, 128
    per_token = [empty(num, heads, width) for _ in range(4)]
    gates = {
        "a_log": empty(heads, dtype=F32),
        "dt_bias": empty(heads * width, dtype=F32),
        "lower_bound": -5.0,
    }
    cu_seqlens = torch.tensor([0, 100, num])
    assert kda_fla.pin_tiles() == []
    with torch.inference_mode():
        out, final = kda_fla.chunk(
            *per_token,
            empty(num, heads),
            **gates,
            initial_state=empty(2, heads, width, width, dtype=F32),
            cu_seqlens=cu_seqlens,
            cu_seqlens_cpu=cu_seqlens,
        )
        kda_fla.step_in_place(
            *per_token,
            empty(num, heads),
            **gates,
            states=empty(num + 1, heads, width, width, dtype=F32),
            slots=torch.arange(1, num + 1),
        )
    assert (out.shape, final.shape, final.dtype) == (
        (num, heads, width),
        (2, heads, width, width),
        F32,
    )
    assert len(compiled) == 9
    check(compiled, tmp_path)
