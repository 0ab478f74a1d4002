"""Counts of mode exact that the device works out from gathered blocks: when the host needs them.

It needs them to size messages. Where the last two dispatches of a bucket brought all rows of the
bucket to all ranks, and all ranks know that of each other, the next one is sent so again: the
messages' sizes are those of the bucket, whatever the counts turn out to be, and the host looks at
them later. A dispatch that is not full after all has cost some bytes, and is the last of its kind.

How all ranks come to expect the same: with its facts each rank tells whether its own dispatch
before was full. If all say so, and every T that the facts tell is the bucket, every rank has read
the same facts, and expects the next one to be full.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_comm.backends.c10d_blocks import Asked, Blocks, Routing
from moe_comm.backends.c10d_plan import GatheredPlan, Plan
from moe_comm.backends.c10d_routing import Located, rows_sent
from moe_comm.backends.c10d_transport import Header, Transfer, Transport, check_header


@dataclass(kw_only=True, eq=False)
class Recent:
    """What the last dispatches of a bucket say of the next.

    Attributes:
        was_full: all this rank's rows of the bucket went to all ranks.
        expects: all ranks expect the next dispatch to be full.
        last: the last dispatch, while its counts were not looked at.
    """

    was_full: bool = False
    expects: bool = False
    last: Counted | None = None

    def settle(self, *, wait: bool = True) -> None:
        """Look at the counts of the last dispatch. May block the host, for a bounded time; without
        `wait` only if they are there."""
        if self.last is not None and (wait or self.last.ready()):
            # On the stream that it began on, where its other half may follow.
            with torch.cuda.stream(self.last.stream):
                self.last.plan()


class Counted:
    """The plan of a dispatch whose counts are on their way to the host.

    Args:
        blocks: still arriving, by `transfer`.
        to: this rank's routing. like: [T, K] of the weights' dtype.
        recent: of the bucket; this dispatch becomes its last.
        whole: all rows of the bucket were sent to all ranks, and what they become comes back so.
        apart: its halves are apart.
        routing: what Blocks.read returned, where it was read.
    """

    def __init__(
        self,
        blocks: Blocks,
        transport: Transport,
        to: Located,
        like: Tensor,
        transfer: Transfer,
        recent: Recent,
        *,
        whole: bool,
        apart: bool,
        routing: Routing | None = None,
    ) -> None:
        on_cuda = to.rank.is_cuda
        self.stream = torch.cuda.current_stream() if apart and on_cuda else None
        self.whole = whole
        self._blocks, self._transport, self._to, self._like = blocks, transport, to, like
        self._transfer, self._recent = transfer, recent
        self._routing = routing
        self._asked: Asked | None = None
        if routing is not None:
            self._asked = blocks.told(transport, to, routing[0])
        self._plan: GatheredPlan | None = None
        recent.last = self

    def routing(self) -> Routing:
        """What Blocks.read returns, for the current stream; read at the first call."""
        if self._routing is None:
            self._transfer.wait()
            self._routing = self._blocks.read(self._like)
            self._asked = self._blocks.told(self._transport, self._to, self._routing[0])
        return self._routing

    def ready(self) -> bool:
        """Whether plan() returns at once."""
        return self._asked is not None and self._asked.ready()

    def settle(self) -> None:
        """Look at the counts if they are there and nobody did: Recent.settle."""
        if self._recent.last is self:
            self._recent.settle(wait=False)

    def plan(self) -> GatheredPlan:
        """See the class. May block the host, for a bounded time."""
        if self._plan is not None:
            return self._plan
        recent, bucket = self._recent, self._blocks.bucket
        local_idx = self.routing()[0]
        assert self._asked is not None
        # Whatever comes of it, the next dispatch does not ask again.
        recent.was_full, recent.expects, recent.last = False, False, None
        told, rank, others = self._asked.answer(), self._transport.rank, self._transport.others
        mine = told.facts[rank]
        for peer in others:
            facts = told.facts[peer]
            if facts[:2] != mine[:2] or facts[4:7] != mine[4:7]:
                check_header(Header(*mine[:7]), Header(*facts[:7]), peer)
        tokens_of = [facts[2] for facts in told.facts]
        received = [
            rows_sent(came, tokens)
            for (came, _), tokens in zip(told.counts, tokens_of, strict=True)
        ]
        received[rank] = 0
        self._plan = plan = GatheredPlan(
            num_tokens=tokens_of[rank],
            sent=[rows_sent(sent, tokens_of[rank]) for _, sent in told.counts],
            received=received,
            tokens_of=tokens_of,
            rank=self._to.rank,
            local_idx=local_idx,
        )
        recent.expects = all(
            tokens_of[r] == bucket and told.facts[r][7] for r in self._transport.alive
        )
        recent.was_full = plan.num_tokens == bucket and all(map(plan.sends_all, others))
        return plan


def plan_of(route: Plan | Counted) -> Plan:
    """The plan, once it is known. May block the host, for a bounded time."""
    return route.plan() if isinstance(route, Counted) else route
