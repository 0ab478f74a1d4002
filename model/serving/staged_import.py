"""StagedImport: an inbound state lands out of sight, is verified, and then becomes visible whole.

While it lands, its slot is STAGING and its pages belong to nobody else. After verification the
slot is an immutable snapshot. After a failure both are freed if the writer is known to be gone,
else quarantined: bytes of a timed-out write may still arrive.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from moe_comm.model.serving.migration_header import Header, MigrationError, check_header
from moe_comm.model.serving.paged_cache import PagedCache
from moe_comm.model.serving.segments import (
    PartSpec,
    Segments,
    checksum,
    import_segments,
    segment_shapes,
    slot_views,
)
from moe_comm.model.serving.slots import Handle
from moe_comm.model.serving.state_pool import StatePool


class ImportState(enum.Enum):
    OPEN = "open"
    PUBLISHED = "published"
    DISCARDED = "discarded"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, kw_only=True)
class Region:
    """Host memory that a writer may fill: `nbytes` at `address`, for a stretch of a segment."""

    address: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Imported:
    """A state that is visible: `snapshot` has one reference, `pages` one each, the caller's."""

    snapshot: Handle
    pages: tuple[int, ...]
    position: int
    pending: tuple[int, ...]


class StagedImport:
    """One request's inbound state: a staging slot, pages, and the parts seen so far.

    Use `open`, then for each part `add_part`, the bytes, `verify_part`; then `publish`.
    """

    def __init__(
        self, pool: StatePool, cache: PagedCache, slot: Handle, pages: tuple[int, ...], head: Header
    ) -> None:
        self.pool, self.cache, self.slot, self.pages, self.head = pool, cache, slot, pages, head
        self.state = ImportState.OPEN
        self._parts: list[tuple[PartSpec, Header, Segments | None]] = []
        self._verified: list[PartSpec] = []

    @classmethod
    def open(cls, pool: StatePool, cache: PagedCache, head: Header) -> StagedImport | None:
        """Reserve a slot and pages for a checked header; None where there is no room now."""
        pages = cache.allocate(pool.layout.pages_for(head.position))
        if pages is None:
            return None
        slot = pool.stage()
        if slot is None:
            cache.release(pages)
            return None
        return cls(pool, cache, slot, pages, head)

    def add_part(self, raw: Mapping[str, Any], *, direct: bool) -> Header:
        """Announce a part. `direct`: its bytes land in the staged slot and pages themselves (host
        pools only); else in a host buffer, which `verify_part` copies in.

        Raises MigrationError where the part's header is wrong, belongs to another state than the
        first one's, or overlaps a part announced before.
        """
        self._expect_open("add_part")
        head = check_header(raw, self.pool.layout)
        for name in ("request", "position", "tokens_hash", "pending"):
            if getattr(head, name) != getattr(self.head, name):
                raise MigrationError(
                    f"{name}: the parts disagree: {getattr(self.head, name)!r} and "
                    f"{getattr(head, name)!r}"
                )
        for part, _, _ in self._parts:
            if head.part.with_mla and part.with_mla:
                raise MigrationError("parts: two of them bring the MLA rows")
            if head.part.first_head < part.last_head and part.first_head < head.part.last_head:
                raise MigrationError(f"parts: heads {part} and {head.part} overlap")
        if direct and self.pool.recurrent.device.type != "cpu":
            raise ValueError("direct: expected a pool in host memory, got one on a device")
        landing = None if direct else self._buffers(head.part)
        self._parts.append((head.part, head, landing))
        return head

    def landing(self, part: PartSpec) -> Segments:
        """The host buffers of a part that does not land directly."""
        for known, _, buffers in self._parts:
            if known == part and buffers is not None:
                return buffers
        raise MigrationError(f"landing: no buffer for {part}")

    def regions(self, part: PartSpec) -> list[Region]:
        """Where a part's bytes go, in segment order: the regions end to end are the segments end
        to end."""
        for known, _, buffers in self._parts:
            if known == part:
                if buffers is not None:
                    return [_region(t) for t in buffers.values()]
                return self._direct_regions(part)
        raise MigrationError(f"regions: {part} was not announced")

    def verify_part(self, part: PartSpec) -> None:
        """Read back what landed and compare every segment's checksum; MigrationError names the
        first that differs."""
        self._expect_open("verify_part")
        for known, head, buffers in self._parts:
            if known != part:
                continue
            landed = self._read_back(part) if buffers is None else buffers
            for name, wanted in head.checksums.items():
                if checksum(landed[name]) != wanted:
                    raise MigrationError(f"{name}: checksum does not match: damaged or incomplete")
            if buffers is not None:
                import_segments(
                    self.pool, self.cache, self.slot.slot, self.pages, buffers, part=part
                )
            self._verified.append(part)
            return
        raise MigrationError(f"verify_part: {part} was not announced")

    def publish(self) -> Imported:
        """Make the state visible. MigrationError unless the verified parts are all heads of this
        rank, once, and the MLA rows, once: state without pages is never visible, nor the reverse.
        """
        self._expect_open("publish")
        missing = self.missing()
        if missing:
            raise MigrationError(f"publish: {missing}")
        self.state = ImportState.PUBLISHED
        return Imported(
            snapshot=self.pool.publish(self.slot, self.head.position),
            pages=self.pages,
            position=self.head.position,
            pending=self.head.pending,
        )

    def missing(self) -> str:
        """What no verified part has brought yet; empty where nothing is missing."""
        next_head, last_head = self.pool.layout.head_range
        for part in sorted(self._verified, key=lambda p: p.first_head):
            if part.first_head != next_head:
                break
            next_head = part.last_head
        if next_head != last_head:
            return f"heads from {next_head} on are missing"
        if sum(part.with_mla for part in self._verified) != 1:
            return "the MLA rows are missing"
        return ""

    def abort(self, reason: str, *, writer_gone: bool) -> None:
        """Give up. With `writer_gone` everything is freed; else it is quarantined until
        `writer_is_gone`. Nothing happens where the import is over already."""
        if self.state is not ImportState.OPEN:
            return
        if writer_gone:
            self.pool.discard(self.slot)
            self.cache.release(self.pages)
            self.state = ImportState.DISCARDED
            self._parts.clear()
        else:
            self.pool.quarantine(self.slot, reason)
            self.cache.quarantine(self.pages)
            self.state = ImportState.QUARANTINED

    def writer_is_gone(self) -> None:
        """End a quarantine: no byte of this import can arrive any more."""
        if self.state is ImportState.QUARANTINED:
            self.pool.end_quarantine(self.slot)
            self.cache.end_quarantine(self.pages)
            self.state = ImportState.DISCARDED
            self._parts.clear()

    # -- inside ----------------------------------------------------------------------------------
    def _expect_open(self, what: str) -> None:
        if self.state is not ImportState.OPEN:
            raise MigrationError(f"{what}: the import is {self.state.value}")

    def _buffers(self, part: PartSpec) -> Segments:
        shapes = segment_shapes(self.pool.layout, part, self.head.position)
        return {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}

    def _direct_regions(self, part: PartSpec) -> list[Region]:
        regions = [
            _region(layer)
            for view in slot_views(self.pool, self.slot.slot, part).values()
            for layer in view
        ]
        if part.with_mla:
            size, position = self.cache.page_size, self.head.position
            for layer in self.cache.rows:
                for i, page in enumerate(self.pages):
                    regions.append(_region(layer[page, : min(size, position - i * size)]))
        return regions

    def _read_back(self, part: PartSpec) -> Segments:
        landed = dict(slot_views(self.pool, self.slot.slot, part))
        if part.with_mla:
            landed["mla"] = self.cache.gather(self.pages, self.head.position)
        return landed


def _region(tensor: torch.Tensor) -> Region:
    assert tensor.is_contiguous()
    return Region(address=tensor.data_ptr(), nbytes=tensor.numel() * tensor.element_size())
