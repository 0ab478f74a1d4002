"""create_communicator: one backend that every rank can build, chosen in agreed steps.

Ranks agree (an exchange each) on 1. the configuration and the backend asked for, 2. each
candidate's verdict: its import, its own answer, and a probe in a child process where it has one,
3. construction under a watchdog. Where a step fails on any rank, all ranks take the next candidate,
and the reasons are logged once, by rank 0.
"""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import IO

import torch
import torch.distributed as dist

from moe_comm import backends, env
from moe_comm.backends import Support
from moe_comm.bounded import run_bounded
from moe_comm.communicator import Communicator
from moe_comm.config import EPConfig
from moe_comm.errors import BackendUnavailableError, ConfigMismatchError
from moe_comm.group import Group, new_number
from moe_comm.topology import Topology

logger = logging.getLogger("moe_comm")


def create_communicator(
    config: EPConfig,
    group: Group | dist.ProcessGroup | None = None,
    backend: str = "auto",
) -> Communicator:
    """Build a communicator that every rank of the group can use. Collective.

    Args:
        config: equal on all ranks.
        group: a torch.distributed process group, or moe_comm.Group; default the world.
        backend: "auto", a backend's name, or "name:mode" ("c10d:dense"). "auto" heeds
            MOE_COMM_BACKEND. A backend asked for by name is the only one tried.

    Raises:
        ConfigMismatchError: ranks were given different configurations, or backends.
        BackendUnavailableError: no candidate can serve all ranks; lists every reason.
        ValueError: an unknown backend name.
    """
    ranks = group if isinstance(group, Group) else Group(group)
    asked = backend
    if asked == "auto":
        asked = env.BACKEND.get() or "auto"
    ranks = _agree_on_config(config, asked, ranks)
    name, _, mode = asked.partition(":")
    if name != "auto" and name not in backends.MODULES:
        known = ", ".join(["auto", *backends.MODULES])
        raise ValueError(f"backend: expected one of {known}, got {asked!r}")
    candidates = backends.AUTO_ORDER if name == "auto" else (name,)
    topology = Topology.detect(ranks)
    reasons: list[str] = []
    for candidate in candidates:
        built, reason = _try_backend(candidate, mode, config, ranks, topology)
        if built is not None:
            built._metrics.fallbacks = len(reasons)
            if ranks.rank == 0:
                passed = f" ({'; '.join(reasons)})" if reasons else ""
                logger.info("backend %s, mode %s%s", built.backend, built.mode, passed)
            return built
        reasons.append(f"{candidate}: {reason}")
    raise BackendUnavailableError(
        f"backend {asked!r}: none can serve all {ranks.num_ranks} ranks. " + "; ".join(reasons)
    )


def supports(name: str, config: EPConfig, topology: Topology) -> Support:
    """One backend's own verdict, import failures included, and that of its probe in a child
    process, which is asked once a process. Not collective."""
    try:
        module = backends.load(name)
        verdict: Support = module.supports(config, topology)
        if verdict.ok and hasattr(module, "probe"):
            # An import may take longer than a rank should wait for a row.
            probed = _in_child(module.probe, topology, timeout_s=max(config.wait_s, 60.0))
            remarks = [text for text in (verdict.reason, probed.reason) if text]
            verdict = verdict._replace(reason="; ".join(remarks)) if probed.ok else probed
    except Exception as error:  # noqa: BLE001 - a broken optional library must become a reason
        return Support(False, f"{type(error).__name__}: {error}")
    return verdict


def _agree_on_config(config: EPConfig, asked: str, group: Group) -> Group:
    """The group under a name of its own."""
    described = group.all_gather((asked, config.describe(), new_number()))
    wanted, first, _ = described[0]
    for rank, (other_asked, other, _) in enumerate(described):
        if other_asked != wanted:
            raise ConfigMismatchError(
                f"backend: rank 0 asks for {wanted!r}, rank {rank} for {other_asked!r}; give all "
                "ranks the same backend and MOE_COMM_BACKEND"
            )
        for field, value in first.items():
            if other[field] != value:
                raise ConfigMismatchError(
                    f"config.{field}: rank 0 has {value!r}, rank {rank} has {other[field]!r}; all "
                    "ranks must be given the same EPConfig"
                )
    return group.renamed([number for _, _, number in described])


def _try_backend(
    name: str, mode: str, config: EPConfig, group: Group, topology: Topology
) -> tuple[Communicator | None, str]:
    verdict = supports(name, config, topology)
    if verdict.ok and mode and mode not in verdict.modes:
        verdict = Support(
            False, f"no mode {mode!r}; it has {', '.join(verdict.modes) or 'no modes'}"
        )
    reason = _failures(group.all_gather((verdict.ok, verdict.reason)))
    if reason:
        return None, reason
    module = backends.load(name)
    built, failure = _under_watchdog(
        lambda: module.build(config, group, mode or None), group, timeout_s=2 * config.wait_s
    )
    reason = _failures(group.all_gather((built is not None, failure)))
    if reason:
        if built is not None:
            _drop(built, timeout_s=config.wait_s)
        return None, reason
    return built, ""


def _drop(built: Communicator, *, timeout_s: float) -> None:
    """Give up what was built here alone. A backend whose destroy() meets the other ranks has an
    abandon() that does not."""
    run_bounded(
        getattr(built, "abandon", built.destroy), timeout_s=timeout_s, name="drop-communicator"
    )


def _failures(verdicts: list[tuple[bool, str]]) -> str:
    """Each reason once, with the first rank that gives it: where one rank fails, others may only
    say that they waited for it."""
    first: dict[str, int] = {}
    for rank, (ok, reason) in enumerate(verdicts):
        if not ok:
            first.setdefault(reason or "it does not say why", rank)
    several = len(verdicts) > 1
    return "; ".join(
        f"{reason} (rank {rank})" if several else reason for reason, rank in first.items()
    )


# Reads the parent's module path first: a pickle names modules. Answers on a pipe of its own, since
# a library may print.
_CHILD = """
import pickle, sys
stdin = sys.stdin.buffer
sys.path[:] = pickle.load(stdin)
from moe_comm.negotiate import _answer_probe
_answer_probe(stdin, int(sys.argv[1]))
"""


def _answer_probe(given: IO[bytes], descriptor: int) -> None:
    """The child's side."""
    probe, topology = pickle.load(given)
    try:
        answer = tuple(probe(topology))
    except Exception as error:  # noqa: BLE001 - whatever it raises is the answer
        answer = (False, f"{type(error).__name__}: {error}", (), ())
    with os.fdopen(descriptor, "wb") as pipe:
        pickle.dump(answer, pipe)


# Answers of probes, by question: a library is imported in a child once a process, not at each
# creation of a communicator.
_answers: dict[bytes, Support] = {}


def _in_child(
    probe: Callable[[Topology], Support], topology: Topology, *, timeout_s: float
) -> Support:
    """Run a probe where an abort of its library cannot hurt this process."""
    question = pickle.dumps(sys.path) + pickle.dumps((probe, topology))
    if question not in _answers:
        _answers[question] = _ask_child(question, timeout_s=timeout_s)
    return _answers[question]


def _ask_child(question: bytes, *, timeout_s: float) -> Support:
    """A plain subprocess: a daemonic worker of a serving stack may not start multiprocessing's, and
    those import the main script again."""
    read, write = os.pipe()
    with os.fdopen(read, "rb") as pipe:
        child = subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(write)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=(write,),
        )
        os.close(write)
        try:
            _, said = child.communicate(question, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            return Support(False, f"its probe did not end within {timeout_s:g} s")
        answer = pipe.read()
    if not answer:
        last = said.decode(errors="replace").strip().splitlines()[-1:]
        more = f": {last[0]}" if last else ""
        return Support(False, f"its probe ended the process (exit code {child.returncode}){more}")
    return Support(*pickle.loads(answer))


def _under_watchdog(
    build: Callable[[], Communicator], group: Group, *, timeout_s: float
) -> tuple[Communicator | None, str]:
    """Build in a thread that is given up after timeout_s: a constructor that waits for a rank
    whose own constructor failed must not hang this one."""
    result: list[Communicator] = []
    failure: list[str] = []
    given_up = False
    lock = threading.Lock()

    def work() -> None:
        try:
            if group.device.type == "cuda":
                # The current device is a thread's own.
                torch.cuda.set_device(group.device)
            built = build()
        except BaseException as error:
            # Also a library's sys.exit(): the other ranks must hear of it.
            logger.debug("construction failed", exc_info=True)
            failure.append(f"{type(error).__name__}: {error}")
            return
        with lock:
            if not given_up:
                result.append(built)
                return
        _drop(built, timeout_s=timeout_s)

    thread = threading.Thread(target=work, name="moe_comm-build", daemon=True)
    thread.start()
    thread.join(timeout_s)
    with lock:
        given_up = not result and not failure
    if given_up:
        return None, f"construction did not end within {timeout_s:g} s"
    return (result[0] if result else None), (failure[0] if failure else "")
