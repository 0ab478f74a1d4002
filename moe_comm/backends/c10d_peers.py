"""Who is lost: what ranks can find out about each other once a message did not arrive."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from moe_comm.group import Group

# Seconds given to the store and to ranks that are about to say whom they missed.
_GRACE_S = 0.5


class Peers:
    """The processes behind the ranks of a group.

    A rank that fails because of a lost peer closes its connections, and looks lost itself to
    those that wait for it. So each rank writes into the group's store whom it missed, and reads
    there what the rank it misses wrote. Construction is collective among `alive`.
    """

    def __init__(self, group: Group, pg: dist.ProcessGroup, alive: Sequence[int]) -> None:
        self.rank, self.device = group.rank, group.device
        facts: list[Any] = [None] * len(alive)
        mine = (_process_here(), _new_number())
        dist.all_gather_object(facts, mine, group=pg)
        self._process = {rank: fact[0] for rank, fact in zip(alive, facts, strict=True)}
        number = max(fact[1] for fact in facts)
        self._key = f"moe_comm/{pg.group_name}/{number}"

    def gone(self) -> list[int]:
        """Ranks of this host whose process has ended."""
        mine = self._process[self.rank]
        return [
            rank
            for rank, process in self._process.items()
            if rank != self.rank
            and process is not None
            and mine is not None
            and process[0] == mine[0]
            and _start_time(process[1]) != process[2]
        ]

    def culprit(self, suspect: int | None) -> int | None:
        """The rank at the end of the chain: `suspect`, or the one that it missed itself. Writes
        the answer where others look for it; takes up to a second."""
        answer = suspect
        seen = {self.rank}
        while answer is not None and answer not in seen:
            seen.add(answer)
            missed = self._ask(answer)
            if missed is None or missed == self.rank:
                break
            answer = missed
        if answer is not None:
            text = str(answer)
            _in_time(lambda: _store().set(f"{self._key}/{self.rank}", text))
        return answer

    def notes(self, mine: Sequence[int]) -> dict[int, list[int]]:
        """What other ranks that failed too were doing, by rank. Writes what this one was doing
        where they look for it; takes up to half a second."""

        def exchange() -> dict[int, list[int]]:
            store, found = _store(), dict[int, list[int]]()
            store.set(f"{self._key}/doing/{self.rank}", " ".join(map(str, mine)))
            missing = [rank for rank in self._process if rank != self.rank]
            end = time.monotonic() + 0.8 * _GRACE_S
            while missing and time.monotonic() < end:
                for rank in missing:
                    key = f"{self._key}/doing/{rank}"
                    if store.check([key]):
                        found[rank] = [int(word) for word in store.get(key).split()]
                missing = [rank for rank in missing if rank not in found]
                time.sleep(0.02)
            return found

        return _in_time(exchange) or {}

    def _ask(self, rank: int) -> int | None:
        key = f"{self._key}/{rank}"

        def read() -> int | None:
            store = _store()
            end = time.monotonic() + 0.8 * _GRACE_S
            while not store.check([key]):
                if time.monotonic() > end:
                    return None
                time.sleep(0.02)
            return int(store.get(key))

        answer: int | None = _in_time(read)
        return answer


_counter = 0


def _new_number() -> int:
    global _counter
    _counter += 1
    return _counter


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _in_time(work: Callable[[], Any]) -> Any:
    """The result, or None: the store's host may be the rank that is lost."""
    result: list[Any] = []

    def run() -> None:
        with contextlib.suppress(RuntimeError, ValueError):
            result.append(work())

    thread = threading.Thread(target=run, name="moe_comm-store", daemon=True)
    thread.start()
    thread.join(_GRACE_S)
    return result[0] if result else None


def _process_here() -> tuple[str, int, int] | None:
    """(host and process namespace, id, start time) of this process; None where /proc is not."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return None
    start = _start_time(os.getpid())
    return None if start is None else (f"{boot} {namespace}", os.getpid(), start)


def _start_time(pid: int) -> int | None:
    """Start of a process in clock ticks since boot; None where it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name, in brackets, may hold anything.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])
