"""Paged MLA rows beside the state pool: one block allocator, pages counted by reference.

Rows of a page are append-only: whoever shares a page reads rows below the depth it was given and
never writes them. A request that must write into a shared page copies the page first.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from moe_comm.model.serving.layout import StateLayout
from moe_comm.model.serving.slots import StateError


@dataclass(frozen=True, kw_only=True)
class PageAudit:
    """`free` + `used` is `total`; `references` counts them over all used pages."""

    total: int
    free: int
    used: int
    references: int


class PagedCache:
    """`num_pages` usable pages and page 0, which is reserved for padding.

    `rows`: [M, 1 + num_pages, page_size, width] of the layout's MLA dtype. `debug=True` fills
    freed pages with NaN.
    """

    def __init__(
        self,
        layout: StateLayout,
        num_pages: int,
        *,
        device: torch.device | str = "cpu",
        debug: bool = False,
    ) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages: expected at least 1, got {num_pages}")
        self.layout, self.num_pages, self.debug = layout, num_pages, debug
        self.page_size = layout.page_size
        self.rows = torch.zeros(
            layout.num_mla_layers,
            num_pages + 1,
            layout.page_size,
            layout.mla_width,
            dtype=layout.mla_dtype,
            device=device,
        )
        self._references = [0] * (num_pages + 1)
        self._quarantined: set[int] = set()
        self._free = deque(range(1, num_pages + 1))
        if debug:
            self.rows[:, 1:] = math.nan

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, num: int) -> tuple[int, ...] | None:
        """`num` pages with one reference each, or None where fewer are free. Not zeroed: rows are
        always written before they are read."""
        if num < 0:
            raise ValueError(f"num: expected at least 0, got {num}")
        if num > len(self._free):
            return None
        pages = tuple(self._free.popleft() for _ in range(num))
        for page in pages:
            self._references[page] = 1
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """One more reference on each page; StateError for a free page."""
        pages = tuple(pages)
        self._expect_used(pages, "retain")
        for page in pages:
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One reference less on each page; the last frees it. StateError for a free page."""
        pages = tuple(pages)
        self._expect_used(pages, "release")
        for page in pages:
            self._references[page] -= 1
            if self._references[page] < 0:
                raise StateError(f"release: page {page} was given more often than it is held")
            if self._references[page] == 0:
                self._free.append(page)
                if self.debug:
                    self.rows[:, page] = math.nan

    def quarantine(self, pages: Sequence[int]) -> None:
        """Keep pages out of use, their one reference with them: a writer may still write."""
        self._expect_used(pages, "quarantine")
        for page in pages:
            if self._references[page] != 1:
                raise StateError(f"quarantine: page {page} is shared")
        self._quarantined.update(pages)

    def end_quarantine(self, pages: Sequence[int]) -> None:
        """Free quarantined pages; the caller knows that the writer is gone."""
        if not self._quarantined.issuperset(pages):
            raise StateError(f"end_quarantine: of pages {tuple(pages)} some are not quarantined")
        self._quarantined.difference_update(pages)
        self.release(pages)

    def references(self, page: int) -> int:
        self._expect_page(page, "references")
        return self._references[page]

    def copy_page(self, source: int, target: int) -> None:
        """Copy every MLA layer's rows of one used page to another, on the current stream."""
        self._expect_used((source, target), "copy_page")
        if source == target:
            raise StateError(f"copy_page: source and target are both page {source}")
        if self._references[target] != 1:
            raise StateError(f"copy_page: page {target} is shared")
        self.rows[:, target].copy_(self.rows[:, source])

    def audit(self) -> PageAudit:
        """Count every page; StateError where the free list and the references disagree."""
        free = sorted(self._free)
        unreferenced = [p for p in range(1, self.num_pages + 1) if self._references[p] == 0]
        if free != unreferenced:
            raise StateError(f"audit: free list {free}, pages without reference {unreferenced}")
        if self._references[0] or self._quarantined.intersection(free):
            raise StateError("audit: page 0 is referenced, or a quarantined page is free")
        return PageAudit(
            total=self.num_pages,
            free=len(free),
            used=self.num_pages - len(free),
            references=sum(self._references),
        )

    def gather(self, pages: Sequence[int], num_rows: int) -> torch.Tensor:
        """The first `num_rows` rows of a block table, contiguous: [M, num_rows, width]."""
        self._expect_used(pages, "gather")
        if num_rows > len(pages) * self.page_size:
            raise ValueError(
                f"num_rows: expected at most {len(pages) * self.page_size}, got {num_rows}"
            )
        index = torch.tensor(list(pages), dtype=torch.int64, device=self.rows.device)
        flat = self.rows[:, index].reshape(self.rows.shape[0], -1, self.layout.mla_width)
        return flat[:, :num_rows].contiguous()

    def scatter(self, pages: Sequence[int], rows: torch.Tensor) -> None:
        """Write [M, n, width] as the first n rows of a block table that nobody shares."""
        self._expect_used(pages, "scatter")
        if any(self._references[page] != 1 for page in pages):
            raise StateError(f"scatter: of pages {tuple(pages)} some are shared")
        size = self.page_size
        for i, page in enumerate(pages):
            part = rows[:, i * size : (i + 1) * size]
            self.rows[:, page, : part.shape[1]] = part.to(self.rows.device)

    def _expect_page(self, page: int, what: str) -> None:
        if not 0 < page <= self.num_pages:
            raise StateError(f"{what}: page {page} is outside [1, {self.num_pages}]")

    def _expect_used(self, pages: Iterable[int], what: str) -> None:
        for page in pages:
            self._expect_page(page, what)
            if self._references[page] == 0:
                raise StateError(f"{what}: page {page} is free")
