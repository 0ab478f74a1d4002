"""One safetensors file, read with pread: no mapping stays behind, no page is held.

Layout: 8 bytes little-endian header length n, n bytes of JSON (name -> dtype, shape, data_offsets
relative to byte 8 + n; optionally `__metadata__`), then the data. The header is checked before any
tensor is read: a file that is cut short, or whose ranges overlap, leave holes, or do not fit their
shape and dtype, is an error that names the file and the tensor.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

# safetensors' own limit on a header.
_MAX_HEADER_BYTES = 100_000_000
TORCH_DTYPES: dict[str, torch.dtype] = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}


class CheckpointError(ValueError):
    """A checkpoint's file is missing, cut short, contradicts itself, or is not what was asked for.

    Attributes: `file` (its path), `tensor` (a name, or None where the fault is the file's).
    """

    def __init__(self, file: Path, tensor: str | None, detail: str) -> None:
        where = f"{file}" if tensor is None else f"{file}: tensor {tensor}"
        super().__init__(f"{where}: {detail}")
        self.file, self.tensor, self.detail = file, tensor, detail


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """Where one tensor lies: `start` is its first byte in the file, `nbytes` its length."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


class SafetensorsFile:
    """An open file and its checked header. Holds one file descriptor and nothing mapped.

    Attributes: `path`; `entries`, name -> TensorEntry in the order of their bytes; `size`, bytes.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(self.path, None, f"cannot open: {error.strerror}") from error
        try:
            self.size = os.fstat(self._fd).st_size
            self.entries = _parse_header(self.path, self._fd, self.size)
        except BaseException:
            os.close(self._fd)
            raise
        self._closed = False

    def read_into(self, start: int, views: Sequence[Tensor], *, name: str) -> None:
        """Fill contiguous uint8 CPU tensors, one after another, from byte `start` on.

        `name` is the tensor to blame where the file ends early. Thread-safe.
        """
        buffers = [memoryview_of(view) for view in views if view.numel()]
        while buffers:
            done = os.preadv(self._fd, buffers, start)
            if done <= 0:
                raise CheckpointError(
                    self.path, name, f"expected more bytes at offset {start}, got the end of file"
                )
            start += done
            while buffers and done >= len(buffers[0]):
                done -= len(buffers[0])
                buffers.pop(0)
            if done:
                buffers[0] = buffers[0][done:]

    def flush(self) -> None:
        """Wait until the file's pages are on the disk: only clean pages can be forgotten."""
        os.fsync(self._fd)

    def drop_cache(self) -> None:
        """Ask the kernel to forget the file's clean cached pages."""
        if not self._closed:
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the descriptor; further reads are errors of the operating system."""
        if not self._closed:
            self._closed = True
            os.close(self._fd)

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def memoryview_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous uint8 CPU tensor, not copied."""
    array: Any = tensor.numpy()
    return memoryview(array)


def _parse_header(path: Path, fd: int, size: int) -> dict[str, TensorEntry]:
    if size < 8:
        raise CheckpointError(path, None, f"truncated: expected at least 8 bytes, got {size}")
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if length > _MAX_HEADER_BYTES or 8 + length > size:
        raise CheckpointError(
            path,
            None,
            f"truncated or not safetensors: header of {length} bytes in a file of {size}",
        )
    try:
        header = json.loads(os.pread(fd, length, 8), object_pairs_hook=_no_duplicates)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(path, None, f"header is not JSON: {error}") from error
    except _DuplicateKeyError as error:
        raise CheckpointError(path, str(error), "duplicate: listed twice in the header") from error
    if not isinstance(header, dict):
        raise CheckpointError(path, None, "header: expected an object")
    header.pop("__metadata__", None)
    base = 8 + length
    entries = [_entry(path, name, fields, base) for name, fields in header.items()]
    entries.sort(key=lambda entry: (entry.start, entry.nbytes))
    position = base
    for entry in entries:
        if entry.start != position:
            kind = "overlaps the tensor before it" if entry.start < position else "follows a hole"
            raise CheckpointError(
                path,
                entry.name,
                f"{kind}: expected its data at byte {position}, got {entry.start}",
            )
        position += entry.nbytes
        if position > size:
            raise CheckpointError(
                path,
                entry.name,
                f"truncated: expected data up to byte {position}, the file has {size}",
            )
    if position != size:
        raise CheckpointError(
            path, None, f"expected {position} bytes by the header, the file has {size}"
        )
    return {entry.name: entry for entry in entries}


def _entry(path: Path, name: str, fields: Any, base: int) -> TensorEntry:
    try:
        dtype, shape = fields["dtype"], tuple(fields["shape"])
        begin, end = fields["data_offsets"]
        numbers = [*shape, begin, end]
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(path, name, f"malformed header entry {fields!r}") from error
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in numbers):
        raise CheckpointError(path, name, f"malformed header entry {fields!r}")
    if dtype not in TORCH_DTYPES:
        raise CheckpointError(
            path, name, f"dtype: expected one of {', '.join(TORCH_DTYPES)}, got {dtype!r}"
        )
    wanted = math.prod(shape) * TORCH_DTYPES[dtype].itemsize
    if end - begin != wanted:
        raise CheckpointError(
            path,
            name,
            f"expected {wanted} bytes for {dtype} {list(shape)}, got data_offsets "
            f"[{begin}, {end}] ({end - begin} bytes)",
        )
    return TensorEntry(
        name=name, file=path, dtype=dtype, shape=shape, start=base + begin, nbytes=wanted
    )


class _DuplicateKeyError(ValueError):
    """Carries the key that JSON's own parser would silently take twice."""


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise _DuplicateKeyError(key)
        result[key] = value
    return result
