"""In which order, and on which streams, a layer launches its communication and its shared experts.

The two need nothing of each other: a first part of the shared experts can run beside dispatch, the
rest beside combine. Whether they do is a matter of multiprocessors, not of streams. A product by
cuBLAS on Hopper has a block on every multiprocessor, with all its registers: a call launched after
it waits for its end. A call of few tokens fills every multiprocessor with programs too, some of
which wait for other ranks: a product launched after it waits for all of them. So the product must
be placed first, and leave multiprocessors free (`leave_free`), on which the call's programs take
turns. With few tokens that costs a product little, since its bound is reading its weights.

What is left exposed is memory's: a combine reads its rows behind the weights that the product has
asked for, so it takes as long on 52 multiprocessors as on 36, three times as long as alone.

With many tokens products are bound by arithmetic and last long, and what takes the time of a call
are copies, which need no multiprocessor but begin behind a kernel that does. So the call's first
half goes ahead of the product.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from collections.abc import Callable

import torch

from moe_comm.chunks import Pending
from moe_comm.communicator import Communicator
from moe_comm.handle import Dispatched
from moe_comm.model.layers.multiprocessors import can_leave_free

# Default of Overlap.leave_free on a GPU of 132 multiprocessors: of those tried, the numbers with
# which K3's shared experts and their calls end first (launch/bench_model.py, section overlap). The
# first product has 112 blocks then, the last one 76.
LEAVE_FREE, OF = (20, 28), 132
# Buckets up to this one are few tokens.
FEW_TOKENS = 256


class Order(enum.StrEnum):
    """What is launched when, and where. "Aside": on Overlap.stream, which is forked from the
    current stream ahead of each pair of a call and a part, and joined to it after each.

    - SEQUENCE: dispatch, routed experts, combine, then the shared experts, on one stream.
    - HALVES: calls in halves on one stream, a part of the shared experts between them.
    - PRODUCTS_ASIDE: the shared experts aside, each part launched ahead of its call.
    """

    SEQUENCE = "sequence"
    HALVES = "halves"
    PRODUCTS_ASIDE = "products-aside"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """One round's launches. z [T, L], idx and weights [T, K] and `bucket` are dispatch's arguments;
    `experts` gives combine's rows; rest(first()) are the shared experts' rows."""

    comm: Communicator
    z: torch.Tensor
    idx: torch.Tensor
    weights: torch.Tensor
    bucket: int
    experts: Callable[[Dispatched], torch.Tensor]
    first: Callable[[], torch.Tensor]
    rest: Callable[[torch.Tensor], torch.Tensor]

    def dispatch(self) -> Dispatched:
        """The whole call."""
        return self.comm.dispatch(self.z, self.idx, self.weights, bucket=self.bucket)

    def start_dispatch(self) -> Pending[Dispatched]:
        """Its first half."""
        return self.comm.dispatch(self.z, self.idx, self.weights, bucket=self.bucket, async_op=True)

    def combine(self, rows: torch.Tensor, arrived: Dispatched) -> torch.Tensor:
        """The whole call."""
        return self.comm.combine(rows, arrived.handle)

    def start_combine(self, rows: torch.Tensor, arrived: Dispatched) -> Pending[torch.Tensor]:
        """Its first half."""
        return self.comm.combine(rows, arrived.handle, async_op=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overlap:
    """How a layer overlaps. Results are the same bits in every order; other kernels for products,
    as leave_free may bring about, sum in other orders.

    Attributes:
        order: see Order.
        order_of_many: the order in buckets above FEW_TOKENS; None: the same.
        stream: of what is aside; None: the current stream, where everything runs in the order it is
            launched in.
        leave_free: multiprocessors that products of the shared experts leave free, beside dispatch
            and beside combine, in buckets up to FEW_TOKENS
            (moe_comm.model.layers.multiprocessors).
    """

    order: Order = Order.HALVES
    order_of_many: Order | None = None
    stream: torch.cuda.Stream | None = None
    leave_free: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        if min(self.leave_free) < 0:
            raise ValueError(f"leave_free: expected at least 0, got {self.leave_free}")

    @classmethod
    def default(cls, device: torch.device) -> Overlap:
        """On a GPU PRODUCTS_ASIDE, and HALVES for many tokens; elsewhere HALVES too, since there a
        call's transfer is the host's or a library's own affair, and begins with its first half."""
        if device.type != "cuda":
            return cls()
        count = torch.cuda.get_device_properties(device).multi_processor_count
        first, rest = (free * count // OF for free in LEAVE_FREE)
        # Of high priority, so that a product is placed ahead of the call that it runs beside.
        return cls(
            order=Order.PRODUCTS_ASIDE,
            order_of_many=Order.HALVES,
            stream=torch.cuda.Stream(device, priority=-1),
            leave_free=(first, rest) if can_leave_free(device) else (0, 0),
        )

    def order_in(self, bucket: int) -> Order:
        """The order of a round in this bucket."""
        return self.order if bucket <= FEW_TOKENS else self.order_of_many or self.order

    def free_in(self, bucket: int) -> tuple[int, int]:
        """Multiprocessors that products of the shared experts leave free in this bucket."""
        return self.leave_free if bucket <= FEW_TOKENS else (0, 0)

    def run(self, work: Work) -> tuple[torch.Tensor, torch.Tensor]:
        """(combined rows [T, L], shared experts' rows [T, D]), both ready on the current stream.
        Collective."""
        return _ORDERS[self.order_in(work.bucket)](self, work)

    # Memory that one stream allocates and the other uses needs no record_stream: each fork waits
    # for everything that the current stream has enqueued, each join the other way round, and what
    # is shared lives until the join.

    def fork(self) -> None:
        """What is aside from now on comes after what the current stream has so far."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))

    def join(self) -> None:
        """The current stream goes on behind what is aside."""
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)

    def aside(self) -> contextlib.AbstractContextManager[None]:
        """Enqueue aside what is launched inside."""
        return contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream)


Rows = tuple[torch.Tensor, torch.Tensor]


def _sequence(overlap: Overlap, work: Work) -> Rows:
    del overlap
    arrived = work.dispatch()
    combined = work.combine(work.experts(arrived), arrived)
    return combined, work.rest(work.first())


def _halves(overlap: Overlap, work: Work) -> Rows:
    del overlap
    sending = work.start_dispatch()
    part = work.first()
    arrived = sending.wait()
    rows = work.experts(arrived)
    returning = work.start_combine(rows, arrived)
    shared = work.rest(part)
    return returning.wait(), shared


def _products_aside(overlap: Overlap, work: Work) -> Rows:
    overlap.fork()
    with overlap.aside():
        part = work.first()
    arrived = work.dispatch()
    overlap.join()
    rows = work.experts(arrived)
    overlap.fork()
    with overlap.aside():
        shared = work.rest(part)
    combined = work.combine(rows, arrived)
    overlap.join()
    return combined, shared


_ORDERS: dict[Order, Callable[[Overlap, Work], Rows]] = {
    Order.SEQUENCE: _sequence,
    Order.HALVES: _halves,
    Order.PRODUCTS_ASIDE: _products_aside,
}
