"""Each known kind of fault, put in on purpose, is found by the comparison that verify-state makes,
at the right place and with the right name; without it, every mode is equal to the baseline."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from moe_comm.model.serving import modes, residency, staged_import
from moe_comm.model.serving.batch import SequenceSlice, make_batch
from moe_comm.model.serving.diagnose import diagnose
from moe_comm.model.serving.modes import RUNNERS, Case, Rig, compare, short_chunks, whole
from moe_comm.model.serving.paged_cache import PagedCache
from moe_comm.model.serving.prefix_cache import PrefixCache
from moe_comm.model.serving.residency import Residency
from moe_comm.model.serving.scheduler import Scheduler
from moe_comm.model.serving.segments import export_segments
from moe_comm.model.serving.slots import SlotState, StateError
from moe_comm.model.serving.state_pool import StatePool

sys.path.append(str(Path(__file__).parent))
from serving_cases import VOCAB, SmallHybrid, small_layout

LAYOUT = small_layout()
CASE = Case.random(VOCAB, grid=8, num_new=4, seed=3)


def rig(model=None) -> Rig:
    return Rig(model or SmallHybrid(LAYOUT), LAYOUT)


def find(mode: str, fault_rig: Rig) -> tuple:
    """(difference, blame) of one mode against the baseline of a sound rig."""
    trail = RUNNERS[mode](fault_rig, CASE)
    sound = rig()
    found = compare(sound, CASE, whole(sound, CASE), trail)
    if found is None:
        return None, ""
    return found[0], diagnose(sound, CASE, *found)


@pytest.mark.parametrize("mode", list(RUNNERS))
def test_every_mode_is_equal_to_the_baseline(mode):
    assert find(mode, rig()) == (None, "")


def test_modes_do_what_they_say():
    sound = rig()
    assert list(RUNNERS["cached"](sound, CASE).taken_over) == [8, 16]
    assert list(RUNNERS["preempted"](sound, CASE).taken_over) == [8, len(CASE.prompt)]
    assert list(RUNNERS["migrated"](sound, CASE).taken_over) == [len(CASE.prompt)]
    assert RUNNERS["whole"](sound, CASE).taken_over == {}
    positions = [len(CASE.prompt) + i for i in range(4)]
    for mode in RUNNERS:
        assert list(RUNNERS[mode](sound, CASE).run) == positions


def test_short_chunks_equal_the_baseline_where_the_model_has_no_grid():
    sound = rig()
    assert compare(sound, CASE, whole(sound, CASE), short_chunks(sound, CASE)) is None


# -- faults: name, modes that must find it, how to put it in, what the blame must say --------------
def stale_slot(patch):
    """A hit reads a slot that was just popped, with the last tenant's bytes in it."""
    fill, restore = StatePool._fill, StatePool.restore

    def fill_zero_only(self, index, value):
        if value == 0:
            fill(self, index, value)

    def restore_nothing(self, snapshot, into=None):
        handle = restore(self, snapshot, into)
        self._copy(1, handle.slot)  # the first tenant, gone by now
        return handle

    patch.setattr(StatePool, "_fill", fill_zero_only)
    patch.setattr(StatePool, "restore", restore_nothing)


def uncleared_slot(patch):
    """Restoring forgets to copy: the slot is as its last tenant left it (poisoned, in debug)."""
    restore, copy = StatePool.restore, StatePool._copy

    def restore_without_copy(self, snapshot, into=None):
        patch.setattr(StatePool, "_copy", lambda *_: None)
        handle = restore(self, snapshot, into)
        patch.setattr(StatePool, "_copy", copy)
        return handle

    patch.setattr(StatePool, "restore", restore_without_copy)
    fill = StatePool._fill
    patch.setattr(StatePool, "_fill", lambda s, i, v: None if v == 0 else fill(s, i, v))


def wrong_depth(patch):
    """The state of a shallower depth than the hit's."""
    restore = StatePool.restore

    def restore_shallower(self, snapshot, into=None):
        handle = restore(self, snapshot, into)
        for slot, record in enumerate(self._slots):
            shallower = record.position < self.position(snapshot)
            if record.state is SlotState.SNAPSHOT and shallower:
                self._copy(slot, handle.slot)
        return handle

    patch.setattr(StatePool, "restore", restore_shallower)


def bf16_snapshot(patch):
    copy = StatePool._copy

    def copy_rounded(self, source, target):
        copy(self, source, target)
        self.recurrent[:, target] = self.recurrent[:, target].bfloat16().float()

    patch.setattr(StatePool, "_copy", copy_rounded)


def bf16_host_copy(patch):
    def export_rounded(*args, **kwargs):
        segments = export_segments(*args, **kwargs)
        return {**segments, "recurrent": segments["recurrent"].bfloat16().float()}

    for module in (modes, residency):
        patch.setattr(module, "export_segments", export_rounded)


def axis_swap(patch):
    def export_swapped(*args, **kwargs):
        segments = export_segments(*args, **kwargs)
        state = segments["recurrent"]
        return {**segments, "recurrent": state.transpose(2, 3).reshape(state.shape)}

    for module in (modes, residency):
        patch.setattr(module, "export_segments", export_swapped)


def swapped_groups(patch):
    def export_swapped(*args, **kwargs):
        segments = export_segments(*args, **kwargs)
        q, k = segments["conv.q"], segments["conv.k"]
        return {**segments, "conv.q": k, "conv.k": q}

    for module in (modes, residency):
        patch.setattr(module, "export_segments", export_swapped)


def state_without_pages(patch):
    patch.setattr(PagedCache, "scatter", lambda *_: None)


def pages_without_state(patch):
    """Only the rows travel; decode starts from zero and stays fluent."""

    def import_rows(pool, cache, slot, pages, segments, *, part):
        pool._fill(slot, 0)
        cache.scatter(pages, segments["mla"])

    for module in (staged_import, residency):
        patch.setattr(module, "import_segments", import_rows)


def token_twice(patch):
    """The producer goes on for one token after the state was labelled."""
    hold = Residency.hold

    def hold_later(self, tracked):
        model = SmallHybrid(LAYOUT)
        assert self.grow(tracked, tracked.processed + 1)
        one = SequenceSlice(
            token_ids=(tracked.tokens[tracked.processed],),
            start=tracked.processed,
            slot=tracked.state.slot,
            pages=tracked.pages,
        )
        model.forward(make_batch([one], pool=self.pool, cache=self.cache.rows))
        hold(self, tracked)

    patch.setattr(Residency, "hold", hold_later)


FAULTS = {
    "stale slot": (stale_slot, ["cached"], "stale slot: another request's state (cousin, 20"),
    "uncleared slot": (uncleared_slot, ["cached"], "freed slot"),
    "wrong depth": (
        wrong_depth,
        ["cached"],
        "wrong depth: a state of 8 tokens was used as one of 16",
    ),
    "bf16 snapshot": (bf16_snapshot, ["cached"], "bf16 snapshot"),
    "bf16 host copy": (bf16_host_copy, ["migrated", "preempted"], "bf16 snapshot"),
    "axis swap": (axis_swap, ["migrated", "preempted"], "axis swap"),
    "swapped conv groups": (swapped_groups, ["migrated", "preempted"], "contiguous conv slicing"),
    "state without pages": (state_without_pages, ["migrated", "preempted"], "freed page"),
    "pages without state": (pages_without_state, ["migrated", "preempted"], "empty state"),
    "token twice at hand-off": (token_twice, ["migrated"], "token processed twice"),
}


@pytest.mark.parametrize(
    ("fault", "mode"),
    [(name, mode) for name, (_, found_by, _) in FAULTS.items() for mode in found_by],
)
def test_a_fault_is_found_and_named(fault, mode, monkeypatch):
    put_in, _, blame = FAULTS[fault]
    with monkeypatch.context() as patch:
        put_in(patch)
        trail = RUNNERS[mode](rig(), CASE)
    sound = rig()
    found = compare(sound, CASE, whole(sound, CASE), trail)
    assert found is not None, "the fault went unnoticed"
    assert diagnose(sound, CASE, *found).startswith(blame)
    layer = 1 if fault == "state without pages" else 0
    assert found[0].layer == layer
    assert str(found[0].position) in str(found[0])


class LosesShortWindows(SmallHybrid):
    """A chunk shorter than the window writes it as if nothing had come before."""

    def forward(self, batch):
        logits = super().forward(batch)
        for i, length in enumerate(batch.lengths):
            lost = self.layout.conv_width - 1 - length
            if lost > 0 and batch.starts[i] + length <= len(CASE.prompt):
                for window in batch.pool.conv.values():
                    window[:, batch.slots[i], :, :lost] = 0
        return logits


def test_a_short_chunk_that_loses_the_window_is_found():
    difference, blame = find("chunked", rig(LosesShortWindows(LAYOUT)))
    assert (difference.layer, difference.tensor) == (0, "conv.q")
    assert blame.startswith("short chunk")


class SharesSnapshots(SmallHybrid):
    """Writes go through to the snapshot that a slot was restored from, as if it were a view."""

    origin: dict[int, int]

    def forward(self, batch):
        logits = super().forward(batch)
        for slot in batch.slots.tolist():
            if slot in self.origin:
                for tensor in (batch.pool.recurrent, *batch.pool.conv.values()):
                    tensor[:, self.origin[slot]] = tensor[:, slot]
        return logits


def test_an_aliased_snapshot_is_found_by_its_second_user(monkeypatch):
    model, restore = SharesSnapshots(LAYOUT), StatePool.restore
    model.origin = {}

    def remember(self, snapshot, into=None):
        handle = restore(self, snapshot, into)
        model.origin[handle.slot] = snapshot.slot
        return handle

    with monkeypatch.context() as patch:
        patch.setattr(StatePool, "restore", remember)
        server = Rig(model, LAYOUT).serve(CASE, prefix=True)
        server.serve(CASE.request("first"))
        server.serve(CASE.request("second"))
        server.serve(CASE.request("third"))
    sound = rig()
    baseline = whole(sound, CASE)
    assert compare(sound, CASE, baseline, server.trail("second")) is None
    found = compare(sound, CASE, baseline, server.trail("third"))
    assert found is not None
    assert diagnose(sound, CASE, *found).startswith("wrong depth")


def test_a_restore_into_a_freed_slot_is_an_error(monkeypatch):
    state_at = Residency._state_at

    def freed(self, hit):
        handle = state_at(self, hit)
        self.pool.free(handle)
        return handle

    monkeypatch.setattr(Residency, "_state_at", freed)
    with pytest.raises(StateError, match="moved on"):
        RUNNERS["cached"](rig(), CASE)


def test_a_hit_on_pages_alone_is_an_error(monkeypatch):
    """Attention rows without a state of that depth: the position gives it away."""
    match = PrefixCache.match

    def deeper(self, tokens):
        hit = match(self, tokens)
        if hit.depth == 16:
            self.unpin(hit)
            shallow = match(self, tokens[:9])
            object.__setattr__(shallow, "depth", 16)
            object.__setattr__(shallow, "pages", hit.pages)
            self.cache.retain(hit.pages[1:])
            return shallow
        return hit

    monkeypatch.setattr(PrefixCache, "match", deeper)
    with pytest.raises(StateError, match="holds 8 tokens, the update starts at 16"):
        RUNNERS["cached"](rig(), CASE)


def test_a_token_processed_again_is_an_error(monkeypatch):
    adopt = Scheduler.adopt

    def adopt_one_back(self, request, imported):
        adopt(self, request, imported)
        self.tracked[request.name].processed -= 1

    monkeypatch.setattr(Scheduler, "adopt", adopt_one_back)
    with pytest.raises(StateError, match="processed twice"):
        RUNNERS["migrated"](rig(), CASE)


def test_contiguous_conv_slicing_is_found(monkeypatch):
    """One cut through q, k and v laid end to end, in place of one cut a group."""
    from test_serving_migration import test_states_are_resliced_between_tensor_parallel_sizes

    import moe_comm.model.serving.segments as segments

    views = segments.slot_views

    def contiguous(pool, slot, part):
        right = views(pool, slot, part)
        if pool.layout.tp_size > 1 or part.num_heads == pool.layout.num_heads:
            return right
        block = torch.cat([pool.conv[g][:, slot] for g in "qkv"], dim=1)
        share = block.shape[1] * part.num_heads // pool.layout.num_heads
        at = share * part.first_head // part.num_heads
        for group in "qkv":
            rows = right[f"conv.{group}"].shape[1]
            right[f"conv.{group}"] = block[:, at : at + rows]
            at += rows
        return right

    test_states_are_resliced_between_tensor_parallel_sizes(1, 2)
    monkeypatch.setattr(segments, "slot_views", contiguous)
    with pytest.raises(AssertionError, match=r"conv\.k"):
        test_states_are_resliced_between_tensor_parallel_sizes(1, 2)


@pytest.mark.parametrize(
    ("method", "broken"),
    [
        ("_fill", lambda *_: None),
        ("_copy", lambda *_: None),
        ("release", lambda self, snapshot: self._expect(snapshot, None, "release")),
    ],
)
def test_the_state_machine_notices_a_broken_pool(method, broken, monkeypatch):
    from test_serving_machine import drive

    monkeypatch.setattr(StatePool, method, broken)
    with pytest.raises((AssertionError, StateError)):
        drive(examples=60, steps=40, shrink=False)
