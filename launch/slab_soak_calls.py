"""One rank's side of a soak: random calls drawn on the device, and what arrives checked there.

Nothing here asks the host, so everything can be captured and replayed. Legend: R ranks, B the
bucket, T tokens here, H hidden, K choices, L local experts, N expert rows.

Every pair is checked twice over. Dispatch by a checksum: the source adds up what it sends to each
destination (the bits of rows and scales, local expert ids, the bits of weights, its token count),
each destination what it received from each source, in wrapping int64, with odd factors for every
place, so that a row in a wrong place counts too; the ledger takes one from the other. Combine
element by element: rows are whole numbers from -2 to 2, weights 1 or 2, and an expert multiplies by
+-1 or +-2, so with up to 32 choices every sum is a whole number below 257: exact in bf16, in any
order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_comm.communicator import Communicator
from moe_comm.handle import Dispatched
from moe_comm.wire import quantize

# A call delays before and between the halves of dispatch and combine, and after each.
DELAY_POINTS = 6
MAX_TOPK = 32
_SLOT, _WEIGHT, _COUNT = 0x1F83D9ABFB41BD6B, 0x3C6EF372FE94F82B, 0x510E527FADE682D1
# Shares of masked choices, one drawn a call.
_MASKED = (0.0, 0.1, 0.95)


@dataclass(frozen=True, kw_only=True, eq=False)
class Lane:
    """What one call reads and writes, in place: `x` [B, H] bf16, `ids` [B, K] int64, `weights`
    [B, K], `count` int32 scalar (T), `out` [B, H]; `kind` [1] and `chance` [B, K] are drawn first,
    `delays` int64 [DELAY_POINTS] in clock cycles."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    count: Tensor
    out: Tensor
    kind: Tensor
    chance: Tensor
    delays: Tensor


class Ledger:
    """Of each pair of a window: what sources sent less what destinations received, [W, R, R], and
    wrong elements of combine, [W]. Entries of all ranks added up are zero where nothing is wrong.
    """

    def __init__(self, window: int, num_ranks: int, device: torch.device) -> None:
        shape = (window, num_ranks, num_ranks)
        self.entries = torch.zeros(shape, dtype=torch.int64, device=device)
        self.wrong = torch.zeros(window, dtype=torch.int64, device=device)
        self.at = torch.zeros(1, dtype=torch.int64, device=device)

    def add(self, rank: int, sent: Tensor, received: Tensor, wrong: Tensor) -> None:
        """Book this rank's part of the current pair."""
        change = torch.zeros_like(self.entries[:1])
        change[0, rank] += sent
        change[0, :, rank] -= received
        self.entries.index_add_(0, self.at, change)
        self.wrong.index_add_(0, self.at, wrong.reshape(1))

    def next_pair(self) -> None:
        """The pair is over on all ranks of this process."""
        self.at.add_(1)

    def clear(self) -> None:
        """Begin a window."""
        for tensor in (self.entries, self.wrong, self.at):
            tensor.zero_()


class Member:
    """One rank's communicator with its calls.

    Args:
        comm: dispatches in any wire and combines in bf16 or none, without copies of experts.
        buckets: token buckets that are called.
        num_lanes: calls that may be under way at once.
        max_delay: largest delay in clock cycles; 0: none.
    """

    def __init__(
        self, comm: Communicator, buckets: tuple[int, ...], *, num_lanes: int, max_delay: int
    ) -> None:
        config, device = comm.config, comm.device
        self.comm, self.rank, self.max_delay = comm, comm.rank, max_delay
        topk, experts, largest = config.num_topk, config.num_experts, max(buckets)
        if topk > MAX_TOPK or comm.placement.num_local_experts(comm.rank) < 1:
            raise ValueError(
                f"config: expected up to {MAX_TOPK} choices and an expert on every rank, got "
                f"{topk} choices and {experts} experts on {comm.num_ranks} ranks"
            )
        table = comm.placement.copy_table[:, 0].to(device, torch.int64)
        self.owner_of, self.slot_of = table[:, 0].contiguous(), table[:, 1].contiguous()
        factors = torch.tensor([1.0, -1.0, 2.0, -2.0]).repeat(-(-experts // 4))[:experts]
        factors = factors[torch.randperm(experts, generator=torch.Generator().manual_seed(7))]
        self.factor_of = factors.to(device)
        mine = torch.tensor(comm.placement.local_expert_ids(comm.rank), device=device)
        self.local_factors = self.factor_of[mine].bfloat16()
        self.ranks = torch.arange(comm.num_ranks, device=device).view(-1, 1, 1)
        self.positions = torch.arange(largest, device=device)
        self.numbers = torch.arange(comm.expert_row_capacity(largest), device=device)
        draw = torch.Generator().manual_seed(11)
        # Of values and, behind them, of scales.
        self.columns = _odd(2 * config.hidden, draw).to(device)
        self.token_factor = _odd(largest, draw).to(device)
        self.choice_factor = _odd(topk, draw).to(device)
        # Which experts a call chooses from, and how many choices it masks: every combination.
        spreads = (experts, experts, -(-experts // comm.num_ranks), 1)
        kinds = [(spread, share) for spread in spreads for share in _MASKED]
        self.spreads = torch.tensor([spread for spread, _ in kinds], device=device)
        self.shares = torch.tensor([share for _, share in kinds], device=device)
        self.lanes = {bucket: [self._lane(bucket) for _ in range(num_lanes)] for bucket in buckets}
        engine = getattr(comm, "engine", None)
        # What the slab returns partial sums into.
        self.returned = (
            engine.memory.view(
                "combine_rows", (engine.memory.regions.sizes["combine_rows"],), torch.uint8
            )
            if engine is not None
            else None
        )

    def _lane(self, bucket: int) -> Lane:
        config, device = self.comm.config, self.comm.device
        x = torch.zeros(bucket, config.hidden, dtype=torch.bfloat16, device=device)
        ids = torch.zeros(bucket, config.num_topk, dtype=torch.int64, device=device)
        return Lane(
            x=x,
            ids=ids,
            weights=torch.zeros(ids.shape, device=device),
            count=torch.zeros((), dtype=torch.int32, device=device),
            out=torch.empty_like(x),
            kind=torch.zeros(1, dtype=torch.int64, device=device),
            chance=torch.zeros(ids.shape, device=device),
            delays=torch.zeros(DELAY_POINTS, dtype=torch.int64, device=device),
        )

    def draw(self, bucket: int, lane: Lane, tokens: int | None) -> None:
        """Fill a lane; with `tokens` that many, else T at random on the device, 0 and B included
        more often than others."""
        lane.x.random_(-2, 3)
        lane.ids.random_(0, self.comm.config.num_experts)
        lane.kind.random_(0, len(self.spreads))
        lane.ids.remainder_(self.spreads.index_select(0, lane.kind))
        lane.chance.uniform_()
        lane.ids.masked_fill_(lane.chance < self.shares.index_select(0, lane.kind), -1)
        lane.weights.random_(1, 3)
        if tokens is None:
            beyond = max(1, bucket // 8)
            lane.count.random_(-beyond, bucket + beyond + 1).clamp_(0, bucket)
        else:
            lane.count.fill_(tokens)
        if self.max_delay:
            # Half of them none at all.
            lane.delays.random_(-self.max_delay, self.max_delay).clamp_(min=0)
        # What nobody writes must be seen.
        lane.out.fill_(torch.nan)

    def left_over(self) -> Tensor:
        """Bytes of partial sums that nobody has taken. While no dispatch of this rank is out no
        other rank returns anything to it, so there must be none."""
        if self.returned is None:
            return torch.zeros((), dtype=torch.int64, device=self.comm.device)
        return torch.count_nonzero(self.returned != 0xFF)

    def delay(self, lane: Lane, point: int) -> None:
        """Hold this rank's stream up."""
        if self.max_delay:
            from moe_comm.kernels.delay import delay

            delay(lane.delays, point)

    def sent(self, lane: Lane, rows: int) -> Tensor:
        """int64 [R]: checksum of what goes to each rank, from the arguments alone."""
        ids, weights = lane.ids[:rows], lane.weights[:rows]
        safe = ids.clamp_min(0)
        owner = torch.where(self._valid(lane, rows), self.owner_of[safe], -1)
        values, scales = quantize(lane.x[:rows], self.comm.config.wire)
        here = owner == self.ranks
        return self._checksum(values, scales, here, self.slot_of[safe], weights, lane.count)

    def received(self, d: Dispatched) -> Tensor:
        """int64 [R]: checksum of what came from each rank."""
        return self._checksum(
            d.rows, d.scales, d.topk_idx >= 0, d.topk_idx, d.topk_weights, d.num_tokens_per_rank
        )

    def experts(self, d: Dispatched) -> Tensor:
        """[N, H]: rows in order of the index, multiplied by their experts' factors."""
        rows = d.dequantized_rows().flatten(0, 1)
        index = d.row_index.clamp_min(0)
        numbers = self.numbers[: len(index)]
        expert = torch.searchsorted(d.expert_offsets[1:].long(), numbers, right=True)
        factors = self.local_factors[expert.clamp_max(len(self.local_factors) - 1)]
        return rows.index_select(0, index).bfloat16() * factors.unsqueeze(-1)

    def poison_rows(self, d: Dispatched) -> None:
        """After they were read and before combine lets others write there again."""
        for tensor in (d.rows, d.scales):
            if tensor is not None:
                tensor.view(torch.uint8).fill_(0xFF)

    def wrong(self, lane: Lane, out: Tensor) -> Tensor:
        """Elements of out [T, H] that are not what they must be; padding must be zero."""
        rows = out.shape[0]
        terms = lane.weights[:rows] * self.factor_of[lane.ids[:rows].clamp_min(0)]
        total = torch.where(self._valid(lane, rows), terms, 0.0).sum(dim=-1, keepdim=True)
        return (out != (lane.x[:rows].float() * total).to(out.dtype)).sum()

    def _valid(self, lane: Lane, rows: int) -> Tensor:
        live = self.positions[:rows] < lane.count
        return (lane.ids[:rows] >= 0) & live.unsqueeze(-1)

    def _checksum(
        self, values: Tensor, scales: Tensor | None, here: Tensor, slots: Tensor,
        weights: Tensor, counts: Tensor,
    ) -> Tensor:  # fmt: skip
        """[R] of values [.., T, H], here [R, T, K], slots and weights [.., T, K], counts [..]."""
        rows = self._row_sum(values, 0)
        if scales is not None:
            rows = rows + self._row_sum(scales, values.shape[-1])
        bits = weights.contiguous().view(torch.int32).long()
        choices = ((slots.long() + 1) * _SLOT + bits * _WEIGHT) * self.choice_factor
        total = torch.where(here.any(dim=-1), rows, 0) + torch.where(here, choices, 0).sum(dim=-1)
        placed = (total * self.token_factor[: total.shape[-1]]).sum(dim=-1)
        return placed + counts.long() * _COUNT

    def _row_sum(self, values: Tensor, first: int) -> Tensor:
        """int64 [...] of [..., H]: its bytes, as wide words as fit, times a factor a word."""
        size = values.shape[-1] * values.element_size()
        kinds = (torch.int64, torch.int32, torch.int16, torch.uint8)
        kind = next(kind for kind in kinds if size % kind.itemsize == 0)
        words = values.contiguous().view(kind).long()
        return (words * self.columns[first : first + words.shape[-1]]).sum(dim=-1)


def _odd(count: int, generator: torch.Generator) -> Tensor:
    """Odd factors: a change of one bit is never lost in a product."""
    return torch.randint(-(2**62), 2**62, (count,), generator=generator) * 2 + 1
