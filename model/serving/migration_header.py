"""The header of a migrated state: everything a receiver checks before a byte becomes visible."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moe_comm.errors import MoeCommError
from moe_comm.model.serving.layout import StateLayout
from moe_comm.model.serving.prefix_cache import token_hash
from moe_comm.model.serving.segments import (
    SEGMENT_AXES,
    PartSpec,
    Segments,
    checksum,
    segment_shapes,
)

SCHEMA = 1
# Field to type; a header has exactly these.
_FIELDS: dict[str, type] = {
    "schema": int,
    "request": str,
    "byte_order": str,
    "layout": dict,
    "model_fingerprint": str,
    "fingerprint": str,
    "position": int,
    "tokens_hash": str,
    "pending": list,
    "first_head": int,
    "last_head": int,
    "with_mla": bool,
    "tensors": list,
    "header_sha256": str,
}


class MigrationError(MoeCommError):
    """A state was not taken over; the message is the reason. Nothing of it is visible."""


@dataclass(frozen=True, kw_only=True)
class Header:
    """A checked header. `pending` are tokens sampled but not yet processed by any layer: the
    receiver processes them, once, from `position` on."""

    request: str
    position: int
    tokens_hash: str
    pending: tuple[int, ...]
    part: PartSpec
    checksums: Mapping[str, str]


def make_header(
    layout: StateLayout,
    segments: Segments,
    *,
    request: str,
    tokens: Sequence[int],
    pending: Sequence[int],
    part: PartSpec,
) -> dict[str, Any]:
    """The header of a part's segments; `tokens` are the ones that the state holds.

    Raises ValueError where a segment's shape or dtype is not the layout's.
    """
    shapes = segment_shapes(layout, part, len(tokens))
    if list(segments) != list(shapes):
        raise ValueError(f"segments: expected {list(shapes)}, got {list(segments)}")
    tensors = []
    for name, (shape, dtype) in shapes.items():
        tensor = segments[name]
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise ValueError(
                f"segments[{name!r}]: expected {shape} {dtype}, got {tuple(tensor.shape)} "
                f"{tensor.dtype}"
            )
        tensors.append({**_expected(layout, name, shape, dtype), "sha256": checksum(tensor)})
    header = {
        "schema": SCHEMA,
        "request": request,
        "byte_order": "little",
        "layout": layout.describe(),
        "model_fingerprint": layout.model_fingerprint(),
        "fingerprint": layout.fingerprint(),
        "position": len(tokens),
        "tokens_hash": token_hash(tokens),
        "pending": list(pending),
        "first_head": part.first_head,
        "last_head": part.last_head,
        "with_mla": part.with_mla,
        "tensors": tensors,
    }
    return {**header, "header_sha256": header_checksum(header)}


def header_checksum(header: Mapping[str, Any]) -> str:
    """sha256 of a header without its own checksum, keys sorted."""
    fields = {k: v for k, v in header.items() if k != "header_sha256"}
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def check_header(
    header: Mapping[str, Any], layout: StateLayout, *, tokens: Sequence[int] | None = None
) -> Header:
    """Check a header against the receiver's layout and, where known, the request's tokens.

    Rejects, never coerces: an unknown or missing field, a wrong checksum, schema or byte order,
    a layout that differs in anything but tensor parallelism and page size, heads outside the
    receiver's, a position or token hash that is not the request's, a tensor whose dtype, shape,
    axis order, layer set or size is not what the layout says. Raises MigrationError.
    """
    if set(header) != set(_FIELDS):
        odd = sorted(set(header) ^ set(_FIELDS))
        raise MigrationError(f"header: fields {odd} missing or unknown")
    for name, kind in _FIELDS.items():
        if type(header[name]) is not kind:
            raise MigrationError(f"{name}: expected {kind.__name__}, got {header[name]!r}")
    if header_checksum(header) != header["header_sha256"]:
        raise MigrationError("header: checksum does not match: damaged on the way")
    _same("schema", SCHEMA, header["schema"])
    _same("byte_order", "little", header["byte_order"])
    theirs, ours = header["layout"], layout.describe()
    local = ("page_size", "tp_rank", "tp_size")
    for name in ours:
        if name not in local:
            _same(f"layout.{name}", ours[name], theirs.get(name))
    _same("model_fingerprint", layout.model_fingerprint(), header["model_fingerprint"])
    part = PartSpec(
        first_head=header["first_head"],
        last_head=header["last_head"],
        with_mla=header["with_mla"],
    )
    first, last = layout.head_range
    if not first <= part.first_head < part.last_head <= last:
        raise MigrationError(
            f"heads: expected within [{first}, {last}), got [{part.first_head}, {part.last_head})"
        )
    position = header["position"]
    if position < 1:
        raise MigrationError(f"position: expected at least 1, got {position!r}")
    if tokens is not None:
        _same("position", len(tokens), position)
        _same("tokens_hash", token_hash(tokens), header["tokens_hash"])
    shapes = segment_shapes(layout, part, position)
    _same("tensors", list(shapes), [t.get("name") for t in header["tensors"]])
    for got, (name, (shape, dtype)) in zip(header["tensors"], shapes.items(), strict=True):
        for field, value in _expected(layout, name, shape, dtype).items():
            _same(f"{name}.{field}", value, got.get(field))
    return Header(
        request=header["request"],
        position=position,
        tokens_hash=header["tokens_hash"],
        pending=tuple(header["pending"]),
        part=part,
        checksums={t["name"]: t["sha256"] for t in header["tensors"]},
    )


def _expected(
    layout: StateLayout, name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> dict[str, Any]:
    layers = layout.mla_layer_ids if name == "mla" else layout.kda_layer_ids
    size = dtype.itemsize
    for extent in shape:
        size *= extent
    return {
        "name": name,
        "dtype": str(dtype).removeprefix("torch."),
        "shape": list(shape),
        "axes": SEGMENT_AXES[name],
        "layer_ids": list(layers),
        "nbytes": size,
    }


def _same(name: str, expected: object, got: object) -> None:
    if expected != got:
        raise MigrationError(f"{name}: expected {expected!r}, got {got!r}")
