"""Signals of the slab under Triton's interpreter: which order of releases means what. Ranks are
driven one after the other, and a wait that would last ends at once as a timeout, so here "the peer
may still come" reads TIMEOUT, and "the peer is in another call" PHASE."""

from __future__ import annotations

import pytest
import torch
from interpreter import inside, outside
from test_slab_interpreted import CPU, _world

MODES = ["low-latency", "high-throughput"]


@outside
def test_signals_under_the_interpreter(interpreted) -> None:
    interpreted()


def _dispatch_call(world, given, slot, bucket=None):
    from moe_comm.calls import check_dispatch

    call = check_dispatch(
        world.config, CPU, given.x, given.topk_idx, given.topk_weights, num_tokens=None,
        bucket=bucket, payloads=None, handle=None,
    )  # fmt: skip
    call.slot = call.call = slot
    return call


def _combine_call(world, d):
    from moe_comm.calls import check_combine

    y = torch.zeros(d.row_index.shape[0], world.config.hidden, dtype=torch.bfloat16)
    return check_combine(
        world.config, CPU, world.num_ranks, y, d.handle, layout="expert", weights_applied=False,
        bias=None, out=None, num_expert_rows=y.shape[0],
    )  # fmt: skip


def _mixed(num_ranks=2):
    """Dispatches of buckets of 9 go by copies, smaller ones by stores."""
    from slab_world import VirtualWorld

    from moe_comm import EPConfig
    from moe_comm.backends.slab_modes import SlabTuning

    config = EPConfig(num_experts=10, num_topk=4, hidden=48, max_tokens_per_rank=9)
    large = 9 * 48 * 2
    tuning = SlabTuning(copy_from_bytes=large, combine_lag=4)
    return VirtualWorld(config, num_ranks, CPU, tuning)


def _late_releases(engine, monkeypatch):
    """The engine's side stream, whose releases come when the returned list is called."""
    late = []
    real = engine._copy_word
    monkeypatch.setattr(engine, "_copy_word", lambda *args: late.append(lambda: real(*args)))
    return late


@inside
def test_rows_may_come_after_the_next_call(monkeypatch) -> None:
    """A dispatch by copies, then one by stores; rank 1's rows come after the second one's ids."""
    from moe_comm.status import StatusBit

    world = _mixed()
    generator = torch.Generator().manual_seed(1)
    wide = world.inputs((9, 9), generator)
    narrow = world.inputs((3, 4), generator)
    first = [_dispatch_call(world, given, 0) for given in wide]
    second = [_dispatch_call(world, given, 1, bucket=4) for given in narrow]
    late = _late_releases(world.engines[1], monkeypatch)
    world.engines[0].dispatch(first[0], send=True, receive=False)
    for call in (first[1], second[1]):
        world.engines[1].dispatch(call, send=True, receive=False)
    # Rank 0 has not issued the second call yet, and rank 1's is here.
    world.engines[0].dispatch(first[0], send=False, receive=True)
    assert world.engines[0].read_status().bits == StatusBit.TIMEOUT
    assert world.engines[0].read_status().phase == "dispatch (rows)"
    assert len(late) == 1


@inside
def test_a_call_by_stores_is_not_blamed_for_copies_that_run_late(monkeypatch) -> None:
    """The other way round: rank 0's own copies are late, and rank 1 has not come to the call that
    rank 0 waits in."""
    from moe_comm.status import StatusBit

    world = _mixed()
    generator = torch.Generator().manual_seed(3)
    wide = world.inputs((9, 9), generator)
    narrow = world.inputs((3, 4), generator)
    first = [_dispatch_call(world, given, 0) for given in wide]
    second = [_dispatch_call(world, given, 1, bucket=4) for given in narrow]
    _late_releases(world.engines[0], monkeypatch)
    world.engines[1].dispatch(first[1], send=True, receive=False)
    world.engines[0].dispatch(first[0], send=True, receive=False)
    world.engines[0].dispatch(second[0], send=True, receive=True)
    assert world.engines[0].read_status().bits == StatusBit.TIMEOUT


@inside
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("second", ["dispatch", "release"])
def test_another_call_in_its_place_is_told_at_once(mode, second) -> None:
    """Rank 1 combines where rank 0 dispatches again, or gives the slot back: both are told."""
    from moe_comm.status import StatusBit

    world = _world(2, mode, chunk=4)
    inputs = world.inputs((9, 3), torch.Generator().manual_seed(4))
    got = world.dispatch(inputs)
    back = _combine_call(world, got[1])
    other = _dispatch_call(world, inputs[0], 1)

    def act(send: bool, receive: bool) -> None:
        if second == "dispatch":
            world.engines[0].dispatch(other, send=send, receive=receive)
        else:
            world.engines[0].signal_release(0, send=send, receive=receive)

    act(True, False)
    world.engines[1].combine(back, send=True, receive=False)
    act(False, True)
    world.engines[1].combine(back, send=False, receive=True)
    for rank, names in ((0, (second, "combine")), (1, ("combine", second))):
        status = world.engines[rank].read_status()
        assert status.bits == StatusBit.PHASE
        assert (status.peer, status.phase, status.other_phase) == (1 - rank, *names)


@inside
def test_a_slot_is_free_when_every_rank_has_given_it_back() -> None:
    """What follows a release on the stream writes into the slot at once, copies in the lead. So
    the release waits for the slot's readers, whether it is captured or not."""
    from moe_comm.status import StatusBit

    world = _world(2, "high-throughput")
    inputs = world.inputs((9, 3), torch.Generator().manual_seed(5))
    for _ in range(2):
        world.check_dispatched(world.dispatch(inputs), world.reference.dispatch(inputs))
        for engine in world.engines:
            engine.signal_release(0, receive=False)
        for engine in world.engines:
            engine.signal_release(0, send=False)
    assert [e.read_status().bits for e in world.engines] == [StatusBit(0)] * 2
    world.dispatch(inputs)
    world.engines[0].signal_release(0)
    status = world.engines[0].read_status()
    assert (status.bits, status.phase, status.peer) == (StatusBit.TIMEOUT, "release", 1)


@inside
def test_copies_start_before_the_kernel_that_puts_ids(monkeypatch) -> None:
    world = _world(2, "high-throughput")
    inputs = world.inputs((9, 3), torch.Generator().manual_seed(6))
    engine, done = world.engines[0], []
    for name in ("_copy_rows", "_dispatch_kernel"):
        real = getattr(engine, name)

        def step(*args, real=real, name=name, **options):
            done.append(name)
            return real(*args, **options)

        monkeypatch.setattr(engine, name, step)
    world.check_dispatched(world.dispatch(inputs), world.reference.dispatch(inputs))
    assert done[:2] == ["_copy_rows", "_dispatch_kernel"]


@inside
@pytest.mark.parametrize("count", [0, 2**31 - 1])
def test_counters_that_survivors_agreed_on_start_no_phase_error(count) -> None:
    """Rank 1 was one release behind when a failure met it; afterwards rank 0 is only late."""
    from moe_comm.kernels.signal import COMBINE
    from moe_comm.status import StatusBit

    world = _world(2)
    for engine in world.engines:
        engine.seed_counters(count)
    ahead, behind = world.engines
    ahead.state[1, COMBINE] = 1
    for flags in (ahead.flags, behind.flags):
        flags[COMBINE, 0] = ((count + 1 + 2**31) % 2**32 - 2**31) << 32
    for engine in world.engines:
        engine.state[0] += engine.state[1]
        engine.state[1].zero_()
    counters = [engine.read_counters() for engine in world.engines]
    assert counters[0] != counters[1]
    for engine in world.engines:
        engine.agree_on_counters(counters)
    inputs = world.inputs((4, 4), torch.Generator().manual_seed(7))
    behind.dispatch(_dispatch_call(world, inputs[1], 0), send=True, receive=True)
    assert behind.read_status().bits == StatusBit.TIMEOUT
