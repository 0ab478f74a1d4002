"""A request's state as contiguous segments: taken out of a pool, put into another, resliced.

A part is a range of heads of every KDA layer, with or without the MLA rows. Segments of a part
with h heads, at position N: "recurrent" [L, h, Dk, Dv] fp32, "conv.q", "conv.k", "conv.v"
[L, h * channels, W - 1], "mla" [M, N, width]. Each convolution group is cut on its own, by heads:
one cut through the three groups laid end to end would give a rank its neighbours' channels.
MLA rows are the same on every tensor-parallel rank, so exactly one part brings them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from moe_comm.model.serving.layout import CONV_GROUPS, RECURRENT_DTYPE, StateLayout
from moe_comm.model.serving.paged_cache import PagedCache
from moe_comm.model.serving.slots import Handle
from moe_comm.model.serving.state_pool import StatePool

Segments = dict[str, torch.Tensor]
SEGMENT_AXES = {
    "recurrent": "layer,head,key,value",
    "conv.q": "layer,channel,tap(oldest first)",
    "conv.k": "layer,channel,tap(oldest first)",
    "conv.v": "layer,channel,tap(oldest first)",
    "mla": "layer,token,width",
}


@dataclass(frozen=True, kw_only=True)
class PartSpec:
    """Which part of a state: heads [first_head, last_head), counted over all ranks, and whether
    the MLA rows come with it."""

    first_head: int
    last_head: int
    with_mla: bool

    @property
    def num_heads(self) -> int:
        return self.last_head - self.first_head


def whole_part(layout: StateLayout) -> PartSpec:
    """Everything that this layout's rank holds."""
    first, last = layout.head_range
    return PartSpec(first_head=first, last_head=last, with_mla=True)


def reshard_plan(
    num_heads: int, source_size: int, target_rank: int, target_size: int
) -> list[tuple[int, PartSpec]]:
    """What each source rank sends to one target rank: [(source rank, part)], heads ascending.

    Both sizes must divide `num_heads`. The first source brings the MLA rows.
    """
    for name, size in (("source_size", source_size), ("target_size", target_size)):
        if size < 1 or num_heads % size:
            raise ValueError(f"{name}: expected a divisor of {num_heads} heads, got {size}")
    if not 0 <= target_rank < target_size:
        raise ValueError(f"target_rank: expected in [0, {target_size}), got {target_rank}")
    per_source, per_target = num_heads // source_size, num_heads // target_size
    low, high = target_rank * per_target, (target_rank + 1) * per_target
    plan: list[tuple[int, PartSpec]] = []
    for source in range(low // per_source, -(-high // per_source)):
        first = max(low, source * per_source)
        last = min(high, (source + 1) * per_source)
        plan.append((source, PartSpec(first_head=first, last_head=last, with_mla=not plan)))
    return plan


def segment_shapes(
    layout: StateLayout, part: PartSpec, position: int
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Name to (shape, dtype) of every segment of a part at a position, in sending order."""
    layers, heads = layout.num_kda_layers, part.num_heads
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "recurrent": ((layers, heads, layout.head_dim_k, layout.head_dim_v), RECURRENT_DTYPE)
    }
    for group in CONV_GROUPS:
        channels = heads * layout.channels(group)
        shapes[f"conv.{group}"] = ((layers, channels, layout.conv_width - 1), layout.conv_dtype)
    if part.with_mla:
        rows = (layout.num_mla_layers, position, layout.mla_width)
        shapes["mla"] = (rows, layout.mla_dtype)
    return shapes


def part_bytes(layout: StateLayout, part: PartSpec, position: int) -> int:
    """Payload bytes of a part, all segments together."""
    shapes = segment_shapes(layout, part, position).values()
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes)


def slot_views(pool: StatePool, slot: int, part: PartSpec) -> Segments:
    """Views of a slot's rows for a part of the pool's own heads: strided over layers, each layer's
    piece contiguous. Raises ValueError for heads that this rank does not hold."""
    layout = pool.layout
    first, last = layout.head_range
    if not first <= part.first_head < part.last_head <= last:
        raise ValueError(
            f"part: expected heads within [{first}, {last}), "
            f"got [{part.first_head}, {part.last_head})"
        )
    low, high = part.first_head - first, part.last_head - first
    views = {"recurrent": pool.recurrent[:, slot, low:high]}
    for group in CONV_GROUPS:
        width = layout.channels(group)
        views[f"conv.{group}"] = pool.conv[group][:, slot, low * width : high * width]
    return views


def export_segments(
    pool: StatePool,
    cache: PagedCache,
    handle: Handle,
    pages: Sequence[int],
    *,
    part: PartSpec | None = None,
) -> Segments:
    """Copies of a live slot's state and its MLA rows in host memory, contiguous.

    Waits for the copies (a device sync). `part` defaults to everything on this rank.
    """
    part = whole_part(pool.layout) if part is None else part
    position = pool.position(handle)
    segments = {
        name: view.to("cpu", copy=True).contiguous()
        for name, view in slot_views(pool, handle.slot, part).items()
    }
    if part.with_mla:
        segments["mla"] = cache.gather(pages, position).cpu()
    return segments


def import_segments(
    pool: StatePool,
    cache: PagedCache,
    slot: int,
    pages: Sequence[int],
    segments: Mapping[str, torch.Tensor],
    *,
    part: PartSpec,
) -> None:
    """Write a part's segments into a slot that its caller has staged, and into its pages."""
    for name, view in slot_views(pool, slot, part).items():
        view.copy_(segments[name])
    if part.with_mla:
        cache.scatter(pages, segments["mla"])


def checksum(tensor: torch.Tensor) -> str:
    """sha256 of a tensor's bytes in row-major order."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()
