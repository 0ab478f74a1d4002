"""Scheduler and engine on the small model: every result equals that of the request alone."""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path

import pytest
import torch

from moe_comm.model.serving.batch import SequenceSlice, make_batch
from moe_comm.model.serving.lockstep import token_bucket
from moe_comm.model.serving.requests import Phase, Request
from moe_comm.model.serving.slots import StateError

sys.path.append(str(Path(__file__).parent))
from serving_cases import Server, alone, assert_same_logits, prompt, small_layout


def request(name, length, new=4, *, seed=None, prefix=(), **fields) -> Request:
    tail = prompt(length, seed=sum(name.encode()) if seed is None else seed)
    return Request(name=name, prompt=(*prefix, *tail), max_new_tokens=new, **fields)


def check(server: Server, requests) -> None:
    for item in requests:
        assert server.scheduler.tracked[item.name].phase is Phase.FINISHED
        assert_same_logits(server.logits[item.name], alone(item), item.name)
    server.expect_empty()


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 25])
def test_chunked_prefill_is_the_whole_prefill(length):
    """Chunks of every length around the convolution width (4) and the grid (8), then decode."""
    item = request("a", length, seed=length)
    server = Server(token_budget=9, max_seqs=1, prefix=False)
    server.run(item)
    check(server, [item])
    assert server.scheduler.counters.steps >= length // 9 + 4


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 7, 8, 11])
def test_a_cut_anywhere_gives_the_same_state(cut):
    server, whole = Server(prefix=False), Server(prefix=False)
    tokens = prompt(12)

    def run(target, bounds):
        (handle,) = target.pool.allocate(1)
        pages = target.cache.allocate(2)
        for start, end in itertools.pairwise(bounds):
            slot = target.pool.begin(handle, start, end)
            part = SequenceSlice(token_ids=tokens[start:end], start=start, slot=slot, pages=pages)
            batch = make_batch([part], pool=target.pool, cache=target.cache.rows)
            logits = target.model.forward(batch)
            target.pool.commit(handle, end)
        return logits, [t[:, slot].clone() for t in target.pool.tensors.values()]

    got, want = run(server, [0, cut, 12]), run(whole, [0, 12])
    assert torch.equal(got[0], want[0])
    for a, b in zip(got[1], want[1], strict=True):
        assert torch.equal(a, b)


def test_a_one_token_first_chunk_in_a_recycled_slot_starts_from_zero():
    server = Server(num_slots=1, max_seqs=1, prefix=False)
    first, second = request("a", 9), request("b", 1, seed=3)
    server.run(first)
    server.run(second)
    check(server, [first, second])


def test_a_mixed_batch_is_many_single_runs():
    items = [request(f"r{i}", n, 5, seed=i) for i, n in enumerate([3, 17, 1, 30, 8, 12])]
    server = Server(token_budget=20, max_seqs=5)
    server.run(*items)
    check(server, items)
    assert server.scheduler.counters.admitted == 6


def test_prefix_hits_give_the_same_logits_and_are_counted():
    shared = prompt(27, seed=5)
    items = [request(f"r{i}", 6, seed=10 + i, prefix=shared) for i in range(5)]
    server = Server(snapshot_interval=8, max_seqs=2)
    for item in items:
        server.run(item)
    stats = server.prefixes.stats()
    hits = [server.scheduler.tracked[item.name].prefix_hit for item in items]
    assert hits[0] == 0
    assert all(hit == 24 for hit in hits[1:])
    assert stats.tokens_hit == sum(hits)
    check(server, items)


def test_without_an_interval_a_branch_point_earns_a_snapshot():
    shared = prompt(27, seed=5)
    items = [request(f"r{i}", 40, seed=10 + i, prefix=shared) for i in range(3)]
    server = Server(max_seqs=1, tail_snapshots=False)
    for item in items:
        server.run(item)
    hits = [server.scheduler.tracked[item.name].prefix_hit for item in items]
    # The only state of the first lies in its own part; the second finds pages, and leaves one.
    assert hits == [0, 0, 24]
    check(server, items)


def test_a_conversation_continues_from_the_end_of_the_last_turn():
    first = request("a", 13, 6)
    server = Server()
    server.run(first)
    history = (*first.prompt, *server.tokens("a"))
    second = Request(name="b", prompt=(*history, 7, 8, 9), max_new_tokens=3)
    server.run(second)
    assert server.scheduler.tracked["b"].prefix_hit == 13 + 5
    check(server, [first, second])


def test_exact_boundary_prompts_compute_their_last_token_from_the_state_before_it():
    item = request("a", 16)
    again = Request(name="b", prompt=item.prompt, max_new_tokens=4)
    server = Server(snapshot_interval=8)
    server.run(item)
    server.run(again)
    assert server.scheduler.tracked["b"].prefix_hit == 8
    check(server, [item, again])


def test_preempted_requests_resume_where_they_stopped():
    items = [request(f"r{i}", 10 + i, 12, seed=i) for i in range(4)]
    server = Server(num_pages=7, max_seqs=4, prefix=False)
    server.run(*items)
    counters = server.scheduler.counters
    assert counters.preemptions > 0
    assert counters.resumes > 0
    # The oldest one is never pushed out.
    assert server.scheduler.tracked["r0"].preemptions == 0
    check(server, items)


@pytest.mark.parametrize("after_steps", [1, 2, 3, 5])
def test_preemption_by_hand_at_any_point(after_steps):
    items = [request("a", 20, 6, seed=1), request("b", 9, 6, seed=2)]
    server = Server(token_budget=12, max_seqs=2, prefix=False)
    for item in items:
        server.scheduler.submit(item)
    for _ in range(after_steps):
        server.engine.step()
    if server.scheduler.tracked["a"].phase is Phase.RUNNING:
        server.scheduler.preempt("a")
    server.scheduler.audit()
    server.engine.run(max_steps=200)
    check(server, items)


def test_a_request_that_can_never_fit_is_refused_with_a_reason():
    server = Server(num_pages=3)
    with pytest.raises(ValueError, match="need 4 pages, the cache has 3"):
        server.scheduler.submit(request("a", 24, 2))
    server.scheduler.submit(request("b", 24, 1))
    with pytest.raises(ValueError, match="submitted before"):
        server.scheduler.submit(request("b", 1, 1))
    with pytest.raises(ValueError, match="prompt"):
        Request(name="c", prompt=(), max_new_tokens=1)
    with pytest.raises(ValueError, match="forced"):
        Request(name="c", prompt=(1,), max_new_tokens=2, forced=(1,))


def test_a_budget_that_could_starve_prefill_is_refused():
    with pytest.raises(ValueError, match="token_budget"):
        Server(token_budget=11, max_seqs=4)
    with pytest.raises(ValueError, match="snapshot_interval"):
        Server(snapshot_interval=12)


def test_a_large_request_is_not_passed_for_ever():
    """Small ones keep coming and would always fit; the large one runs after a bounded number."""
    server = Server(num_pages=8, max_seqs=4, prefix=False, max_bypass=2)
    # Holds four pages while it decodes, so that the large one (seven) does not fit.
    server.scheduler.submit(request("long", 9, 24, seed=1))
    server.engine.step()
    server.scheduler.submit(request("large", 52, 2, seed=2))
    for i in range(12):
        server.scheduler.submit(request(f"small{i}", 3, 2, seed=3 + i))
    order = []
    for _ in range(400):
        more = server.engine.step()
        for name, tracked in server.scheduler.tracked.items():
            if tracked.phase is Phase.FINISHED and name not in order:
                order.append(name)
        if not more:
            break
    assert set(order) == set(server.scheduler.tracked)
    assert sum(name.startswith("small") for name in order[: order.index("large")]) == 2
    server.expect_empty()


def test_decode_does_not_starve_prefill():
    server = Server(token_budget=4 + 8, max_seqs=4, prefix=False)
    items = [request(f"d{i}", 2, 40, seed=i) for i in range(3)]
    late = request("late", 24, 1, seed=9)
    for item in items:
        server.scheduler.submit(item)
    server.engine.step()
    server.scheduler.submit(late)
    for _ in range(4):
        server.engine.step()
    assert server.scheduler.tracked["late"].phase is Phase.FINISHED
    server.engine.run(max_steps=100)
    check(server, [*items, late])


@pytest.mark.parametrize("seed", range(4))
def test_cancellation_at_any_point_leaks_nothing_and_disturbs_nobody(seed):
    draw = random.Random(seed)
    shared = prompt(17, seed=99)
    items = [
        request(f"r{i}", draw.randint(1, 20), draw.randint(1, 8), seed=i, prefix=shared)
        for i in range(8)
    ]
    server = Server(num_slots=6, num_pages=20, token_budget=16, max_seqs=3, snapshot_interval=8)
    for item in items:
        server.scheduler.submit(item)
    cancelled, now = set(), 0.0
    for step in range(300):
        plan = server.scheduler.plan(now)
        if step % 4 == seed:
            name = f"r{draw.randrange(8)}"
            if server.scheduler.tracked[name].phase is not Phase.FINISHED:
                cancelled.add(name)
            server.scheduler.cancel(name)
            server.scheduler.cancel("nobody")
        sampled = {}
        if plan.work:
            batch = server.engine.batch(plan, plan.num_tokens)
            sampled = server.engine._sample(plan, server.model.forward(batch))
        server.scheduler.complete(plan, sampled, now)
        server.scheduler.audit()
        if not server.scheduler.unfinished:
            break
    assert cancelled
    for item in items:
        phase = server.scheduler.tracked[item.name].phase
        assert phase is (Phase.CANCELLED if item.name in cancelled else Phase.FINISHED)
        if item.name not in cancelled:
            assert_same_logits(server.logits[item.name], alone(item), item.name)
    server.expect_empty()


def test_a_failed_forward_gives_everything_back_and_can_be_tried_again():
    items = [request("a", 11, 5, seed=1), request("b", 4, 5, seed=2)]
    server = Server(prefix=False)
    for item in items:
        server.scheduler.submit(item)
    server.engine.step()
    server.engine.step()
    forward = server.model.forward

    def broken(batch):
        forward(batch)  # the states have moved when it fails
        raise OSError("the device fell over")

    server.model.forward = broken
    with pytest.raises(OSError, match="fell over"):
        server.engine.step()
    server.scheduler.audit()
    assert server.pool.audit().in_use == 0
    server.model.forward = forward
    server.engine.run(max_steps=100)
    check(server, items)


def test_steps_are_opened_and_closed_in_turn():
    server = Server()
    server.scheduler.submit(request("a", 5))
    plan = server.scheduler.plan(0.0)
    with pytest.raises(StateError, match="not been completed"):
        server.scheduler.plan(0.0)
    with pytest.raises(StateError, match="open"):
        server.scheduler.preempt("a")
    server.scheduler.abandon(plan)
    with pytest.raises(StateError, match="not the open step"):
        server.scheduler.complete(plan, {}, 0.0)


def test_requests_are_not_seen_before_they_arrive():
    server = Server(clock=lambda: 1.0)
    server.scheduler.submit(request("later", 5, arrival_s=2.0))
    server.scheduler.submit(request("now", 5, arrival_s=1.0))
    for _ in range(10):
        assert server.engine.step()
    phases = {n: t.phase for n, t in server.scheduler.tracked.items()}
    assert phases == {"later": Phase.WAITING, "now": Phase.FINISHED}
    with pytest.raises(RuntimeError, match="1 requests are unfinished"):
        server.engine.run(max_steps=3)


def test_forced_tokens_and_stop_tokens():
    item = request("a", 6, 4, seed=2, forced=(1, 2, 3, 4))
    server = Server()
    server.run(item)
    assert server.tokens("a") == [1, 2, 3, 4]
    stop = request("b", 6, 4, seed=2, forced=(1, 2, 3, 4), stop_token=2)
    server.run(stop)
    assert server.tokens("b") == [1, 2]
    server.expect_empty()


def test_token_buckets_are_powers_of_two():
    assert [token_bucket(n) for n in (0, 1, 2, 3, 4, 5, 64, 65)] == [0, 1, 2, 4, 4, 8, 64, 128]


def test_batches_refuse_what_would_write_into_somebody_else():
    server = Server(small_layout())
    part = SequenceSlice(token_ids=(1, 2), start=0, slot=1, pages=(1,))

    def build(*parts, **more):
        return make_batch(list(parts), pool=server.pool, cache=server.cache.rows, **more)

    def change(**fields):
        return SequenceSlice(
            **{"token_ids": (1, 2), "start": 0, "slot": 1, "pages": (1,), **fields}
        )

    for bad, name in (
        ((change(slot=0),), "slot"),
        ((part, change(pages=(2,))), "slot"),
        ((change(pages=(0,)),), "pages"),
        ((change(start=7),), "pages"),
        ((change(token_ids=()),), "token_ids"),
    ):
        with pytest.raises(ValueError, match=name):
            build(*bad)
    with pytest.raises(ValueError, match="bucket"):
        build(part, bucket=1)
    empty = build()
    assert (empty.num_seqs, empty.num_tokens) == (0, 0)
    assert empty.cu_seqlens.tolist() == [0]


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_draft_tokens_through_the_model_leave_no_trace_when_they_are_rejected(accepted):
    """Verify three draft tokens, keep some, decode on: the logits are those of a run that never
    drafted. Rejected tokens' MLA rows are overwritten, their states are dropped."""
    tokens = prompt(21, seed=8)
    server = Server(prefix=False)
    pool, cache = server.pool, server.cache
    (state,) = pool.allocate(1)
    pages = cache.allocate(4)

    def step(handle, start, end, source):
        slot = pool.begin(handle, start, end)
        part = SequenceSlice(token_ids=source[start:end], start=start, slot=slot, pages=pages)
        logits = server.model.forward(make_batch([part], pool=pool, cache=cache.rows))
        pool.commit(handle, end)
        return logits[0]

    step(state, 0, 15, tokens)
    drafted = (*tokens[: 15 + accepted], *(60 - t for t in tokens[15 + accepted : 18]))
    before, drafts = state, pool.begin_draft(state, 3)
    for i, draft in enumerate(drafts):
        pool.advance_draft(before, draft)
        step(draft, 15 + i, 16 + i, drafted)
        before = draft
    state = pool.commit_draft(state, drafts, accepted)
    rows = {}
    for at in range(15 + accepted, 21):
        rows[at + 1] = step(state, at, at + 1, tokens)
    plain = Request(name="p", prompt=tokens[:15], max_new_tokens=7, forced=(*tokens[15:], 0))
    want = alone(plain)
    for position, row in rows.items():
        assert torch.equal(row, want[position])
    assert pool.audit().in_use == 1
