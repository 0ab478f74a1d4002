"""Inside a rank: join the others, agree with them, and end with the right exit code."""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from moe_comm.errors import (
    BackendUnavailableError,
    ConfigMismatchError,
    MoeCommError,
    PeerTimeoutError,
    WrongDataError,
)
from moe_comm.group import Group
from moe_comm.launch import spawn
from moe_comm.launch.spawn import LOST, LOST_RANK_KEY, PARENT_VARIABLE

WRONG, UNAVAILABLE = 1, 3
# Ranks that start together may be this far apart: imports on a busy machine.
_START_S = 120.0


class Ranks:
    """This rank among all: identity, agreed exchanges, and errors that name the lost rank.

    Attributes:
        group: moe_comm's group over the world.
        rank, num_ranks, device: of this process.
        timeout_s: bound of every wait.
    """

    def __init__(
        self, group: Group, *, timeout_s: float, launcher_store: Store | None = None
    ) -> None:
        self.group, self.timeout_s = group, timeout_s
        self._launcher_store = launcher_store
        self.rank, self.num_ranks, self.device = group.rank, group.num_ranks, group.device

    @property
    def is_first(self) -> bool:
        """Rank 0, the one that writes stdout."""
        return self.rank == 0

    def say(self, text: str) -> None:
        """A line on stderr, from rank 0 alone."""
        if self.is_first:
            print(text, file=sys.stderr, flush=True)

    def gather(self, value: Any, *, what: str = "exchange") -> list[Any]:
        """One picklable value of each rank. Collective; raises PeerTimeoutError."""
        with self.transport_errors(what):
            return self.group.all_gather(value)

    def barrier(self, *, what: str = "barrier") -> None:
        """Wait for all ranks. Collective; raises PeerTimeoutError."""
        with self.transport_errors(what):
            self.group.barrier(timeout_s=self.timeout_s)

    @contextlib.contextmanager
    def transport_errors(self, what: str) -> Iterator[None]:
        """Turn what torch.distributed raises into PeerTimeoutError with the lost rank's number.

        Around collectives alone: any RuntimeError inside is taken for the transport's.
        """
        try:
            yield
        except MoeCommError:
            raise
        except RuntimeError as error:
            detail = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise PeerTimeoutError(
                what, self.rank, self.lost_rank(), timeout_s=self.timeout_s, detail=detail
            ) from error

    def lost_rank(self, *, wait_s: float = 3.0) -> int | None:
        """The rank that the launcher saw die, if it saw one; it may need a moment to see it."""
        store, end = self._launcher_store, time.monotonic() + wait_s
        while store is not None and time.monotonic() < end:
            with contextlib.suppress(RuntimeError):
                if store.check([LOST_RANK_KEY]):
                    return int(store.get(LOST_RANK_KEY))
            time.sleep(0.05)
        return None


def rank_device(device_type: str) -> torch.device:
    """This rank's device: the CPU, or the accelerator of its local rank."""
    if device_type == "cpu":
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    count = torch.accelerator.device_count()
    if index >= count:
        raise BackendUnavailableError(
            f"rank with local rank {index} finds {count} {device_type} devices; start at most "
            f"{count} ranks on this host (--nproc), or use --device cpu"
        )
    return torch.device(device_type, index)


@contextlib.contextmanager
def joined(device_type: str, *, timeout_s: float) -> Iterator[Ranks]:
    """Join the ranks named by the environment; leave them at the end.

    CPU tensors travel over gloo, the accelerator's over its own backend (NCCL for CUDA).
    """
    spawn.note_rank()
    device = rank_device(device_type)
    backend = "gloo"
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    dist.init_process_group(
        backend,
        timeout=datetime.timedelta(seconds=max(timeout_s, _START_S)),
        device_id=device if device.type != "cpu" else None,
    )
    try:
        yield Ranks(Group(device=device), timeout_s=timeout_s, launcher_store=_launcher_store())
    finally:
        # After an error a collective of a peer may never come: then the process just ends.
        if sys.exc_info()[0] is None:
            dist.destroy_process_group()


def _launcher_store() -> Store | None:
    """The launcher's own store, where it writes what the ranks cannot know; None under torchrun."""
    if PARENT_VARIABLE not in os.environ:
        return None
    return TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=_START_S),
    )


def run_rank(body: Callable[[Ranks], int], *, device_type: str, timeout_s: float) -> int:
    """Join, run the body, and turn its errors into one line and an exit code.

    Returns the body's code, 1 for wrong data, 3 where the environment cannot, and ends the process
    with 124 where a rank was lost: nothing that waits for that rank may run after it.
    """
    met: list[Ranks] = []
    try:
        with joined(device_type, timeout_s=timeout_s) as ranks:
            met.append(ranks)
            return body(ranks)
    except PeerTimeoutError as error:
        lost = met[0].lost_rank() if met else None
        if lost is not None and lost != error.peer:
            # Who failed because of the lost rank looks lost itself; the launcher knows better.
            error = PeerTimeoutError(
                error.phase, error.rank, lost, timeout_s=timeout_s, detail="its process has ended"
            )
        _leave(f"PeerTimeoutError: {error}", LOST)
    except WrongDataError as error:
        _leave(str(error), WRONG)
    except (BackendUnavailableError, ConfigMismatchError) as error:
        # All ranks have the same reason; one says it.
        first = os.environ.get("RANK", "0") == "0"
        _leave(f"{type(error).__name__}: {error}" if first else "", UNAVAILABLE)
    except dist.DistStoreError as error:
        _leave(f"the ranks did not meet: {str(error).splitlines()[0]}", LOST)


def _leave(message: str, code: int) -> NoReturn:
    """End this rank without the collective teardown that a lost peer would never answer."""
    if message:
        print(f"moe-bench: {message}", file=sys.stderr)
    spawn.end_at_once(code)
