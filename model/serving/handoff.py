"""Hand a prefilled request over: the sender's side (`receiver.py` has the other).

    sender                                   receiver
    offer {request, headers}      ->         checks headers, reserves slot and pages
                                  <-         grant {regions} | refuse {reason} | accepted (known)
    bytes, by the transport
    written | failed {settled}    ->         reads back, compares checksums
                                  <-         accepted | refuse {reason}

With several senders (tensor-parallel ranks that each bring some heads) every one of them waits
until all parts are there. Nothing is visible before "accepted". A request that was accepted once is
accepted again without a second copy, so a sender that missed the answer may simply ask again.
"""

from __future__ import annotations

import enum
import itertools
import time
from dataclasses import dataclass

from moe_comm.model.serving.channels import (
    Channel,
    ChannelClosedError,
    ChannelTimeoutError,
    Message,
)
from moe_comm.model.serving.segments import Segments
from moe_comm.model.serving.staged_import import Region
from moe_comm.model.serving.transports import TransferError, Transport


class Outcome(enum.Enum):
    """ACCEPTED: the receiver owns the request. REFUSED: it said no, and why; nothing is there.
    FAILED: the bytes did not arrive; the request may be retried. UNKNOWN: no answer; ask the same
    receiver again, or another one once it is known gone."""

    ACCEPTED = "accepted"
    REFUSED = "refused"
    FAILED = "failed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class Result:
    outcome: Outcome
    reason: str = ""


_TRANSFERS = itertools.count(1)


def send_state(
    channel: Channel,
    transport: Transport,
    header: Message,
    segments: Segments,
    *,
    timeout_s: float,
) -> Result:
    """Offer one part with its header (`make_header`), write its bytes, and wait for the verdict.

    The source state must stay until the outcome is ACCEPTED or REFUSED. Each wait is bounded by
    `timeout_s`; the transport has its own bound.
    """
    transfer = next(_TRANSFERS)
    try:
        channel.send({"type": "offer", "transfer": transfer, "header": header})
        reply = _reply(channel, transfer, timeout_s)
        if reply["type"] == "grant":
            regions = [Region(address=a, nbytes=n) for a, n in reply["regions"]]
            try:
                transport.write(reply["target"], regions, segments)
            except TransferError as error:
                channel.send({"type": "failed", "transfer": transfer, "settled": error.settled})
                return Result(outcome=Outcome.FAILED, reason=str(error))
            channel.send({"type": "written", "transfer": transfer})
            reply = _reply(channel, transfer, timeout_s)
    except ChannelTimeoutError as error:
        return Result(outcome=Outcome.UNKNOWN, reason=str(error))
    except ChannelClosedError as error:
        return Result(outcome=Outcome.FAILED, reason=f"the receiver is gone: {error}")
    if reply["type"] == "accepted":
        return Result(outcome=Outcome.ACCEPTED)
    return Result(outcome=Outcome.REFUSED, reason=str(reply.get("reason", reply)))


def _reply(channel: Channel, transfer: int, timeout_s: float) -> Message:
    """The next message about this transfer; a late grant for an abandoned one is turned down."""
    deadline = time.monotonic() + timeout_s
    while True:
        message = channel.receive(max(0.0, deadline - time.monotonic()))
        if message.get("transfer") == transfer:
            return message
        if message.get("type") == "grant":
            channel.send({"type": "failed", "transfer": message["transfer"], "settled": True})
