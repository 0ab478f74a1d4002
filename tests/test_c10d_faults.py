"""Ranks that die, stall, disagree or give rubbish: who is named, how soon, and what still works."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comm_cases import SHAPE, assert_same_bits, expert_rows
from rank_pool import RankContext, RankPool, run_ranks

from moe_comm import (
    ConfigMismatchError,
    EPConfig,
    InvalidRoutingError,
    PeerTimeoutError,
    PhaseError,
    SlotError,
)
from moe_comm.backends.reference import RankInput, ReferenceWorld
from moe_comm.launch.rank_data import RankData

MODES = ["exact", "dense", "hierarchical"]
TIMEOUT_S = 4.0
# The communicator of the last fault, for what comes after it in the same rank.
LAST: dict[str, Any] = {}


def config_of(mode: str, **fields: Any) -> EPConfig:
    """SHAPE with the mode's reduction and a short timeout."""
    reduction = "node" if mode == "hierarchical" else "rank"
    return EPConfig(**{**SHAPE, "reduction": reduction, "timeout_s": TIMEOUT_S, **fields})


def make(context: RankContext, mode: str, **fields: Any) -> Any:
    """A communicator of a mode, two ranks a node."""
    os.environ["MOE_COMM_RANKS_PER_NODE"] = "2"
    try:
        return context.communicator(config_of(mode, **fields), f"c10d:{mode}")
    finally:
        del os.environ["MOE_COMM_RANKS_PER_NODE"]


def data_of(context: RankContext, comm: Any, seed: int = 1) -> RankData:
    """This rank's seven tokens."""
    tokens = [7] * context.num_ranks
    return RankData.create(comm.config, rank=context.rank, num_tokens=tokens, seed=seed)


def names_the_lost(context: RankContext, mode: str, how: str, lost: int) -> tuple[Any, float]:
    """A good round, then rank `lost` is lost before its combine; who is named, after how long."""
    comm = LAST["comm"] = make(context, mode)
    data = data_of(context, comm)
    d = comm.dispatch(data.x, data.topk_idx, data.topk_weights)
    y = expert_rows(d, comm.config, comm.rank, comm.num_ranks, torch.bfloat16)
    comm.combine(y, d.handle)
    d = comm.dispatch(data.x, data.topk_idx, data.topk_weights)
    if context.rank == lost:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        # Its process and its connections live on; it makes no call.
        return None, 0.0
    # Ranks come at different times.
    time.sleep(0.3 * context.rank)
    start = time.monotonic()
    with pytest.raises(PeerTimeoutError) as caught:
        comm.combine(y, d.handle)
    took = time.monotonic() - start
    assert caught.value.rank == context.rank
    assert caught.value.phase == "combine"
    assert comm.metrics()["timeouts"] == 1
    # The group is lost, and says so at once.
    again = time.monotonic()
    with pytest.raises(PeerTimeoutError):
        comm.dispatch(data.x, data.topk_idx, data.topk_weights)
    assert time.monotonic() - again < 1.0
    return caught.value.peer, took


@pytest.mark.parametrize(
    "mode", ["exact", *(pytest.param(mode, marks=pytest.mark.slow) for mode in MODES[1:])]
)
def test_a_stalled_rank_is_named(mode):
    with RankPool(4) as ranks:
        results = ranks.outcomes(names_the_lost, mode, "stall", 1)
    for rank in (0, 2, 3):
        peer, took = results[rank]
        assert peer == 1
        assert took < TIMEOUT_S + 1.0


def dies_while_sending(context: RankContext) -> Any:
    """Rank 1 dies after its counts arrived, with rows under way."""
    comm = context.communicator(
        EPConfig.preset("k3-tiny", hidden=65536, max_tokens_per_rank=64, timeout_s=TIMEOUT_S),
        "c10d:exact",
    )
    data = data_of(context, comm)
    comm._transport.count = lambda peer, size: (
        os.kill(os.getpid(), signal.SIGKILL) if context.rank == 1 and size > 10**5 else None
    )
    with pytest.raises(PeerTimeoutError) as caught:
        comm.dispatch(data.x, data.topk_idx, data.topk_weights)
    return caught.value.peer


def test_a_rank_that_dies_while_sending():
    with RankPool(3) as ranks:
        results = ranks.outcomes(dies_while_sending)
    assert (results[0], results[2]) == (1, 1)


def goes_on_without(context: RankContext, mode: str, lost: int) -> None:
    """A rank is killed; the survivors name it, mask it, and get the reference's results with its
    choices masked."""
    peer, took = names_the_lost(context, mode, "kill", lost)
    assert peer == lost
    assert took < TIMEOUT_S + 1.0
    comm = LAST["comm"]
    comm.mask_rank(lost)
    config, ranks = comm.config, context.num_ranks
    held = set(config.placement_for(ranks).local_expert_ids(lost))
    inputs = []
    for given in RankData.create_all(config, num_tokens=[7] * ranks, seed=2):
        gone = torch.tensor([[int(e) in held for e in row] for row in given.topk_idx])
        idx = torch.where(gone, -1, given.topk_idx)
        tokens = 0 if given.rank == lost else 7
        inputs.append(
            RankInput(x=given.x, topk_idx=idx, topk_weights=given.topk_weights, num_tokens=tokens)
        )
    nodes = comm.group.node_of_rank
    world = ReferenceWorld(config, ranks, node_of_rank=nodes)
    want = world.dispatch(inputs)
    y = [expert_rows(w, config, rank, ranks, torch.bfloat16) for rank, w in enumerate(want)]
    out = world.combine(y, [w.handle for w in want])
    mine = RankData.create(config, rank=context.rank, num_tokens=[7] * ranks, seed=2)
    for _ in range(3):
        d = comm.dispatch(mine.x, mine.topk_idx, mine.topk_weights)
        assert_same_bits("topk_idx", d.topk_idx, want[context.rank].topk_idx)
        assert_same_bits("tokens", d.num_tokens_per_rank, want[context.rank].num_tokens_per_rank)
        got = comm.combine(y[context.rank], d.handle)
        assert_same_bits("out", got, out[context.rank])
    comm.check()


@pytest.mark.parametrize(
    "mode", ["exact", "hierarchical", pytest.param("dense", marks=pytest.mark.slow)]
)
def test_survivors_go_on_without_a_killed_rank(mode):
    with RankPool(4) as ranks:
        results = ranks.outcomes(goes_on_without, mode, 3)
    assert "exit code -9" in str(results[3])
    for rank in (0, 1, 2):
        assert results[rank] is None, results[rank]


def disagrees(context: RankContext, mode: str) -> None:
    """Rank 0 combines while the others dispatch; then all is well again."""
    comm = make(context, mode)
    data = data_of(context, comm)
    d = comm.dispatch(data.x, data.topk_idx, data.topk_weights)
    y = expert_rows(d, comm.config, comm.rank, comm.num_ranks, torch.bfloat16)
    if context.rank == 0:
        with pytest.raises(PhaseError) as caught:
            comm.combine(y, d.handle)
        mine, others = "combine", "dispatch"
    else:
        with pytest.raises(PhaseError) as caught:
            comm.dispatch(data.x, data.topk_idx, data.topk_weights)
        mine, others = "dispatch", "combine"
    assert caught.value.expected == mine
    assert caught.value.got == others
    assert (caught.value.rank == 0) == (context.rank != 0)


@pytest.mark.parametrize("mode", MODES)
def test_phases_that_differ(mode):
    run_ranks(2, disagrees, mode)


def buckets_differ(context: RankContext, mode: str, name: str) -> None:
    """Ranks call with another bucket, or payloads."""
    comm = make(context, mode)
    data = data_of(context, comm)
    first = context.rank == 0
    extra: dict[str, Any] = {"bucket": 16 if first else 8}
    if name == "payloads":
        extra = {"payloads": {"a": torch.zeros(7, 3 if first else 4)}}
    what = {"bucket": "the bucket", "payloads": "its payloads"}[name]
    with pytest.raises(ConfigMismatchError, match=what):
        comm.dispatch(data.x, data.topk_idx, data.topk_weights, **extra)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["bucket", "payloads"])
def test_arguments_that_must_agree(mode, name):
    run_ranks(2, buckets_differ, mode, name)


def bad_calls(context: RankContext, mode: str) -> None:
    """Arguments that are refused before a byte moves, on all ranks alike, and a good call after."""
    comm = make(context, mode, num_slots=1)
    data, config = data_of(context, comm), comm.config
    x, idx, weights = data.x, data.topk_idx, data.topk_weights
    many = torch.zeros(17, config.hidden, dtype=torch.bfloat16)
    calls: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (ValueError, r"x: expected at most 16 tokens \(max_tokens_per_rank\), got 17",
         lambda: comm.dispatch(many, idx, weights)),
        (ValueError, "x: expected torch.bfloat16 for wire 'bf16', got torch.float32",
         lambda: comm.dispatch(x.float(), idx, weights)),
        (ValueError, r"x: expected shape \[T, 176\] \(hidden\), got \(7, 175\)",
         lambda: comm.dispatch(x[:, 1:], idx, weights)),
        (ValueError, r"topk_idx: expected shape \[7, 6\]",
         lambda: comm.dispatch(x, idx[:, :5], weights)),
        (ValueError, "topk_idx: expected torch.int16, torch.int32, torch.int64",
         lambda: comm.dispatch(x, idx.float(), weights)),
        (ValueError, "topk_weights: expected torch.float32, got torch.bfloat16",
         lambda: comm.dispatch(x, idx, weights.bfloat16())),
        (ValueError, r"num_tokens: expected 0 to 7 \(x.shape\[0\]\), got -1",
         lambda: comm.dispatch(x, idx, weights, num_tokens=-1)),
        (ValueError, "bucket: expected 0 to 16", lambda: comm.dispatch(x, idx, weights, bucket=17)),
        (ValueError, r"x: expected at most 4 tokens \(the bucket\), got 7",
         lambda: comm.dispatch(x, idx, weights, bucket=4)),
        (ValueError, r"payloads\['p'\]: expected \[7, ...\]",
         lambda: comm.dispatch(x, idx, weights, payloads={"p": torch.zeros(6)})),
        (ValueError, "topk_idx, topk_weights: expected tensors", lambda: comm.dispatch(x)),
        (TypeError, "x: expected a tensor", lambda: comm.dispatch([1.0], idx, weights)),
    ]  # fmt: skip
    before = comm.metrics()["sent_bytes"]
    for kind, text, call in calls:
        with pytest.raises(kind, match=text):
            call()
    assert comm.metrics()["sent_bytes"] == before
    d = comm.dispatch(x, idx, weights)
    y = expert_rows(d, config, comm.rank, comm.num_ranks, torch.bfloat16)
    with pytest.raises(SlotError, match="all 1 slots are taken"):
        comm.dispatch(x, idx, weights)
    with pytest.raises(SlotError, match="still holds slot 0"):
        comm.dispatch(x, handle=d.handle)
    with pytest.raises(ValueError, match="y: expected shape"):
        comm.combine(y[:, 1:], d.handle)
    with pytest.raises(ValueError, match=r"y: expected torch.bfloat16 for combine wire"):
        comm.combine(y.float(), d.handle)
    with pytest.raises(ValueError, match=r"bias\[0\]: expected \[7, 176\]"):
        comm.combine(y, d.handle, bias=torch.zeros(6, 176, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="layout: expected"):
        comm.combine(y, d.handle, layout="columns")
    out = comm.combine(y, d.handle)
    assert torch.isfinite(out).all()
    with pytest.raises(SlotError, match="was combined already"):
        comm.combine(y, d.handle)
    again = comm.dispatch(x, idx, weights)
    again.handle.release()
    with pytest.raises(SlotError, match="was released already"):
        comm.combine(y, again.handle)
    # Ids out of range are masked and reported once.
    wild = idx.clone()
    wild[0, 0], wild[1, 1] = config.num_experts, -2
    d = comm.dispatch(x, wild, weights)
    d.handle.release()
    with pytest.raises(InvalidRoutingError, match="num_experts"):
        comm.check()
    comm.check()
    os.environ["MOE_COMM_DEBUG"] = "1"
    with pytest.raises(ValueError, match=r"topk_idx: expected ids in \[-1, 40\), got -2"):
        comm.dispatch(x, wild, weights)
    del os.environ["MOE_COMM_DEBUG"]
    comm.destroy()
    comm.destroy()
    with pytest.raises(RuntimeError, match="destroyed"):
        comm.dispatch(x, idx, weights)


@pytest.mark.parametrize("mode", MODES)
def test_bad_arguments(mode):
    run_ranks(2, bad_calls, mode)


def records_gradients_nowhere(context: RankContext) -> None:
    """A backend without gradients says so instead of detaching."""
    comm = context.communicator(config_of("exact"), "reference")
    data = data_of(context, comm)
    with pytest.raises(ValueError, match="backend reference computes no gradients"):
        comm.dispatch(data.x.clone().requires_grad_(), data.topk_idx, data.topk_weights)
    with torch.no_grad():
        comm.dispatch(data.x.clone().requires_grad_(), data.topk_idx, data.topk_weights)
    quantized = context.communicator(config_of("exact", dispatch_wire="fp8"), "c10d")
    with pytest.raises(ValueError, match="float8"):
        quantized.dispatch(data.x.clone().requires_grad_(), data.topk_idx, data.topk_weights)


def test_gradients_are_refused_where_there_are_none():
    run_ranks(2, records_gradients_nowhere)
