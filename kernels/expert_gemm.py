"""Grouped expert MLP on MXFP4 weights: the interface, the choice, and the torch reference.

Shape legend: M received rows, H hidden (K3: the 3584-wide latent), I intermediate width, L local
experts, C capacity (room for expert rows), G scale groups of a row.

For expert row n of expert e (expert_offsets[e] <= n < expert_offsets[e + 1]):
  y[n] = act(x W1_e^T + b1, x W3_e^T + b3) W2_e^T + b2,  x = rows[row_index[n]]
W1 is the gate, W3 the up projection. Weights are exact in bfloat16; products accumulate in float32;
the activation's result is rounded to bfloat16 once. An implementation may round gate and up to
bfloat16 before the activation (torch, humming) or not (Triton).
"""

from __future__ import annotations

import importlib.util
import itertools

import torch
from torch import Tensor

from moe_comm.kernels import mxfp4_format
from moe_comm.kernels.expert_gemm_weights import ExpertWeights
from moe_comm.kernels.situ import SITU, Activation, activate_torch

IMPLEMENTATIONS = ("torch", "triton", "humming")
# The layout each implementation reads.
LAYOUT_OF = {"torch": "rows", "triton": "tiles", "humming": "humming"}


def choose_implementation(
    device: torch.device | str, *, hidden: int, inter: int, bias: bool = False
) -> str:
    """The default: torch on CPUs; on NVIDIA GPUs humming, where it is installed and its tiles fit
    (512 divides hidden and inter, no biases); Triton on every other accelerator and shape."""
    device = torch.device(device)
    if device.type == "cpu":
        return "torch"
    nvidia = device.type == "cuda" and torch.version.cuda is not None
    fits = hidden % 512 == 0 and inter % 512 == 0 and not bias
    if nvidia and fits and importlib.util.find_spec("humming") is not None:
        return "humming"
    return "triton"


def grouped_mlp(
    rows: Tensor,
    row_index: Tensor,
    expert_offsets: Tensor,
    weights: ExpertWeights,
    *,
    scales: Tensor | None = None,
    activation: Activation = SITU,
    implementation: str | None = None,
    expected_rows: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """All local experts on all their rows.

    Args:
        rows: [M, H] or [R, B, H] (received row r * B + t is rows[r, t]; the outer stride is free),
            bfloat16, or float8_e4m3fn with `scales`; the last dimension is contiguous.
        row_index: [C] int32, the received row of each expert row; not read past the last offset.
        expert_offsets: [L + 1] int32, ascending from 0, at most C.
        weights: of the layout that the implementation reads.
        scales: [M, G] or [R, B, G]: float32 for groups of 128, uint8 E8M0 for groups of 32 (a short
            last group has its own); None for bfloat16 rows.
        activation: between the products.
        implementation: "torch", "triton" or "humming"; None: the one that reads weights.layout.
        expected_rows: how many expert rows there will be, roughly; chooses tile sizes without a
            host sync. Default: C.
        out: bfloat16 [C, H] to write to.

    Returns:
        y [C, H] bfloat16, grouped by expert in the order of row_index; rows from
        expert_offsets[-1] on are undefined. No host sync, except torch's.
    """
    if implementation is None:
        implementation = next(name for name in IMPLEMENTATIONS if LAYOUT_OF[name] == weights.layout)
    if rows.dim() == 2:
        rows, scales = rows[None], None if scales is None else scales[None]
    _check_arguments(rows, row_index, expert_offsets, weights, scales, implementation)
    capacity = row_index.shape[0]
    if out is None:
        out = torch.empty(capacity, weights.hidden, dtype=torch.bfloat16, device=rows.device)
    elif out.shape != (capacity, weights.hidden) or out.dtype != torch.bfloat16:
        raise ValueError(
            f"out: expected bfloat16 {(capacity, weights.hidden)}, got {out.dtype} "
            f"{tuple(out.shape)}"
        )
    if capacity == 0 or weights.num_experts == 0:
        return out
    expected = capacity if expected_rows is None else max(1, min(expected_rows, capacity))
    arguments = (rows, row_index, expert_offsets, weights, scales, activation, expected, out)
    if implementation == "torch":
        return grouped_mlp_torch(*arguments)
    if implementation == "triton":
        from moe_comm.kernels.expert_gemm_triton import grouped_mlp_triton

        return grouped_mlp_triton(*arguments)
    from moe_comm.kernels.expert_gemm_humming import grouped_mlp_humming

    return grouped_mlp_humming(*arguments)


def dequantize_rows(rows: Tensor, scales: Tensor | None) -> Tensor:
    """[M, H] on any wire -> bfloat16: value * scale in float32, rounded once."""
    if scales is None:
        return rows
    group = scale_group(scales)
    factor = scales if scales.dtype == torch.float32 else mxfp4_format.decode_scales(scales)
    wide = factor.repeat_interleave(group, dim=-1)[..., : rows.shape[-1]]
    return (rows.float() * wide).to(torch.bfloat16)


def scale_group(scales: Tensor) -> int:
    """Elements of a row that share a scale: 128 under float32 scales, 32 under E8M0."""
    return 128 if scales.dtype == torch.float32 else 32


def grouped_mlp_torch(
    rows: Tensor,
    row_index: Tensor,
    expert_offsets: Tensor,
    weights: ExpertWeights,
    scales: Tensor | None,
    activation: Activation,
    expected_rows: int,
    out: Tensor,
) -> Tensor:
    """The reference, and the CPU path: per active expert, dequantize to bfloat16 and multiply.
    Reads layouts rows and tiles. Synchronizes once for the offsets."""
    offsets = [int(n) for n in expert_offsets.cpu()]
    for expert, (start, end) in enumerate(itertools.pairwise(offsets)):
        if start == end:
            continue
        index = row_index[start:end].to(torch.int64)
        source, token = index // rows.shape[1], index % rows.shape[1]
        x = dequantize_rows(rows[source, token], None if scales is None else scales[source, token])
        gate_pair, up_pair, down_pair = weights.get(expert)
        gate = x @ mxfp4_format.dequantize(*gate_pair).T
        up = x @ mxfp4_format.dequantize(*up_pair).T
        if weights.w13_bias is not None:
            gate = gate + weights.w13_bias[expert, : weights.inter]
            up = up + weights.w13_bias[expert, weights.inter :]
        hidden = activate_torch(gate, up, activation)
        y = hidden @ mxfp4_format.dequantize(*down_pair).T
        out[start:end] = y if weights.w2_bias is None else y + weights.w2_bias[expert]
    return out


def _check_arguments(
    rows: Tensor,
    row_index: Tensor,
    expert_offsets: Tensor,
    weights: ExpertWeights,
    scales: Tensor | None,
    implementation: str,
) -> None:
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation: expected one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}"
        )
    readable = ("rows", "tiles") if implementation == "torch" else (LAYOUT_OF[implementation],)
    if weights.layout not in readable:
        raise ValueError(
            f"weights.layout: expected {' or '.join(readable)} for {implementation}, "
            f"got {weights.layout!r}"
        )
    if rows.dim() != 3 or rows.shape[2] != weights.hidden or rows.stride(2) != 1:
        raise ValueError(
            f"rows: expected [M, {weights.hidden}] or [R, B, {weights.hidden}] with a contiguous "
            f"last dimension, got {tuple(rows.shape)} with strides {rows.stride()}"
        )
    wanted = torch.bfloat16 if scales is None else torch.float8_e4m3fn
    if rows.dtype != wanted:
        raise TypeError(
            f"rows: expected {wanted} with scales={'None' if scales is None else 'given'}, "
            f"got {rows.dtype}"
        )
    if scales is not None:
        if scales.dtype not in (torch.float32, torch.uint8):
            raise TypeError(f"scales: expected float32 or uint8, got {scales.dtype}")
        groups = -(-weights.hidden // scale_group(scales))
        if tuple(scales.shape) != (*rows.shape[:2], groups) or scales.stride(2) != 1:
            raise ValueError(
                f"scales: expected {(*rows.shape[:2], groups)} with a contiguous last dimension, "
                f"got {tuple(scales.shape)} with strides {scales.stride()}"
            )
    for name, tensor, size in (
        ("row_index", row_index, None),
        ("expert_offsets", expert_offsets, weights.num_experts + 1),
    ):
        if tensor.dtype != torch.int32 or tensor.dim() != 1 or not tensor.is_contiguous():
            raise TypeError(f"{name}: expected contiguous int32 [n], got {tensor.dtype}")
        if size is not None and tensor.shape[0] != size:
            raise ValueError(f"{name}: expected {size} entries, got {tensor.shape[0]}")
    for name, tensor in (
        ("row_index", row_index),
        ("expert_offsets", expert_offsets),
        ("weights", weights.w13),
        *((("scales", scales),) if scales is not None else ()),
    ):
        if tensor.device != rows.device:
            raise ValueError(f"{name}: expected on {rows.device} like rows, got {tensor.device}")
