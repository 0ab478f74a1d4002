"""Rows and records as bytes: what lies where in a message, and fast copies of rows.

A record is what travels beside a row: expert ids, weights, scales, payloads, the token's number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Field:
    """One field of a record: `shape` elements of `dtype`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of the field in one record."""
        return math.prod(self.shape) * self.dtype.itemsize


class RecordLayout:
    """Fields one after another, each aligned to its own element.

    Attributes:
        fields: in order.
        num_bytes: of one record; a multiple of the largest element.
    """

    def __init__(self, fields: Sequence[Field]) -> None:
        self.fields = {field.name: field for field in fields}
        self._start: dict[str, int] = {}
        at, widest = 0, 1
        for field in fields:
            size = field.dtype.itemsize
            at = round_up(at, size)
            self._start[field.name] = at
            at += field.num_bytes
            widest = max(widest, size)
        self.num_bytes = round_up(at, widest)

    def start(self, *names: str) -> tuple[int, ...]:
        """Bytes at which fields begin in a record."""
        return tuple(self._start[name] for name in names)

    def view(self, records: Tensor, name: str) -> Tensor:
        """The field of all records: uint8 [..., num_bytes] -> [..., *shape], sharing memory."""
        field = self.fields[name]
        start = self._start[name]
        part = records[..., start : start + field.num_bytes]
        if field.num_bytes == 0:
            return torch.empty(
                (*records.shape[:-1], *field.shape), dtype=field.dtype, device=records.device
            )
        typed = part.view(field.dtype)
        return typed.unflatten(-1, field.shape) if field.shape else typed.squeeze(-1)


def round_up(value: int, multiple: int) -> int:
    """The next multiple."""
    return -(-value // multiple) * multiple


def as_bytes(rows: Tensor) -> Tensor:
    """[M, D] of any dtype -> uint8 [M, bytes], sharing memory; the inner dimension contiguous."""
    if rows.shape[-1] == 1 and rows.stride(-1) != 1:
        # The stride of a single column is free; a view of another size asks for 1.
        rows = rows.as_strided(rows.shape, (*rows.stride()[:-1], 1))
    return rows.view(torch.uint8) if rows.dtype != torch.uint8 else rows


def _words(rows: Tensor) -> Tensor:
    """A uint8 matrix as the widest integers that fit, since rows are copied by the element."""
    for dtype in (torch.int64, torch.int32, torch.int16):
        size = dtype.itemsize
        if (
            rows.shape[-1] % size == 0
            and rows.storage_offset() % size == 0
            and rows.stride(0) % size == 0
        ):
            return rows.view(dtype)
    return rows


def take_rows(rows: Tensor, index: Tensor, out: Tensor | None = None) -> Tensor:
    """uint8 [M, bytes] and int [N] -> [N, bytes]: rows[index]."""
    if out is None:
        out = rows.new_empty(index.shape[0], rows.shape[1])
    if rows.shape[1] and index.shape[0]:
        source, target = _words(rows), _words(out)
        if source.dtype == target.dtype:
            torch.index_select(source, 0, index, out=target)
        else:
            torch.index_select(rows, 0, index, out=out)
    return out


def put_rows(target: Tensor, index: Tensor, rows: Tensor) -> None:
    """target[index] = rows, on uint8 matrices; no row number appears twice."""
    if rows.shape[1] and index.shape[0]:
        wide, source = _words(target), _words(rows)
        if wide.dtype == source.dtype:
            wide.index_copy_(0, index, source)
        else:
            target.index_copy_(0, index, rows)


class Parts:
    """int32 tensors of given sizes that are made in one allocation, each 16-byte aligned."""

    __slots__ = ("_sizes", "_total")

    def __init__(self, *sizes: int) -> None:
        self._sizes = [part for size in sizes for part in (size, -size % 4)]
        self._total = sum(self._sizes)

    def make(self, device: torch.device) -> Sequence[Tensor]:
        """New ones."""
        whole = torch.empty(self._total, dtype=torch.int32, device=device)
        return whole.split_with_sizes(self._sizes)[::2]


# Views kept by a workspace: enough for what recurs.
_MOST_VIEWS = 256


class Workspace:
    """Named buffers of one slot: allocated at first use, kept, grown where a call needs more.

    Attributes:
        age: grows whenever a buffer is replaced: what others keep of it is out of date then.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: dict[str, Tensor] = {}
        self._views: dict[tuple[str, tuple[int, ...], torch.dtype], Tensor] = {}
        self.age = 0

    def bytes(self, name: str, num_bytes: int, *, reserve: int = 0) -> Tensor:
        """uint8 [num_bytes] of the buffer `name`, which is made at least `reserve` bytes large."""
        have = self._buffers.get(name)
        if have is None or have.numel() < num_bytes:
            have = torch.empty(max(num_bytes, reserve), dtype=torch.uint8, device=self.device)
            self._buffers[name] = have
            self._outdate()
        return have[:num_bytes]

    def tensor(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, *, reserve: int = 0
    ) -> Tensor:
        """A tensor in the buffer `name`; `reserve` as for bytes(). The same object each time: what
        callers outside get is an alias of it."""
        key = (name, tuple(shape), dtype)
        found = self._views.get(key)
        if found is None:
            num_bytes = math.prod(shape) * dtype.itemsize
            found = self.bytes(name, num_bytes, reserve=reserve).view(dtype).view(*shape)
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            self._views[key] = found
        return found

    def clear(self) -> None:
        """Free everything."""
        self._buffers.clear()
        self._outdate()

    def _outdate(self) -> None:
        self._views.clear()
        self.age += 1
