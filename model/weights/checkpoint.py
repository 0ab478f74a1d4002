"""A checkpoint directory: sharded safetensors, read tensor by tensor and hashed as they pass.

Nothing is mapped and nothing is written; `Manifest.save` is another matter, and asked for. The
directory is taken as a whole: every shard's header is read and checked at opening, so a missing
shard, a tensor that is in two files, or an index that contradicts the shards is known at once.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from moe_comm.model.weights.manifest import HashBook, Manifest
from moe_comm.model.weights.safetensors_file import (
    TORCH_DTYPES,
    CheckpointError,
    SafetensorsFile,
    TensorEntry,
    memoryview_of,
)

INDEX_NAME = "model.safetensors.index.json"
# Hashing and reading of large tensors go in pieces of this size, so that both overlap with the
# readers of other threads and nothing but the destination grows with the tensor.
CHUNK_BYTES = 16 << 20
# Bytes of one shard that keep_cache=False lets the page cache hold.
DROP_BYTES = 512 << 20


class Checkpoint:
    """An open checkpoint. Use as a context manager, or close() it.

    Args:
        directory: holds *.safetensors and, for a sharded one, model.safetensors.index.json.
        verify: compare every tensor read with the manifest where one lies beside the files.
        record: remember hashes of what is read, for a new manifest (`hashes.seen`).
        keep_cache: leave what was read in the page cache; False asks the kernel to forget it, so
            that loading does not push other programs' pages out.

    Raises:
        CheckpointError: names the file, and the tensor where there is one.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        verify: bool = True,
        record: bool = False,
        keep_cache: bool = True,
    ) -> None:
        self.directory = Path(directory)
        self._keep_cache = keep_cache
        self._files: dict[Path, SafetensorsFile] = {}
        self._cached: dict[Path, int] = {}
        self._lock = threading.Lock()
        if not self.directory.is_dir():
            raise CheckpointError(self.directory, None, "expected a directory")
        manifest = Manifest.load(self.directory) if verify else None
        self.hashes = HashBook(manifest=manifest, record=record)
        try:
            self.entries = self._open_all()
        except BaseException:
            self.close()
            raise
        if manifest is not None:
            manifest.check_complete(
                self.directory, {(e.file.name, e.name) for e in self.entries.values()}
            )

    def _open_all(self) -> dict[str, TensorEntry]:
        listed = self._index()
        names = sorted(set(listed.values())) if listed is not None else None
        if names is None:
            names = sorted(path.name for path in self.directory.glob("*.safetensors"))
        if not names:
            raise CheckpointError(self.directory, None, "expected *.safetensors, got none")
        entries: dict[str, TensorEntry] = {}
        for name in names:
            path = self.directory / name
            if not path.is_file():
                raise CheckpointError(path, None, "missing: the index names this file")
            self._files[path] = file = SafetensorsFile(path)
            for entry in file.entries.values():
                if entry.name in entries:
                    other = entries[entry.name].file.name
                    raise CheckpointError(path, entry.name, f"duplicate: it is in {other} too")
                entries[entry.name] = entry
        for tensor, name in (listed or {}).items():
            if tensor not in entries or entries[tensor].file.name != name:
                raise CheckpointError(
                    self.directory / name, tensor, "missing: the index says it is in this file"
                )
        if listed is not None:
            for tensor, entry in entries.items():
                if tensor not in listed:
                    raise CheckpointError(entry.file, tensor, f"not listed in {INDEX_NAME}")
        return entries

    def _index(self) -> Mapping[str, str] | None:
        path = self.directory / INDEX_NAME
        if not path.exists():
            return None
        try:
            data: Any = json.loads(path.read_text(encoding="utf-8"))
            weight_map = data["weight_map"]
            listed = {str(tensor): str(file) for tensor, file in weight_map.items()}
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as e:
            raise CheckpointError(path, None, f"malformed index: {e!r}") from e
        outside = next((f for f in listed.values() if Path(f).name != f), None)
        if outside is not None:
            raise CheckpointError(path, None, f"expected plain file names, got {outside!r}")
        return listed

    @property
    def files(self) -> list[SafetensorsFile]:
        """The open shards, by name."""
        return list(self._files.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.entries.values())

    def find(
        self, name: str, *, shape: Sequence[int] | None = None, dtypes: Iterable[str] | None = None
    ) -> TensorEntry:
        """The entry of `name`. CheckpointError where it is missing, or its shape or dtype is not
        the expected one (`dtypes`: any of these, in safetensors' spelling)."""
        entry = self.entries.get(name)
        if entry is None:
            raise CheckpointError(self.directory, name, "missing: no shard has this tensor")
        if dtypes is not None and entry.dtype not in (wanted := list(dtypes)):
            raise CheckpointError(
                entry.file, name, f"dtype: expected {' or '.join(wanted)}, got {entry.dtype}"
            )
        if shape is not None and entry.shape != tuple(shape):
            raise CheckpointError(
                entry.file, name, f"shape: expected {list(shape)}, got {list(entry.shape)}"
            )
        return entry

    def read(
        self, name: str, *, shape: Sequence[int] | None = None, dtypes: Iterable[str] | None = None
    ) -> Tensor:
        """One whole tensor on the CPU, in its own dtype, verified; arguments as in `find`."""
        entry = self.find(name, shape=shape, dtypes=dtypes)
        out = torch.empty(entry.shape, dtype=TORCH_DTYPES[entry.dtype])
        self.read_into([entry], [as_bytes(out)])
        return out

    def read_into(self, entries: Sequence[TensorEntry], views: Sequence[Tensor]) -> None:
        """Read whole tensors into uint8 CPU tensors of their sizes, hashing as configured.

        Neighbours in a file are read by one call. Thread-safe.
        """
        for run in _runs(entries):
            first, last = entries[run.start], entries[run.stop - 1]
            file = self._files[first.file]
            if len(run) > 1:
                file.read_into(first.start, [views[i] for i in run], name=first.name)
                for i in run:
                    self._hash(entries[i], views[i])
            else:
                self._read_large(file, first, views[run.start])
            self._forget(file, last.start + last.nbytes - first.start)

    def stream(self, entry: TensorEntry, buffer: Tensor) -> None:
        """Read and hash one tensor through a fixed uint8 buffer, keeping nothing."""
        digest = hashlib.sha256() if self.hashes.active else None
        file, room = self._files[entry.file], buffer.numel()
        for offset in range(0, entry.nbytes, room):
            piece = buffer[: min(room, entry.nbytes - offset)]
            file.read_into(entry.start + offset, [piece], name=entry.name)
            if digest is not None:
                digest.update(memoryview_of(piece))
        if digest is not None:
            self.hashes.settle(entry, digest.hexdigest())
        self._forget(file, entry.nbytes)

    def read_rows(self, entry: TensorEntry, index: int, view: Tensor) -> None:
        """Read `tensor[index]` (along its first dimension) into a uint8 tensor, without hashing: a
        hash covers the whole tensor, see `stream`."""
        if not 0 <= index < entry.shape[0]:
            raise IndexError(f"index: expected 0 to {entry.shape[0] - 1}, got {index}")
        step = entry.nbytes // entry.shape[0]
        self._files[entry.file].read_into(entry.start + index * step, [view], name=entry.name)

    def drop_cache(self) -> None:
        """Ask the kernel to forget what it has cached of the shards. The files stay as they are."""
        for file in self._files.values():
            file.flush()
            file.drop_cache()

    def close(self) -> None:
        """Close every shard, forgetting its cached pages unless they are to be kept."""
        for file in self._files.values():
            if not self._keep_cache:
                file.drop_cache()
            file.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _forget(self, file: SafetensorsFile, nbytes: int) -> None:
        """Count what was read of a file, and drop its pages once there are DROP_BYTES of them: the
        call waits for every core, so it is made seldom."""
        if self._keep_cache:
            return
        with self._lock:
            self._cached[file.path] = self._cached.get(file.path, 0) + nbytes
            due = self._cached[file.path] >= DROP_BYTES
            if due:
                self._cached[file.path] = 0
        if due:
            file.drop_cache()

    def _read_large(self, file: SafetensorsFile, entry: TensorEntry, view: Tensor) -> None:
        digest = hashlib.sha256() if self.hashes.active else None
        for offset in range(0, entry.nbytes, CHUNK_BYTES):
            piece = view[offset : offset + CHUNK_BYTES]
            file.read_into(entry.start + offset, [piece], name=entry.name)
            if digest is not None:
                digest.update(memoryview_of(piece))
        if digest is not None:
            self.hashes.settle(entry, digest.hexdigest())

    def _hash(self, entry: TensorEntry, view: Tensor) -> None:
        if self.hashes.active:
            digest = hashlib.sha256(memoryview_of(view)).hexdigest()
            self.hashes.settle(entry, digest)


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's memory as a flat uint8 tensor."""
    return tensor.view(-1).view(torch.uint8)


def _runs(entries: Sequence[TensorEntry]) -> Iterable[range]:
    """Maximal ranges of `entries` that lie one right after another in one file."""
    start = 0
    for i in range(1, len(entries) + 1):
        if i < len(entries):
            before, entry = entries[i - 1], entries[i]
            if entry.file == before.file and entry.start == before.start + before.nbytes:
                continue
        yield range(start, i)
        start = i
