"""The inline PTX of the dequantization, executed here by a small emulator, and the GEMM compiled
for sm_90: neither needs a GPU."""

from __future__ import annotations

import re
import subprocess

import pytest
import torch

from moe_comm.kernels import mxfp4_dequant, mxfp4_format, mxfp4_tiles
from moe_comm.kernels.expert_gemm_config import FEW, FEWEST, MANY, MOST, SOME

WORD = 0xFFFFFFFF


def emulate(ptx, **registers):
    """Run the straight-line PTX that mxfp4_dequant writes, on int64 tensors of 32-bit values."""
    held = {f"${name[1:]}": value for name, value in registers.items()}

    def read(name):
        return held[name] if name in held else int(name, 0)

    for operation, operands in re.findall(r"([a-z0-9.]+) ([^;]+);", ptx):
        target, *names = (operand.strip() for operand in operands.split(","))
        if operation == ".reg":
            continue
        a, *rest = (read(name) for name in names)
        if operation == "mov.b32":
            held[target] = a
        elif operation == "and.b32":
            held[target] = a & rest[0]
        elif operation == "shl.b32":
            held[target] = (a << rest[0]) & WORD
        elif operation == "shr.u32":
            held[target] = a >> rest[0]
        elif operation == "lop3.b32":
            assert rest[2] == 0xEA  # (a & b) | c
            held[target] = (a & rest[0]) | rest[1]
        elif operation == "mad.lo.u32":
            held[target] = (a * rest[0] + rest[1]) & WORD
        elif operation == "prmt.b32":
            four = [(a >> (8 * i)) & 0xFF for i in range(4)] + [rest[0]] * 4
            picks = [four[(rest[1] >> (4 * i)) & 7] for i in range(4)]
            held[target] = sum(pick << (8 * i) for i, pick in enumerate(picks))
        elif operation == "fma.rn.bf16x2":
            assert rest[1] == 0x80008000  # plus -0: a product with one rounding
            held[target] = multiply_pairs(a, rest[0])
        else:
            raise AssertionError(f"no such instruction in the emulator: {operation}")
    return held["$0"]


def multiply_pairs(a, b):
    """Products of the bfloat16 pairs in two 32-bit registers; float64 holds them exactly."""
    low, high = (
        (bfloat16(a, shift).double() * bfloat16(b, shift).double()).to(torch.bfloat16)
        for shift in (0, 16)
    )
    bits = [half.view(torch.int16).long() & 0xFFFF for half in (low, high)]
    return bits[0] | (bits[1] << 16)


def bfloat16(register, shift):
    half = (torch.as_tensor(register) >> shift) & 0xFFFF
    return torch.where(half < 0x8000, half, half - 0x10000).to(torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize(("mode", "largest"), [("N", mxfp4_dequant.NARROW_LIMIT), ("W", 254)])
def test_ptx_equals_the_format(mode, largest):
    blocks = 300
    generator = torch.Generator().manual_seed(largest)
    packed = torch.randint(0, 256, (1, blocks * 64), generator=generator).to(torch.uint8)
    scales = torch.randint(0, largest + 1, (1, blocks * 4), generator=generator).to(torch.uint8)
    scales[0, :4], scales[0, 4:8] = torch.tensor([0, 1, 2, 3]), largest
    words = torch.empty(blocks, 1, 32, dtype=torch.int16)
    tile_scales = torch.empty(blocks, 1, 4, dtype=torch.uint8)
    mxfp4_tiles.to_tiles(packed, scales, words, tile_scales)
    wanted = mxfp4_format.dequantize(packed, scales).view(blocks, 4, 32)
    halves = words.view(blocks, 32).long() & 0xFFFF
    registers = halves[:, 0::2] | (halves[:, 1::2] << 16)
    four = sum(tile_scales[:, 0, i].long() << (8 * i) for i in range(4))
    for code in range(4):
        if mode == "N":
            pair = emulate(getattr(mxfp4_dequant, f"_S{code}").value, r1=four)
        else:
            # As block_scale computes it for WIDE, in Triton.
            pair = ((four >> (8 * code) & 0xFF) << 7).clamp(min=0x40) * 0x10001
        pair = pair[:, None].expand(-1, 16)
        ptx = getattr(mxfp4_dequant, f"_{mode}{code}").value
        got = emulate(ptx, r1=registers, r2=pair, r3=pair)
        got = torch.stack((got & 0xFFFF, got >> 16), dim=-1).flatten(1)
        assert torch.equal(got, wanted[:, code].contiguous().view(torch.int16).long() & 0xFFFF)


def compile_product(tiles, *, block_m, swap, gated):
    """One product of K3's shape for sm_90: the compiled kernel, its registers a thread and its
    stack bytes (spills)."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from moe_comm.kernels.expert_gemm_triton import _expert_gemm_kernel as kernel

    constants = {
        "GATED": gated,
        "GATHER": gated,
        "HAS_BIAS": False,
        "ACT": 0,
        "ACT_A": 4.0,
        "ACT_B": 25.0,
        "EVEN_K": True,
        "EVEN_N": True,
        "SWAP": swap,
        "MODE": mxfp4_dequant.NARROW,
        "FP32": False,
        "BLOCK_M": block_m,
        "BLOCK_N": tiles.block_n,
    }
    pointers = {
        "x": "*bf16",
        "row_index": "*i32",
        "expert_offsets": "*i32",
        "plan": "*i32",
        "words": "*i16",
        "scales": "*i32",
        "bias": "*bf16",
        "out": "*bf16",
    }
    names = kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names
    }
    aligned = {*pointers, "stride_xr", "stride_xt", "K", "N"}
    source = ASTSource(
        kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": tiles.num_warps, "num_stages": tiles.num_stages},
    )
    return compiled, *registers_and_stack(compiled)


def registers_and_stack(compiled):
    import tempfile

    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        found = subprocess.run(
            [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", found).groups()
    return int(registers), int(stack)


def programs_that_fit(compiled, registers, num_warps):
    """On one multiprocessor of an H200: 64 Ki registers, given out by 8 a thread; 227 KiB."""
    by_registers = (64 << 10) // (-(-registers // 8) * 8 * 32 * num_warps)
    return min(by_registers, (227 << 10) // (compiled.metadata.shared + 1024))


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "down"])
@pytest.mark.parametrize(
    "config", [FEWEST, FEW, SOME, MANY, MOST], ids=lambda c: f"rows{c.block_m}"
)
def test_gemm_compiles_for_hopper(config, gated):
    """Weights reach the tensor cores through registers, nothing spills, and, with the Triton that
    the tiles were tuned with, as many programs fit a multiprocessor as they say."""
    import triton

    tiles = config.gated if gated else config.down
    compiled, registers, stack = compile_product(
        tiles, block_m=config.block_m, swap=config.swap, gated=gated
    )
    ptx = compiled.asm["ptx"]
    # Triton below 3.9 takes the older instruction for 8 rows.
    few = config.block_m == 8 and "mma.sync" in ptx
    assert few or "wgmma.mma_async" in ptx
    assert re.search(r"cp\.async\.\w+\.shared\.global \[[^\]]*\], \[[^\]]*\], 0x10", ptx)
    assert stack == 0
    if triton.__version__.startswith("3.6."):
        assert programs_that_fit(compiled, registers, tiles.num_warps) >= tiles.programs_per_sm


@pytest.mark.slow
@pytest.mark.parametrize("rows", [5, 18, 146, 1170])
def test_candidates_compile_without_spills_and_fit(rows):
    """So that a search on a GPU loses no time with tiles that a compiler rules out here."""
    from moe_comm.launch.bench_gemm_tune import candidates

    for group in candidates(rows):
        for gated, several in ((True, group.gated), (False, group.down)):
            for tiles in several:
                compiled, registers, stack = compile_product(
                    tiles, block_m=group.block_m, swap=group.swap, gated=gated
                )
                assert stack == 0, (group.block_m, tiles)
                fit = programs_that_fit(compiled, registers, tiles.num_warps)
                assert fit == tiles.programs_per_sm, (group.block_m, gated, tiles)


@pytest.mark.parametrize("wire", ["bf16", "fp8", "mxfp8"])
def test_passes_over_rows_compile_for_hopper(monkeypatch, wire):
    """What runs beside the products: the gather and the activation for GEMMs that do neither."""
    from test_slab_compiles import compile_launch
    from triton.runtime.jit import JITFunction

    from moe_comm.kernels.expert_gemm_activate import activate_rows
    from moe_comm.kernels.expert_gemm_gather import gather_rows, read_rows

    found = {}

    def launch(self, *args, grid, warmup, **options):
        found[self.__name__, len(found)] = compile_launch(self, args, options).asm["ptx"]

    monkeypatch.setattr(JITFunction, "run", launch)
    rows = torch.zeros(2, 8, 3584, dtype=torch.bfloat16)
    scales = None
    if wire != "bf16":
        rows = rows.to(torch.float8_e4m3fn)
        groups, dtype = (28, torch.float32) if wire == "fp8" else (112, torch.uint8)
        scales = torch.zeros(2, 8, groups, dtype=dtype)
    index, last = torch.zeros(9, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    gather_rows(rows, scales, index, last, out=torch.zeros(9, 3584, dtype=torch.bfloat16))
    if scales is not None:
        wide = torch.zeros(rows.shape, dtype=torch.bfloat16)
        # As they lie, and those that the index names.
        for expected in (16, 15):
            read_rows(rows, scales, index, last, expected_rows=expected, out=wide)
    gate_up = torch.zeros(9, 6144, dtype=torch.bfloat16)
    hidden = torch.zeros(9, 3072, dtype=torch.bfloat16)
    for num_rows in (last, 9):
        activate_rows(gate_up, num_rows, out=hidden)
    assert len(found) == (3 if scales is None else 5)
    for (name, _), ptx in found.items():
        # Rows are read and written 16 bytes a thread, or 8 where a row is half as wide.
        wide = ".v2.b32" if wire != "bf16" and "gather" in name else ".v4.b32"
        assert f"ld.global{wide}" in ptx, name
        assert "st.global.v4.b32" in ptx, name
