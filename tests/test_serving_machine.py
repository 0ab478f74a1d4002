"""State machines over the pool, the pages and the prefix cache, against a plain model of both."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from moe_comm.model.serving.paged_cache import PagedCache
from moe_comm.model.serving.prefix_cache import PrefixCache
from moe_comm.model.serving.slots import SlotState, StateError
from moe_comm.model.serving.state_pool import StatePool

sys.path.append(str(Path(__file__).parent))
from serving_cases import small_layout

SLOTS, PAGES, PAGE = 5, 14, 4


def mark(tokens) -> float:
    """A number that stands for the state after these tokens; exact in every dtype used here."""
    value = 1
    for token in tokens:
        value = (value * 31 + token + 1) % 251
    return float(value)


class ServingMachine(RuleBasedStateMachine):
    """Requests are token lists over a tiny alphabet, so that prefixes meet. The plain model is a
    dictionary from handle to (tokens, kind); a slot's bytes are `mark` of its tokens, and a page's
    rows likewise, so any mix-up of slots, depths or pages shows as a wrong number."""

    checks = 0

    def __init__(self) -> None:
        super().__init__()
        layout = small_layout(
            kda_layer_ids=(0,),
            num_heads=1,
            head_dim_k=2,
            head_dim_v=1,
            mla_width=1,
            page_size=PAGE,
            chunk_size=PAGE,
        )
        self.pool = StatePool(layout, SLOTS, debug=True)
        self.cache = PagedCache(layout, PAGES, debug=True)
        self.prefixes = PrefixCache(self.pool, self.cache)
        self.active: list[tuple] = []  # (handle, tokens, pages)
        self.snapshots: list[tuple] = []  # (handle, tokens, pages), a reference each
        self.staged: list = []
        self.quarantined: list = []
        self.hits: list[tuple] = []  # (hit, tokens)
        self.dead: list = []

    # -- helpers ---------------------------------------------------------------------------------
    def write(self, slot: int, tokens) -> None:
        for tensor in self.pool.tensors.values():
            tensor[:, slot] = mark(tokens)

    def check_slot(self, handle, tokens) -> None:
        for tensor in self.pool.tensors.values():
            want = mark(tokens) if tokens else 0.0
            assert (tensor[:, handle.slot] == want).all()
        assert self.pool.position(handle) == len(tokens)

    def check_rows(self, pages, tokens) -> None:
        rows = self.cache.gather(pages, len(tokens)).flatten().tolist()
        assert rows == [mark(tokens[: i + 1]) for i in range(len(tokens))]

    def pick(self, data, things):
        return things[data.draw(st.integers(0, len(things) - 1))]

    # -- requests --------------------------------------------------------------------------------
    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14))
    def start(self, tokens):
        hit = self.prefixes.match(tokens)
        depth, shared = hit.depth, hit.depth // PAGE
        assert depth < len(tokens)
        assert hit.matched <= len(tokens) - 1
        if depth:
            self.check_slot(hit.snapshot, tokens[:depth])
            self.check_rows(hit.pages, tokens[:depth])
        needed = self.pool.layout.pages_for(depth) - shared
        if not self.prefixes.evict(slots=1, pages=needed):
            self.prefixes.unpin(hit)
            return
        fresh = self.cache.allocate(needed)
        handle = self.pool.restore(hit.snapshot) if depth else self.pool.allocate(1)[0]
        self.cache.retain(hit.pages[:shared])
        if depth % PAGE:
            self.cache.copy_page(hit.pages[-1], fresh[0])
        self.prefixes.unpin(hit)
        self.active.append((handle, list(tokens[:depth]), (*hit.pages[:shared], *fresh)))
        self.advance(len(self.active) - 1, tokens[depth:])

    @precondition(lambda self: self.active)
    @rule(data=st.data(), new=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def extend(self, data, new):
        self.advance(data.draw(st.integers(0, len(self.active) - 1)), new)

    def advance(self, index, new):
        """What a forward pass does, in so far as it matters here."""
        handle, tokens, pages = self.active[index]
        longer = [*tokens, *new]
        needed = self.pool.layout.pages_for(len(longer)) - len(pages)
        if not self.prefixes.evict(pages=needed):
            return
        pages = (*pages, *self.cache.allocate(needed))
        slot = self.pool.begin(handle, len(tokens), len(longer))
        self.write(slot, longer)
        for at in range(len(tokens), len(longer)):
            self.cache.rows[:, pages[at // PAGE], at % PAGE] = mark(longer[: at + 1])
        self.pool.commit(handle, len(longer))
        self.active[index] = (handle, longer, pages)

    @precondition(lambda self: self.active)
    @rule(data=st.data())
    def finish(self, data):
        item = self.pick(data, self.active)
        self.active.remove(item)
        self.pool.free(item[0])
        self.cache.release(item[2])
        self.dead.append(item[0])

    @precondition(lambda self: self.active)
    @rule(data=st.data(), donate=st.booleans())
    def snapshot(self, data, donate):
        item = self.pick(data, self.active)
        handle, tokens, pages = item
        assume(tokens)
        if donate:
            self.active.remove(item)
            snapshot = self.pool.donate(handle, len(tokens))
            self.dead.append(handle)
        else:
            snapshot = self.pool.snapshot(handle, len(tokens))
            if snapshot is None:
                assert self.pool.num_free == 0
                return
            self.cache.retain(pages)
        used = pages[: self.pool.layout.pages_for(len(tokens))]
        assert used == pages
        self.snapshots.append((snapshot, tokens, pages))

    @precondition(lambda self: self.snapshots)
    @rule(data=st.data(), keep=st.booleans())
    def publish(self, data, keep):
        item = self.pick(data, self.snapshots)
        snapshot, tokens, pages = item
        known = self.prefixes.has_entry(tokens)
        assert self.prefixes.insert(tokens, pages, snapshot) != known
        if not keep:
            self.snapshots.remove(item)
            self.pool.release(snapshot)
            self.cache.release(pages)

    @precondition(lambda self: self.snapshots)
    @rule(data=st.data())
    def restore_over(self, data):
        snapshot, tokens, _ = self.pick(data, self.snapshots)
        handle = self.pool.restore(snapshot)
        if handle is None:
            assert self.pool.num_free == 0
            return
        self.check_slot(handle, tokens)
        self.write(handle.slot, [0, 0, 0])
        self.check_slot(snapshot, tokens)
        self.pool.free(handle)

    @precondition(lambda self: self.active)
    @rule(data=st.data(), num=st.integers(1, 3), accepted=st.integers(0, 3))
    def draft(self, data, num, accepted):
        index = data.draw(st.integers(0, len(self.active) - 1))
        handle, tokens, pages = self.active[index]
        # Draft rows would be written behind the committed ones; none need new pages here.
        room = len(pages) * PAGE - len(tokens)
        accepted = min(accepted, num)
        assume(num <= room)
        drafts = self.pool.begin_draft(handle, num)
        if drafts is None:
            assert self.pool.num_free < num
            return
        before, longer = handle, list(tokens)
        for draft in drafts:
            self.pool.advance_draft(before, draft)
            longer.append(1)
            slot = self.pool.begin(draft, len(longer) - 1, len(longer))
            self.write(slot, longer)
            at = len(longer) - 1
            self.cache.rows[:, pages[at // PAGE], at % PAGE] = mark(longer)
            self.pool.commit(draft, len(longer))
            before = draft
        kept = self.pool.commit_draft(handle, drafts, accepted)
        self.dead += [h for h in (handle, *drafts) if h != kept]
        self.active[index] = (kept, longer[: len(tokens) + accepted], pages)

    # -- pins, eviction, transfers ---------------------------------------------------------------
    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14))
    def pin(self, tokens):
        if len(self.hits) < 2:
            self.hits.append((self.prefixes.match(tokens), tokens))

    @precondition(lambda self: self.hits)
    @rule()
    def unpin(self):
        hit, tokens = self.hits.pop(0)
        if hit.depth:
            self.check_slot(hit.snapshot, tokens[: hit.depth])
            self.check_rows(hit.pages, tokens[: hit.depth])
        self.prefixes.unpin(hit)

    @rule(slots=st.integers(0, SLOTS), pages=st.integers(0, PAGES))
    def evict(self, slots, pages):
        if self.prefixes.evict(slots=slots, pages=pages):
            assert self.pool.num_free >= slots
            assert self.cache.num_free >= pages

    @rule()
    def stage(self):
        handle = self.pool.stage()
        if handle is not None:
            self.staged.append(handle)

    @precondition(lambda self: self.staged)
    @rule(how=st.sampled_from(["discard", "quarantine", "publish"]))
    def unstage(self, how):
        handle = self.staged.pop(0)
        if how == "discard":
            self.pool.discard(handle)
        elif how == "quarantine":
            self.pool.quarantine(handle, "test")
            self.quarantined.append(handle)
            return
        else:
            self.write(handle.slot, [1])
            self.pool.release(self.pool.publish(handle, 1))
        self.dead.append(handle)

    @precondition(lambda self: self.quarantined)
    @rule()
    def end_quarantine(self):
        self.pool.end_quarantine(self.quarantined.pop(0))

    @precondition(lambda self: self.dead)
    @rule(data=st.data())
    def use_a_dead_handle(self, data):
        handle = self.pick(data, self.dead)
        for use in (self.pool.free, self.pool.restore, self.pool.release, self.pool.position):
            with pytest.raises(StateError):
                use(handle)

    # -- always ----------------------------------------------------------------------------------
    @invariant()
    def accounts_balance(self):
        ServingMachine.checks += 1
        audit = self.pool.audit()
        pages, snapshots = self.prefixes.audit()
        held = {h.slot for h, _, _ in self.snapshots} | {h.slot for h in snapshots}
        pinned = {hit.snapshot.slot for hit, _ in self.hits if hit.snapshot}
        assert pinned <= held
        assert audit.counts[SlotState.ACTIVE] == len(self.active)
        assert audit.counts[SlotState.SNAPSHOT] == len(held)
        assert audit.counts[SlotState.STAGING] == len(self.staged)
        assert audit.counts[SlotState.QUARANTINED] == len(self.quarantined)
        for _, _, more in [*self.active, *self.snapshots]:
            pages = [*pages, *more]
        for hit, _ in self.hits:
            pages = [*pages, *hit.pages]
        assert self.cache.audit().used == len(set(pages))
        assert self.cache.audit().references == len(pages)

    @invariant()
    def contents_are_their_own(self):
        for handle, tokens, pages in [*self.active, *self.snapshots]:
            self.check_slot(handle, tokens)
            self.check_rows(pages, tokens)
        free = set(range(1, SLOTS + 1)) - set(self.pool.audit().positions)
        for slot in free:
            assert torch.isnan(self.pool.recurrent[:, slot]).all()

    def teardown(self):
        while self.hits:
            self.unpin()
        for handle, _, pages in self.active:
            self.pool.free(handle)
            self.cache.release(pages)
        for handle, _, pages in self.snapshots:
            self.pool.release(handle)
            self.cache.release(pages)
        for handle in self.staged:
            self.pool.discard(handle)
        for handle in self.quarantined:
            self.pool.end_quarantine(handle)
        assert self.prefixes.clear()
        assert self.pool.audit().in_use == 0
        assert self.cache.audit().used == 0


QUIET = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


def drive(*, examples: int, steps: int, shrink: bool = True) -> int:
    """Run the machine; how many states were audited."""
    ServingMachine.checks = 0
    run_state_machine_as_test(
        ServingMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            phases=list(Phase) if shrink else [Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
    return ServingMachine.checks


def test_random_operations_agree_with_the_plain_model():
    assert drive(examples=30, steps=40) >= 600


@pytest.mark.slow
def test_twenty_thousand_random_operations_agree_with_the_plain_model():
    done = 0
    while done < 20_000:
        done += drive(examples=200, steps=100)
