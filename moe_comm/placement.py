"""ExpertPlacement: which ranks hold which logical expert, as a table.

Shape legend: E logical experts, R ranks, C the largest number of copies of one expert.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ExpertPlacement:
    """Logical expert -> (rank, slot). Any E and R: uneven counts, empty ranks, several copies.

    Attributes:
        num_experts: E, the number of logical experts.
        slots: `slots[rank][slot]` is the logical expert held there; a slot is the local expert id
            that `Dispatched` speaks of. Every logical expert has at least one slot.

    A token of source rank s at position t of its call goes to copy `(s + t) % num_copies`, copies
    in order of (rank, slot): a rule of (token, rank) alone, so results do not depend on timing.
    """

    num_experts: int
    slots: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not self.slots:
            raise ValueError("slots: expected at least one rank, got none")
        held = [expert for rank_slots in self.slots for expert in rank_slots]
        for expert in held:
            if not 0 <= expert < self.num_experts:
                raise ValueError(
                    f"slots: expected expert ids in [0, {self.num_experts}), got {expert}"
                )
        missing = sorted(set(range(self.num_experts)) - set(held))
        if missing:
            raise ValueError(
                f"slots: expected every expert on some rank, got none for {missing[:8]}"
                f"{' and more' if len(missing) > 8 else ''}"
            )

    @classmethod
    def contiguous(cls, num_experts: int, num_ranks: int) -> ExpertPlacement:
        """Consecutive experts a rank; the first E % R ranks hold one more."""
        if num_ranks < 1:
            raise ValueError(f"num_ranks: expected at least 1, got {num_ranks}")
        base, extra = divmod(num_experts, num_ranks)
        return cls.from_counts([base + (rank < extra) for rank in range(num_ranks)])

    @classmethod
    def from_counts(cls, counts: Sequence[int]) -> ExpertPlacement:
        """Consecutive experts, `counts[rank]` of them on each rank (0 is fine)."""
        if any(count < 0 for count in counts):
            raise ValueError(f"counts: expected no negative count, got {list(counts)}")
        slots, start = [], 0
        for count in counts:
            slots.append(tuple(range(start, start + count)))
            start += count
        return cls(num_experts=start, slots=tuple(slots))

    @classmethod
    def from_load(
        cls, load: Tensor | Sequence[float], num_ranks: int, *, num_redundant: int = 0
    ) -> ExpertPlacement:
        """Balance measured load: replicate the hottest experts, then pack greedily.

        Args:
            load: [E] rows (or tokens) each logical expert received; any non-negative numbers.
            num_ranks: R.
            num_redundant: further physical experts beyond E; each goes to the expert whose load
                a copy is largest at that moment.

        The E + num_redundant physical experts are spread over ranks as evenly as their count
        allows, heaviest first onto the least loaded rank with a free slot. Ties go to the lowest
        id, so every rank computes the same table. Copies of one expert avoid a common rank where
        another has room.
        """
        loads = [float(value) for value in load]
        if num_ranks < 1 or num_redundant < 0:
            raise ValueError(
                "num_ranks, num_redundant: expected at least 1 and 0, got "
                f"{num_ranks} and {num_redundant}"
            )
        if any(not value >= 0 for value in loads):
            raise ValueError("load: expected non-negative numbers, got a negative one or NaN")
        copies = [1] * len(loads)
        heap = [(-value, expert) for expert, value in enumerate(loads)]
        heapq.heapify(heap)
        for _ in range(num_redundant):
            _, expert = heapq.heappop(heap)
            copies[expert] += 1
            heapq.heappush(heap, (-loads[expert] / copies[expert], expert))
        physical = sorted(
            (-loads[expert] / copies[expert], expert)
            for expert in range(len(loads))
            for _ in range(copies[expert])
        )
        base, extra = divmod(len(physical), num_ranks)
        room = [base + (rank < extra) for rank in range(num_ranks)]
        held: list[list[int]] = [[] for _ in range(num_ranks)]
        total = [0.0] * num_ranks
        for negative, expert in physical:
            rank = min(
                (rank for rank in range(num_ranks) if len(held[rank]) < room[rank]),
                key=lambda rank: (expert in held[rank], total[rank], rank),
            )
            held[rank].append(expert)
            total[rank] -= negative
        return cls(num_experts=len(loads), slots=tuple(tuple(sorted(experts)) for experts in held))

    @property
    def num_ranks(self) -> int:
        """R."""
        return len(self.slots)

    def num_local_experts(self, rank: int) -> int:
        """Physical experts on `rank`."""
        return len(self.slots[rank])

    @cached_property
    def max_local_experts(self) -> int:
        """The largest number of physical experts on one rank."""
        return max(len(rank_slots) for rank_slots in self.slots)

    @cached_property
    def num_copies(self) -> Tensor:
        """[E] int32, on the CPU: copies of each logical expert."""
        return torch.bincount(
            torch.tensor([e for rank_slots in self.slots for e in rank_slots], dtype=torch.int64),
            minlength=self.num_experts,
        ).to(torch.int32)

    @cached_property
    def copy_table(self) -> Tensor:
        """[E, C, 2] int32, on the CPU: (rank, slot) of each copy, -1 where there is none."""
        width = int(self.num_copies.max())
        table = torch.full((self.num_experts, width, 2), -1, dtype=torch.int32)
        seen = [0] * self.num_experts
        for rank, rank_slots in enumerate(self.slots):
            for slot, expert in enumerate(rank_slots):
                table[expert, seen[expert], 0] = rank
                table[expert, seen[expert], 1] = slot
                seen[expert] += 1
        return table

    def local_expert_ids(self, rank: int) -> list[int]:
        """Logical expert of each slot of `rank`: the weights that rank has to load."""
        return list(self.slots[rank])
