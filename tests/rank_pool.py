"""Pools of real ranks that live across tests: one a world size, each rank a process over gloo.

A test hands a pool a function (importable: defined in a module of this folder) and arguments; every
rank calls it with its RankContext first. Results come back in rank order. The first failing rank
is named with its traceback. A pool whose ranks hang or die is killed and made anew at its next use.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import importlib
import io
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

START_S = 120.0
CALL_S = 90.0


class RankFailedError(AssertionError):
    """A rank of a pool raised, died or hung; the message says which and how."""


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """What a test function gets: its rank, the number of ranks, and the default group."""

    rank: int
    num_ranks: int

    def communicator(self, config: Any, backend: str, **group_options: Any) -> Any:
        """A communicator over the world; collective."""
        from moe_comm import Group, create_communicator

        return create_communicator(config, Group(**group_options), backend)


def free_port() -> int:
    """A TCP port of this host that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RankPool:
    """Processes that wait for work. Use as a context manager or call kill().

    Args:
        num_ranks: processes.
        device_type: "cpu" (gloo), or "cuda": rank r on GPU r, NCCL beside gloo.
        variables: environment of the ranks, on top of this process's.
    """

    def __init__(
        self,
        num_ranks: int,
        device_type: str = "cpu",
        variables: Mapping[str, str] | None = None,
    ) -> None:
        # The store lives here, so that no rank's death takes it away.
        import torch.distributed as dist

        self.num_ranks = num_ranks
        self.store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False,
            timeout=datetime.timedelta(seconds=START_S),
        )  # fmt: skip
        # Forked from a process that has done nothing but import torch: a rank starts in no time.
        # CUDA, and what reads its environment while it is imported, need processes of their own.
        forks = device_type == "cpu" and not variables
        context = multiprocessing.get_context("forkserver" if forks else "spawn")
        context.set_forkserver_preload(["torch.distributed"])
        self.pipes: list[Connection] = []
        self.processes = []
        with _environment({"OMP_NUM_THREADS": "1", **(variables or {})}):
            for rank in range(num_ranks):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_serve,
                    args=(rank, num_ranks, self.store.port, theirs, device_type),
                    daemon=True,
                )
                process.start()
                theirs.close()
                self.pipes.append(ours)
                self.processes.append(process)
        self._collect(START_S, what="start")

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = CALL_S) -> list[Any]:
        """function(RankContext, *args) on every rank; the results in rank order."""
        self._send(function, args)
        return self._collect(timeout_s, what=function.__qualname__)

    def outcomes(
        self, function: Callable[..., Any], *args: Any, timeout_s: float = CALL_S
    ) -> dict[int, Any]:
        """As run, for tests that lose ranks: rank -> result, or RankFailedError for those that
        raised, died or did not answer. The pool cannot be used again."""
        self._send(function, args)
        results, failures, missing = self._gather(timeout_s, patience_s=timeout_s)
        self.kill()
        lost = {rank: RankFailedError(text) for rank, text in failures.items()}
        silent = {rank: RankFailedError("did not answer in time") for rank in missing}
        return {**results, **lost, **silent}

    def _send(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        for pipe in self.pipes:
            pipe.send(((function.__module__, function.__qualname__), args))

    def _gather(
        self, timeout_s: float, *, patience_s: float
    ) -> tuple[dict[int, Any], dict[int, str], set[int]]:
        """Results, failures, and ranks without an answer. After the first failure the others have
        patience_s left."""
        end = time.monotonic() + timeout_s
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        missing = set(range(self.num_ranks))
        while missing and time.monotonic() < end:
            ready = wait([self.pipes[rank] for rank in missing], timeout=0.2)
            for rank in sorted(missing):
                if self.pipes[rank] not in ready:
                    continue
                missing.discard(rank)
                try:
                    ok, value = self.pipes[rank].recv()
                except (EOFError, OSError):
                    self.processes[rank].join(5.0)
                    code = self.processes[rank].exitcode
                    failures[rank] = f"the process ended (exit code {code})"
                    continue
                (results if ok else failures)[rank] = value
            if failures:
                end = min(end, time.monotonic() + patience_s)
        return results, failures, missing

    def _collect(self, timeout_s: float, *, what: str) -> list[Any]:
        # The others may wait for a failed rank: they get a moment, not the whole time.
        results, failures, missing = self._gather(timeout_s, patience_s=3.0)
        if not failures and not missing:
            return [results[rank] for rank in range(self.num_ranks)]
        self.kill()
        lines = [f"{what}: rank {rank} failed:\n{text}" for rank, text in sorted(failures.items())]
        if missing:
            lines.append(f"{what}: ranks {sorted(missing)} did not answer in time")
        raise RankFailedError("\n".join(lines))

    @property
    def is_alive(self) -> bool:
        """Every rank is there to take work."""
        return all(process.is_alive() for process in self.processes)

    def kill(self) -> None:
        """End every rank, whatever it does."""
        for process in self.processes:
            if process.is_alive():
                process.kill()
        for process in self.processes:
            process.join()
        for pipe in self.pipes:
            pipe.close()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()


_pools: dict[tuple[int, str], RankPool] = {}


def pool(num_ranks: int, device_type: str = "cpu") -> RankPool:
    """The shared pool of this size, started or replaced where it has to be."""
    key = (num_ranks, device_type)
    found = _pools.get(key)
    if found is None or not found.is_alive:
        if found is not None:
            found.kill()
        found = _pools[key] = RankPool(num_ranks, device_type)
    return found


def run_ranks(
    num_ranks: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = CALL_S,
    device_type: str = "cpu",
) -> list[Any]:
    """function(RankContext, *args) on every rank of the shared pool of this size."""
    return pool(num_ranks, device_type).run(function, *args, timeout_s=timeout_s)


def kill_all() -> None:
    """End all shared pools."""
    while _pools:
        _pools.popitem()[1].kill()


atexit.register(kill_all)


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _poison_empty() -> None:
    """Fill what torch.empty and its like return with 0xFF bytes (NaN in every float), so that a
    read of memory nobody wrote cannot pass for zero."""
    import torch

    def poisoned(make: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            tensor = make(*args, **options)
            if not torch.compiler.is_compiling() and type(tensor) is torch.Tensor:
                with torch.no_grad(), contextlib.suppress(RuntimeError):
                    tensor.view(-1).view(torch.uint8).fill_(0xFF)
            return tensor

        return call

    torch.empty = poisoned(torch.empty)
    torch.empty_like = poisoned(torch.empty_like)
    torch.Tensor.new_empty = poisoned(torch.Tensor.new_empty)


def _serve(rank: int, num_ranks: int, port: int, pipe: Connection, device_type: str) -> None:
    """One rank: join the world, then call what comes down the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.path.insert(0, str(Path(__file__).parent))
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        _poison_empty()
        timeout = datetime.timedelta(seconds=START_S)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
        backend = "gloo"
        if device_type == "cuda":
            torch.cuda.set_device(rank)
            backend = "cpu:gloo,cuda:nccl"
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=num_ranks, timeout=timeout
        )
    except Exception:  # noqa: BLE001 - whatever it is, the test must see it
        pipe.send((False, traceback.format_exc()))
        return
    pipe.send((True, None))
    context = RankContext(rank=rank, num_ranks=num_ranks)
    while True:
        try:
            (module, name), args = pipe.recv()
        except EOFError:
            return
        pipe.send(_call(module, name, context, args))


def _call(module: str, name: str, context: RankContext, args: tuple[Any, ...]) -> tuple[bool, Any]:
    output = io.StringIO()
    try:
        target: Any = importlib.import_module(module)
        for part in name.split("."):
            target = getattr(target, part)
        return True, target(context, *args)
    except BaseException:  # noqa: BLE001 - including pytest's own outcomes
        traceback.print_exc(file=output)
        return False, output.getvalue()
