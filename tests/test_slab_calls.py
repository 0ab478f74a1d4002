"""Calls of a slab communicator that fail, before or after they have sent, and what each may cost.
Ranks are virtual, under Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from interpreter import inside, outside
from test_slab_interpreted import CPU, _world

MODES = ["low-latency", "high-throughput"]
SHAPE = {"num_experts": 4, "num_topk": 2, "hidden": 8, "max_tokens_per_rank": 4}


@outside
def test_calls_under_the_interpreter(interpreted) -> None:
    interpreted()


def _communicators(num_ranks=1, mode="low-latency", **shape):
    from moe_comm import EPConfig
    from moe_comm.backends.slab import SlabCommunicator, region_sizes
    from moe_comm.symmetric import VirtualSymmetricMemory

    config = EPConfig(**(SHAPE | shape))
    memories = VirtualSymmetricMemory.create(num_ranks, region_sizes(config, num_ranks), CPU)
    return [
        SlabCommunicator(
            config, SimpleNamespace(rank=rank, num_ranks=num_ranks, device=CPU), mode=mode,
            memory=memory,
        )
        for rank, memory in enumerate(memories)
    ]  # fmt: skip


def _dispatch(comm, **options):
    ids = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 3]])
    x = torch.arange(32, dtype=torch.bfloat16).view(4, 8)
    return comm.dispatch(x, ids, torch.full((4, 2), 0.5), **options)


def _identity(d):
    rows = d.rows.flatten(0, 1)[d.row_index.clamp_min(0).long()]
    return torch.where((d.row_index >= 0).unsqueeze(-1), rows, 0)


def _fails_once(monkeypatch, owner, name, error=MemoryError):
    """The next call of owner.name raises."""
    real, left = getattr(owner, name), [error("no memory left")]

    def step(*args, **options):
        if left:
            raise left.pop()
        return real(*args, **options)

    monkeypatch.setattr(owner, name, step)


@inside
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("async_op", [False, True])
def test_a_combine_without_memory_may_be_repeated(mode, async_op, monkeypatch) -> None:
    (comm,) = _communicators(mode=mode)
    d = _dispatch(comm)
    y = _identity(d)
    _fails_once(monkeypatch, torch, "empty")
    with pytest.raises(MemoryError):
        comm.combine(y, d.handle, async_op=async_op)
    assert not d.handle.combined
    out = comm.combine(y, d.handle)
    assert torch.equal(out, torch.arange(32, dtype=torch.bfloat16).view(4, 8))
    assert comm.metrics()["combines"] == 1
    for _ in range(3):
        comm.combine(y, _dispatch(comm).handle)
    comm.check()


@inside
def test_a_dispatch_without_memory_takes_no_slot(monkeypatch) -> None:
    from moe_comm.backends import slab_dispatch_kernel

    (comm,) = _communicators(max_payload_bytes=16, num_slots=1)
    payloads = {"a": torch.arange(4)}
    before = _dispatch(comm)
    before.handle.release()
    _fails_once(monkeypatch, slab_dispatch_kernel, "pack_payloads")
    with pytest.raises(MemoryError):
        _dispatch(comm, payloads=payloads)
    # The routing of the dispatch before still lies in the slot.
    x = torch.ones(4, 8, dtype=torch.bfloat16)
    comm.dispatch(x, handle=before.handle).handle.release()
    d = _dispatch(comm, payloads=payloads)
    assert torch.equal(d.payloads["a"][0], torch.arange(4))
    assert d.handle.call == 2


@inside
@pytest.mark.parametrize("where", ["dispatch", "receive half", "combine", "release"])
def test_a_failure_after_the_launch_ends_the_communicator(where, monkeypatch) -> None:
    """Its counters and the peers' may have gone apart: a slot dispatched into with the same count
    again would pass for what arrived before."""
    from moe_comm import MoeCommError

    (comm,) = _communicators()
    if where == "dispatch":
        _fails_once(monkeypatch, comm.engine, "_dispatched")
        with pytest.raises(MemoryError):
            _dispatch(comm)
    elif where == "receive half":
        pending = _dispatch(comm, async_op=True)
        _fails_once(monkeypatch, comm.engine, "_dispatch_kernel", KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            pending.wait()
    else:
        d = _dispatch(comm)
        other = _dispatch(comm)
        if where == "combine":
            _fails_once(monkeypatch, comm.engine, "_combine_kernel")
        else:
            _fails_once(monkeypatch, comm.engine, "signal_release")
        with pytest.raises(MemoryError):
            comm.combine(_identity(d), d.handle) if where == "combine" else d.handle.release()
        with pytest.raises(MoeCommError, match="destroy the communicator"):
            comm.combine(_identity(other), other.handle)
    with pytest.raises(MoeCommError, match="failed after it had begun to send") as caught:
        _dispatch(comm)
    assert isinstance(caught.value.__cause__, (MemoryError, KeyboardInterrupt))


@inside
def test_a_hook_that_raises_takes_no_slot() -> None:
    (comm,) = _communicators(num_slots=1)
    bad: list[Exception] = [ValueError("hook")]

    def hook(event) -> None:
        if bad:
            raise bad.pop()

    comm.add_hook(hook)
    with pytest.raises(ValueError, match="hook"):
        _dispatch(comm)
    assert torch.equal(comm.combine(_identity(d := _dispatch(comm)), d.handle)[0], d.rows[0, 0])


class Allocations(torch.utils._python_dispatch.TorchDispatchMode):
    """Names of the operators that make memory of their own, from `start()` on."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.counts = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        makes = isinstance(result, torch.Tensor) and not func.is_view
        if self.counts and makes and not func._schema.is_mutable:
            self.names.append(str(func))
        return result


@inside
@pytest.mark.parametrize("mode", MODES)
def test_memory_is_made_before_the_first_launch(mode, monkeypatch) -> None:
    (comm,) = _communicators(mode=mode, max_payload_bytes=16)
    engine = comm.engine
    for _ in range(2):
        with Allocations() as made:

            def launched(name: str, made=made) -> Callable[..., Any]:
                def step(*args: Any, **options: Any) -> None:
                    made.counts = True

                return step

            with monkeypatch.context() as patched:
                for name in ("_dispatch_kernel", "_combine_kernel", "_copy_word", "_wait"):
                    patched.setattr(engine, name, launched(name))
                x = torch.ones(8, 4, dtype=torch.bfloat16).t()
                ids = torch.zeros(2, 4, dtype=torch.int64).t()
                d = comm.dispatch(x, ids, torch.ones(4, 2), payloads={"a": torch.arange(4)})
                assert made.counts
                assert made.names == []
                made.counts = False
                y = torch.ones(8, d.row_index.shape[0], dtype=torch.bfloat16).t()
                out = torch.ones(8, 4, dtype=torch.bfloat16).t()
                pending = comm.combine(y, d.handle, bias=(x, x), out=out, async_op=True)
                assert made.counts
                pending.wait()
                assert made.names == []


@inside
@pytest.mark.parametrize("next_call", ["dispatch", "combine"])
def test_the_next_call_raises_what_the_device_recorded(next_call) -> None:
    from moe_comm import PeerTimeoutError

    comm, peer = _communicators(2)
    d = _dispatch(comm)
    assert int(d.expert_offsets[-1]) == 0
    with pytest.raises(PeerTimeoutError, match=r"dispatch on rank 0: rank 1 did not arrive") as why:
        _dispatch(comm) if next_call == "dispatch" else comm.combine(_identity(d), d.handle)
    assert (why.value.phase, why.value.peer) == ("dispatch", 1)
    assert (why.value.seen, why.value.wanted) == (0, comm.engine.status[4])
    assert comm.metrics()["timeouts"] == 1
    with pytest.raises(PeerTimeoutError, match="rank 1"):
        comm.check()
    with pytest.raises(PeerTimeoutError, match="rank 1"):
        _dispatch(comm)
    _dispatch(peer, async_op=True)  # has recorded nothing
    comm.engine.mask_rank(1)
    _dispatch(comm)
    comm.check()


@inside
def test_what_can_be_gone_on_from_is_told_by_check_alone() -> None:
    from moe_comm import InvalidRoutingError

    (comm,) = _communicators()
    x = torch.ones(1, 8, dtype=torch.bfloat16)
    comm.dispatch(x, torch.tensor([[7, 0]]), torch.ones(1, 2)).handle.release()
    _dispatch(comm)
    with pytest.raises(InvalidRoutingError):
        comm.check()


@inside
def test_a_combine_adds_its_biases_once_and_makes_one_result(monkeypatch) -> None:
    from moe_comm.backends import slab_combine

    world = _world(2, "high-throughput", chunk=3)
    real, summed, made, empty = slab_combine.summed_bias, [], [], torch.empty

    def adding(call):
        summed.append(call)
        return real(call)

    def making(*shape, **options):
        made.append(shape)
        return empty(*shape, **options)

    monkeypatch.setattr(slab_combine, "summed_bias", adding)
    world.round_trip((9, 3), torch.Generator().manual_seed(1), with_bias=True)
    assert len(summed) == 2  # three chunks and a receive half on each of two ranks
    (comm,) = _communicators()
    d = _dispatch(comm)
    y = _identity(d)
    monkeypatch.setattr(torch, "empty", making)
    comm.combine(y, d.handle, async_op=True).wait()
    assert made == [((4, 8),)]


@inside
def test_float64_weights_are_refused() -> None:
    (comm,) = _communicators(dispatch_wire="none", combine_wire="none")
    x, ids = torch.ones(4, 8), torch.zeros(4, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"topk_weights: expected torch.float32 on the slab.*64"):
        comm.dispatch(x, ids, torch.ones(4, 2, dtype=torch.float64))
    d = comm.dispatch(x, ids, torch.ones(4, 2))
    assert torch.equal(comm.combine(_identity(d), d.handle), torch.full((4, 8), 2.0))


def test_the_mode_and_the_tunings_are_one_setting() -> None:
    from moe_comm.backends.slab_modes import SlabTuning

    knobs = SlabTuning(dispatch_warps=4)
    assert knobs.with_mode("auto") is knobs
    assert knobs.with_mode("low-latency") == SlabTuning(mode="low-latency", dispatch_warps=4)
    fixed = SlabTuning(mode="high-throughput")
    assert fixed.with_mode("auto") is fixed
    assert fixed.with_mode("high-throughput") is fixed
    with pytest.raises(ValueError, match="mode: expected 'high-throughput', the tuning's"):
        fixed.with_mode("low-latency")
    with pytest.raises(ValueError, match="mode: expected one of auto, low-latency"):
        SlabTuning(mode="fast")


def test_copies_bring_rows_where_nearly_all_of_them_are_wanted() -> None:
    """1 - (1 - 1 / R) ** K of the tokens, about, reach a rank: 0.99 of four at top-16, 0.88 of
    eight."""
    from moe_comm import EPConfig
    from moe_comm.backends.slab_modes import SlabTuning

    k3 = EPConfig.preset("kimi-k3")
    modes = {ranks: SlabTuning().mode_of(k3, 4096, ranks) for ranks in (1, 2, 4, 5, 6, 8, 64)}
    copies = {ranks for ranks, mode in modes.items() if mode == "high-throughput"}
    assert copies == {1, 2, 4, 5}
    stored = [
        (k3, 1024, 2),
        (k3.replace(num_topk=2), 4096, 2),
        (k3.replace(dispatch_wire="fp8"), 4096, 2),
    ]
    assert {SlabTuning().mode_of(*one) for one in stored} == {"low-latency"}
    assert SlabTuning(mode="high-throughput").plan(k3, 1, 64).mode == "high-throughput"


@inside
def test_a_communicator_takes_its_mode_beside_a_tuning() -> None:
    from moe_comm import EPConfig
    from moe_comm.backends.slab import SlabCommunicator, region_sizes
    from moe_comm.backends.slab_modes import SlabTuning
    from moe_comm.symmetric import VirtualSymmetricMemory

    config = EPConfig(**SHAPE)
    memory = VirtualSymmetricMemory.create(1, region_sizes(config, 1), CPU)[0]
    comm = SlabCommunicator(
        config, SimpleNamespace(rank=0, num_ranks=1, device=CPU), mode="high-throughput",
        tuning=SlabTuning(combine_warps=4), memory=memory,
    )  # fmt: skip
    assert comm.mode == comm.mode_for(4) == "high-throughput"
    assert comm.tuning.combine_warps == 4
