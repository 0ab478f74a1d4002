"""create_communicator: what ranks agree on, how a backend is chosen, and how it fails."""

from __future__ import annotations

import os
import sys
import time
import types
from typing import Any

import pytest
import torch
from comm_cases import SHAPE
from rank_pool import RankContext, run_ranks

from moe_comm import (
    BackendUnavailableError,
    ConfigMismatchError,
    EPConfig,
    ExpertPlacement,
    Topology,
    backends,
    create_communicator,
    negotiate,
)
from moe_comm.backends import Support
from moe_comm.group import Group


def disagrees(context: RankContext) -> None:
    for field, mine, other in (
        ("num_slots", 2, 3),
        ("hidden", 64, 32),
        ("placement", None, ExpertPlacement.contiguous(40, context.num_ranks)),
    ):
        changes = {field: mine if context.rank != 1 else other}
        with pytest.raises(ConfigMismatchError, match=rf"config.{field}: rank 0 has .*rank 1 has"):
            context.communicator(EPConfig(**{**SHAPE, **changes}), "c10d")


def test_configs_must_agree():
    run_ranks(3, disagrees)


def asks_otherwise(context: RankContext) -> None:
    config = EPConfig(**SHAPE)
    os.environ["MOE_COMM_BACKEND"] = "c10d" if context.rank else "c10d:dense"
    try:
        with pytest.raises(ConfigMismatchError, match="rank 0 asks for 'c10d:dense', rank 1 for"):
            context.communicator(config, "auto")
    finally:
        del os.environ["MOE_COMM_BACKEND"]


def test_ranks_must_ask_for_the_same_backend():
    run_ranks(2, asks_otherwise)


def chooses(context: RankContext) -> None:
    config = EPConfig(**SHAPE)
    for asked, backend, mode in (
        ("auto", "c10d", "exact"),
        ("c10d", "c10d", "exact"),
        ("c10d:dense", "c10d", "dense"),
        ("reference", "reference", "loop"),
    ):
        with context.communicator(config, asked) as comm:
            assert (comm.backend, comm.mode) == (backend, mode)
    with context.communicator(config.replace(reduction="node"), "auto") as comm:
        assert comm.mode == "hierarchical"
    with pytest.raises(BackendUnavailableError, match="no mode 'dense'; it has hierarchical"):
        context.communicator(config.replace(reduction="node"), "c10d:dense")
    with pytest.raises(ValueError, match=r"backend: expected one of auto, .*got 'mpi'"):
        context.communicator(config, "mpi")
    os.environ["MOE_COMM_BACKEND"] = "c10d:dense"
    try:
        with context.communicator(config, "auto") as comm:
            assert comm.mode == "dense"
        os.environ["MOE_COMM_BACKEND"] = "slab"
        with pytest.raises(BackendUnavailableError, match="backend 'slab': none can serve"):
            context.communicator(config, "auto")
    finally:
        del os.environ["MOE_COMM_BACKEND"]


def test_a_backend_is_chosen():
    run_ranks(2, chooses)


def fake_backend(rank: int, where: str, how: str) -> None:
    """Register "fake" in front; it fails at `where` on rank 1 alone."""
    module: Any = types.ModuleType("fake_backend")
    fails = rank == 1

    def supports(config: EPConfig, topology: Topology) -> Support:
        del config, topology
        if where == "supports" and fails:
            if how == "raises":
                raise OSError("libfake.so is missing")
            return Support(False, "" if how == "is silent" else "no fake device")
        return Support(True, "", ("only",))

    def build(config: EPConfig, group: Group, mode: str | None) -> Any:
        if where == "build" and fails:
            if how == "hangs":
                time.sleep(30)
            if how == "exits":
                sys.exit("fake gave up")
            raise RuntimeError("fake ran out of doors")
        return backends.load("reference").build(config, group, mode)

    module.supports, module.build = supports, build
    if where == "probe":
        module.probe = abort if fails else answer
    sys.modules["fake_backend"] = module
    backends.MODULES["fake"] = "fake_backend"


def abort(topology: Topology) -> Support:
    """A probe whose library ends the process."""
    del topology
    os.abort()


def answer(topology: Topology) -> Support:
    """A probe that is content."""
    del topology
    return Support(True)


def falls_back(context: RankContext, where: str, how: str, reason: str) -> None:
    order = backends.AUTO_ORDER
    fake_backend(context.rank, where, how)
    backends.AUTO_ORDER = ("fake", "c10d")
    config = EPConfig(**{**SHAPE, "timeout_s": 1.0 if how == "hangs" else 20.0})
    try:
        start = time.monotonic()
        with context.communicator(config, "auto") as comm:
            assert comm.backend == "c10d"
            assert comm.metrics()["fallbacks"] == 1
        assert time.monotonic() - start < 20
        with pytest.raises(BackendUnavailableError, match=reason):
            context.communicator(config, "fake")
    finally:
        backends.AUTO_ORDER = order
        del backends.MODULES["fake"], sys.modules["fake_backend"]


@pytest.mark.parametrize(
    ("where", "how", "reason"),
    [
        ("supports", "says no", r"fake: no fake device \(rank 1\)"),
        ("supports", "is silent", r"fake: it does not say why \(rank 1\)"),
        ("supports", "raises", r"fake: OSError: libfake.so is missing \(rank 1\)"),
        ("build", "raises", r"fake: RuntimeError: fake ran out of doors \(rank 1\)"),
        ("build", "exits", r"fake: SystemExit: fake gave up \(rank 1\)"),
        ("build", "hangs", r"fake: construction did not end within 2 s \(rank 1\)"),
        ("probe", "aborts", r"fake: its probe ended the process \(exit code -6\) \(rank 1\)"),
    ],
)
def test_all_ranks_fall_back_together(where, how, reason):
    run_ranks(2, falls_back, where, how, reason)


def test_without_a_group_the_error_says_what_to_do():
    with pytest.raises(RuntimeError, match="init_process_group"):
        create_communicator(EPConfig(**SHAPE))


def topology_of(device: str, transport: str) -> Topology:
    return Topology(
        num_ranks=2, node_of_rank=(0, 0), device_type=device, device_names=("a", "b"),
        peer_access=False, transport=transport,
    )  # fmt: skip


def test_verdicts_need_no_group():
    config = EPConfig(**SHAPE)
    good = negotiate.supports("c10d", config, topology_of("cpu", "gloo"))
    assert good.ok
    assert good.modes == ("exact", "dense")
    assert "capture" not in good.capabilities
    cuda = negotiate.supports("c10d", config, topology_of("cuda", "nccl"))
    assert {"capture", "overlap"} <= set(cuda.capabilities)
    vendor = negotiate.supports("c10d", config, topology_of("musa", "mccl"))
    assert vendor.ok
    assert (
        "gloo does not move cuda"
        in negotiate.supports("c10d", config, topology_of("cuda", "gloo")).reason
    )
    assert not negotiate.supports("c10d", config, topology_of("mixed", "gloo")).ok
    backends.MODULES["broken"] = "moe_comm.backends.no_such_module"
    try:
        verdict = negotiate.supports("broken", config, topology_of("cpu", "gloo"))
    finally:
        del backends.MODULES["broken"]
    assert not verdict.ok
    assert "ModuleNotFoundError" in verdict.reason


def finds_nodes(context: RankContext) -> tuple[Any, ...]:
    os.environ["MOE_COMM_RANKS_PER_NODE"] = "2"
    try:
        told = Group()
    finally:
        del os.environ["MOE_COMM_RANKS_PER_NODE"]
    seen = Group()
    topology = Topology.detect(seen)
    seen.barrier(timeout_s=10)
    return (
        told.node_of_rank, told.ranks_of_node(1), seen.num_nodes, topology.device_type,
        topology.transport, topology.peer_access, str(seen.device) == str(torch.device("cpu")),
    )  # fmt: skip


def test_nodes_by_host_name_or_by_variable():
    for found in run_ranks(3, finds_nodes):
        assert found == ((0, 0, 1), [2], 1, "cpu", "gloo", False, True)
