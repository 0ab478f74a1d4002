"""The launcher: starts the ranks of one command on this host, watches them, leaves no orphans.

Each rank is a process of its own, in a process group of its own, with the environment that
torchrun would give it (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT). The launcher
holds the rendezvous store, so no rank's death takes it away; it writes there who died, so that
the survivors can name that rank. Under torchrun the command uses torchrun's ranks instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NoReturn

import click

PARENT_VARIABLE = "MOE_BENCH_PARENT"
# Key in the store: the rank that was lost first.
LOST_RANK_KEY = "moe_bench/lost_rank"
LOST, INTERRUPTED = 124, 130
_POLL_S = 0.05
_PR_SET_PDEATHSIG = 1


def is_rank() -> bool:
    """Whether this process is a rank already: started by this launcher, torchrun or srun."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def die_with_parent() -> None:
    """In a rank of this launcher: be killed when the launcher dies, however it dies."""
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is None:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        os._exit(LOST)


def run_ranks(
    arguments: Sequence[str],
    *,
    num_ranks: int,
    grace_s: float,
    deadline_s: float | None = None,
) -> int:
    """Run `moe-bench ARGUMENTS` on num_ranks ranks of this host and wait for all of them.

    Args:
        arguments: of moe-bench, the subcommand first.
        num_ranks: processes to start.
        grace_s: seconds that the other ranks have to end by themselves once one failed; more than
            the timeout of their waits, so that they can say whom they missed. Then they are killed.
        deadline_s: seconds for everything; None: none.

    Returns:
        The exit code: 0 where all ranks returned 0; 124 where a rank was killed, or the deadline
        passed; else the code of the rank that failed first. 130 when interrupted.
    """
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(_listening_socket())
        ranks = _Ranks(arguments, num_ranks, port=listener.getsockname()[1])
        stack.callback(ranks.kill)
        stack.enter_context(_terminate_as_interrupt())
        try:
            ranks.start()
            return ranks.wait(listener, grace_s=grace_s, deadline_s=deadline_s)
        except KeyboardInterrupt:
            ranks.kill()
            print("moe-bench: interrupted; all ranks were stopped", file=sys.stderr)
            return INTERRUPTED


def _listening_socket() -> socket.socket:
    """Bound and listening before any rank starts: the port cannot be taken in between."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(1024)
    return listener


@contextlib.contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """SIGTERM ends the launcher as Ctrl-C does, so that it takes its ranks along."""

    def interrupt(number: int, frame: object) -> None:
        del number, frame
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Ranks:
    """The processes of one run."""

    def __init__(self, arguments: Sequence[str], num_ranks: int, *, port: int) -> None:
        self.arguments, self.num_ranks, self.port = list(arguments), num_ranks, port
        self.processes: list[subprocess.Popen[bytes]] = []
        self.first_failure: tuple[int, int] | None = None

    def start(self) -> None:
        # -P: the current directory must not shadow installed packages.
        command = [sys.executable, "-P", "-m", "moe_comm.launch.cli", *self.arguments]
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        threads = str(max(1, cores // self.num_ranks))
        for rank in range(self.num_ranks):
            environment = {
                "OMP_NUM_THREADS": threads,
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self.num_ranks),
                "LOCAL_WORLD_SIZE": str(self.num_ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self.port),
                # torch's name for "the store is held elsewhere, rank 0 is a client too".
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                PARENT_VARIABLE: str(os.getpid()),
            }
            self.processes.append(
                subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    # Rank 0 alone writes stdout.
                    stdout=None if rank == 0 else sys.stderr.fileno(),
                    process_group=0,
                )
            )

    def wait(self, listener: socket.socket, *, grace_s: float, deadline_s: float | None) -> int:
        # Imported while the ranks import it too, not before they start.
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        store = TCPStore(
            "127.0.0.1",
            self.port,
            None,
            True,
            wait_for_workers=False,
            master_listen_fd=os.dup(listener.fileno()),
        )
        end = None if deadline_s is None else time.monotonic() + deadline_s
        while True:
            codes = [process.poll() for process in self.processes]
            if all(code is not None for code in codes):
                return self._verdict()
            failed = [(rank, code) for rank, code in enumerate(codes) if code]
            if failed and self.first_failure is None:
                self.first_failure = failed[0]
                rank, code = failed[0]
                if code < 0:
                    name = signal.Signals(-code).name
                    print(f"moe-bench: rank {rank} was killed ({name})", file=sys.stderr)
                    store.set(LOST_RANK_KEY, str(rank))
                latest = time.monotonic() + grace_s
                end = latest if end is None else min(end, latest)
            if end is not None and time.monotonic() > end:
                left = [rank for rank, code in enumerate(codes) if code is None]
                print(f"moe-bench: ranks {left} did not end in time: killed", file=sys.stderr)
                if self.first_failure is None:
                    self.first_failure = (left[0], -signal.SIGKILL)
                self.kill()
                return self._verdict()
            time.sleep(_POLL_S)

    def _verdict(self) -> int:
        if self.first_failure is None:
            failed = [(rank, p.returncode) for rank, p in enumerate(self.processes) if p.returncode]
            if not failed:
                return 0
            self.first_failure = failed[0]
        _, code = self.first_failure
        return LOST if code < 0 else code

    def kill(self) -> None:
        """End every rank and what it started; returns when the ranks are gone."""
        for process in self.processes:
            # The group may outlive its leader: a rank's own children are in it.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()


_was_rank = False


def note_rank() -> None:
    """This process joins others."""
    global _was_rank
    _was_rank = True


def leave(code: object) -> NoReturn:
    """sys.exit (0 for what is no int), for processes that may have been ranks. Of one that was, the
    interpreter is not torn down: a thread of gloo's may be about to drop the last collective's
    Python objects, and would abort the process."""
    number = code if isinstance(code, int) else 0
    if _was_rank:
        end_at_once(number)
    sys.exit(number)


def end_at_once(code: int) -> NoReturn:
    """End this process without any teardown."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_command(command: click.Command, *, quiet_ranks: bool = False) -> NoReturn:
    """Run a command on the arguments of this process and end with its exit code.

    Args:
        command: whose callback returns the code (None: 0), or raises a ClickException with it.
        quiet_ranks: an error is the same on every rank, so rank 0 alone shows it.
    """
    try:
        code = command.main(standalone_mode=False)
    except click.exceptions.Abort:
        print("interrupted", file=sys.stderr)
        code = INTERRUPTED
    except click.ClickException as error:
        if not quiet_ranks or os.environ.get("RANK", "0") == "0":
            error.show()
        code = error.exit_code
    leave(code)
