"""A whole checkpoint as one rank loads it: every tensor read and verified, experts kept."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_comm.kernels.expert_gemm_weights import ExpertWeights
from moe_comm.model.config import K3Config
from moe_comm.model.tensor_names import expert_prefix
from moe_comm.model.weights.checkpoint import CHUNK_BYTES, Checkpoint
from moe_comm.model.weights.dense import check_tensors
from moe_comm.model.weights.load_experts import (
    READERS,
    LoadProgress,
    load_experts,
    memory_bound,
    pinned_bytes,
    warm_up,
)
from moe_comm.model.weights.memory import MemoryMeter, Sample, mapped_bytes
from moe_comm.model.weights.safetensors_file import TensorEntry


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What a load did. Bytes; `seconds` covers reading, hashing, copying and repacking."""

    read_bytes: int
    tensors: int
    seconds: float
    resident_bytes: int
    peak_host_extra: int
    peak_device_extra: int
    bound: int
    verified: bool
    samples: tuple[Sample, ...]

    @property
    def gbps(self) -> float:
        """Decimal GB a second."""
        return self.read_bytes / self.seconds / 1e9

    @property
    def peak_extra(self) -> int:
        """Host and device peaks added."""
        return self.peak_host_extra + self.peak_device_extra


def load_all(
    checkpoint: Checkpoint,
    config: K3Config,
    expert_ids: Sequence[int],
    *,
    device: torch.device | str = "cpu",
    layout: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[dict[int, ExpertWeights], LoadReport]:
    """Check the headers against the model, stream every tensor that is no routed expert (verified,
    not kept), then load `expert_ids` of every MoE layer. Other ranks' experts are not read. On a
    GPU the kernels are warmed up first, outside the time and memory that the report states.

    Args:
        progress: called from any thread with (bytes read, bytes in all).

    Raises: as load_experts.
    """
    device = torch.device(device)
    check_tensors(checkpoint, config)
    experts = {
        f"{expert_prefix(layer, expert)}{matrix}.{part}"
        for layer in config.moe_layers
        for expert in range(config.num_experts)
        for matrix in ("w1", "w2", "w3")
        for part in ("weight_packed", "weight_scale")
    }
    others = [entry for name, entry in checkpoint.entries.items() if name not in experts]
    others_bytes = sum(entry.nbytes for entry in others)
    layers = len(config.moe_layers)
    total = others_bytes
    if layers:
        one = [e.nbytes for n, e in checkpoint.entries.items() if n in experts]
        total += sum(one) // (layers * config.num_experts) * layers * len(expert_ids)
    if device.type != "cpu" and layers:
        warm_up(config, device, layout)
    meter = MemoryMeter(device=device)
    began = time.perf_counter()
    with meter:
        done = 0

        def streamed(entry: TensorEntry) -> None:
            nonlocal done
            done += entry.nbytes
            meter.step("dense", read=done, resident=0, reserved=0)
            if progress is not None:
                progress(done, total)

        stream_tensors(checkpoint, others, after=streamed)
        meter.pinned = pinned_bytes(config) if device.type == "cuda" else 0

        def placed(at: LoadProgress) -> None:
            read = others_bytes + at.read_bytes
            meter.step(
                f"layer {at.layer}",
                read=read,
                resident=at.resident_bytes,
                reserved=at.reserved_bytes,
            )
            if progress is not None:
                progress(read, total)

        loaded = load_experts(
            checkpoint, config, expert_ids, device=device, layout=layout, progress=placed
        )
        seconds = time.perf_counter() - began
    report = LoadReport(
        read_bytes=total,
        tensors=len(others) + 6 * layers * len(expert_ids),
        seconds=seconds,
        resident_bytes=sum(weights.nbytes for weights in loaded.values()),
        peak_host_extra=meter.peak_host_extra,
        peak_device_extra=meter.peak_device_extra,
        bound=memory_bound(config),
        verified=checkpoint.hashes.manifest is not None and checkpoint.hashes.enabled,
        samples=tuple(meter.samples),
    )
    return loaded, report


def stream_tensors(
    checkpoint: Checkpoint,
    entries: Sequence[TensorEntry],
    *,
    after: Callable[[TensorEntry], None] | None = None,
) -> None:
    """Read and hash tensors through READERS fixed buffers, keeping nothing. `after` is called from
    this thread, in order."""
    buffers: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
    largest = max((entry.nbytes for entry in entries), default=0)
    for _ in range(READERS):
        buffers.put(mapped_bytes(max(1, min(CHUNK_BYTES, largest))))

    def read(entry: TensorEntry) -> TensorEntry:
        buffer = buffers.get()
        try:
            checkpoint.stream(entry, buffer)
        finally:
            buffers.put(buffer)
        return entry

    with ThreadPoolExecutor(max_workers=READERS, thread_name_prefix="tensor-reader") as pool:
        futures = [pool.submit(read, entry) for entry in entries]
        try:
            for future in futures:
                entry = future.result()
                if after is not None:
                    after(entry)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def read_plain(checkpoint: Checkpoint) -> tuple[int, float]:
    """Read all shards from end to end in large pieces and throw them away, with as many threads as
    a load uses: the rate that the disk gives. Returns bytes and seconds."""
    pieces = [
        (file, start, min(CHUNK_BYTES, file.size - start))
        for file in checkpoint.files
        for start in range(0, file.size, CHUNK_BYTES)
    ]
    buffers: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
    for _ in range(READERS):
        buffers.put(mapped_bytes(CHUNK_BYTES))

    def read(index: int) -> int:
        file, start, count = pieces[index]
        buffer = buffers.get()
        try:
            file.read_into(start, [buffer[:count]], name=file.path.name)
        finally:
            buffers.put(buffer)
        return count

    began = time.perf_counter()
    with ThreadPoolExecutor(max_workers=READERS, thread_name_prefix="plain-reader") as pool:
        total = sum(pool.map(read, range(len(pieces))))
    return total, time.perf_counter() - began
