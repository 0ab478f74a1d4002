"""Migration inside one process: headers, staging, reslicing between tensor-parallel sizes."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

import pytest
import torch

from moe_comm.model.serving.migration_header import (
    MigrationError,
    check_header,
    header_checksum,
    make_header,
)
from moe_comm.model.serving.paged_cache import PagedCache
from moe_comm.model.serving.requests import Phase, Request
from moe_comm.model.serving.segments import (
    PartSpec,
    export_segments,
    import_segments,
    part_bytes,
    reshard_plan,
    whole_part,
)
from moe_comm.model.serving.slots import SlotState, StateError
from moe_comm.model.serving.staged_import import ImportState, StagedImport
from moe_comm.model.serving.state_pool import StatePool

sys.path.append(str(Path(__file__).parent))
from serving_cases import Server, alone, assert_same_logits, prompt, small_layout

TOKENS = prompt(19)


class Host:
    """A pool and a cache of one rank."""

    def __init__(self, layout, *, slots: int = 3, pages: int = 8) -> None:
        self.layout = layout
        self.pool = StatePool(layout, slots, debug=True)
        self.cache = PagedCache(layout, pages, debug=True)

    def hold(self, segments, tokens=TOKENS):
        """Put a whole state in, as if it had been computed here."""
        slot, pages = self.pool.stage(), self.cache.allocate(self.layout.pages_for(len(tokens)))
        import_segments(
            self.pool, self.cache, slot.slot, pages, segments, part=whole_part(self.layout)
        )
        return self.pool.publish(slot, len(tokens)), pages

    def export(self, handle, pages, part=None, **changes):
        part = part or whole_part(self.layout)
        segments = export_segments(self.pool, self.cache, handle, pages, part=part)
        fields = {"request": "r", "tokens": TOKENS, "pending": [5], "part": part, **changes}
        return make_header(self.layout, segments, **fields), segments

    def expect_empty(self) -> None:
        assert self.pool.audit().in_use == 0
        assert self.cache.audit().used == 0


def random_state(layout, seed: int = 0, position: int = len(TOKENS)):
    draw = torch.Generator().manual_seed(seed)
    from moe_comm.model.serving.segments import segment_shapes

    return {
        name: torch.randn(shape, generator=draw).to(dtype)
        for name, (shape, dtype) in segment_shapes(layout, whole_part(layout), position).items()
    }


def land(staged: StagedImport, header, segments) -> PartSpec:
    """Write a part's bytes the way a remote writer would: region after region."""
    import ctypes

    head = staged.add_part(header, direct=True)
    data = torch.cat([s.reshape(-1).view(torch.uint8) for s in segments.values()])
    at = data.data_ptr()
    for region in staged.regions(head.part):
        ctypes.memmove(region.address, at, region.nbytes)
        at += region.nbytes
    assert at == data.data_ptr() + data.numel()
    return head.part


def equal(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("source_page", [8, 3])
def test_a_state_arrives_whole_and_equal(source_page):
    source, target = Host(small_layout(page_size=source_page)), Host(small_layout())
    state = random_state(source.layout)
    header, segments = source.export(*source.hold(state))
    assert equal(segments, state)
    head = check_header(json.loads(json.dumps(header)), target.layout, tokens=TOKENS)
    staged = StagedImport.open(target.pool, target.cache, head)
    part = land(staged, header, segments)
    staged.verify_part(part)
    imported = staged.publish()
    assert (imported.position, imported.pending) == (19, (5,))
    assert equal(target.export(imported.snapshot, imported.pages)[1], state)
    target.pool.release(imported.snapshot)
    target.cache.release(imported.pages)
    target.expect_empty()


@pytest.mark.parametrize("source_size", [1, 2, 4])
@pytest.mark.parametrize("target_size", [1, 2, 4])
def test_states_are_resliced_between_tensor_parallel_sizes(source_size, target_size):
    """From one whole state to every shard of the source size, and from these to every shard of
    the target size: each must be what cutting the whole state by heads gives."""
    whole = Host(small_layout())
    state = random_state(whole.layout)
    kept = whole.hold(state)
    sources = []
    for rank in range(source_size):
        host = Host(small_layout(tp_rank=rank, tp_size=source_size))
        part = whole_part(host.layout)
        sources.append((host, host.hold(whole.export(*kept, part=part)[1])))
    for rank in range(target_size):
        target = Host(small_layout(tp_rank=rank, tp_size=target_size))
        staged = None
        for source_rank, part in reshard_plan(4, source_size, rank, target_size):
            host, held = sources[source_rank]
            header, segments = host.export(*held, part=part)
            if staged is None:
                head = check_header(header, target.layout, tokens=TOKENS)
                staged = StagedImport.open(target.pool, target.cache, head)
            staged.verify_part(land(staged, header, segments))
        imported = staged.publish()
        got = target.export(imported.snapshot, imported.pages)[1]
        first, last = target.layout.head_range
        for name, tensor in got.items():
            heads = state[name]
            if name != "mla":
                # [L, H * c, ...] seen as [L, H, c, ...], cut by heads.
                per_head = state[name].reshape(2, 4, -1)[:, first:last]
                assert torch.equal(tensor.reshape(per_head.shape), per_head), name
            else:
                assert torch.equal(tensor, heads)


def test_reshard_plans_cover_every_head_once_and_the_rows_once():
    for heads, source, target in [(96, 8, 1), (96, 1, 8), (96, 4, 6), (96, 96, 1), (12, 3, 4)]:
        for rank in range(target):
            plan = reshard_plan(heads, source, rank, target)
            covered = [h for _, p in plan for h in range(p.first_head, p.last_head)]
            per = heads // target
            assert covered == list(range(rank * per, (rank + 1) * per))
            assert [p.with_mla for _, p in plan] == [True] + [False] * (len(plan) - 1)
            for owner, part in plan:
                own = heads // source
                assert owner * own <= part.first_head < part.last_head <= (owner + 1) * own
    with pytest.raises(ValueError, match="source_size"):
        reshard_plan(96, 5, 0, 1)
    with pytest.raises(ValueError, match="target_rank"):
        reshard_plan(96, 1, 2, 2)


def test_a_full_k3_state_has_the_published_size():
    from moe_comm.model.config import K3Config
    from moe_comm.model.serving.layout import StateLayout

    layout = StateLayout.from_config(K3Config.preset("kimi-k3"))
    part = whole_part(layout)
    assert part_bytes(layout, part, 1000) == 449_372_160 + 1000 * 27_648


def reseal(header):
    return {**header, "header_sha256": header_checksum(header)}


def bad_headers(header):
    """(what is wrong, header, message): the checksum is right unless it is what is wrong."""

    def change(**fields):
        return reseal({**copy.deepcopy(header), **fields})

    def layout(**fields):
        return change(layout={**header["layout"], **fields})

    def tensor(index, **fields):
        tensors = copy.deepcopy(header["tensors"])
        tensors[index].update(fields)
        return change(tensors=tensors)

    flipped = {**header, "position": header["position"] + 1}
    missing = {k: v for k, v in header.items() if k != "pending"}
    return [
        ("damaged", flipped, "checksum"),
        ("a field less", reseal(missing), "pending"),
        ("a field more", change(extra=1), "extra"),
        ("a field of another type", change(position="19"), "position: expected int"),
        ("schema", change(schema=2), "schema"),
        ("byte order", change(byte_order="big"), "byte_order"),
        ("another model", layout(model_id="other"), "layout.model_id"),
        ("axis order", layout(recurrent_axes="HVK"), "layout.recurrent_axes"),
        ("layer set", layout(kda_layer_ids=[0, 3]), "layout.kda_layer_ids"),
        ("conv dtype", layout(conv_dtype="float16"), "layout.conv_dtype"),
        ("conv width", layout(conv_width=5), "layout.conv_width"),
        ("chunk", layout(chunk_size=16), "layout.chunk_size"),
        ("fingerprint", change(model_fingerprint="0" * 64), "model_fingerprint"),
        ("heads", change(last_head=5), "heads"),
        ("position", change(position=18), "position: expected 19, got 18"),
        ("position 0", change(position=0), "position"),
        ("tokens", change(tokens_hash="0" * 64), "tokens_hash"),
        ("a bf16 snapshot", tensor(0, dtype="bfloat16"), "recurrent.dtype"),
        ("shape", tensor(0, shape=[2, 4, 3, 5]), "recurrent.shape"),
        ("axes", tensor(0, axes="layer,head,value,key"), "recurrent.axes"),
        ("size", tensor(1, nbytes=1), "conv.q.nbytes"),
        ("tensor layers", tensor(4, layer_ids=[2]), "mla.layer_ids"),
        ("no rows", change(tensors=header["tensors"][:4]), "tensors"),
    ]


def test_headers_are_rejected_for_every_reason():
    host = Host(small_layout())
    header, _ = host.export(*host.hold(random_state(host.layout)))
    check_header(header, host.layout, tokens=TOKENS)
    cases = bad_headers(header)
    assert len(cases) == 23
    for _, bad, message in cases:
        with pytest.raises(MigrationError, match=message):
            check_header(bad, host.layout, tokens=TOKENS)
    other = (*TOKENS[:-1], (TOKENS[-1] + 1) % 61)
    with pytest.raises(MigrationError, match="tokens_hash"):
        check_header(header, host.layout, tokens=other)


def test_a_flipped_bit_in_any_segment_is_found_and_nothing_becomes_visible():
    source = Host(small_layout())
    header, segments = source.export(*source.hold(random_state(source.layout)))
    for name in segments:
        for at in (0, -1):
            target = Host(small_layout())
            head = check_header(header, target.layout)
            staged = StagedImport.open(target.pool, target.cache, head)
            damaged = {k: v.clone() for k, v in segments.items()}
            damaged[name].reshape(-1).view(torch.uint8)[at] ^= 1
            part = land(staged, header, damaged)
            with pytest.raises(MigrationError, match=f"{name}: checksum"):
                staged.verify_part(part)
            with pytest.raises(MigrationError, match="missing"):
                staged.publish()
            assert target.pool.audit().counts[SlotState.SNAPSHOT] == 0
            staged.abort("damaged", writer_gone=True)
            target.expect_empty()


def test_bytes_that_never_came_do_not_look_like_an_empty_state():
    source, target = Host(small_layout()), Host(small_layout())
    zeros = {k: torch.zeros_like(v) for k, v in random_state(source.layout).items()}
    header, _ = source.export(*source.hold(zeros))
    staged = StagedImport.open(target.pool, target.cache, check_header(header, target.layout))
    part = staged.add_part(header, direct=True).part
    with pytest.raises(MigrationError, match="checksum"):
        staged.verify_part(part)


def test_state_without_rows_and_rows_without_state_stay_invisible():
    source, target = Host(small_layout()), Host(small_layout())
    held = source.hold(random_state(source.layout))
    for first, last, rows, missing in [(0, 4, False, "MLA rows"), (0, 3, True, "heads from 3")]:
        part = PartSpec(first_head=first, last_head=last, with_mla=rows)
        header, segments = source.export(*held, part=part)
        staged = StagedImport.open(target.pool, target.cache, check_header(header, target.layout))
        staged.verify_part(land(staged, header, segments))
        with pytest.raises(MigrationError, match=missing):
            staged.publish()
        staged.abort("incomplete", writer_gone=True)
    target.expect_empty()


def test_parts_of_different_states_do_not_mix():
    source, target = Host(small_layout()), Host(small_layout())
    held = source.hold(random_state(source.layout))
    low = PartSpec(first_head=0, last_head=2, with_mla=True)
    high = PartSpec(first_head=2, last_head=4, with_mla=False)
    header, segments = source.export(*held, part=low)
    staged = StagedImport.open(target.pool, target.cache, check_header(header, target.layout))
    land(staged, header, segments)
    for changes, message in [
        ({"pending": [6]}, "pending"),
        ({"request": "s"}, "request"),
        ({"part": low}, "bring the MLA rows"),
        ({"part": PartSpec(first_head=1, last_head=3, with_mla=False)}, "overlap"),
    ]:
        other, _ = source.export(*held, **{"part": high, **changes})
        with pytest.raises(MigrationError, match=message):
            staged.add_part(other, direct=True)
    with pytest.raises(MigrationError, match="was not announced"):
        staged.verify_part(high)


def test_quarantine_keeps_slot_and_pages_until_the_writer_is_gone():
    source, target = Host(small_layout()), Host(small_layout(), slots=1, pages=3)
    header, segments = source.export(*source.hold(random_state(source.layout)))
    head = check_header(header, target.layout)
    staged = StagedImport.open(target.pool, target.cache, head)
    assert StagedImport.open(target.pool, target.cache, head) is None
    land(staged, header, segments)
    staged.abort("timed out", writer_gone=False)
    assert staged.state is ImportState.QUARANTINED
    assert target.pool.audit().counts[SlotState.QUARANTINED] == 1
    assert target.cache.num_free == 0
    with pytest.raises(MigrationError, match="quarantined"):
        staged.verify_part(whole_part(target.layout))
    with pytest.raises(StateError, match="not quarantined"):
        target.cache.end_quarantine((4,) if target.cache.num_pages > 3 else (0,))
    staged.writer_is_gone()
    staged.writer_is_gone()
    target.expect_empty()


def test_no_room_leaves_nothing_behind():
    source = Host(small_layout())
    header, _ = source.export(*source.hold(random_state(source.layout)))
    for slots, pages in ((1, 2), (1, 8)):
        target = Host(small_layout(), slots=slots, pages=pages)
        if pages == 8:
            target.pool.allocate(1)
        before = (target.pool.num_free, target.cache.num_free)
        head = check_header(header, target.layout)
        assert StagedImport.open(target.pool, target.cache, head) is None
        assert (target.pool.num_free, target.cache.num_free) == before


def test_the_pending_token_is_processed_once_on_the_other_side():
    item = Request(name="a", prompt=prompt(19), max_new_tokens=6)
    prefill, decode = Server(prefix=False), Server(prefix=False)
    prefill.run(Request(name="a", prompt=item.prompt, max_new_tokens=6, hand_off=True))
    held = prefill.scheduler.tracked["a"]
    assert held.phase is Phase.HELD
    assert held.processed == 19
    prefill.scheduler.audit()
    part = whole_part(prefill.layout)
    segments = export_segments(prefill.pool, prefill.cache, held.state, held.pages)
    header = make_header(
        prefill.layout, segments, request="a", tokens=item.prompt, pending=held.generated, part=part
    )
    head = check_header(header, decode.layout, tokens=item.prompt)
    staged = StagedImport.open(decode.pool, decode.cache, head)
    staged.verify_part(land(staged, header, segments))
    decode.scheduler.audit([(staged.slot, staged.pages)])
    imported = staged.publish()
    short = Request(name="b", prompt=item.prompt[:-1], max_new_tokens=6)
    with pytest.raises(StateError, match="18 prompt tokens"):
        decode.scheduler.adopt(short, imported)
    decode.scheduler.adopt(item, imported)
    decode.engine.run(max_steps=50)
    assert_same_logits({**prefill.logits["a"], **decode.logits["a"]}, alone(item))
    prefill.scheduler.let_go("a")
    with pytest.raises(StateError, match="expected held"):
        prefill.scheduler.let_go("a")
    prefill.expect_empty()
    decode.expect_empty()


def test_a_cancelled_hand_off_is_let_go():
    server = Server()
    server.run(Request(name="a", prompt=prompt(9), max_new_tokens=2, hand_off=True))
    server.scheduler.cancel("a")
    assert server.scheduler.tracked["a"].phase is Phase.CANCELLED
    server.expect_empty()
