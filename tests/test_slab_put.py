"""The slab over puts on the CPU, under Triton's interpreter: ranks of one process, whose puts are
plain stores. Everything else is what runs over NVSHMEM: staging, forwarding, flags, waits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from interpreter import INTERPRETED, inside, outside

from moe_comm import EPConfig
from moe_comm.backends import slab
from moe_comm.backends.slab_modes import SlabTuning
from moe_comm.backends.slab_staging import COMBINE_PIECES, DISPATCH_PIECES, part_bytes, stage
from moe_comm.backends.slab_state import region_sizes
from moe_comm.topology import Topology

CPU = torch.device("cpu")


@outside
@pytest.mark.slow
def test_under_the_interpreter(interpreted) -> None:
    interpreted()


def world(num_ranks: int = 2, mode: str = "low-latency", programs: int = 4, **shape: Any) -> Any:
    from slab_world import VirtualWorld

    config = EPConfig(
        **{"num_experts": 10, "num_topk": 3, "hidden": 48, "max_tokens_per_rank": 6} | shape
    )
    tuning = SlabTuning(mode=mode, combine_lag=4, put_programs=programs)
    return VirtualWorld(config, num_ranks, CPU, tuning, puts=True)


@inside
@pytest.mark.parametrize("mode", ["low-latency", "high-throughput"])
@pytest.mark.parametrize(("num_ranks", "tokens"), [(1, (5,)), (2, (1, 6)), (3, (6, 0, 4))])
def test_round_trip(mode, num_ranks, tokens) -> None:
    # Counters wrap past 2^31. Few choices: many rows go alone.
    here = world(num_ranks, mode)
    here.round_trip(tokens, torch.Generator().manual_seed(num_ranks), masked=0.6)


@inside
def test_call_after_call() -> None:
    here = world()
    generator = torch.Generator().manual_seed(4)
    for tokens in ((0, 0), (2, 3), (6, 1)):
        here.round_trip(tokens, generator)


@inside
def test_large_tiles_and_a_wide_row() -> None:
    here = world(programs=2, hidden=1200, max_tokens_per_rank=18, num_topk=1)
    here.round_trip((18, 17), torch.Generator().manual_seed(3), masked=0.4)


@inside
@pytest.mark.parametrize("wire", ["fp8", "mxfp8"])
def test_quantized_wires(wire) -> None:
    here = world(mode="high-throughput", dispatch_wire=wire, combine_wire=wire, hidden=160)
    here.round_trip((6, 3), torch.Generator().manual_seed(5))


@inside
@pytest.mark.parametrize(
    "options", [{"layout": "rows"}, {"weights_applied": True, "with_bias": True}]
)
def test_combine_options(options) -> None:
    world().round_trip((6, 2), torch.Generator().manual_seed(7), **options)


@inside
def test_bucket_below_the_capacity_and_second_slot() -> None:
    world().round_trip((3, 4), torch.Generator().manual_seed(8), bucket=4, slot=1)


@inside
def test_float32_rows_on_wire_none() -> None:
    here = world(dispatch_wire="none", combine_wire="none")
    here.round_trip((6, 4), torch.Generator().manual_seed(9), dtype=torch.float32)


@inside
def test_payloads_travel() -> None:
    here = world(max_payload_bytes=48)
    generator = torch.Generator().manual_seed(12)
    inputs = here.inputs((6, 4), generator)
    payloads = [
        {"a": torch.randn(n, 3, generator=generator), "b": torch.arange(n, dtype=torch.int64)}
        for n in (6, 4)
    ]
    inputs = [replace(given, payloads=p) for given, p in zip(inputs, payloads, strict=True)]
    want = here.reference.dispatch(inputs)
    here.check_dispatched(here.dispatch(inputs, payloads=payloads), want)


@inside
def test_slots_that_are_given_back() -> None:
    """Without a combine: every rank's flag must have come before the slot is written again."""
    here = world()
    generator = torch.Generator().manual_seed(13)
    for _ in range(2):
        inputs = here.inputs((6, 4), generator)
        here.check_dispatched(here.dispatch(inputs), here.reference.dispatch(inputs))
        for engine in here.engines:
            engine.signal_release(0, send=True, receive=False)
        for engine in here.engines:
            engine.signal_release(0, send=False, receive=True)
    assert [engine.status.tolist() for engine in here.engines] == [[0] * 8] * 2


@inside
def test_a_masked_rank_is_sent_nothing_and_delivers_nothing() -> None:
    here = world(3)
    inputs = here.inputs((6, 0, 5), torch.Generator().manual_seed(14))
    alive = here.mask_rank(1, inputs)
    ids = [memory.view("topk_idx", (3, 6, 3), torch.int32) for memory in here.memories]
    flags = here.engines[1].flags.clone()
    for own in ids:
        # As a rank that has died may leave them behind.
        own.fill_(0)
    want = here.reference.dispatch(alive)
    calls = here.dispatch(inputs)
    # Rank 1 still tells itself; nobody tells it anything.
    assert bool((ids[1][[0, 2]] == 0).all())
    assert torch.equal(here.engines[1].flags[:, [0, 2]], flags[:, [0, 2]])
    assert bool((ids[0][1] == -1).all())
    for rank in (0, 2):
        assert torch.equal(calls[rank].expert_offsets, want[rank].expert_offsets)
        assert torch.equal(calls[rank].row_index, want[rank].row_index)


@inside
def test_a_rank_that_failed_puts_nothing() -> None:
    from moe_comm.status import StatusBit

    here = world(3)
    inputs = here.inputs((4, 4, 4), torch.Generator().manual_seed(13))
    here.engines[1].status.fill_(int(StatusBit.TIMEOUT))
    got = here.dispatch(inputs)
    status = here.engines[0].read_status()
    assert status.bits == StatusBit.TIMEOUT
    assert (status.phase, status.peer) == ("dispatch", 1)
    assert int(got[0].expert_offsets[-1]) == 0
    rows = [torch.zeros(d.row_index.shape[0], 48, dtype=torch.bfloat16) for d in got]
    assert bool(here.combine(rows, got)[0].isnan().all())


@pytest.mark.skipif(INTERPRETED, reason="needs no kernel")
@pytest.mark.parametrize("wire", ["bf16", "fp8", "mxfp8", "none"])
@pytest.mark.parametrize("bucket", [0, 1, 33])
def test_pieces_stay_in_their_part(wire, bucket) -> None:
    """At the capacity and below: inside the part, aligned, and apart from each other."""
    config = EPConfig(
        num_experts=10, num_topk=3, hidden=180, max_tokens_per_rank=33, max_payload_bytes=40,
        num_slots=3, dispatch_wire=wire, combine_wire=wire,
    )  # fmt: skip
    ranks = 4
    sizes = region_sizes(config, ranks, puts=True)
    part = part_bytes(sizes, config.num_slots, ranks)
    assert sizes["staging"] == config.num_slots * ranks * part
    for names in (DISPATCH_PIECES, COMBINE_PIECES):
        rows = {name: sizes[name] // (config.num_slots * ranks * config.bucket) for name in names}
        staged = stage(torch.zeros(ranks), part, rows, bucket=bucket, rank=2)
        end = 0
        for name in names:
            first, row_bytes = staged.pieces[name]
            assert first % 256 == 0
            assert first >= end
            end = first + bucket * row_bytes
            # The kernels add the place of this rank's rows among those of all ranks.
            assert staged.offset(name) + 2 * bucket * row_bytes == first
        assert end <= part


def topology(**changes: Any) -> Topology:
    given = {
        "num_ranks": 2, "node_of_rank": (0, 0), "device_type": "cuda", "device_names": ("a", "a"),
        "peer_access": True, "transport": "nccl",
    }  # fmt: skip
    return Topology(**given | changes)


@pytest.mark.skipif(INTERPRETED, reason="needs no kernel")
class TestSelection:
    config = EPConfig(num_experts=10, num_topk=4, hidden=48, max_tokens_per_rank=9)

    def test_stores_where_they_reach_everyone(self, monkeypatch) -> None:
        monkeypatch.delenv("MOE_COMM_SLAB_FORCE_PUT", raising=False)
        answer = slab.supports(self.config, topology())
        assert answer.ok
        assert "put" not in answer.capabilities

    @pytest.mark.parametrize(
        ("forced", "changes", "why"),
        [
            ("1", {}, "MOE_COMM_SLAB_FORCE_PUT"),
            ("", {"node_of_rank": (0, 1)}, "span 2 nodes"),
            ("", {"peer_access": False}, "no direct access"),
        ],
    )
    def test_puts_elsewhere_and_why_not(self, monkeypatch, forced, changes, why) -> None:
        from moe_comm import symmetric_nvshmem

        monkeypatch.setenv("MOE_COMM_SLAB_FORCE_PUT", forced)
        answer = slab.supports(self.config, topology(**changes))
        # This torch has no NVSHMEM.
        assert not answer.ok
        assert why in answer.reason
        assert "NVSHMEM" in answer.reason
        monkeypatch.setattr(symmetric_nvshmem, "missing", lambda: "")
        answer = slab.supports(self.config, topology(**changes))
        assert answer.ok
        assert "put" in answer.capabilities
        assert why in answer.reason
