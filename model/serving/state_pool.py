"""StatePool: fixed slots of recurrent and convolution state, with handles that go stale.

Every slot is in one state: FREE, ACTIVE (a request updates it in place), SNAPSHOT (immutable,
reference-counted), STAGING (an inbound transfer writes it) or QUARANTINED (a transfer timed out
and its writer may still write). Slot 0 is reserved: padded rows may write there.

Running out of slots is not an error: the call returns None and the scheduler queues or evicts.
Using a stale handle, a wrong position or an immutable slot is one, always.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from collections.abc import Sequence

import torch

from moe_comm.model.serving.layout import CONV_GROUPS, RECURRENT_DTYPE, StateLayout
from moe_comm.model.serving.slots import Handle, PoolAudit, Slot, SlotState, StateError

_POOL_IDS = itertools.count(1)


class StatePool:
    """All KDA layers' state of `num_slots` tenants, and one reserved slot more.

    Tensors (public: the model updates them in place):
    - `recurrent`: [L, 1 + num_slots, H, Dk, Dv] fp32;
    - `conv`: "q", "k", "v" to [L, 1 + num_slots, channels, W - 1] of the layout's dtype.

    `debug=True` fills a freed slot with NaN, so that a reader of a dead slot cannot go unnoticed.
    Copies run on the current stream; a snapshot may be released as soon as the call returns,
    because whatever reuses its slot is enqueued later on the same stream.
    """

    def __init__(
        self,
        layout: StateLayout,
        num_slots: int,
        *,
        device: torch.device | str = "cpu",
        debug: bool = False,
    ) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots: expected at least 1, got {num_slots}")
        self.layout, self.num_slots, self.debug = layout, num_slots, debug
        self.pool_id = next(_POOL_IDS)
        rows = (layout.num_kda_layers, num_slots + 1)
        self.recurrent = torch.zeros(
            *rows, *layout.recurrent_shape, dtype=RECURRENT_DTYPE, device=device
        )
        self.conv = {
            group: torch.zeros(
                *rows, *layout.conv_shape(group), dtype=layout.conv_dtype, device=device
            )
            for group in CONV_GROUPS
        }
        # The same memory in elements of up to 16 bytes: a copy of one slot is strided over layers,
        # and wide elements keep such a copy near the rate of a plain one.
        self._wide = [_widest(tensor) for tensor in self.tensors.values()]
        self._slots = [Slot() for _ in range(num_slots + 1)]
        # First in, first out: a freed slot rests as long as it can, so a use after free meets
        # poison more often than a new tenant.
        self._free = deque(range(1, num_slots + 1))
        if debug:
            for slot in range(1, num_slots + 1):
                self._fill(slot, math.nan)

    @staticmethod
    def max_concurrency(layout: StateLayout, memory_bytes: int) -> int:
        """Tenants that fit in `memory_bytes`, the reserved slot paid for. Exact."""
        if memory_bytes < 0:
            raise ValueError(f"memory_bytes: expected at least 0, got {memory_bytes}")
        return max(0, memory_bytes // layout.slot_bytes - 1)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Name to tensor: "recurrent", "conv.q", "conv.k", "conv.v". Slots are axis 1 of each."""
        return {"recurrent": self.recurrent, **{f"conv.{g}": self.conv[g] for g in CONV_GROUPS}}

    @property
    def num_free(self) -> int:
        return len(self._free)

    # -- tenants ---------------------------------------------------------------------------------
    def allocate(self, num: int = 1) -> list[Handle] | None:
        """`num` ACTIVE slots of zero state at position 0, or None where fewer are free."""
        if num < 0:
            raise ValueError(f"num: expected at least 0, got {num}")
        if num > len(self._free):
            return None
        handles = [self._take(SlotState.ACTIVE) for _ in range(num)]
        for handle in handles:
            self._fill(handle.slot, 0)
        return handles

    def free(self, handle: Handle) -> None:
        """End an ACTIVE tenancy. A second free of the same handle raises StateError."""
        self._expect(handle, SlotState.ACTIVE, "free")
        self._give_back(handle.slot)

    def position(self, handle: Handle) -> int:
        """Tokens that a live slot's state holds, as of the last commit."""
        return self._expect(handle, None, "position").position

    def begin(self, handle: Handle, from_position: int, to_position: int) -> int:
        """Announce an in-place update over tokens [from_position, to_position); returns the slot.

        Raises StateError unless the slot is ACTIVE, holds exactly `from_position` tokens and has
        no update open: so no token is processed twice, and none is skipped.
        """
        slot = self._expect(handle, SlotState.ACTIVE, "begin")
        if slot.updating_to is not None:
            raise StateError(f"begin: slot {handle.slot} has an update to {slot.updating_to} open")
        if from_position != slot.position:
            raise StateError(
                f"begin: slot {handle.slot} holds {slot.position} tokens, the update starts at "
                f"{from_position}: tokens would be {_twice(from_position, slot.position)}"
            )
        if to_position <= from_position:
            raise ValueError(f"to_position: expected above {from_position}, got {to_position}")
        slot.updating_to = to_position
        return handle.slot

    def commit(self, handle: Handle, position: int) -> None:
        """Close an update whose kernels are enqueued; `position` must be the announced end."""
        slot = self._expect(handle, SlotState.ACTIVE, "commit")
        if slot.updating_to != position:
            raise StateError(
                f"commit: slot {handle.slot} was to reach {slot.updating_to}, got {position}"
            )
        slot.position, slot.updating_to = position, None

    # -- snapshots -------------------------------------------------------------------------------
    def snapshot(self, handle: Handle, position: int) -> Handle | None:
        """An immutable copy of the state at `position`, one reference; None where no slot is free.

        Raises StateError where the committed position is another, an update is open, or the slot
        holds draft tokens nobody has verified.
        """
        self._expect_settled(handle, position, "snapshot")
        if not self._free:
            return None
        copy = self._take(SlotState.SNAPSHOT)
        self._copy(handle.slot, copy.slot)
        self._slots[copy.slot].position = position
        self._slots[copy.slot].references = 1
        return copy

    def donate(self, handle: Handle, position: int) -> Handle:
        """Turn an ACTIVE slot into a snapshot without a copy; `handle` is dead afterwards."""
        slot = self._expect_settled(handle, position, "donate")
        slot.state, slot.references = SlotState.SNAPSHOT, 1
        slot.generation += 1
        return Handle(pool=self.pool_id, slot=handle.slot, generation=slot.generation)

    def activate(self, snapshot: Handle) -> Handle:
        """Turn a snapshot into an ACTIVE slot without a copy; `snapshot` is dead afterwards.

        Raises StateError where somebody else holds a reference to it.
        """
        slot = self._expect(snapshot, SlotState.SNAPSHOT, "activate")
        if slot.references != 1:
            raise StateError(
                f"activate: slot {snapshot.slot} has {slot.references} references; restore copies"
            )
        slot.state, slot.references = SlotState.ACTIVE, 0
        slot.generation += 1
        return Handle(pool=self.pool_id, slot=snapshot.slot, generation=slot.generation)

    def restore(self, snapshot: Handle, into: Handle | None = None) -> Handle | None:
        """A deep copy of a snapshot in an ACTIVE slot, position included.

        `into`: an ACTIVE slot to overwrite (an open update there is dropped); default: a new one,
        or None where no slot is free.
        """
        source = self._expect(snapshot, SlotState.SNAPSHOT, "restore")
        if into is None:
            if not self._free:
                return None
            into = self._take(SlotState.ACTIVE)
        target = self._expect(into, SlotState.ACTIVE, "restore into")
        self._copy(snapshot.slot, into.slot)
        target.position, target.updating_to, target.draft = source.position, None, False
        return into

    def retain(self, snapshot: Handle) -> None:
        """One more reference: the snapshot lives until each has been released."""
        self._expect(snapshot, SlotState.SNAPSHOT, "retain").references += 1

    def release(self, snapshot: Handle) -> None:
        """One reference less; the last one frees the slot."""
        slot = self._expect(snapshot, SlotState.SNAPSHOT, "release")
        slot.references -= 1
        if slot.references == 0:
            self._give_back(snapshot.slot)

    def references(self, snapshot: Handle) -> int:
        return self._expect(snapshot, SlotState.SNAPSHOT, "references").references

    # -- draft tokens ----------------------------------------------------------------------------
    def begin_draft(self, handle: Handle, num_tokens: int) -> list[Handle] | None:
        """`num_tokens` draft slots for the states after 1, 2, ... draft tokens; None if too few.

        Fill them in order: `advance_draft` copies the state before a draft token, then the model
        updates the draft slot in place. The request's own slot stays as it is until
        `commit_draft` chooses; nothing is ever undone.
        """
        self._expect_settled(handle, self.position(handle), "begin_draft")
        if num_tokens < 1:
            raise ValueError(f"num_tokens: expected at least 1, got {num_tokens}")
        if num_tokens > len(self._free):
            return None
        drafts = [self._take(SlotState.ACTIVE) for _ in range(num_tokens)]
        for draft in drafts:
            self._slots[draft.slot].draft = True
        return drafts

    def advance_draft(self, before: Handle, draft: Handle) -> None:
        """Copy the state before a draft token into that token's draft slot."""
        source = self._expect(before, SlotState.ACTIVE, "advance_draft")
        target = self._expect(draft, SlotState.ACTIVE, "advance_draft")
        if before.slot == draft.slot or not target.draft:
            raise StateError(f"advance_draft: slot {draft.slot} is no draft slot of {before.slot}")
        if source.updating_to is not None:
            raise StateError(f"advance_draft: slot {before.slot} has an update open")
        self._copy(before.slot, draft.slot)
        target.position = source.position

    def commit_draft(self, handle: Handle, drafts: Sequence[Handle], accepted: int) -> Handle:
        """Keep the state after `accepted` draft tokens (0: the request's own); free the others.

        Raises StateError where the chosen slot does not hold exactly that many tokens more than
        the request's own: a draft slot that nobody filled cannot be committed.
        """
        if not 0 <= accepted <= len(drafts):
            raise ValueError(f"accepted: expected 0 to {len(drafts)}, got {accepted}")
        base = self._expect_settled(handle, self.position(handle), "commit_draft")
        for draft in drafts:
            if not self._expect(draft, SlotState.ACTIVE, "commit_draft").draft:
                raise StateError(f"commit_draft: slot {draft.slot} holds no draft token")
        chosen = handle if accepted == 0 else drafts[accepted - 1]
        slot = self._slots[chosen.slot]
        if slot.updating_to is not None or slot.position != base.position + accepted:
            raise StateError(
                f"commit_draft: slot {chosen.slot} holds {slot.position} tokens, expected "
                f"{base.position} + {accepted}"
            )
        slot.draft = False
        for other in (handle, *drafts):
            if other != chosen:
                self._give_back(other.slot)
        return chosen

    # -- inbound transfers -----------------------------------------------------------------------
    def stage(self) -> Handle | None:
        """A STAGING slot for a transfer to write; invisible to everyone until published."""
        if not self._free:
            return None
        handle = self._take(SlotState.STAGING)
        # Not zero: bytes that never arrive must not look like an empty request's state.
        self._fill(handle.slot, math.nan)
        return handle

    def publish(self, handle: Handle, position: int) -> Handle:
        """A verified STAGING slot becomes a snapshot of `position` tokens with one reference."""
        slot = self._expect(handle, SlotState.STAGING, "publish")
        if position < 1:
            raise ValueError(f"position: expected at least 1, got {position}")
        slot.state, slot.position, slot.references = SlotState.SNAPSHOT, position, 1
        slot.generation += 1
        return Handle(pool=self.pool_id, slot=handle.slot, generation=slot.generation)

    def discard(self, handle: Handle) -> None:
        """Free a STAGING slot whose writer has finished or is known gone."""
        self._expect(handle, SlotState.STAGING, "discard")
        self._give_back(handle.slot)

    def quarantine(self, handle: Handle, reason: str) -> None:
        """Keep a STAGING slot out of use: its writer may still write."""
        slot = self._expect(handle, SlotState.STAGING, "quarantine")
        slot.state, slot.reason = SlotState.QUARANTINED, reason

    def end_quarantine(self, handle: Handle) -> None:
        """Free a QUARANTINED slot; the caller knows that the writer is gone."""
        self._expect(handle, SlotState.QUARANTINED, "end_quarantine")
        self._give_back(handle.slot)

    # -- accounts --------------------------------------------------------------------------------
    def state_of(self, handle: Handle) -> SlotState:
        """The state of a live handle; StateError for a stale one."""
        return self._expect(handle, None, "state_of").state

    def audit(self) -> PoolAudit:
        """Count every slot; StateError where the free list and the slots' states disagree."""
        free = list(self._free)
        marked = [i for i, s in enumerate(self._slots) if s.state is SlotState.FREE and i > 0]
        if sorted(free) != marked:
            raise StateError(f"audit: free list {sorted(free)}, slots marked free {marked}")
        for i, slot in enumerate(self._slots):
            if (slot.references > 0) != (slot.state is SlotState.SNAPSHOT):
                raise StateError(f"audit: slot {i} is {slot.state}, {slot.references} references")
        tally = Counter(slot.state for slot in self._slots[1:])
        return PoolAudit(
            total=self.num_slots,
            counts={state: tally.get(state, 0) for state in SlotState},
            positions={
                i: s.position
                for i, s in enumerate(self._slots)
                if i > 0 and s.state is not SlotState.FREE
            },
        )

    # -- inside ----------------------------------------------------------------------------------
    def _take(self, state: SlotState) -> Handle:
        index = self._free.popleft()
        slot = self._slots[index]
        self._slots[index] = Slot(state=state, generation=slot.generation + 1)
        return Handle(pool=self.pool_id, slot=index, generation=slot.generation + 1)

    def _give_back(self, index: int) -> None:
        self._slots[index] = Slot(generation=self._slots[index].generation + 1)
        self._free.append(index)
        if self.debug:
            self._fill(index, math.nan)

    def _fill(self, index: int, value: float) -> None:
        for tensor in self.tensors.values():
            tensor[:, index] = value

    def _copy(self, source: int, target: int) -> None:
        for tensor in self._wide:
            tensor[:, target].copy_(tensor[:, source])

    def _expect(self, handle: Handle, state: SlotState | None, what: str) -> Slot:
        if handle.pool != self.pool_id:
            raise StateError(f"{what}: the handle is of pool {handle.pool}, not {self.pool_id}")
        if not 0 < handle.slot <= self.num_slots:
            raise StateError(f"{what}: slot {handle.slot} is outside [1, {self.num_slots}]")
        slot = self._slots[handle.slot]
        if slot.generation != handle.generation:
            raise StateError(
                f"{what}: slot {handle.slot} has moved on: generation {slot.generation}, the "
                f"handle has {handle.generation}"
            )
        if state is not None and slot.state is not state:
            raise StateError(
                f"{what}: slot {handle.slot} is {slot.state.value}, expected {state.value}"
            )
        return slot

    def _expect_settled(self, handle: Handle, position: int, what: str) -> Slot:
        slot = self._expect(handle, SlotState.ACTIVE, what)
        if slot.updating_to is not None:
            raise StateError(f"{what}: slot {handle.slot} has an update to {slot.updating_to} open")
        if slot.draft:
            raise StateError(f"{what}: slot {handle.slot} holds draft tokens nobody has verified")
        if slot.position != position:
            raise StateError(
                f"{what}: slot {handle.slot} holds {slot.position} tokens, asked for {position}"
            )
        return slot


def _twice(start: int, held: int) -> str:
    return "processed twice" if start < held else "skipped"


def _widest(tensor: torch.Tensor) -> torch.Tensor:
    rows = tensor.view(tensor.shape[0], tensor.shape[1], -1)
    row_bytes = rows.shape[2] * rows.element_size()
    for dtype in (torch.complex128, torch.int64, torch.int32, torch.int16):
        if row_bytes % dtype.itemsize == 0:
            return rows.view(dtype)
    return rows
