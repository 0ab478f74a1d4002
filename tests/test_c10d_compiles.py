"""Every launch of c10d's own kernels compiles for sm_90, without a GPU."""

from __future__ import annotations

import os

import pytest
import torch
from test_slab_compiles import POINTERS, compiled  # noqa: F401 - a fixture

from moe_comm.backends.c10d_blocks import HEAD_BYTES, Blocks
from moe_comm.backends.c10d_index import IndexLaunches, index_bytes
from moe_comm.backends.c10d_plan import PackedPlan
from moe_comm.backends.c10d_routing import Router
from moe_comm.backends.c10d_transport import Header, Headers
from moe_comm.backends.packing import Field, RecordLayout
from moe_comm.backends.sum_launches import fold, partial_sums
from moe_comm.placement import ExpertPlacement

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled under the interpreter"
)


@pytest.fixture(autouse=True)
def pointers_to_bool(monkeypatch):
    monkeypatch.setitem(POINTERS, torch.bool, "*i1")


def router_of(num_ranks: int, *, masked: bool = False) -> Router:
    placement = ExpertPlacement.contiguous(896, num_ranks)
    router = Router(
        rank=1,
        num_ranks=num_ranks,
        copy_table=placement.copy_table,
        num_copies=placement.num_copies,
        width=placement.max_local_experts,
        status=torch.zeros(1, dtype=torch.int32),
        uses_kernels=True,
    )
    if masked:
        router.alive = torch.ones(num_ranks, dtype=torch.bool)
    return router


def layout_of(*more: Field) -> RecordLayout:
    fields = [
        Field(name="ids", dtype=torch.int32, shape=(16,)),
        Field(name="weights", dtype=torch.float32, shape=(16,)),
    ]
    return RecordLayout([*fields, *more])


@pytest.mark.parametrize("tells", [False, True])
@pytest.mark.parametrize(
    ("num_ranks", "bucket", "masked", "on_device"),
    [(2, 4096, False, False), (2, 4096, False, True), (8, 100, True, False), (3, 1, False, True)],
)
def test_gathered(compiled, num_ranks, bucket, masked, on_device, tells):  # noqa: F811
    router, form = router_of(num_ranks, masked=masked), layout_of()
    choices = num_ranks * bucket * 16
    size = index_bytes(num_ranks * bucket, 16, 448)
    index = IndexLaunches(
        num_ranks * bucket, 16, 448, choices, memory=torch.zeros(size // 4, dtype=torch.int32),
        status=router.status,
    )  # fmt: skip
    memory = torch.zeros(num_ranks, HEAD_BYTES + bucket * form.num_bytes, dtype=torch.uint8)
    rows = torch.zeros(bucket, 3584, dtype=torch.bfloat16)
    blocks = Blocks(
        router, form, memory, bucket=bucket, row_bytes=7168, index=index, tells=tells,
        own=rows if tells else None,
    )  # fmt: skip
    assert blocks.copies == tells
    idx, weights = torch.zeros(bucket, 16, dtype=torch.int64), torch.zeros(bucket, 16)
    count = torch.tensor(1) if on_device else bucket
    blocks.write(idx, weights, count, 5)
    if tells:
        blocks.announce_whole(idx, weights, rows, 5, was_full=True)
        blocks.read_whole()
    local_idx, _, _ = blocks.read(weights)
    index(local_idx)
    launched = {"_announce_kernel", "_gathered_kernel"}
    steps = {"_count_kernel", "_scan_kernel", "_place_kernel"}
    launched |= steps if choices > 8192 else {"_one_launch_kernel"}
    assert set(compiled) == launched
    for kernels in compiled.values():
        for kernel in kernels:
            assert "st.local" not in kernel.asm["ptx"]


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_packed(compiled, num_ranks):  # noqa: F811
    router, form = router_of(num_ranks), layout_of(Field(name="token", dtype=torch.int32))
    idx, weights = torch.zeros(100, 16, dtype=torch.int64), torch.zeros(100, 16)
    to = router.locate(idx, 100)
    header = Header(
        phase=1, call=0, num_tokens=100, num_rows=0, bucket=128, row_bytes=7168,
        record_bytes=form.num_bytes,
    )  # fmt: skip
    positions, mine = router.choose(to, header)
    counts = [100] * num_ranks
    plan = PackedPlan(
        num_tokens=100, sent=counts, received=counts, tokens_of=counts, positions=positions,
        headers=mine,
    )  # fmt: skip
    records = torch.zeros(100, form.num_bytes, dtype=torch.uint8)
    rows = torch.zeros(100, 7168, dtype=torch.uint8)
    router.pack(plan, to, form, weights, rows, records=records, packed=rows, packing=[0])
    told = Headers(mine=mine, theirs=mine, on_device=mine)
    router.unpack(plan, to, form, weights, records, told, bucket=128)
    assert set(compiled) == {"_locate_kernel", "_plan_kernel", "_pack_kernel", "_unpack_kernel"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_terms", [2, 8])
def test_sums(compiled, num_terms, dtype):  # noqa: F811
    y, out = torch.zeros(64, 3584, dtype=dtype), torch.zeros(5, 3584, dtype=dtype)
    position, weights = torch.zeros(40, 16, dtype=torch.int32), torch.zeros(40, 16)
    for applied in (False, True):
        partial_sums(y, position, weights, weights_applied=applied, out=y, rows=range(3, 40))
    terms, who = torch.zeros(num_terms, 9, 3584, dtype=dtype), position[:5]
    for bias in (None, torch.zeros(5, 3584)):
        fold(terms, who, bias=bias, out=out)
    assert {name: len(kernels) for name, kernels in compiled.items()} == {
        "_partials_kernel": 2, "_fold_kernel": 2
    }  # fmt: skip
    for kernels in compiled.values():
        for kernel in kernels:
            assert "st.local" not in kernel.asm["ptx"]
