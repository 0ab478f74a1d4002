"""Control messages between a prefill and a decode process: small JSON objects, with deadlines."""

from __future__ import annotations

import json
import logging
import queue
import threading
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch
import torch.distributed as dist

from moe_comm.errors import MoeCommError

logger = logging.getLogger("moe_comm")

Message = dict[str, Any]
# Control messages and state bytes of one pair of ranks pass each other.
CONTROL_TAG, DATA_TAG = 71, 72


class ChannelClosedError(MoeCommError):
    """The other side is gone: its process ended, or its connection broke."""


class ChannelTimeoutError(MoeCommError):
    """The other side did not answer in time; it may still be alive."""


class Channel(Protocol):
    """Ordered, reliable messages to one peer."""

    def send(self, message: Message) -> None:
        """Raises ChannelClosedError where the peer is gone."""
        ...

    def receive(self, timeout_s: float) -> Message:
        """Raises ChannelTimeoutError or ChannelClosedError."""
        ...


class PipeChannel:
    """Over a `multiprocessing.connection.Connection` (a pipe, a Unix socket, or TCP with a key).
    JSON, not pickle: a peer can send wrong values, but no code."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, message: Message) -> None:
        try:
            self._connection.send_bytes(json.dumps(message).encode())
        except OSError as error:
            raise ChannelClosedError(f"send: {error}") from error

    def receive(self, timeout_s: float) -> Message:
        try:
            if not self._connection.poll(timeout_s):
                raise ChannelTimeoutError(f"receive: nothing within {timeout_s:g} s")
            return _message(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise ChannelClosedError(f"receive: {error or 'end of file'}") from error

    def close(self) -> None:
        self._connection.close()


class GroupChannel:
    """Over send and receive of torch.distributed (a gloo group).

    gloo has no poll, and a timed-out receive ends the connection, so a daemon thread waits for
    messages; the group's own timeout bounds how long a channel may be idle. Close both ends, or
    end the process, when done.
    """

    def __init__(self, peer: int, group: dist.ProcessGroup | None = None) -> None:
        self.peer, self._group = peer, group
        self._inbox: queue.SimpleQueue[bytes | Exception] = queue.SimpleQueue()
        self._broken: str | None = None
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def send(self, message: Message) -> None:
        data = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
        size = torch.tensor([data.numel()], dtype=torch.int64)
        if self._broken is not None:
            raise ChannelClosedError(self._broken)
        try:
            dist.send(size, self.peer, group=self._group, tag=CONTROL_TAG)
            dist.send(data, self.peer, group=self._group, tag=CONTROL_TAG)
        except RuntimeError as error:
            raise ChannelClosedError(f"send to rank {self.peer}: {error}") from error

    def receive(self, timeout_s: float) -> Message:
        if self._broken is not None:
            raise ChannelClosedError(self._broken)
        try:
            data = self._inbox.get(timeout=max(timeout_s, 0.0))
        except queue.Empty:
            raise ChannelTimeoutError(f"receive: nothing within {timeout_s:g} s") from None
        if isinstance(data, Exception):
            self._broken = f"rank {self.peer}: {data}"
            raise ChannelClosedError(self._broken) from data
        return _message(data)

    def close(self, timeout_s: float = 10.0) -> None:
        """Say that no message follows, and wait for the peer to say so too: a process that ends
        while its thread is inside gloo aborts."""
        try:
            dist.send(torch.tensor([0]), self.peer, group=self._group, tag=CONTROL_TAG)
        except RuntimeError as error:
            logger.debug("close: rank %d is gone already: %s", self.peer, error)
        self._broken = self._broken or "the channel was closed"
        self._thread.join(timeout_s)

    def _listen(self) -> None:
        try:
            while True:
                size = torch.zeros(1, dtype=torch.int64)
                dist.recv(size, self.peer, group=self._group, tag=CONTROL_TAG)
                if int(size) == 0:
                    self._inbox.put(EOFError("the other side closed the channel"))
                    return
                data = torch.empty(int(size), dtype=torch.uint8)
                dist.recv(data, self.peer, group=self._group, tag=CONTROL_TAG)
                self._inbox.put(data.numpy().tobytes())
        except RuntimeError as error:
            self._inbox.put(error)


def _message(data: bytes) -> Message:
    try:
        message = json.loads(data)
    except ValueError as error:
        raise ChannelClosedError(f"receive: not a message: {error}") from error
    if not isinstance(message, dict):
        raise ChannelClosedError(f"receive: expected an object, got {type(message).__name__}")
    return message
