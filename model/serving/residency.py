"""Where a request's state is: in a slot and pages, in the prefix cache, or in host memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moe_comm.model.serving.chunking import snapshot_stops
from moe_comm.model.serving.paged_cache import PagedCache
from moe_comm.model.serving.prefix_cache import Hit, PrefixCache
from moe_comm.model.serving.requests import Tracked
from moe_comm.model.serving.segments import export_segments, import_segments, whole_part
from moe_comm.model.serving.slots import Handle, StateError
from moe_comm.model.serving.state_pool import StatePool


@dataclass(slots=True)
class Counters:
    """Running totals of one scheduler."""

    steps: int = 0
    admitted: int = 0
    preemptions: int = 0
    resumes: int = 0
    snapshots: int = 0
    snapshots_skipped: int = 0


class Residency:
    """Moves requests in and out of the pool. Each method either does all of it or nothing.

    `interval`: tokens between snapshots (0: none); `tails`: also keep snapshots off the grid, at
    prompt ends and at the ends of finished requests.
    """

    def __init__(
        self,
        pool: StatePool,
        cache: PagedCache,
        prefixes: PrefixCache | None,
        *,
        interval: int,
        tails: bool,
    ) -> None:
        self.pool, self.cache, self.prefixes = pool, cache, prefixes
        self.interval, self.tails = interval, tails
        self.counters = Counters()

    def room(self, *, slots: int = 0, pages: int = 0) -> bool:
        """Whether so much is free, after dropping cached prefixes if need be."""
        if self.prefixes is not None:
            return self.prefixes.evict(slots=slots, pages=pages)
        return self.pool.num_free >= slots and self.cache.num_free >= pages

    def start(self, tracked: Tracked, *, alone: bool) -> bool:
        """Give a request a slot and pages for its known tokens, from the deepest usable prefix.

        `alone`: nothing else runs, so that room will not come from waiting; the cached prefix is
        then given up where holding it is what leaves too little room.
        """
        if self.prefixes is None:
            return self._start_from(tracked, None)
        hit = self.prefixes.match(tracked.tokens)
        try:
            if self._start_from(tracked, hit):
                return True
        finally:
            # The copies out of the prefix are enqueued by now, or were given up.
            self.prefixes.unpin(hit)
        return alone and hit.depth > 0 and self._start_from(tracked, None)

    def _start_from(self, tracked: Tracked, hit: Hit | None) -> bool:
        depth = hit.depth if hit else 0
        shared = depth // self.cache.page_size
        needed = self.cache.layout.pages_for(len(tracked.tokens)) - shared
        if not self.room(slots=1, pages=needed):
            return False
        state = self._state_at(hit)
        fresh = self.cache.allocate(needed)
        assert state is not None
        assert fresh is not None
        kept = hit.pages[:shared] if hit else ()
        self.cache.retain(kept)
        if hit and depth % self.cache.page_size:
            # The prefix's last page is partly filled and shared: rows are added to a copy.
            self.cache.copy_page(hit.pages[-1], fresh[0])
        if self.prefixes is not None and hit is not None:
            self.prefixes.count(hit, len(tracked.tokens))
        tracked.state, tracked.pages = state, (*kept, *fresh)
        tracked.processed = tracked.prefix_hit = depth
        tracked.stops = tracked.request.chunk_ends
        if self.prefixes is not None:
            tracked.stops += snapshot_stops(
                len(tracked.tokens),
                start=depth,
                grid=self.pool.layout.snapshot_grid,
                interval=self.interval,
                branch=hit.matched if hit else None,
                tail=self.tails,
            )
        return True

    def _state_at(self, hit: Hit | None) -> Handle | None:
        if hit is not None and hit.snapshot is not None:
            return self.pool.restore(hit.snapshot)
        handles = self.pool.allocate(1)
        return handles[0] if handles else None

    def grow(self, tracked: Tracked, num_tokens: int) -> bool:
        """Pages for `num_tokens` rows; False where they are not to be had."""
        needed = self.cache.layout.pages_for(num_tokens) - len(tracked.pages)
        if needed <= 0:
            return True
        if not self.room(pages=needed):
            return False
        fresh = self.cache.allocate(needed)
        assert fresh is not None
        tracked.pages += fresh
        return True

    def push_out(self, tracked: Tracked) -> None:
        """Copy state and rows to host memory, and give slot and pages back."""
        assert tracked.state is not None
        if tracked.processed > 0:
            tracked.parcel = export_segments(self.pool, self.cache, tracked.state, tracked.pages)
        self.give_back(tracked)
        tracked.preemptions += 1
        self.counters.preemptions += 1

    def bring_back(self, tracked: Tracked) -> bool:
        """Undo `push_out`, in any slot and any pages; False where there is no room."""
        pages = self.cache.layout.pages_for(len(tracked.tokens))
        if not self.room(slots=1, pages=pages):
            return False
        slot, fresh = self.pool.stage(), self.cache.allocate(pages)
        assert slot is not None
        assert fresh is not None
        assert tracked.parcel is not None
        part = whole_part(self.pool.layout)
        import_segments(self.pool, self.cache, slot.slot, fresh, tracked.parcel, part=part)
        tracked.state = self.pool.activate(self.pool.publish(slot, tracked.processed))
        tracked.pages, tracked.parcel = fresh, None
        self.counters.resumes += 1
        return True

    def leave_prefix(self, tracked: Tracked) -> None:
        """Put a snapshot of the committed state into the prefix cache, where there is room."""
        if self.prefixes is None:
            return
        assert tracked.state is not None
        tokens = tracked.tokens[: tracked.processed]
        if self.prefixes.has_entry(tokens):
            return
        snapshot = None
        if self.prefixes.evict(slots=1):
            snapshot = self.pool.snapshot(tracked.state, tracked.processed)
        if snapshot is None:
            self.counters.snapshots_skipped += 1
            return
        self._insert(tracked, tokens, snapshot)

    def finish(self, tracked: Tracked) -> None:
        """Give everything back; a state off the grid first goes to the prefix cache as it is, so
        that a further turn of the same conversation finds it."""
        if self.prefixes is not None and self.tails and tracked.state is not None:
            tokens = tracked.tokens[: tracked.processed]
            if tokens and not self.prefixes.has_entry(tokens):
                snapshot = self.pool.donate(tracked.state, tracked.processed)
                tracked.state = None
                self._insert(tracked, tokens, snapshot)
        self.give_back(tracked)

    def hold(self, tracked: Tracked) -> None:
        """Turn the state into a snapshot that stays, with its pages, until `let_go`."""
        assert tracked.state is not None
        tracked.state = self.pool.donate(tracked.state, tracked.processed)

    def let_go(self, tracked: Tracked) -> None:
        """End `hold`."""
        assert tracked.state is not None
        self.pool.release(tracked.state)
        tracked.state = None
        self.give_back(tracked)

    def give_back(self, tracked: Tracked) -> None:
        """Free slot and pages, if any."""
        if tracked.state is not None:
            self.pool.free(tracked.state)
        self.cache.release(tracked.pages)
        tracked.state, tracked.pages = None, ()

    def audit(
        self, residents: Iterable[Tracked], others: Iterable[tuple[Handle, Sequence[int]]]
    ) -> None:
        """Every slot and page in use has exactly the owners that its references say. `others` are
        transfers' slots and pages. StateError names what leaks."""
        slots: list[int] = []
        pages: list[int] = []
        for tracked in residents:
            pages += tracked.pages
            slots += [tracked.state.slot] if tracked.state else []
        for handle, held in others:
            slots.append(handle.slot)
            pages += held
        if self.prefixes is not None:
            cached_pages, snapshots = self.prefixes.audit()
            pages += cached_pages
            slots += [snapshot.slot for snapshot in snapshots]
        in_use = sorted(self.pool.audit().positions)
        if sorted(slots) != in_use:
            raise StateError(f"audit: slots {in_use} are in use, {sorted(slots)} have an owner")
        if self.cache.audit().used != len(set(pages)):
            raise StateError("audit: a page is in use without an owner, or the reverse")
        for page in set(pages):
            if self.cache.references(page) != pages.count(page):
                raise StateError(
                    f"audit: page {page}: {self.cache.references(page)} references, "
                    f"{pages.count(page)} owners"
                )

    def _insert(self, tracked: Tracked, tokens: Sequence[int], snapshot: Handle) -> None:
        assert self.prefixes is not None
        pages = tracked.pages[: self.cache.layout.pages_for(len(tokens))]
        self.prefixes.insert(tokens, pages, snapshot)
        self.pool.release(snapshot)
        self.counters.snapshots += 1
