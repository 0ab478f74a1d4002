"""StatePool and StateLayout: tenancies, snapshots, drafts, sizes."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path

import pytest
import torch

from moe_comm.model.config import K3Config
from moe_comm.model.serving.layout import StateLayout
from moe_comm.model.serving.slots import SlotState, StateError
from moe_comm.model.serving.state_pool import StatePool

sys.path.append(str(Path(__file__).parent))
from serving_cases import small_layout


def fill(pool: StatePool, slot: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    for tensor in pool.tensors.values():
        tensor[:, slot] = torch.randn(tensor[:, slot].shape, generator=draw).to(tensor.dtype)


def contents(pool: StatePool, slot: int) -> list[torch.Tensor]:
    return [tensor[:, slot].clone() for tensor in pool.tensors.values()]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def advance(pool: StatePool, handle, to: int, seed: int) -> None:
    slot = pool.begin(handle, pool.position(handle), to)
    fill(pool, slot, seed)
    pool.commit(handle, to)


@pytest.fixture
def pool() -> StatePool:
    return StatePool(small_layout(), 4, debug=True)


def test_layout_sizes_are_those_of_the_published_model():
    layout = StateLayout.from_config(K3Config.preset("kimi-k3"))
    assert layout.num_kda_layers == 69
    assert layout.num_mla_layers == 24
    assert layout.slot_bytes == 449_372_160
    assert layout.page_bytes == 64 * 27_648
    tp8 = layout.with_tp(3, 8)
    assert tp8.slot_bytes * 8 == layout.slot_bytes
    assert tp8.head_range == (36, 48)


def test_fingerprint_tells_every_field_apart():
    layout = small_layout()
    changes = {
        "kda_layer_ids": (0, 3),
        "mla_layer_ids": (3,),
        "num_heads": 8,
        "head_dim_k": 3,
        "head_dim_v": 5,
        "conv_width": 3,
        "conv_dtype": torch.float16,
        "mla_width": 7,
        "mla_dtype": torch.float16,
        "page_size": 16,
        "chunk_size": 16,
        "tp_rank": 1,
        "tp_size": 2,
        "model_id": "other",
    }
    assert set(changes) == {f.name for f in dataclasses.fields(StateLayout)}
    prints = {layout.fingerprint()}
    for name, value in changes.items():
        extra = {"tp_size": 2} if name == "tp_rank" else {}
        prints.add(small_layout(**{name: value, **extra}).fingerprint())
    assert len(prints) == len(changes) + 1
    assert small_layout().fingerprint() == layout.fingerprint()


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_heads", 3), ("conv_width", 1), ("tp_rank", 2), ("kda_layer_ids", (2, 0))],
)
def test_layout_refuses_impossible_shapes(field, value):
    with pytest.raises(ValueError, match=field):
        small_layout(tp_size=2, **{field: value})


def test_max_concurrency_is_exact():
    layout = small_layout()
    pool = StatePool(layout, 5)
    used = sum(t.numel() * t.element_size() for t in pool.tensors.values())
    assert used == 6 * layout.slot_bytes
    assert StatePool.max_concurrency(layout, used) == 5
    assert StatePool.max_concurrency(layout, used - 1) == 4
    assert StatePool.max_concurrency(layout, 0) == 0


def test_allocation_zeroes_and_never_gives_out_slot_zero(pool):
    handles = pool.allocate(4)
    assert sorted(h.slot for h in handles) == [1, 2, 3, 4]
    for handle in handles:
        assert all(not t.any() for t in contents(pool, handle.slot))
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []


def test_a_freed_slot_is_poisoned_and_zero_for_the_next_tenant():
    pool = StatePool(small_layout(), 1, debug=True)
    (handle,) = pool.allocate(1)
    advance(pool, handle, 3, seed=1)
    pool.free(handle)
    assert all(t.isnan().all() for t in contents(pool, handle.slot))
    (again,) = pool.allocate(1)
    assert again.slot == handle.slot
    assert all(not t.any() for t in contents(pool, again.slot))
    assert pool.position(again) == 0


def test_handles_are_plain_integers_that_later_calls_do_not_change(pool):
    (first,) = pool.allocate(1)
    before = (first.slot, first.generation)
    pool.free(first)
    pool.allocate(4)
    assert (first.slot, first.generation) == before
    assert all(type(value) is int for value in before)


def test_stale_and_foreign_handles_raise(pool):
    (handle,) = pool.allocate(1)
    pool.free(handle)
    for use in (
        lambda: pool.free(handle),
        lambda: pool.position(handle),
        lambda: pool.begin(handle, 0, 1),
        lambda: pool.snapshot(handle, 0),
    ):
        with pytest.raises(StateError, match="moved on"):
            use()
    other = StatePool(small_layout(), 4)
    (live,) = other.allocate(1)
    with pytest.raises(StateError, match="pool"):
        pool.free(live)
    with pytest.raises(StateError, match="outside"):
        other.free(dataclasses.replace(live, slot=-1))
    with pytest.raises(StateError, match="outside"):
        other.free(dataclasses.replace(live, slot=0))


def test_updates_must_start_where_the_state_stands(pool):
    (handle,) = pool.allocate(1)
    advance(pool, handle, 5, seed=1)
    with pytest.raises(StateError, match="twice"):
        pool.begin(handle, 4, 6)
    with pytest.raises(StateError, match="skipped"):
        pool.begin(handle, 6, 7)
    pool.begin(handle, 5, 6)
    with pytest.raises(StateError, match="open"):
        pool.begin(handle, 5, 6)
    with pytest.raises(StateError, match="was to reach 6"):
        pool.commit(handle, 7)
    with pytest.raises(StateError, match="open"):
        pool.snapshot(handle, 5)


def test_snapshot_at_another_position_is_refused(pool):
    (handle,) = pool.allocate(1)
    advance(pool, handle, 5, seed=1)
    for position in (4, 6, 0):
        with pytest.raises(StateError, match="holds 5 tokens"):
            pool.snapshot(handle, position)
        with pytest.raises(StateError, match="holds 5 tokens"):
            pool.donate(handle, position)


def test_snapshots_and_restores_are_deep_and_independent(pool):
    (handle,) = pool.allocate(1)
    advance(pool, handle, 7, seed=1)
    kept = contents(pool, handle.slot)
    snapshot = pool.snapshot(handle, 7)
    first, second = pool.restore(snapshot), pool.restore(snapshot)
    advance(pool, handle, 8, seed=2)
    advance(pool, first, 9, seed=3)
    assert same(contents(pool, snapshot.slot), kept)
    assert same(contents(pool, second.slot), kept)
    assert pool.position(second) == 7
    assert pool.restore(snapshot) is None  # full, not an assertion
    assert pool.snapshot(handle, 8) is None
    with pytest.raises(StateError, match="expected active"):
        pool.begin(snapshot, 7, 8)


def test_restore_into_a_live_slot_and_never_into_a_freed_one(pool):
    first, second = pool.allocate(2)
    advance(pool, first, 4, seed=1)
    snapshot = pool.snapshot(first, 4)
    pool.begin(second, 0, 3)
    pool.restore(snapshot, second)
    assert same(contents(pool, second.slot), contents(pool, first.slot))
    pool.begin(second, 4, 5)
    pool.free(second)
    with pytest.raises(StateError, match="moved on"):
        pool.restore(snapshot, second)


def test_references_keep_a_snapshot_alive(pool):
    (handle,) = pool.allocate(1)
    snapshot = pool.snapshot(handle, 0)
    pool.retain(snapshot)
    pool.release(snapshot)
    assert pool.state_of(snapshot) is SlotState.SNAPSHOT
    pool.release(snapshot)
    with pytest.raises(StateError, match="moved on"):
        pool.release(snapshot)
    with pytest.raises(StateError, match="moved on"):
        pool.restore(snapshot)


def test_donation_and_activation_move_ownership_without_a_copy(pool):
    (handle,) = pool.allocate(1)
    advance(pool, handle, 4, seed=1)
    kept = contents(pool, handle.slot)
    snapshot = pool.donate(handle, 4)
    with pytest.raises(StateError, match="moved on"):
        pool.begin(handle, 4, 5)
    pool.retain(snapshot)
    with pytest.raises(StateError, match="2 references"):
        pool.activate(snapshot)
    pool.release(snapshot)
    active = pool.activate(snapshot)
    assert active.slot == handle.slot
    assert same(contents(pool, active.slot), kept)
    assert pool.audit().counts[SlotState.ACTIVE] == 1


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_draft_tokens_are_kept_or_dropped_by_choice_of_slot(pool, accepted):
    (handle,) = pool.allocate(1)
    advance(pool, handle, 10, seed=1)
    states = [contents(pool, handle.slot)]
    drafts = pool.begin_draft(handle, 3)
    assert pool.begin_draft(handle, 1) is None
    before = handle
    for i, draft in enumerate(drafts):
        pool.advance_draft(before, draft)
        assert same(contents(pool, draft.slot), states[-1])
        advance(pool, draft, 11 + i, seed=20 + i)
        states.append(contents(pool, draft.slot))
        with pytest.raises(StateError, match="draft"):
            pool.snapshot(draft, 11 + i)  # nothing unverified is ever published
        before = draft
    kept = pool.commit_draft(handle, drafts, accepted)
    assert pool.position(kept) == 10 + accepted
    assert same(contents(pool, kept.slot), states[accepted])
    assert pool.audit().in_use == 1
    assert pool.snapshot(kept, 10 + accepted) is not None


def test_a_draft_slot_that_nobody_filled_cannot_be_committed(pool):
    (handle,) = pool.allocate(1)
    advance(pool, handle, 10, seed=1)
    drafts = pool.begin_draft(handle, 2)
    pool.advance_draft(handle, drafts[0])
    advance(pool, drafts[0], 11, seed=2)
    for unfilled in (2,):
        with pytest.raises(StateError, match="expected 10"):
            pool.commit_draft(handle, drafts, unfilled)
    kept = pool.commit_draft(handle, drafts, 1)
    assert pool.position(kept) == 11


def test_staged_slots_are_poisoned_until_published(pool):
    staged = pool.stage()
    assert all(t.isnan().all() for t in contents(pool, staged.slot))
    with pytest.raises(StateError, match="expected snapshot"):
        pool.restore(staged)
    fill(pool, staged.slot, 3)
    snapshot = pool.publish(staged, 9)
    assert pool.position(snapshot) == 9
    with pytest.raises(StateError, match="moved on"):
        pool.publish(staged, 9)


def test_quarantine_holds_a_slot_until_it_is_ended(pool):
    staged = pool.stage()
    pool.quarantine(staged, "timed out")
    assert len(pool.allocate(3)) == 3
    assert pool.allocate(1) is None
    with pytest.raises(StateError, match="expected staging"):
        pool.publish(staged, 1)
    pool.end_quarantine(staged)
    assert pool.audit().counts[SlotState.QUARANTINED] == 0
    assert pool.allocate(1) is not None


def test_audit_finds_a_slot_that_is_counted_twice(pool):
    (handle,) = pool.allocate(1)
    pool._free.append(handle.slot)
    with pytest.raises(StateError, match="audit"):
        pool.audit()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_copies_are_exact_for_odd_row_sizes(dtype):
    layout = small_layout(num_heads=1, head_dim_k=3, head_dim_v=1, conv_dtype=dtype)
    pool = StatePool(layout, 3)
    (handle,) = pool.allocate(1)
    advance(pool, handle, 1, seed=4)
    pool.recurrent[0, handle.slot, 0, 0, 0] = -math.nan
    pool.recurrent[0, handle.slot, 0, 1, 0] = -0.0
    snapshot = pool.snapshot(handle, 1)
    for tensor in pool.tensors.values():
        a, b = tensor[:, handle.slot].contiguous(), tensor[:, snapshot.slot].contiguous()
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
