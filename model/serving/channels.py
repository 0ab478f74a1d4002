"""Control messages between a prefill and a decode process: small JSON objects, with deadlines."""

from __future__ import annotations

import json
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch
import torch.distributed as dist

from moe_comm.errors import MoeCommError

Message = dict[str, Any]


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
    """Over send and receive of torch.distributed (gloo). After a timed-out receive the pair is out
    of step, so the channel is closed for good."""

    def __init__(self, peer: int, group: dist.ProcessGroup | None = None) -> None:
        self.peer, self._group, self._open = peer, group, True

    def send(self, message: Message) -> None:
        data = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
        self._run(dist.isend, torch.tensor([data.numel()], dtype=torch.int64), None)
        self._run(dist.isend, data, None)

    def receive(self, timeout_s: float) -> Message:
        length = torch.zeros(1, dtype=torch.int64)
        self._run(dist.irecv, length, timeout_s)
        data = torch.empty(int(length), dtype=torch.uint8)
        self._run(dist.irecv, data, timeout_s)
        return _message(data.numpy().tobytes())

    def _run(self, operation: Any, tensor: torch.Tensor, timeout_s: float | None) -> None:
        if not self._open:
            raise ChannelClosedError(f"the channel to rank {self.peer} was closed by an error")
        try:
            work = operation(tensor, self.peer, group=self._group)
            done = work.wait() if timeout_s is None else work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            self._open = False
            if "imed out" in str(error) or "imeout" in str(error):
                raise ChannelTimeoutError(f"rank {self.peer}: {error}") from error
            raise ChannelClosedError(f"rank {self.peer}: {error}") from error
        if done is False:
            self._open = False
            raise ChannelTimeoutError(f"rank {self.peer}: nothing within {timeout_s:g} s")


def _message(data: bytes) -> Message:
    try:
        message = json.loads(data)
    except ValueError as error:
        raise ChannelClosedError(f"receive: not a message: {error}") from error
    if not isinstance(message, dict):
        raise ChannelClosedError(f"receive: expected an object, got {type(message).__name__}")
    return message
