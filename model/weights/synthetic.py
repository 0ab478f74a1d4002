"""Synthetic K3 checkpoints: K3's names, packing and sharding at any size, from a seed.

Shard i of n holds layer i - 1: its dense tensors, then its experts, each expert's six tensors side
by side; the last shard holds the embedding, the final norms and the head. Every tensor's bytes
depend on (seed, name, shape) alone.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from moe_comm.model.config import K3Config
from moe_comm.model.tensor_names import (
    TensorSpec,
    dense_layer_tensors,
    expert_tensors,
    outer_tensors,
)
from moe_comm.model.weights.checkpoint import INDEX_NAME, as_bytes
from moe_comm.model.weights.manifest import MANIFEST_NAME
from moe_comm.model.weights.mxfp4 import GROUP
from moe_comm.model.weights.safetensors_file import TORCH_DTYPES, memoryview_of

_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
# Root mean square of E2M1 values over uniform codes: sqrt(68.5 / 8).
_CODE_RMS = 2.926
# Elements generated and written at once.
_CHUNK = 1 << 24
# Bytes of tensors generated ahead of what is written, and threads that do it.
_AHEAD = 256 << 20
_WORKERS = min(8, os.cpu_count() or 1)


def write_checkpoint(
    config: K3Config,
    directory: str | Path,
    *,
    seed: int = 0,
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> list[Path]:
    """Write config.json, the shards and the index.

    Args:
        config: the model's shape.
        directory: made if missing. FileExistsError where it is not empty, unless `force`, which
            removes an earlier checkpoint's shards, index and manifest, and nothing else.
        seed: of all values.
        progress: called with (bytes written, bytes in all) after each tensor.

    Returns:
        The shards' paths, in order.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    present = sorted(directory.iterdir())
    if present and not force:
        raise FileExistsError(
            f"{directory}: expected an empty directory, found {present[0].name}"
            f"{' and more' if len(present) > 1 else ''}; force overwrites a checkpoint"
        )
    for path in present:
        if _SHARD.fullmatch(path.name) or path.name in (INDEX_NAME, MANIFEST_NAME):
            path.unlink()
    shards = [list(shard) for shard in _shards(config)]
    total = sum(_nbytes(spec) for shard in shards for spec in shard)
    text = json.dumps(config.to_hf_dict(), indent=2)
    (directory / "config.json").write_text(text + "\n", encoding="utf-8")
    weight_map: dict[str, str] = {}
    paths, done = [], 0
    for number, specs in enumerate(shards, start=1):
        path = directory / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        with path.open("wb") as out:
            out.write(_header(specs))
            for spec, pieces in _generated(specs, seed=seed):
                for piece in pieces:
                    out.write(memoryview_of(piece))
                weight_map[spec.name] = path.name
                done += _nbytes(spec)
                if progress is not None:
                    progress(done, total)
        paths.append(path)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX_NAME).write_text(json.dumps(index), encoding="utf-8")
    return paths


def _generated(
    specs: Iterable[TensorSpec], *, seed: int
) -> Iterator[tuple[TensorSpec, Iterable[Tensor]]]:
    """Each tensor with its pieces, in order; several threads work ahead by at most _AHEAD bytes."""
    pending: deque[tuple[TensorSpec, Future[list[Tensor]]]] = deque()
    ahead = 0
    with ThreadPoolExecutor(max_workers=_WORKERS, thread_name_prefix="synthetic") as pool:
        for spec in specs:
            size = _nbytes(spec)
            while pending and ahead + size > _AHEAD:
                first, future = pending.popleft()
                ahead -= _nbytes(first)
                yield first, future.result()
            if size > _AHEAD:
                # Never whole in memory.
                yield spec, tensor_bytes(spec, seed=seed)
                continue
            pending.append((spec, pool.submit(_whole, spec, seed)))
            ahead += size
        for first, future in pending:
            yield first, future.result()


def _whole(spec: TensorSpec, seed: int) -> list[Tensor]:
    return list(tensor_bytes(spec, seed=seed))


def tensor_bytes(spec: TensorSpec, *, seed: int) -> Iterator[Tensor]:
    """The raw bytes of one tensor, as flat uint8 tensors in order."""
    digest = hashlib.sha256(f"{seed} {spec.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    total = math.prod(spec.shape)
    for start in range(0, total, _CHUNK):
        count = min(_CHUNK, total - start)
        yield as_bytes(_values(spec, start, count, generator))


def _values(spec: TensorSpec, start: int, count: int, generator: torch.Generator) -> Tensor:
    leaf = spec.name.rsplit(".", 1)[-1]
    if leaf == "weight_packed":
        words = torch.empty(-(-count // 8), dtype=torch.int64)
        words.random_(-(2**63), None, generator=generator)
        return as_bytes(words)[:count]
    if leaf == "weight_scale":
        # Weights of variance 1 / K, with neighbouring groups a factor of two to either side.
        k = spec.shape[-1] * GROUP
        center = 127 + round(-math.log2(_CODE_RMS * math.sqrt(k)))
        noise = torch.randint(-1, 2, (count,), generator=generator)
        return (noise + center).to(torch.uint8)
    normal = torch.empty(count, dtype=torch.float32).normal_(generator=generator)
    if leaf == "A_log":
        # Decay rates of 1 to 16; what lies past num_heads is padding, and is zero.
        value = torch.rand(count, generator=generator).mul_(15).add_(1).log_()
    elif leaf == "dt_bias":
        value = normal
    elif leaf == "e_score_correction_bias":
        value = normal * 0.01
    elif "norm" in spec.name.rsplit(".", 2)[-2]:
        value = 1 + normal * 0.1
    elif "_conv1d." in spec.name:
        value = normal / math.sqrt(spec.shape[-1])
    elif "embed_tokens" in spec.name:
        value = normal
    else:
        value = normal / math.sqrt(spec.shape[-1])
    return value.to(TORCH_DTYPES[spec.dtype])


def _shards(config: K3Config) -> Iterator[Iterator[TensorSpec]]:
    for layer in range(config.num_hidden_layers):
        yield _layer(config, layer)
    yield outer_tensors(config)


def _layer(config: K3Config, layer: int) -> Iterator[TensorSpec]:
    yield from dense_layer_tensors(config, layer)
    if config.is_moe(layer):
        for expert in range(config.num_experts):
            yield from expert_tensors(config, layer, expert)


def _nbytes(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * TORCH_DTYPES[spec.dtype].itemsize


def _header(specs: list[TensorSpec]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for spec in specs:
        end = position + _nbytes(spec)
        header[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
