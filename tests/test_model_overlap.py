"""A MoE layer in every order of its communication and its shared experts: the same bits, every
piece launched once and in the order said; on a pair of GPUs, captured too, with as many kernels."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch
from model_cases import DictSource, random_tensors
from rank_pool import RankContext, run_ranks

from moe_comm import create_communicator
from moe_comm.group import Group
from moe_comm.launch.model_experts import random_experts
from moe_comm.launch.model_overlap import variants
from moe_comm.launch.model_timeline import beside, kernels_of, profiled, shifted
from moe_comm.model.build import Builder
from moe_comm.model.config import K3Config
from moe_comm.model.layers import latent_moe
from moe_comm.model.layers.experts import GroupedExperts
from moe_comm.model.layers.linear import Numerics, linear
from moe_comm.model.layers.multiprocessors import (
    can_leave_free,
    leave_free,
    sm_count_target,
)
from moe_comm.model.layers.overlap import FEW_TOKENS, Order, Overlap, Work
from moe_comm.model.parallel import Parallel
from moe_comm.model.transformer import ep_config

CONFIG = dataclasses.replace(
    K3Config.preset("k3-tiny").truncate(2), num_experts=32, num_experts_per_token=4
)
BUCKET = 8
# Ranks of unequal length, a rank without tokens, a full bucket.
TOKENS = [(7, 3), (5, 0), (8, 8)]
# What each order launches, one after the other, where nothing is aside.
LAUNCHED = {
    Order.SEQUENCE: ["dispatch", "experts", "combine", "first", "rest"],
    Order.HALVES: ["dispatch", "first", "experts", "combine", "rest"],
    Order.PRODUCTS_ASIDE: ["first", "dispatch", "experts", "rest", "combine"],
}

# Products that nothing keeps from running beside their call, and what is not on the current stream.
PRODUCTS = {"first", "rest"}
ASIDE = {
    Order.SEQUENCE: (set(), set()),
    Order.HALVES: (set(), set()),
    Order.PRODUCTS_ASIDE: (PRODUCTS, PRODUCTS),
}


def layer_of(device: torch.device, comm, numerics: Numerics | None = None):
    """The MoE layer of a small model, its weights on `device`, its experts those of the rank."""
    builder = Builder(
        CONFIG,
        DictSource(random_tensors(CONFIG, 3)),
        parallel=Parallel(),
        numerics=numerics or Numerics(),
        device=device,
        dtype=torch.bfloat16,
    )
    weights = random_experts(
        CONFIG,
        comm.placement.num_local_experts(comm.rank),
        device,
        11 + comm.rank,
        implementation="torch" if device.type == "cpu" else "triton",
    )
    return builder.layer(1, lambda layer: GroupedExperts(weights=weights)).mlp


def communicator(group: Group, backend: str):
    shape = ep_config(CONFIG, max_tokens_per_rank=BUCKET, numerics=Numerics(), timeout_s=30.0)
    return create_communicator(shape, group, backend)


def inputs(num: int, rank: int, seed: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randn(num, CONFIG.hidden_size, generator=generator).bfloat16().to(device)


def recording(layer, log: list[str]):
    """The layer with what it launches of its own written into `log`."""

    def noting(name, call):
        def noted(*args):
            log.append(name)
            return call(*args)

        return noted

    class Recorded(latent_moe.LatentMoe):
        def work(self, *args, **options):
            work = super().work(*args, **options)
            return dataclasses.replace(
                work,
                experts=noting("experts", work.experts),
                first=noting("first", work.first),
                rest=noting("rest", work.rest),
            )

    values = {field.name: getattr(layer, field.name) for field in dataclasses.fields(layer)}
    return Recorded(**values)


def orders_on_cpu(context: RankContext) -> dict[str, list[list[str]]]:
    """Compares outputs; returns what was launched, by order, for each of TOKENS."""
    device, launched = torch.device("cpu"), {str(order): [] for order in Order}
    with communicator(Group(), "c10d:exact") as comm:
        log: list[str] = []
        comm.add_hook(lambda event: log.append(event.phase))
        layer = recording(layer_of(device, comm), log)
        for seed, tokens in enumerate(TOKENS):
            x = inputs(tokens[context.rank], context.rank, seed, device)
            wanted = None
            for order in Order:
                log.clear()
                run = dataclasses.replace(layer, overlap=Overlap(order=order))
                out = run.forward(x, comm, Parallel(), bucket=BUCKET)
                launched[str(order)].append(list(log))
                assert out.shape == x.shape
                assert torch.isfinite(out).all()
                wanted = out if wanted is None else wanted
                assert torch.equal(out, wanted), (order, tokens)
            if x.shape[0]:
                assert wanted.float().std() > 0.01
    return launched


def test_every_order_gives_the_same_bits_and_launches_each_piece_once():
    assert set(LAUNCHED) == set(Order)
    for launched in run_ranks(2, orders_on_cpu):
        for order, wanted in LAUNCHED.items():
            assert launched[order] == [wanted] * len(TOKENS), order


class Streams:
    """Streams as CUDA orders them, without running anything: an operation comes after all that its
    stream holds, and, behind a wait, after all that the other stream held at that time."""

    def __init__(self, monkeypatch):
        self.after = {"main": frozenset(), "side": frozenset()}
        self.now = "main"
        self.seen: dict[str, frozenset[str]] = {}
        self.where: dict[str, str] = {}
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.of(self.now))
        monkeypatch.setattr(torch.cuda, "stream", self.enter)

    def of(self, name):
        return SimpleNamespace(
            name=name, device=None, wait_stream=lambda other: self.wait(name, other.name)
        )

    def wait(self, name, other):
        self.after[name] |= self.after[other]

    @contextlib.contextmanager
    def enter(self, stream):
        before, self.now = self.now, stream.name
        yield
        self.now = before

    def launch(self, name, result):
        self.seen[name], self.where[name] = self.after[self.now], self.now
        self.after[self.now] |= {name}
        return result


@pytest.mark.parametrize("order", Order)
def test_streams_are_forked_and_joined(order, monkeypatch):
    """Every piece comes after what it reads and everything that was there before; after the layer
    the current stream comes after every piece, and a second layer after the first."""
    streams = Streams(monkeypatch)

    class Comm:
        def dispatch(self, z, idx, weights, *, bucket, async_op=False):
            arrived = SimpleNamespace(handle=None)
            if not async_op:
                return streams.launch("dispatch", arrived)
            streams.launch("dispatch.send", None)
            return SimpleNamespace(wait=lambda: streams.launch("dispatch", arrived))

        def combine(self, rows, handle, *, async_op=False):
            if not async_op:
                return streams.launch("combine", "combined")
            streams.launch("combine.send", None)
            return SimpleNamespace(wait=lambda: streams.launch("combine", "combined"))

    work = Work(
        comm=Comm(), z=None, idx=None, weights=None, bucket=BUCKET,
        experts=lambda arrived: streams.launch("experts", "rows"),
        first=lambda: streams.launch("first", "part"),
        rest=lambda part: streams.launch("rest", "shared"),
    )  # fmt: skip
    pieces = {"dispatch", "experts", "combine", "first", "rest"}
    for turn in range(2):
        before = streams.after["main"] | {f"before {turn}"}
        streams.launch(f"before {turn}", None)
        overlap = Overlap(order=order, stream=streams.of("side"))
        assert overlap.run(work) == ("combined", "shared")
        assert streams.now == "main"
        assert pieces <= streams.after["main"]
        assert before <= frozenset.intersection(*(streams.seen[name] for name in pieces))
        assert "dispatch" in streams.seen["experts"]
        assert {"dispatch", "experts"} <= streams.seen["combine"]
        assert "first" in streams.seen["rest"]
        beside = {
            name
            for call, name in (("dispatch", "first"), ("combine", "rest"))
            if name not in streams.seen[call] and call not in streams.seen[name]
        }
        aside = {name for name in pieces if streams.where[name] == "side"}
        wanted_beside, wanted_aside = ASIDE[order]
        if not turn:
            assert (beside, aside) == (wanted_beside, wanted_aside)
        # A second turn looks at the second launches alone.
        streams.seen.clear()
        streams.after = {name: held - pieces for name, held in streams.after.items()}


def test_many_tokens_have_an_order_of_their_own():
    both = Overlap(order=Order.PRODUCTS_ASIDE, order_of_many=Order.HALVES, leave_free=(5, 6))
    assert both.order_in(FEW_TOKENS) is Order.PRODUCTS_ASIDE
    assert both.order_in(FEW_TOKENS + 1) is Order.HALVES
    assert Overlap(order=Order.SEQUENCE).order_in(FEW_TOKENS + 1) is Order.SEQUENCE
    assert (both.free_in(FEW_TOKENS), both.free_in(FEW_TOKENS + 1)) == ((5, 6), (0, 0))


def test_what_is_left_free(monkeypatch):
    """Only beside few tokens, and never where a row's bits must not depend on how many there are.
    Asked of the real layer; what it asks of cuBLAS is for the tests on a GPU."""
    asked: list[int] = []

    def noted(count, device):
        asked.append(count)
        return leave_free(count, device)

    monkeypatch.setattr(latent_moe, "leave_free", noted)
    comm = SimpleNamespace(rank=0, placement=SimpleNamespace(num_local_experts=lambda rank: 32))
    device = torch.device("cpu")
    for numerics, num, wanted in (
        (Numerics(), 3, [5, 6]),
        (Numerics(), FEW_TOKENS + 1, [0, 0]),
        (Numerics(batch_invariant=True), 3, [0, 0]),
    ):
        layer = dataclasses.replace(
            layer_of(device, comm, numerics), overlap=Overlap(leave_free=(5, 6))
        )
        x = inputs(num, 0, 1, device)
        work = layer.work(x, x, x, x, comm, bucket=num)
        assert work.rest(work.first()).shape == x.shape
        assert asked == wanted
        asked.clear()
    with pytest.raises(ValueError, match=r"leave_free: expected at least 0, got \(1, -1\)"):
        Overlap(leave_free=(1, -1))
    assert not can_leave_free(device)
    assert Overlap.default(device) == Overlap(order=Order.HALVES)


def test_variants_of_a_device_without_streams():
    found = variants(Overlap(), torch.device("cpu"), bucket=BUCKET)
    assert [variant.is_models for variant in found] == [True] + [False] * (len(found) - 1)
    assert {variant.overlap.order for variant in found} == set(Order)
    assert len({variant.name for variant in found}) == len(found)


def test_a_timeline_of_a_trace():
    def kernel(name, ts, dur, **more):
        args = {"grid": [4, 2, 1], "block": [32, 4, 1], "registers per thread": 77} | more
        return {"cat": "kernel", "name": name, "ts": ts, "dur": dur, "args": args}

    events = [
        kernel("nvjet_product", 1004.0, 26.0, stream=7),
        {"cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 990, "dur": 5, "args": {}},
        kernel("_dispatch_kernel", 1000.0, 10.004),
        kernel("_combine_kernel", 1040.0, 10.0),
    ]
    found = shifted(kernels_of(json.loads(json.dumps({"traceEvents": events}))))
    assert [k["name"] for k in found] == ["_dispatch_kernel", "nvjet_product", "_combine_kernel"]
    assert [k["start_us"] for k in found] == [0.0, 4.0, 40.0]
    assert (found[1]["blocks"], found[1]["threads"], found[1]["registers"]) == (8, 128, 77)
    # 6 of 10 us of the dispatch, none of the combine's 10.
    assert beside(found) == pytest.approx(0.3)
    # Two products over the same time count once.
    assert beside([*found, found[1]]) == pytest.approx(0.3)
    assert beside([found[1]]) is None
    assert kernels_of({}) == shifted([]) == []


@pytest.mark.gpu
def test_a_product_that_leaves_multiprocessors_free():
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.randn(128, 7168, device=device, dtype=torch.bfloat16)
    weight = torch.randn(6144, 7168, device=device, dtype=torch.bfloat16)
    if not can_leave_free(device):
        pytest.skip("torch's cuBLAS was not found by name")
    wanted = linear(x, weight, Numerics())
    handle = torch.cuda.current_blas_handle()
    total = torch.cuda.get_device_properties(device).multi_processor_count
    assert sm_count_target(handle) == 0
    with leave_free(20, device):
        assert sm_count_target(handle) == total - 20
        with leave_free(40, device):
            got = linear(x, weight, Numerics())
        assert sm_count_target(handle) == total - 20
    assert sm_count_target(handle) == 0
    assert (got - wanted).norm() / wanted.norm() < 0.01
    with pytest.raises(ValueError, match=f"count: expected 0 to {total - 1} multiprocessors"):
        leave_free(total, device).__enter__()


@pytest.mark.gpu
@pytest.mark.multi_gpu(2)
def test_orders_on_a_pair_of_gpus():
    run_ranks(2, orders_on_gpu, device_type="cuda", timeout_s=240.0)


def orders_on_gpu(context: RankContext) -> None:
    """Every variant that is measured, eager and captured, against the sequence; launches counted
    where the products are the same kernels."""
    device = torch.device("cuda", context.rank)
    with torch.inference_mode(), communicator(Group(), "slab") as comm:
        layer = layer_of(device, comm)
        assert layer.overlap.order is Order.PRODUCTS_ASIDE
        x = inputs(7 - 2 * context.rank, context.rank, 5, device)

        def call_of(variant):
            run = dataclasses.replace(layer, overlap=variant.overlap)
            return lambda: run.forward(x, comm, Parallel(), bucket=BUCKET)

        counts = {}
        for variant in variants(layer.overlap, device, bucket=BUCKET):
            call = call_of(variant)
            plain = dataclasses.replace(
                variant,
                overlap=dataclasses.replace(variant.overlap, order=Order.SEQUENCE),
            )
            wanted = call_of(plain)().clone()
            for _ in range(3):
                assert torch.equal(call(), wanted), variant.name
            stream = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                call()
            torch.cuda.synchronize(device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                out = call()
            for _ in range(3):
                out.fill_(torch.nan)
                graph.replay()
                torch.cuda.synchronize(device)
                assert torch.equal(out, wanted), variant.name
            if not any(variant.overlap.leave_free):
                counts[variant.name] = (variant.overlap.order, launches(graph))
        comm.check()
    whole = counts["sequence"][1]
    assert whole > 8
    for name, (order, count) in counts.items():
        assert count == whole + 2 * (order is Order.HALVES), name


def launches(graph: torch.cuda.CUDAGraph) -> int:
    """Kernels of a replay."""

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return len(profiled(replay))
