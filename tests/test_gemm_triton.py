"""The Triton GEMM. On the CPU under Triton's interpreter, in a process of its own (the switch is
read when kernels are defined): it proves indices, masks, gathering, tails and dequantization; its
conversions to bfloat16 cut digits off instead of rounding, which is at most two half units each, so
the tolerance there is twice that of a GPU."""

from __future__ import annotations

import dataclasses
import functools
import operator
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from interpreter import inside, outside

from moe_comm.kernels.expert_gemm import grouped_mlp
from moe_comm.kernels.situ import SITU, Activation

cases = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("gemm_cases.py"))))
check, make_case = cases.check, cases.make_case
CLAMPED = Activation(kind="swiglu_clamped")


@outside
def test_under_the_interpreter(interpreted):
    interpreted()


def run(case, device, *, activation=SITU, tiles=None, mode=None):
    from moe_comm.kernels.expert_gemm_triton import grouped_mlp_triton

    capacity = case.row_index.shape[0]
    out = torch.full((capacity, case.hidden), torch.nan, dtype=torch.bfloat16, device=device)
    rows, row_index, offsets = case.to(device)
    scales = None if case.scales is None else case.scales.to(device)
    weights = case.weights("tiles", device)
    if tiles is None and mode is None:
        return grouped_mlp(
            rows, row_index, offsets, weights, scales=scales, activation=activation, out=out
        )
    return grouped_mlp_triton(
        rows[None],
        row_index,
        offsets,
        weights,
        None if scales is None else scales[None],
        activation,
        capacity,
        out,
        tiles=tiles,
        mode=mode,
    )


def small_tiles(*, swap, block_m=16):
    from moe_comm.kernels.expert_gemm_config import ProductTiles, TileConfig

    product = ProductTiles(block_n=64, num_stages=3, programs_per_sm=1)
    return TileConfig(block_m=block_m, gated=product, down=product, swap=swap)


def with_tail():
    return dataclasses.replace(
        small_tiles(swap=True, block_m=32), tail=small_tiles(swap=True, block_m=8)
    )


@inside
@pytest.mark.parametrize("swap", [True, False])
@pytest.mark.parametrize(
    ("counts", "hidden", "inter", "wire"),
    [
        ([5, 0, 1, 18], 128, 64, "bf16"),  # an empty expert, one row, two row blocks
        ([33], 160, 96, "bf16"),  # one hot expert; tails of K and of N
        ([2, 3], 288, 32, "fp8"),  # a short last scale group
        ([2, 3], 160, 64, "mxfp8"),
    ],
)
def test_interp_shapes(swap, counts, hidden, inter, wire):
    case = make_case(counts, hidden, inter, seed=hidden, wire=wire)
    y = run(case, "cpu", tiles=small_tiles(swap=swap))
    check(case, y, factor=2)
    assert y[sum(counts) :].isnan().all()


@inside
def test_interp_eight_rows():
    case = make_case([9, 0, 8, 1], 160, 96, seed=21)
    check(case, run(case, "cpu", tiles=small_tiles(swap=True, block_m=8)), factor=2)


@inside
@pytest.mark.parametrize("activation", [Activation(kind="swiglu"), CLAMPED], ids=lambda a: a.kind)
def test_interp_activations_and_biases(activation):
    case = make_case([4, 1], 64, 64, seed=9, bias=True)
    check(case, run(case, "cpu", activation=activation), activation=activation, factor=2)


def check_every_code(device, mode, largest, *, smallest=0):
    """Every byte under scales `smallest` to `largest`, and a tail of K: exact, so bit-equal."""
    from moe_comm.kernels import mxfp4_format, mxfp4_tiles
    from moe_comm.kernels.mxfp4_dequant import dequantize_tiles

    packed = torch.arange(256, dtype=torch.uint8).repeat(largest + 1, 1)[:, :240].contiguous()
    packed[:, :16] = torch.arange(240, 256, dtype=torch.uint8)
    scales = torch.arange(largest + 1, dtype=torch.uint8)[:, None].repeat(1, 15)
    words = torch.empty(4, largest + 1, 32, dtype=torch.int16)
    tile_scales = torch.empty(4, largest + 1, 4, dtype=torch.uint8)
    mxfp4_tiles.to_tiles(packed, scales, words, tile_scales)
    got = dequantize_tiles(words.to(device), tile_scales.to(device), k=480, mode=mode).cpu()
    wanted = mxfp4_format.dequantize(packed, scales)
    assert torch.equal(got.view(torch.int16)[smallest:], wanted.view(torch.int16)[smallest:])


@inside
def test_interp_every_code_and_scale():
    from moe_comm.kernels.mxfp4_dequant import PORTABLE

    # The interpreter takes subnormal bfloat16 for 0: scales 0 and 1 are for the GPU.
    check_every_code("cpu", PORTABLE, 254, smallest=2)


@inside
@pytest.mark.parametrize("wire", ["bf16", "fp8", "mxfp8"])
def test_interp_rows_of_ranks_apart(wire):
    """Rows [R, B, H] whose ranks lie further apart than B rows, as a slab's do."""
    case = make_case([7, 6], 160, 64, seed=12, wire=wire)
    bucket = -(-case.rows.shape[0] // 2)
    apart = spread(case.rows, bucket)
    scales = None if case.scales is None else spread(case.scales, bucket)
    out = torch.full((16, 160), torch.nan, dtype=torch.bfloat16)
    weights = case.weights("tiles")
    grouped_mlp(apart, case.row_index, case.expert_offsets, weights, scales=scales, out=out)
    check(case, out, factor=2)
    from moe_comm.kernels.expert_gemm_gather import gather_rows

    x = torch.full((16, 160), torch.nan, dtype=torch.bfloat16)
    gather_rows(apart, scales, case.row_index, case.expert_offsets[-1:], out=x)
    wanted = torch.stack([cases.read_row(case, int(n)) for n in case.row_index[:13]])
    torch.testing.assert_close(x[:13].double(), wanted, rtol=2.0**-7, atol=0)
    assert x[13:].isnan().all()


@inside
@pytest.mark.parametrize("wire", ["fp8", "mxfp8"])
@pytest.mark.parametrize("expected", [2, 100])
def test_interp_quantized_rows_are_read_once(wire, expected):
    """Where they lie: all of them, or, where few expert rows are expected, those of experts."""
    from moe_comm.kernels.expert_gemm_gather import read_rows

    case = make_case([2, 1], 160, 64, seed=13, wire=wire)
    bucket = -(-case.rows.shape[0] // 2)
    apart, scales = spread(case.rows, bucket), spread(case.scales, bucket)
    wide = torch.full(apart.shape, torch.nan, dtype=torch.bfloat16)
    last = case.expert_offsets[-1:]
    read_rows(apart, scales, case.row_index, last, expected_rows=expected, out=wide)
    named = case.row_index[:3].long()
    wanted = torch.stack([cases.read_row(case, int(n)) for n in named])
    flat = wide.flatten(0, 1)
    torch.testing.assert_close(flat[named].double(), wanted, rtol=2.0**-7, atol=0)
    others = torch.ones(2 * bucket, dtype=torch.bool)
    others[named] = False
    assert bool(others.any())
    assert bool(flat[others].isnan().all()) == (expected == 2)
    out = torch.full((case.row_index.shape[0], 160), torch.nan, dtype=torch.bfloat16)
    grouped_mlp(
        apart, case.row_index, case.expert_offsets, case.weights("tiles"), scales=scales, out=out,
        expected_rows=expected,
    )  # fmt: skip
    check(case, out, factor=2)


def spread(tensor, bucket):
    """[M, n] -> [2, bucket, n], a view of memory with three rows of rubbish after each rank."""
    wide = tensor.new_zeros(2, bucket + 3, tensor.shape[1])
    for rank in (0, 1):
        part = tensor[rank * bucket : (rank + 1) * bucket]
        wide[rank, : part.shape[0]] = part
    return wide[:, :bucket]


@inside
def test_interp_plan_example():
    from moe_comm.kernels.expert_gemm_plan import _plan_kernel

    offsets = torch.tensor([0, 5, 5, 40], dtype=torch.int32)
    plan = torch.full((1 + 2 * 6,), -7, dtype=torch.int32)
    sizes = {"EXPERTS": 4, "BLOCK_M": 16}
    _plan_kernel[(3,)](offsets, plan, 3, 48, 6, **sizes, TAIL=0, ONLY_TAILS=False)
    assert plan.tolist() == [4, 0, 2, 2, 2, -7, -7, 0, 5, 21, 37, -7, -7]
    plan.fill_(-7)
    _plan_kernel[(3,)](offsets, plan, 3, 48, 6, **sizes, TAIL=4, ONLY_TAILS=False)
    assert plan.tolist() == [3, 0, 2, 2, -7, -7, -7, 0, 5, 21, -7, -7, -7]
    plan.fill_(-7)
    _plan_kernel[(3,)](offsets, plan, 3, 48, 6, **sizes, TAIL=4, ONLY_TAILS=True)
    assert plan.tolist() == [1, 2, -7, -7, -7, -7, -7, 37, -7, -7, -7, -7, -7]


@inside
def test_interp_plans_with_tails_cover_every_row_once():
    from moe_comm.kernels.expert_gemm_triton import plan_parts

    counts = [0, 1, 8, 9, 32, 33, 40, 41, 72, 64, 0]
    offsets = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    end = int(offsets[-1])
    # The last expert's rows are cut off by the capacity.
    for capacity in (end, end - 3):
        seen = torch.zeros(capacity, dtype=torch.int32)
        for config, plan in plan_parts(offsets, capacity, with_tail()):
            most = plan.shape[0] // 2
            assert int(plan[0]) <= most
            for block in range(int(plan[0])):
                expert, first = int(plan[1 + block]), int(plan[1 + most + block])
                last = min(first + config.block_m, int(offsets[expert + 1]), capacity)
                assert int(offsets[expert]) <= first < last
                seen[first:last] += 1
        assert (seen == 1).all()
    with pytest.raises(ValueError, match="tail: expected tiles of fewer than 8 rows"):
        dataclasses.replace(small_tiles(swap=True, block_m=8), tail=small_tiles(swap=True))


@inside
def test_interp_tails():
    case = make_case([5, 0, 33, 47, 32], 160, 96, seed=23)
    y = run(case, "cpu", tiles=with_tail())
    check(case, y, factor=2)
    assert y[117:].isnan().all()


@inside
@pytest.mark.parametrize("num_rows", [5, 1, torch.tensor([5], dtype=torch.int32)])
def test_interp_activation_pass(num_rows):
    from moe_comm.kernels.expert_gemm_activate import activate_rows
    from moe_comm.kernels.situ import activate_torch

    generator = torch.Generator().manual_seed(4)
    gate_up = (torch.randn(7, 2 * 70, generator=generator) * 6).bfloat16()
    out = torch.full((7, 70), torch.nan, dtype=torch.bfloat16)
    activate_rows(gate_up, num_rows, out=out)
    rows = int(num_rows)
    wanted = activate_torch(gate_up[:rows, :70].float(), gate_up[:rows, 70:].float())
    # Truncation to bfloat16 (the interpreter's) is one unit, 2 U, at most.
    torch.testing.assert_close(out[:rows].float(), wanted, rtol=2.0**-7, atol=1e-6)
    assert out[rows:].isnan().all()


@inside
def test_interp_read_memory():
    from moe_comm.kernels.expert_gemm_read import read_memory

    words = torch.randint(-(2**31), 2**31 - 1, (50001,), dtype=torch.int32)
    out = torch.zeros(3, dtype=torch.int32)
    read_memory(words, out=out)
    fold = functools.partial(functools.reduce, operator.xor)
    assert fold(out.tolist()) == fold(words.tolist())


GPU_CASES = [
    ([5] * 7 + [0, 1], 3584, 256, "bf16"),  # decode rows at K3's latent
    ([0, 300, 1, 0, 17], 512, 384, "bf16"),  # one hot expert among empty ones
    ([64, 65, 63], 416, 160, "bf16"),  # tails of N and of K
    ([9, 2], 3584, 96, "fp8"),
    ([9, 2], 352, 96, "mxfp8"),
    ([200, 131], 256, 3072, "bf16"),  # prefill rows
    ([700, 3], 512, 512, "bf16"),  # the largest tiles
    ([300, 128, 90, 16], 512, 256, "bf16"),  # the largest tiles, tails left over or not
]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
class TestGpu:
    @pytest.mark.parametrize(("counts", "hidden", "inter", "wire"), GPU_CASES)
    def test_shapes(self, counts, hidden, inter, wire):
        case = make_case(counts, hidden, inter, seed=len(counts), wire=wire)
        y = run(case, "cuda")
        check(case, y)
        assert y[sum(counts) :].isnan().all()

    @pytest.mark.parametrize("swap", [True, False])
    @pytest.mark.parametrize("block_m", [8, 16, 64])
    def test_tiles_and_modes(self, swap, block_m):
        from moe_comm.kernels.mxfp4_dequant import NARROW, PORTABLE, WIDE

        case = make_case([3, 70, 0, 1], 256, 160, seed=5)
        tiles = small_tiles(swap=swap, block_m=block_m)
        results = [run(case, "cuda", tiles=tiles, mode=m) for m in (NARROW, WIDE, PORTABLE)]
        used = 74
        assert torch.equal(results[0][:used], results[1][:used])
        assert torch.equal(results[0][:used], results[2][:used])
        check(case, results[0])

    @pytest.mark.parametrize("name", ["PORTABLE", "NARROW", "WIDE"])
    def test_every_code_and_scale(self, name):
        from moe_comm.kernels import mxfp4_dequant

        largest = mxfp4_dequant.NARROW_LIMIT if name == "NARROW" else 254
        check_every_code("cuda", getattr(mxfp4_dequant, name), largest)

    def test_large_scales_choose_the_wide_mode(self):
        from moe_comm.kernels.expert_gemm_triton import choose_mode
        from moe_comm.kernels.mxfp4_dequant import NARROW, WIDE

        large = make_case([2, 3], 128, 64, seed=6, exponents=(127, 132))
        assert choose_mode(large.weights("tiles", "cuda")) == WIDE
        check(large, run(large, "cuda"))
        assert choose_mode(make_case([1], 64, 32).weights("tiles", "cuda")) == NARROW

    @pytest.mark.parametrize("activation", [Activation(kind="swiglu"), CLAMPED])
    def test_activations_and_biases(self, activation):
        case = make_case([40, 1, 0, 6], 2880, 160, seed=9, bias=True)
        check(case, run(case, "cuda", activation=activation), activation=activation)

    def test_same_bits_every_run_and_under_a_graph(self):
        case = make_case([5] * 20, 512, 256, seed=10)
        rows, index, offsets = case.to("cuda")
        weights = case.weights("tiles", "cuda")
        first = grouped_mlp(rows, index, offsets, weights)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = grouped_mlp(rows, index, offsets, weights)
        captured.fill_(torch.nan)
        graph.replay()
        assert torch.equal(captured[:100], first[:100])
        assert torch.equal(grouped_mlp(rows, index, offsets, weights)[:100], first[:100])

    @pytest.mark.parametrize("wire", ["bf16", "fp8", "mxfp8"])
    def test_rows_of_ranks_apart(self, wire):
        case = make_case([7, 6], 416, 64, seed=12, wire=wire)
        bucket = -(-case.rows.shape[0] // 2)
        scales = None if case.scales is None else spread(case.scales, bucket).cuda()
        y = grouped_mlp(
            spread(case.rows, bucket).cuda(),
            case.row_index.cuda(),
            case.expert_offsets.cuda(),
            case.weights("tiles", "cuda"),
            scales=scales,
        )
        check(case, y)

    def test_addresses_beyond_2_31(self):
        """Weights of the last experts lie beyond element 2^31, and so do the rows."""
        from moe_comm.kernels.expert_gemm_weights import ExpertWeights

        case = make_case([4, 3], 3584, 3072, seed=11)
        experts = 420
        weights = ExpertWeights.empty(experts, 3584, 3072, layout="tiles", device="cuda")
        assert weights.w13[: experts - 2].numel() > 2**31
        for slot, parts in enumerate(case.experts, start=experts - 2):
            gate, up, down = (tuple(t.cuda() for t in pair) for pair in parts)
            weights.put(slot, gate=gate, up=up, down=down)
        offsets = torch.zeros(experts + 1, dtype=torch.int32, device="cuda")
        offsets[experts - 1], offsets[experts] = 4, 7
        rows, index, _ = case.to("cuda")
        shift = 2**31 // 3584 + 1
        far = torch.empty(shift + rows.shape[0], 3584, dtype=rows.dtype, device="cuda")
        far[shift:] = rows
        moved = torch.where(index >= 0, index + shift, index).to(torch.int32)
        check(case, grouped_mlp(far, moved, offsets, weights))
