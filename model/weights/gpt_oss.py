"""gpt-oss's experts into the same runtime form as K3's.

On disk one tensor holds all experts of a layer: `model.layers.{L}.mlp.experts.` followed by
gate_up_proj_blocks uint8 [E, 2 I, H / 32, 16] and gate_up_proj_scales [E, 2 I, H / 32], whose rows
alternate gate and up; gate_up_proj_bias bfloat16 [E, 2 I], alternating too; down_proj_blocks
[E, H, I / 32, 16], down_proj_scales [E, H, I / 32], down_proj_bias [E, H].

Shape legend: E experts, H hidden, I intermediate width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_comm.kernels.expert_gemm import LAYOUT_OF, choose_implementation
from moe_comm.kernels.expert_gemm_weights import ExpertWeights
from moe_comm.model.weights.checkpoint import CHUNK_BYTES, Checkpoint, as_bytes
from moe_comm.model.weights.mxfp4 import has_nan_scale, join_blocks, split_gpt_oss
from moe_comm.model.weights.safetensors_file import TORCH_DTYPES, CheckpointError, TensorEntry

_PARTS = (
    ("gate_up_proj_blocks", "U8", 4),
    ("gate_up_proj_scales", "U8", 3),
    ("gate_up_proj_bias", "BF16", 2),
    ("down_proj_blocks", "U8", 4),
    ("down_proj_scales", "U8", 3),
    ("down_proj_bias", "BF16", 2),
)


def load_gpt_oss_experts(
    checkpoint: Checkpoint,
    layer: int,
    expert_ids: Sequence[int],
    *,
    device: torch.device | str = "cpu",
    layout: str | None = None,
    prefix: str = "model.",
) -> ExpertWeights:
    """Load experts of one layer; slot i holds expert_ids[i].

    Reads one expert at a time. Where the checkpoint verifies, each tensor is hashed whole in a pass
    of its own first, since a manifest knows whole tensors only.

    Raises: CheckpointError, HashMismatchError as load_experts.
    """
    device = torch.device(device)
    base = f"{prefix}layers.{layer}.mlp.experts."
    entries = [
        _find(checkpoint, f"{base}{name}", dtype, dimensions) for name, dtype, dimensions in _PARTS
    ]
    experts, width, groups, _ = entries[0].shape
    hidden, inter = groups * 32, width // 2
    for entry, shape in zip(
        entries,
        (
            (experts, 2 * inter, hidden // 32, 16),
            (experts, 2 * inter, hidden // 32),
            (experts, 2 * inter),
            (experts, hidden, inter // 32, 16),
            (experts, hidden, inter // 32),
            (experts, hidden),
        ),
        strict=True,
    ):
        checkpoint.find(entry.name, shape=shape)
    for expert in expert_ids:
        if not 0 <= expert < experts:
            raise ValueError(f"expert_ids: expected ids in [0, {experts}), got {expert}")
    if checkpoint.hashes.active:
        buffer = torch.empty(CHUNK_BYTES, dtype=torch.uint8)
        for entry in entries:
            checkpoint.stream(entry, buffer)
    if layout is None:
        chosen = choose_implementation(device, hidden=hidden, inter=inter, bias=True)
        layout = LAYOUT_OF[chosen]
    weights = ExpertWeights.empty(
        len(expert_ids), hidden, inter, layout=layout, device=device, bias=True
    )
    for slot, expert in enumerate(expert_ids):
        blocks, scales, bias, down, down_scales, down_bias = (
            _expert(checkpoint, entry, expert).to(device) for entry in entries
        )
        for entry, tensor in ((entries[1], scales), (entries[4], down_scales)):
            if has_nan_scale(tensor):
                raise CheckpointError(
                    entry.file, entry.name, f"NaN scale in expert {expert}: expected no byte 255"
                )
        gate, gate_scales, up, up_scales = split_gpt_oss(blocks, scales)
        weights.put(
            slot,
            gate=(gate.contiguous(), gate_scales.contiguous()),
            up=(up.contiguous(), up_scales.contiguous()),
            down=(join_blocks(down, down_scales), down_scales),
            gate_bias=bias[0::2],
            up_bias=bias[1::2],
            down_bias=down_bias,
        )
    return weights


def _find(checkpoint: Checkpoint, name: str, dtype: str, dimensions: int) -> TensorEntry:
    entry = checkpoint.find(name, dtypes=(dtype,))
    if len(entry.shape) != dimensions:
        raise CheckpointError(
            entry.file, name, f"shape: expected {dimensions} dimensions, got {list(entry.shape)}"
        )
    return entry


def _expert(checkpoint: Checkpoint, entry: TensorEntry, expert: int) -> Tensor:
    out = torch.empty(entry.shape[1:], dtype=TORCH_DTYPES[entry.dtype])
    checkpoint.read_rows(entry, expert, as_bytes(out))
    return out
