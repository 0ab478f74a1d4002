"""Routed experts from a checkpoint into runtime buffers, one expert at a time.

Reader threads fill a fixed set of staging buffers (pinned for a GPU), each hashed as it is read;
the calling thread copies an expert to the device, checks its scales, repacks it into the layer's
preallocated buffers, and gives the staging buffer back. Nothing else is held: whatever the number
of layers and experts, at most STAGING experts on the host and about 1.7 on the device.

Shape legend: H hidden, I intermediate width.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_comm.kernels.expert_gemm import LAYOUT_OF, choose_implementation
from moe_comm.kernels.expert_gemm_weights import ExpertWeights
from moe_comm.model.config import K3Config
from moe_comm.model.tensor_names import expert_tensors
from moe_comm.model.weights.checkpoint import Checkpoint
from moe_comm.model.weights.mxfp4 import has_nan_scale
from moe_comm.model.weights.safetensors_file import CheckpointError, TensorEntry

STAGING = 3
READERS = 3


@dataclass(frozen=True, kw_only=True)
class LoadProgress:
    """Where a load stands after an expert is in place. Bytes count since the load began."""

    layer: int
    read_bytes: int
    resident_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, kw_only=True)
class _Job:
    layer: int
    slot: int
    entries: tuple[TensorEntry, ...]


def expert_bytes(config: K3Config) -> int:
    """Bytes of one routed expert in the checkpoint."""
    matrix = config.moe_intermediate_size * config.routed_expert_hidden_size
    return 3 * (matrix // 2 + matrix // 32)


def memory_bound(config: K3Config) -> int:
    """The bound on extra host and device memory of a load: four experts and 64 MiB."""
    return 4 * expert_bytes(config) + (64 << 20)


def pinned_bytes(config: K3Config) -> int:
    """Pinned host memory of a load onto a GPU: one block for all staging buffers, because torch
    rounds a pinned block up to a power of two."""
    return 1 << (STAGING * expert_bytes(config) - 1).bit_length()


def default_layout(config: K3Config, device: torch.device) -> str:
    """The layout that the device's default implementation reads."""
    hidden, inter = config.routed_expert_hidden_size, config.moe_intermediate_size
    return LAYOUT_OF[choose_implementation(device, hidden=hidden, inter=inter)]


def warm_up(config: K3Config, device: torch.device, layout: str | None = None) -> None:
    """Repack one expert of zeros and drop it: afterwards the driver, kernels and libraries that
    repacking needs are in memory, and what a load takes beyond them is its own."""
    weights = _allocate(config, 1, layout or default_layout(config, device), device)
    shapes = [spec.shape for spec in expert_tensors(config, config.moe_layers[0], 0)]
    place_expert(weights, 0, [torch.zeros(s, dtype=torch.uint8, device=device) for s in shapes], ())


def load_experts(
    checkpoint: Checkpoint,
    config: K3Config,
    expert_ids: Sequence[int],
    *,
    layers: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
    layout: str | None = None,
    progress: Callable[[LoadProgress], None] | None = None,
) -> dict[int, ExpertWeights]:
    """Load experts `expert_ids` (logical ids; slot i holds expert_ids[i]) of MoE layers.

    Args:
        checkpoint: open; its hashes are verified if it says so.
        config: the model's shape.
        layers: counted from 0; default: every MoE layer.
        device: of the runtime buffers.
        layout: of the runtime buffers; default: what the device's default implementation reads.
        progress: called from this thread after each expert.

    Returns:
        layer -> ExpertWeights.

    Raises:
        CheckpointError: a tensor is missing, of another shape or dtype, cut short, or has a NaN
            scale. HashMismatchError: its bytes are not the manifest's.
    """
    device = torch.device(device)
    layout = layout or default_layout(config, device)
    wanted = list(config.moe_layers if layers is None else layers)
    for layer in wanted:
        if layer not in config.moe_layers:
            raise ValueError(f"layers: expected MoE layers (counted from 0), got {layer}")
    for expert in expert_ids:
        if not 0 <= expert < config.num_experts:
            raise ValueError(f"expert_ids: expected ids in [0, {config.num_experts}), got {expert}")
    jobs = [job for layer in wanted for job in _jobs(checkpoint, config, layer, expert_ids)]
    sizes = [spec.shape for spec in expert_tensors(config, wanted[0], 0)] if wanted else []
    loaded: dict[int, ExpertWeights] = {}
    read = resident = reserved = 0
    room = torch.empty(
        expert_bytes(config) if device.type != "cpu" else 0, dtype=torch.uint8, device=device
    )
    for layer in wanted:
        if not expert_ids:
            loaded[layer] = _allocate(config, 0, layout, device)
    for job, staged in _stream(checkpoint, jobs, expert_bytes(config), pin=device.type == "cuda"):
        if job.layer not in loaded:
            loaded[job.layer] = _allocate(config, len(expert_ids), layout, device)
            reserved += loaded[job.layer].nbytes
        weights = loaded[job.layer]
        on_device = staged
        if device.type != "cpu":
            room.copy_(staged, non_blocking=True)
            on_device = room
        place_expert(weights, job.slot, _split(on_device, sizes), job.entries)
        read += sum(entry.nbytes for entry in job.entries)
        resident += weights.nbytes // weights.num_experts
        if progress is not None:
            progress(
                LoadProgress(
                    layer=job.layer,
                    read_bytes=read,
                    resident_bytes=resident,
                    reserved_bytes=reserved,
                )
            )
    return loaded


def place_expert(
    weights: ExpertWeights, slot: int, parts: Sequence[Tensor], entries: Sequence[TensorEntry]
) -> None:
    """Check and repack one expert: parts are w1, w2, w3, each packed and scales, in checkpoint form
    on the weights' device; `entries` say whom to blame for a NaN scale."""
    w1, s1, w2, s2, w3, s3 = parts
    # One answer for all three: it is also the point where the copy from staging has finished.
    if has_nan_scale(torch.cat((s1.flatten(), s2.flatten(), s3.flatten()))):
        guilty = next(i for i in (1, 3, 5) if has_nan_scale(parts[i]))
        raise CheckpointError(
            entries[guilty].file, entries[guilty].name, "NaN scale: expected no byte 255"
        )
    weights.put(slot, gate=(w1, s1), up=(w3, s3), down=(w2, s2))


def _allocate(
    config: K3Config, num_experts: int, layout: str, device: torch.device
) -> ExpertWeights:
    return ExpertWeights.empty(
        num_experts,
        config.routed_expert_hidden_size,
        config.moe_intermediate_size,
        layout=layout,
        device=device,
    )


def _jobs(
    checkpoint: Checkpoint, config: K3Config, layer: int, expert_ids: Sequence[int]
) -> list[_Job]:
    jobs = [
        _Job(
            layer=layer,
            slot=slot,
            entries=tuple(
                checkpoint.find(spec.name, shape=spec.shape, dtypes=spec.accepted)
                for spec in expert_tensors(config, layer, expert)
            ),
        )
        for slot, expert in enumerate(expert_ids)
    ]
    # In the order of the file, so that reading is sequential whatever the placement.
    return sorted(jobs, key=lambda job: (job.entries[0].file, job.entries[0].start))


def _split(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    parts, start = [], 0
    for rows, columns in shapes:
        parts.append(flat[start : start + rows * columns].view(rows, columns))
        start += rows * columns
    return parts


def _stream(
    checkpoint: Checkpoint, jobs: Sequence[_Job], size: int, *, pin: bool
) -> Iterator[tuple[_Job, Tensor]]:
    """Yield each job with its bytes, in order. A staging buffer is free again once the next job is
    asked for."""
    free: queue.SimpleQueue[Tensor | None] = queue.SimpleQueue()
    for buffer in torch.empty(STAGING * size, dtype=torch.uint8, pin_memory=pin).split(size):
        free.put(buffer)
    stop = threading.Event()

    def read(job: _Job, buffer: Tensor) -> Tensor:
        views, start = [], 0
        for entry in job.entries:
            views.append(buffer[start : start + entry.nbytes])
            start += entry.nbytes
        checkpoint.read_into(job.entries, views)
        return buffer

    pool = ThreadPoolExecutor(max_workers=READERS, thread_name_prefix="expert-reader")
    pending: queue.SimpleQueue[tuple[_Job, Future[Tensor]] | None] = queue.SimpleQueue()

    def feed() -> None:
        for job in jobs:
            buffer = free.get()
            if buffer is None or stop.is_set():
                break
            pending.put((job, pool.submit(read, job, buffer)))
        pending.put(None)

    feeder = threading.Thread(target=feed, name="expert-feeder", daemon=True)
    feeder.start()
    try:
        while (item := pending.get()) is not None:
            job, future = item
            buffer = future.result()
            yield job, buffer
            free.put(buffer)
    finally:
        stop.set()
        free.put(None)
        feeder.join()
        pool.shutdown(wait=True, cancel_futures=True)
