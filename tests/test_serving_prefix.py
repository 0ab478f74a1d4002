"""Paged cache, prefix cache and chunk ends."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_comm.model.serving.chunking import chunk_end, snapshot_stops
from moe_comm.model.serving.paged_cache import PagedCache
from moe_comm.model.serving.prefix_cache import PrefixCache
from moe_comm.model.serving.slots import StateError
from moe_comm.model.serving.state_pool import StatePool

sys.path.append(str(Path(__file__).parent))
from serving_cases import prompt, small_layout

PAGE = 8


class Shelf:
    """A pool, a cache and a prefix cache, with entries that nobody computed: bytes do not matter
    for what is found."""

    def __init__(self, *, slots: int = 6, pages: int = 24) -> None:
        layout = small_layout()
        self.pool = StatePool(layout, slots, debug=True)
        self.cache = PagedCache(layout, pages, debug=True)
        self.prefixes = PrefixCache(self.pool, self.cache)

    def put(self, tokens) -> bool:
        (handle,) = self.pool.allocate(1)
        self.pool.begin(handle, 0, len(tokens))
        self.pool.commit(handle, len(tokens))
        snapshot = self.pool.donate(handle, len(tokens))
        pages = self.cache.allocate(self.pool.layout.pages_for(len(tokens)))
        new = self.prefixes.insert(tokens, pages, snapshot)
        self.pool.release(snapshot)
        self.cache.release(pages)
        return new

    def depth(self, tokens) -> int:
        hit = self.prefixes.match(tokens)
        self.prefixes.unpin(hit)
        return hit.depth

    def expect_balanced(self) -> None:
        pages, snapshots = self.prefixes.audit()
        assert self.cache.audit().used == len(set(pages))
        assert self.pool.audit().in_use == len(snapshots)


def test_pages_are_counted_by_reference():
    cache = PagedCache(small_layout(), 4, debug=True)
    pages = cache.allocate(3)
    assert 0 not in pages
    assert cache.allocate(2) is None
    cache.retain(pages[:1])
    cache.release(pages)
    assert cache.audit().used == 1
    assert cache.rows[:, pages[1]].isnan().all()
    cache.release(pages[:1])
    with pytest.raises(StateError, match="free"):
        cache.release(pages[:1])
    with pytest.raises(StateError, match="outside"):
        cache.retain((0,))
    with pytest.raises(StateError, match="outside"):
        cache.release((-1,))


def test_pages_are_copied_only_where_nobody_shares_the_target():
    cache = PagedCache(small_layout(), 4)
    a, b = cache.allocate(2)
    cache.rows[:, a] = 3
    cache.copy_page(a, b)
    assert (cache.rows[:, b] == 3).all()
    cache.retain((b,))
    with pytest.raises(StateError, match="shared"):
        cache.copy_page(a, b)
    with pytest.raises(StateError, match="both"):
        cache.copy_page(a, a)
    with pytest.raises(StateError, match="shared"):
        cache.quarantine((b,))


def test_rows_survive_repaging():
    cache = PagedCache(small_layout(), 8)
    other = PagedCache(small_layout(page_size=3), 8)
    pages, others = cache.allocate(3), other.allocate(7)
    rows = torch.randn(1, 19, 6).bfloat16()
    cache.scatter(pages, rows)
    other.scatter(others, cache.gather(pages, 19))
    assert torch.equal(other.gather(others, 19), rows)


def test_a_hit_is_the_deepest_depth_with_pages_and_a_snapshot():
    shelf, tokens = Shelf(), prompt(40)
    shelf.put(tokens[:8])
    shelf.put(tokens[:24])
    hit = shelf.prefixes.match(tokens)
    assert (hit.depth, len(hit.pages)) == (24, 3)
    assert shelf.pool.position(hit.snapshot) == 24
    shelf.prefixes.unpin(hit)
    # A prompt that leaves the path after 16 tokens has matching pages up to 16, a state up to 8.
    hit = shelf.prefixes.match((*tokens[:16], *prompt(20, seed=9)))
    assert (hit.depth, hit.matched) == (8, 16)
    shelf.prefixes.unpin(hit)
    shelf.expect_balanced()


def test_the_last_token_is_always_left_to_compute():
    shelf, tokens = Shelf(), prompt(16)
    shelf.put(tokens[:8])
    shelf.put(tokens)
    assert shelf.depth(tokens) == 8
    assert shelf.depth((*tokens, 5)) == 16
    assert shelf.depth(tokens[:8]) == 0
    assert shelf.depth(tokens[:1]) == 0


def test_an_entry_off_the_page_grid_is_found_as_a_tail():
    shelf, tokens = Shelf(), prompt(40)
    shelf.put(tokens[:11])
    shelf.put(tokens[:13])
    assert shelf.depth(tokens) == 13
    assert shelf.depth(tokens[:13]) == 11
    assert shelf.depth((*tokens[:12], 60, 60)) == 11
    assert shelf.depth(tokens[:11]) == 0
    hit = shelf.prefixes.match(tokens)
    assert len(hit.pages) == 2
    shelf.prefixes.unpin(hit)
    shelf.expect_balanced()


def test_inserting_twice_keeps_one_entry_and_leaks_nothing():
    shelf, tokens = Shelf(), prompt(16)
    assert shelf.put(tokens)
    assert not shelf.put(tokens)
    assert shelf.prefixes.stats().entries == 1
    shelf.expect_balanced()


def test_insert_refuses_a_snapshot_of_another_depth():
    shelf, tokens = Shelf(), prompt(16)
    (handle,) = shelf.pool.allocate(1)
    shelf.pool.begin(handle, 0, 15)
    shelf.pool.commit(handle, 15)
    snapshot = shelf.pool.donate(handle, 15)
    pages = shelf.cache.allocate(2)
    with pytest.raises(StateError, match="16 tokens, but a snapshot of 15"):
        shelf.prefixes.insert(tokens, pages, snapshot)
    with pytest.raises(StateError, match="pages"):
        shelf.prefixes.insert(tokens[:15], pages[:1], snapshot)
    assert shelf.prefixes.stats().pages == 0


def test_eviction_is_least_recently_used_and_drops_state_and_pages_together():
    shelf = Shelf(slots=3)
    a, b, c = (prompt(16, seed=s) for s in (1, 2, 3))
    for tokens in (a, b, c):
        shelf.put(tokens)
    assert shelf.depth((*a, 1)) == 16  # a is the most recently used now
    assert shelf.prefixes.evict(slots=1)
    assert (shelf.depth((*a, 1)), shelf.depth((*b, 1)), shelf.depth((*c, 1))) == (16, 0, 16)
    assert shelf.cache.audit().used == 4
    shelf.expect_balanced()


def test_an_inner_entry_can_lose_its_state_and_get_it_back():
    shelf, tokens = Shelf(slots=2), prompt(24)
    shelf.put(tokens[:8])
    shelf.put(tokens[:16])
    assert shelf.depth((*tokens[:16], 1)) == 16
    assert shelf.prefixes.evict(slots=1)  # the inner one is older
    assert shelf.depth(tokens[:12]) == 0
    assert shelf.depth(tokens) == 16
    shelf.put(tokens[:8])
    assert shelf.depth(tokens[:12]) == 8
    shelf.expect_balanced()


def test_eviction_gives_up_politely_when_everything_is_pinned():
    shelf = Shelf(slots=2, pages=4)
    a, b = prompt(16, seed=1), prompt(16, seed=2)
    shelf.put(a)
    shelf.put(b)
    hits = [shelf.prefixes.match((*tokens, 1)) for tokens in (a, b)]
    assert not shelf.prefixes.evict(slots=1)
    assert not shelf.prefixes.evict(pages=1)
    assert not shelf.prefixes.clear()
    shelf.prefixes.unpin(hits[0])
    assert shelf.prefixes.evict(pages=2)
    assert shelf.depth((*b, 1)) == 16
    shelf.prefixes.unpin(hits[1])
    with pytest.raises(StateError, match="not pinned"):
        shelf.prefixes.unpin(hits[1])
    assert shelf.prefixes.clear()
    shelf.expect_balanced()


def test_a_hit_outlives_the_eviction_of_its_entry_by_another_path():
    """A pinned entry is never a victim, so the pages and the snapshot stay what they were."""
    shelf = Shelf(slots=3)
    tokens = prompt(16)
    shelf.put(tokens)
    hit = shelf.prefixes.match((*tokens, 1))
    assert not shelf.prefixes.evict(slots=3)
    assert shelf.pool.position(hit.snapshot) == 16
    shelf.prefixes.unpin(hit)


def test_caches_of_two_layouts_do_not_mix():
    pool = StatePool(small_layout(), 2)
    with pytest.raises(StateError, match="different layouts"):
        PrefixCache(pool, PagedCache(small_layout(page_size=16), 2))


@given(
    length=st.integers(1, 300),
    budget=st.integers(8, 80),
    stops=st.sets(st.integers(1, 300)),
    start=st.integers(0, 299),
)
def test_chunks_cover_the_prompt_and_end_only_where_they_may(length, budget, stops, start):
    at, ends = min(start, length - 1), []
    while at < length:
        end = chunk_end(at, length, budget=budget, grid=PAGE, stops=stops)
        assert end is not None
        assert at < end <= min(at + budget, length)
        assert end % PAGE == 0 or end in stops or end == length
        ends.append(end)
        at = end
    due = {s for s in stops if min(start, length - 1) < s <= length}
    assert due <= set(ends)


def test_a_budget_too_small_for_a_grid_step_waits():
    assert chunk_end(0, 100, budget=7, grid=8) is None
    assert chunk_end(0, 7, budget=7, grid=8) == 7
    assert chunk_end(8, 100, budget=0, grid=8) is None
    assert chunk_end(3, 100, budget=5, grid=8) == 8
    with pytest.raises(ValueError, match="start"):
        chunk_end(5, 5, budget=8, grid=8)


def test_snapshots_are_due_at_intervals_ends_and_branches():
    assert snapshot_stops(45, grid=8, interval=16) == (16, 32, 40, 45)
    assert snapshot_stops(45, grid=8, interval=0) == (40, 45)
    assert snapshot_stops(45, grid=8, interval=0, tail=False) == (40,)
    assert snapshot_stops(45, grid=8, interval=16, start=32) == (40, 45)
    assert snapshot_stops(45, grid=8, interval=0, branch=30) == (24, 40, 45)
    assert snapshot_stops(16, grid=8, interval=8) == (8, 16)
    assert snapshot_stops(3, grid=8, interval=8) == (3,)
    with pytest.raises(ValueError, match="interval"):
        snapshot_stops(45, grid=8, interval=12)
