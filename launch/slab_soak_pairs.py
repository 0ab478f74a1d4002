"""Pairs of dispatch and combine over the ranks of this process: one, or all of a virtual world.

Virtual ranks share one device, so all of them send before any waits; a single rank takes both
halves in one launch unless it is told to split them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from moe_comm.chunks import Pending
from moe_comm.handle import Dispatched
from moe_comm.launch.experts import expert_factors, expert_step
from moe_comm.launch.oracle import expected_combine, expected_dispatch
from moe_comm.launch.rank_data import RankData
from moe_comm.launch.slab_soak_calls import Lane, Ledger, Member
from moe_comm.launch.verify import Findings, check_combined, check_dispatched, flip_bit

T = TypeVar("T")
# Of pairs that are compared with the reference, in turn.
ROUTINGS = ("uniform", "zipf:1.2", "hot:3+masked:0.3", "uniform+masked:0.9")


def _in_step(
    calls: Sequence[Callable[..., Any]], hold: Callable[[int], None], *, split: bool
) -> Any:
    """Each call's result: the send halves of all, then the receive halves. `hold(i)` delays before
    (0), between (1) and after (2)."""
    hold(0)
    if not split:
        results = [call(async_op=False) for call in calls]
    else:
        pending: list[Pending[Any]] = [call(async_op=True) for call in calls]
        hold(1)
        results = [half.wait() for half in pending]
    hold(2)
    return results


def run_pairs(
    members: Sequence[Member],
    bucket: int,
    num_lanes: int,
    ledger: Ledger,
    *,
    split: bool,
    tokens: Sequence[int] | None = None,
    flip: bool = False,
) -> None:
    """`num_lanes` pairs that overlap: all dispatches, then all combines. Nothing synchronizes.

    Args:
        members: the ranks of this process, with no dispatch outstanding.
        bucket: of the calls.
        num_lanes: at most the lanes and the slots.
        ledger: gets an entry a pair.
        split: send and receive halves apart.
        tokens: T of each member, from the host; None: drawn on the device.
        flip: a bit of the first row that arrives is flipped (synchronizes; tests of the check).
    """
    rows = [bucket if tokens is None else mine for mine in (tokens or [0] * len(members))]
    lanes = [[member.lanes[bucket][index] for member in members] for index in range(num_lanes)]
    left_over = [member.left_over() for member in members]
    for lane in lanes:
        for index, member in enumerate(members):
            member.draw(bucket, lane[index], None if tokens is None else rows[index])

    def hold(lane: Sequence[Lane], first: int, point: int) -> None:
        for member, mine in zip(members, lane, strict=True):
            member.delay(mine, first + point)

    def dispatch(member: Member, lane: Lane, mine: int, *, async_op: bool) -> Any:
        call: Callable[..., Any] = member.comm.dispatch
        return call(
            lane.x[:mine], lane.ids[:mine], lane.weights[:mine],
            num_tokens=lane.count if tokens is None else None, bucket=bucket, async_op=async_op,
        )  # fmt: skip

    arrived: list[list[Dispatched]] = []
    for lane in lanes:
        calls = [
            functools.partial(dispatch, member, mine, count)
            for member, mine, count in zip(members, lane, rows, strict=True)
        ]
        arrived.append(_in_step(calls, functools.partial(hold, lane, 0), split=split))
    for lane, came in zip(lanes, arrived, strict=True):
        if flip:
            flip_bit(came[0])
        received = [member.received(d) for member, d in zip(members, came, strict=True)]
        ys = [member.experts(d) for member, d in zip(members, came, strict=True)]
        for member, d in zip(members, came, strict=True):
            member.poison_rows(d)
        calls = [
            functools.partial(member.comm.combine, y, d.handle, out=mine.out[:count])
            for member, y, d, mine, count in zip(members, ys, came, lane, rows, strict=True)
        ]
        outs: list[Tensor] = _in_step(calls, functools.partial(hold, lane, 3), split=split)
        for member, mine, count, got, out, left in zip(
            members, lane, rows, received, outs, left_over, strict=True
        ):
            ledger.add(member.rank, member.sent(mine, count), got, member.wrong(mine, out) + left)
        ledger.next_pair()


def check_pair(
    members: Sequence[Member],
    bucket: int,
    tokens: Sequence[int],
    *,
    number: int,
    split: bool,
    node_of_rank: Sequence[int],
) -> list[Findings]:
    """One pair with random rows and weights, everything compared with the reference bit for bit.

    Args:
        members, bucket, split: as run_pairs.
        tokens: T of every rank.
        number: of the pair: its seed, and which of ROUTINGS it takes.
        node_of_rank: of all ranks.
    """
    config, device = members[0].comm.config, members[0].comm.device
    placement = members[0].comm.placement
    data = RankData.create_all(
        config,
        num_tokens=tokens,
        routing=ROUTINGS[number % len(ROUTINGS)],
        seed=number,
        device=device,
    )

    def nothing(point: int) -> None:
        del point

    def dispatch(member: Member, *, async_op: bool) -> Any:
        mine = data[member.rank]
        call: Callable[..., Any] = member.comm.dispatch
        return call(mine.x, mine.topk_idx, mine.topk_weights, bucket=bucket, async_op=async_op)

    came: list[Dispatched] = _in_step(
        [functools.partial(dispatch, member) for member in members], nothing, split=split
    )
    found, ys = [], []
    factors = expert_factors(config.num_experts, device)
    for member, d in zip(members, came, strict=True):
        want = expected_dispatch(config, data, placement, rank=member.rank, bucket=bucket)
        found.append(check_dispatched(d, want, rank=member.rank))
        ys.append(expert_step(d, factors[placement.local_expert_ids(member.rank)]))
        member.poison_rows(d)
    calls = [
        functools.partial(
            member.comm.combine, y, d.handle,
            out=torch.full_like(data[member.rank].x, torch.nan),
        )
        for member, y, d in zip(members, ys, came, strict=True)
    ]  # fmt: skip
    outs: list[Tensor] = _in_step(calls, nothing, split=split)
    if members[0].comm.backend == "slab" and device.type == "cpu":
        # Triton's interpreter rounds otherwise than a GPU.
        return found
    for member, out in zip(members, outs, strict=True):
        combined = expected_combine(config, data[member.rank], placement, node_of_rank=node_of_rank)
        found.append(check_combined(out, combined, rank=member.rank))
    return found
