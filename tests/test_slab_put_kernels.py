"""The forwarding kernel by itself: which bytes go where, the flag, and that it compiles for sm_90.

Under the interpreter plain stores stand for NVSHMEM's puts, as for ranks of one process; the rest
of the kernel is the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from interpreter import INTERPRETED, inside, outside

CHANNELS, CHANNEL, PIECES = 6, 4, 5


@outside
def test_under_the_interpreter(interpreted) -> None:
    interpreted()


class Layout:
    """Regions of a block and parts of a staging area, in an order of no account, with gaps."""

    def __init__(self, num_ranks: int, bucket: int, row_bytes: list[int]) -> None:
        self.num_ranks, self.bucket, self.row_bytes = num_ranks, bucket, row_bytes
        self.regions, at = [], 40
        for size in reversed(row_bytes):
            self.regions.insert(0, at)
            at += num_ranks * bucket * size + 8
        self.flags = -(-at // 8) * 8
        self.block_bytes = self.flags + CHANNELS * num_ranks * 8
        self.firsts, at = [], 16
        for size in row_bytes:
            self.firsts.append(at)
            at += -(-bucket * size // 4) * 4 + 4
        self.part_bytes = at

    def places(self, rank: int) -> list[int]:
        """What the kernel is told of each piece."""
        told = []
        for first, region, size in zip(self.firsts, self.regions, self.row_bytes, strict=True):
            told += [first, region + rank * self.bucket * size, size]
        return told


def expected(
    blocks: torch.Tensor, parts: torch.Tensor, layout: Layout, reached: torch.Tensor, rank: int,
    tokens: range, tile: int, own: bool,
) -> torch.Tensor:  # fmt: skip
    """Token by token. A token of a tile that is mostly reached travels as well."""
    want = blocks.clone()
    for peer in range(layout.num_ranks):
        if peer == rank and not own:
            continue
        for begin in range(tokens.start, tokens.stop, tile):
            here = range(begin, min(begin + tile, tokens.stop))
            hits = [bool(reached[peer, token]) for token in here]
            for token, hit in zip(here, hits, strict=True):
                # Combine's memory holds nothing but what is for the peer.
                rows = hit or (own and 4 * sum(hits) >= 3 * len(hits))
                scales = any(hits) if own else hit
                travels = [rows and any(hits), scales, True, any(hits), any(hits)]
                for piece in range(PIECES):
                    size = layout.row_bytes[piece]
                    if travels[piece] and size:
                        source = layout.firsts[piece] + token * size
                        target = layout.regions[piece] + (rank * layout.bucket + token) * size
                        want[peer, target : target + size] = parts[peer, source : source + size]
    return want


def run(
    layout: Layout, rank: int, *, reached: torch.Tensor, tokens: range, tile: int, lanes: int,
    own: bool, dead: tuple[int, ...] = (), status: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """One launch over random memory; what was there before and after."""
    from moe_comm.kernels.put_remote import PAD_BYTES, _forward_kernel

    ranks = layout.num_ranks
    generator = torch.Generator().manual_seed(ranks * 1000 + tile)
    blocks = torch.randint(256, (ranks, layout.block_bytes), generator=generator, dtype=torch.uint8)
    parts = torch.randint(256, (ranks, layout.part_bytes), generator=generator, dtype=torch.uint8)
    # Marks are the ids here: three of a token, of which any may be the one.
    marks = torch.full((ranks, layout.bucket, 3), -1, dtype=torch.int32)
    chosen = torch.randint(3, (ranks, layout.bucket, 1), generator=generator)
    marks.scatter_(2, chosen, torch.where(reached, 5, -1).int()[..., None])
    state = torch.zeros(3, CHANNELS, dtype=torch.int32)
    state[0] = 2**31 - 1
    words = torch.zeros(8, dtype=torch.int32)
    words[0] = status
    alive = torch.ones(ranks, dtype=torch.int32)
    alive[list(dead)] = 0
    arrivals = torch.zeros(CHANNELS, ranks, dtype=torch.int32)
    before = blocks.clone()
    empty = torch.zeros(1, dtype=torch.int32)
    _forward_kernel[(lanes * ranks,)](
        blocks[rank], parts, torch.tensor([b.data_ptr() for b in blocks]), empty, alive, marks,
        state, words, arrivals, torch.tensor(7), 0, 6, *layout.places(rank), layout.part_bytes,
        layout.bucket * 3, 0, layout.flags, CHANNEL, rank, tokens.start, tokens.stop, TILE=tile,
        MARKS=3, MARKS_P=4, LEAST=0, OWN=own, T_ON_DEVICE=True, R=ranks,
        NUM_CHANNELS=CHANNELS, PAD=PAD_BYTES, POLL=32, NVSHMEM=False, num_warps=1,
    )  # fmt: skip
    return {"before": before, "after": blocks, "parts": parts, "state": state,
            "arrivals": arrivals}  # fmt: skip


def flag_of(layout: Layout, block: torch.Tensor, source: int) -> int:
    at = layout.flags + (CHANNEL * layout.num_ranks + source) * 8
    return int(block[at : at + 8].clone().view(torch.int64))


@inside
@pytest.mark.parametrize(
    ("num_ranks", "bucket", "tile", "lanes", "density"),
    [(1, 5, 2, 2, 0.5), (2, 9, 4, 2, 0.9), (3, 17, 8, 1, 0.3), (4, 6, 1, 6, 0.5), (2, 8, 8, 1, 1)],
)
@pytest.mark.parametrize("own", [True, False])
def test_bytes_go_where_they_belong(num_ranks, bucket, tile, lanes, density, own) -> None:
    layout = Layout(num_ranks, bucket, [96, 12, 12, 8, 0])
    generator = torch.Generator().manual_seed(bucket)
    reached = torch.rand(num_ranks, bucket, generator=generator) < density
    rank = num_ranks - 1
    tokens = range(bucket // 4, bucket)
    ran = run(layout, rank, reached=reached, tokens=tokens, tile=tile, lanes=lanes, own=own)
    want = expected(ran["before"], ran["parts"], layout, reached, rank, tokens, tile, own)
    for peer in range(num_ranks):
        # The count has wrapped; 7 tokens on the device are more than the 6 rows there are.
        assert flag_of(layout, ran["after"][peer], rank) == (-(2**31) << 32) | 6
        at = layout.flags + (CHANNEL * num_ranks + rank) * 8
        want[peer, at : at + 8] = ran["after"][peer, at : at + 8]
    assert torch.equal(ran["after"], want)
    # Every lane was counted, and the counts are 0 again.
    assert not ran["arrivals"].any()
    assert ran["state"][1].tolist() == [0, 0, 0, 0, 1, 0]


@inside
def test_nothing_goes_to_a_masked_rank_or_after_a_failure() -> None:
    layout = Layout(3, 4, [32, 0, 12, 12, 0])
    reached = torch.ones(3, 4, dtype=torch.bool)
    given = {"reached": reached, "tokens": range(4), "tile": 2, "lanes": 2, "own": True}
    ran = run(layout, 0, **given, dead=(2,))
    assert torch.equal(ran["after"][2], ran["before"][2])
    assert not torch.equal(ran["after"][1], ran["before"][1])
    failed = run(layout, 0, **given, status=4)
    assert torch.equal(failed["after"], failed["before"])
    assert not failed["arrivals"].any()
    assert not failed["state"][1].any()


@inside
def test_release_and_greeting() -> None:
    from moe_comm.kernels.put_remote import PAD_BYTES, _greet_kernel, _put_release_kernel

    ranks, flags = 3, 64
    blocks = torch.zeros(ranks, flags + CHANNELS * ranks * 8, dtype=torch.uint8)
    peers = torch.tensor([block.data_ptr() for block in blocks])
    empty = torch.zeros(1, dtype=torch.int32)
    state = torch.zeros(3, CHANNELS, dtype=torch.int32)
    state[0, CHANNEL], state[1, 0], state[1, 1] = 3, 1, 1
    _put_release_kernel[(ranks,)](
        blocks[1], peers, empty, torch.tensor([1, 1, 0], dtype=torch.int32), state,
        torch.zeros(8, dtype=torch.int32), 0, flags, CHANNEL, 0, 1, R=ranks, NUM_CHANNELS=CHANNELS,
        PAD=PAD_BYTES, FREES_SLOT=True, POLL=32, NVSHMEM=False, num_warps=1,
    )  # fmt: skip
    words = blocks.view(torch.int64)[:, flags // 8 :].view(ranks, CHANNELS, ranks)
    assert words[:, CHANNEL, 1].tolist() == [4 << 32, 4 << 32, 0]
    assert int((words != 0).sum()) == 2
    assert state[0].tolist() == [1, 1, 0, 0, 3, 0]
    assert state[1].tolist() == [0, 0, 0, 0, 1, 0]
    for rank in range(ranks):
        _greet_kernel[(ranks,)](
            blocks[rank], peers, empty, 0, 0, rank, PAD=PAD_BYTES, NVSHMEM=False, num_warps=1
        )
    assert blocks.view(torch.int64)[:, :ranks].tolist() == [[1, 2, 3]] * ranks


FORWARDING = ("_forward_kernel", "_put_release_kernel")


@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled under the interpreter")
@pytest.mark.parametrize("nvshmem", [True, False])
def test_forwarding_compiles_for_sm_90(nvshmem, monkeypatch, tmp_path) -> None:
    """As a dispatch, a combine and a released slot launch it. NVSHMEM's functions stay open, so
    their kernels end as PTX."""
    from test_slab_compiles import compile_launch, launch
    from triton.backends.nvidia import compiler
    from triton.runtime.jit import JITFunction

    from moe_comm.kernels import put_remote

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(put_remote, "over_nvshmem", lambda kernel: kernel)
    stages = compiler.CUDABackend.add_stages

    def until_ptx(self: Any, found: dict[str, Any], *rest: Any) -> None:
        stages(self, found, *rest)
        found["cubin"] = lambda ptx, metadata: b""

    if nvshmem:
        monkeypatch.setattr(compiler.CUDABackend, "add_stages", until_ptx)
    compiled: list[tuple[str, str]] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        del grid, warmup
        name = self.__name__
        if name in FORWARDING:
            compiled.append((name, compile_launch(self, args, options).asm["ptx"]))

    monkeypatch.setattr(JITFunction, "run", run)
    launch(2, 128, 128, "low-latency", puts=True, nvshmem=nvshmem, dispatch_wire="fp8")
    assert {name for name, _ in compiled} == set(FORWARDING)
    for name, ptx in compiled:
        assert ".target sm_90" in ptx
        assert ("nvshmemx_putmem_signal_block" in ptx) == nvshmem
        assert ("nvshmem_quiet" in ptx) == nvshmem
        if name == "_forward_kernel":
            assert ("nvshmemx_putmem_block" in ptx) == nvshmem


@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled under the interpreter")
def test_nvshmem_library_links(monkeypatch, tmp_path) -> None:
    """Where NVSHMEM's device library is (NVSHMEM_LIB_DIR, or its wheel): down to machine code."""
    from test_slab_compiles import compile_launch
    from torch.distributed._symmetric_memory._nvshmem_triton import NvshmemLibFinder

    from moe_comm.kernels.put_remote import PAD_BYTES, _greet_kernel

    try:
        library = NvshmemLibFinder.find_device_library()
    except RuntimeError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    args = (torch.zeros(16, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64),
            torch.zeros(2, dtype=torch.int32), 0, 16, 1)  # fmt: skip
    options = {"PAD": PAD_BYTES, "NVSHMEM": True, "num_warps": 1}
    options |= {"extern_libs": {"libnvshmem_device": library}}
    compiled = compile_launch(_greet_kernel, args, options)
    assert len(compiled.asm["cubin"]) > 0
    assert "nvshmemi_device_state_d" in compiled.asm["ptx"]
