"""Dense tensors of a K3 checkpoint: all but routed experts, checked against the config."""

from __future__ import annotations

from torch import Tensor

from moe_comm.model.config import K3Config
from moe_comm.model.tensor_names import TensorSpec, dense_tensors, expert_tensors
from moe_comm.model.weights.checkpoint import Checkpoint
from moe_comm.model.weights.safetensors_file import CheckpointError, TensorEntry


def find_dense(checkpoint: Checkpoint, config: K3Config, spec: TensorSpec) -> TensorEntry:
    """The entry of one dense tensor. CheckpointError where it is missing or of another shape or
    dtype. A_log may be padded past num_heads (K3's is, to the head width)."""
    if not spec.name.endswith(".A_log"):
        return checkpoint.find(spec.name, shape=spec.shape, dtypes=spec.accepted)
    entry = checkpoint.find(spec.name, dtypes=spec.accepted)
    heads = config.linear_num_heads
    if len(entry.shape) != 1 or entry.shape[0] < heads:
        raise CheckpointError(
            entry.file,
            spec.name,
            f"shape: expected [n] with n >= {heads} heads, got {list(entry.shape)}",
        )
    return entry


def read_dense(checkpoint: Checkpoint, config: K3Config, spec: TensorSpec) -> Tensor:
    """One dense tensor on the CPU in its file's dtype, verified; A_log without its padding."""
    entry = find_dense(checkpoint, config, spec)
    tensor = checkpoint.read(spec.name)
    if spec.name.endswith(".A_log") and entry.shape[0] > config.linear_num_heads:
        # Narrowed, never reshaped: entries past the heads are padding.
        return tensor[: config.linear_num_heads].clone()
    return tensor


def check_tensors(checkpoint: Checkpoint, config: K3Config) -> None:
    """CheckpointError for the first tensor of the model that the checkpoint lacks or holds in
    another shape or dtype. Reads no data."""
    for spec in dense_tensors(config):
        find_dense(checkpoint, config, spec)
    for layer in config.moe_layers:
        for expert in range(config.num_experts):
            for spec in expert_tensors(config, layer, expert):
                checkpoint.find(spec.name, shape=spec.shape, dtypes=spec.accepted)
