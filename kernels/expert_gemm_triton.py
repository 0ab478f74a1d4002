"""The grouped expert MLP in Triton: MXFP4 weights dequantized in registers, rows gathered.

Three launches: a plan (which expert and rows each tile has, from expert_offsets, on the device),
the gate and up products with the activation, the down product; each twice where an expert's last
rows have smaller tiles. One more dequantizes rows that are quantized. Programs are persistent and
walk the tiles in order (row block, column block), so tiles of one expert run side by side and share
its weights in the cache. No host sync; every address is 64 bits wide.

Weights are the left operand (W x^T, tensor cores take it from registers, where it was dequantized)
when SWAP, else the right one. The reduction runs in blocks of 128: nibble j of the block's words
multiplies 32 neighbouring elements of x.

Shape legend: R source ranks, B rows of each, H hidden, I intermediate width, L local experts,
C capacity, KB blocks of 128 along the reduction.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_comm.kernels.expert_gemm_activate import activate
from moe_comm.kernels.expert_gemm_config import TileConfig, choose_tiles
from moe_comm.kernels.expert_gemm_gather import read_rows
from moe_comm.kernels.expert_gemm_plan import make_plan
from moe_comm.kernels.expert_gemm_weights import ExpertWeights
from moe_comm.kernels.mxfp4_dequant import (
    NARROW,
    NARROW_LIMIT,
    PORTABLE,
    WIDE,
    block_scale,
    dequantize_words,
)
from moe_comm.kernels.situ import Activation


@triton.jit
def _load_x(x_row, live, k0, K, EVEN: tl.constexpr):
    """[BLOCK_M, 32] elements from k0 on of the rows at pointers x_row."""
    k = k0 + tl.arange(0, 32)
    mask = live[:, None] if EVEN else live[:, None] & (k < K)[None, :]
    return tl.load(x_row[:, None] + k[None, :], mask=mask, other=0.0)


@triton.jit
def _multiply(acc, w, x, SWAP: tl.constexpr, FP32: tl.constexpr):
    if FP32:
        # The interpreter's dot takes a bfloat16's bits for an integer.
        w, x = w.to(tl.float32), x.to(tl.float32)
    return tl.dot(w, x.T, acc) if SWAP else tl.dot(x, w.T, acc)


@triton.jit
def _block_product(
    acc,
    word_ptr,
    scale_ptr,
    in_n,
    x0,
    x1,
    x2,
    x3,
    EVEN_N: tl.constexpr,
    SWAP: tl.constexpr,
    MODE: tl.constexpr,
    FP32: tl.constexpr,
):
    """acc += W x^T (SWAP) or x W^T over one block of 128."""
    if EVEN_N:
        words = tl.load(word_ptr)
        packed = tl.load(scale_ptr)
    else:
        words = tl.load(word_ptr, mask=in_n[:, None], other=0)
        packed = tl.load(scale_ptr, mask=in_n, other=0x7F7F7F7F)
    w0 = dequantize_words(words, block_scale(packed, 0, MODE), 0, MODE)
    w1 = dequantize_words(words, block_scale(packed, 1, MODE), 1, MODE)
    w2 = dequantize_words(words, block_scale(packed, 2, MODE), 2, MODE)
    w3 = dequantize_words(words, block_scale(packed, 3, MODE), 3, MODE)
    acc = _multiply(acc, w0, x0, SWAP, FP32)
    acc = _multiply(acc, w1, x1, SWAP, FP32)
    acc = _multiply(acc, w2, x2, SWAP, FP32)
    return _multiply(acc, w3, x3, SWAP, FP32)


@triton.jit
def _expert_gemm_kernel(
    x,
    row_index,
    expert_offsets,
    plan,
    words,
    scales,
    bias,
    out,
    max_blocks,
    bucket,
    stride_xr,
    stride_xt,
    K,
    N,
    capacity,
    KB,
    GATED: tl.constexpr,
    GATHER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACT: tl.constexpr,
    ACT_A: tl.constexpr,
    ACT_B: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    SWAP: tl.constexpr,
    MODE: tl.constexpr,
    FP32: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """out[n] = x[row] W^T of n's expert, [C, N]; GATED: W has 2 N rows, gate then up, and out is
    act(gate, up). GATHER: row = row_index[n], else n itself."""
    num_blocks = tl.load(plan)
    columns = tl.cdiv(N, BLOCK_N)
    weight_rows = 2 * N if GATED else N
    for tile in range(tl.program_id(0), num_blocks * columns, tl.num_programs(0)):
        block = tile // columns
        expert = tl.load(plan + 1 + block).to(tl.int64)
        first = tl.load(plan + 1 + max_blocks + block)
        end = tl.minimum(tl.load(expert_offsets + expert + 1), capacity)
        position = first + tl.arange(0, BLOCK_M)
        live = position < end
        if GATHER:
            row = tl.load(row_index + position, mask=live, other=0).to(tl.int64)
            source, token = row // bucket, row % bucket
            x_row = x + source * stride_xr + token * stride_xt
        else:
            x_row = x + position.to(tl.int64) * stride_xt
        n = (tile % columns) * BLOCK_N + tl.arange(0, BLOCK_N)
        in_n = n < N
        base = expert * KB * weight_rows
        word_ptr = words + (base + n)[:, None] * 32 + tl.arange(0, 32)[None, :]
        scale_ptr = scales + base + n
        if SWAP:
            acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
            acc_up = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        else:
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            acc_up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for kb in range(KB):
            k0 = kb * 128
            x0 = _load_x(x_row, live, k0, K, EVEN_K)
            x1 = _load_x(x_row, live, k0 + 32, K, EVEN_K)
            x2 = _load_x(x_row, live, k0 + 64, K, EVEN_K)
            x3 = _load_x(x_row, live, k0 + 96, K, EVEN_K)
            acc = _block_product(
                acc, word_ptr, scale_ptr, in_n, x0, x1, x2, x3, EVEN_N, SWAP, MODE, FP32
            )
            if GATED:
                acc_up = _block_product(
                    acc_up,
                    word_ptr + N * 32,
                    scale_ptr + N,
                    in_n,
                    x0,
                    x1,
                    x2,
                    x3,
                    EVEN_N,
                    SWAP,
                    MODE,
                    FP32,
                )
            word_ptr += weight_rows * 32
            scale_ptr += weight_rows
        if HAS_BIAS:
            first_bias = tl.load(bias + expert * weight_rows + n, mask=in_n, other=0.0)
            first_bias = first_bias.to(tl.float32)
            acc += first_bias[:, None] if SWAP else first_bias[None, :]
            if GATED:
                up_bias = tl.load(bias + expert * weight_rows + N + n, mask=in_n, other=0.0)
                up_bias = up_bias.to(tl.float32)
                acc_up += up_bias[:, None] if SWAP else up_bias[None, :]
        value = activate(acc, acc_up, ACT, ACT_A, ACT_B) if GATED else acc
        value = value.to(tl.bfloat16)
        if SWAP:
            value = value.T
        target = out + position.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(target, value, mask=live[:, None] & in_n[None, :])


def grouped_mlp_triton(
    rows: Tensor,
    row_index: Tensor,
    expert_offsets: Tensor,
    weights: ExpertWeights,
    scales: Tensor | None,
    activation: Activation,
    expected_rows: int,
    out: Tensor,
    *,
    tiles: TileConfig | None = None,
    mode: int | None = None,
) -> Tensor:
    """The launches; arguments as expert_gemm.grouped_mlp checks them.

    Args:
        tiles: default: chosen by expected_rows an expert.
        mode: of mxfp4_dequant; default: by the device and the weights' largest scale.
    """
    config = tiles or choose_tiles(expected_rows / weights.num_experts)
    if mode is None:
        mode = choose_mode(weights)
    capacity = row_index.shape[0]
    parts = plan_parts(expert_offsets, capacity, config)
    hidden = torch.empty(capacity, weights.inter, dtype=torch.bfloat16, device=rows.device)
    if scales is not None:
        # Every column block of a product reads the rows again: they are dequantized once.
        wide = torch.empty(rows.shape, dtype=torch.bfloat16, device=rows.device)
        rows = read_rows(
            rows, scales, row_index, expert_offsets[-1:], expected_rows=expected_rows, out=wide
        )
    for gated in (True, False):
        for part, plan in parts:
            expert_product(
                rows if gated else hidden[None],
                row_index,
                expert_offsets,
                plan,
                weights,
                gated=gated,
                activation=activation,
                config=part,
                mode=mode,
                out=hidden if gated else out,
            )
    return out


def plan_parts(
    expert_offsets: Tensor, capacity: int, config: TileConfig
) -> list[tuple[TileConfig, Tensor]]:
    """The launches that a product takes, each with its tiles and their plan: the tiles themselves,
    then those for tails, if any. Together they cover every expert row once."""
    tail = config.tail
    rest = 0 if tail is None else tail.block_m
    main = make_plan(expert_offsets, capacity, block_m=config.block_m, tail=rest)
    if tail is None:
        return [(config, main)]
    tails = make_plan(expert_offsets, capacity, block_m=config.block_m, tail=rest, only_tails=True)
    return [(config, main), (tail, tails)]


def expert_product(
    x: Tensor,
    row_index: Tensor,
    expert_offsets: Tensor,
    plan: Tensor,
    weights: ExpertWeights,
    *,
    gated: bool,
    activation: Activation,
    config: TileConfig,
    mode: int,
    out: Tensor,
) -> Tensor:
    """One product of every expert on its rows.

    Args:
        x: bfloat16 [R, B, K]; gated: received rows, read through row_index; else [1, C, K] in
            expert order.
        plan: of plan_parts, with `config`.
        gated: act(x W1^T, x W3^T), else x W2^T.
        out: bfloat16 [C, N], contiguous.
    """
    tiles = config.gated if gated else config.down
    words = weights.w13 if gated else weights.w2
    word_scales = weights.w13_scale if gated else weights.w2_scale
    bias = weights.w13_bias if gated else weights.w2_bias
    capacity, n = out.shape
    k, max_blocks = x.shape[2], plan.shape[0] // 2
    act, act_a, act_b = activation.constants
    most = max_blocks * triton.cdiv(n, tiles.block_n)
    programs = min(most, _processors(x.device) * tiles.programs_per_sm)
    _expert_gemm_kernel[(programs,)](
        x,
        row_index,
        expert_offsets,
        plan,
        words,
        word_scales.view(torch.int32),
        out if bias is None else bias,
        out,
        max_blocks,
        x.shape[1],
        x.stride(0),
        x.stride(1),
        k,
        n,
        capacity,
        words.shape[1],
        GATED=gated,
        GATHER=gated,
        HAS_BIAS=bias is not None,
        ACT=act,
        ACT_A=act_a,
        ACT_B=act_b,
        EVEN_K=k % 128 == 0,
        EVEN_N=n % tiles.block_n == 0,
        SWAP=config.swap,
        MODE=mode,
        FP32=x.device.type == "cpu",
        BLOCK_M=config.block_m,
        BLOCK_N=tiles.block_n,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return out


def choose_mode(weights: ExpertWeights) -> int:
    """Inline PTX on NVIDIA GPUs, in the form that the weights' largest scale allows."""
    if weights.device.type != "cuda" or torch.version.cuda is None:
        return PORTABLE
    return NARROW if weights.scale_range.largest <= NARROW_LIMIT else WIDE


def _processors(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    # Elsewhere (the interpreter too) a few programs, so that each walks several tiles.
    return 4 if device.type == "cpu" else 64
