"""Every knob of SlabTuning changes what is launched: one that nothing reads would be measured in
vain."""

from __future__ import annotations

import dataclasses
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="launches are watched, not run"
)
CPU = torch.device("cpu")
# Another value of each, and what it takes to be seen: ranks, tokens, rows that are put.
OTHERS = {
    "mode": ("high-throughput", 2, 16, False), "copy_from_bytes": (0, 2, 16, False),
    "dispatch_block": (32, 2, 16, False), "dispatch_warps": (4, 2, 16, False),
    "dispatch_programs": (1, 2, 16, False), "aside_programs": (1, 2, 64, False),
    "combine_block": (32, 2, 16, False), "combine_warps": (2, 2, 16, False),
    "combine_registers": (96, 2, 16, False), "combine_programs": (3, 2, 16, False),
    "combine_lag": (5, 2, 16, False), "combine_unroll": (1, 2, 16, False),
    "direct_ranks": (1, 2, 16, False), "ranked_choices": (0, 2, 16, False),
    "counted_choices": (0, 2, 64, False), "ranked_programs": (3, 2, 16, False),
    "counted_programs": (3, 2, 64, False), "ranked_registers": (96, 2, 16, False),
    "counted_registers": (96, 2, 64, False), "index_queries": (8, 2, 16, False),
    "put_programs": (3, 2, 16, True), "put_warps": (2, 2, 16, True),
}  # fmt: skip
# So that 64 tokens are counted, and what hangs on a mode is in it.
GIVEN = {"counted_": {"ranked_choices": 300}, "aside_": {"mode": "high-throughput"}}


def _launches(
    monkeypatch: Any, num_ranks: int, tokens: int, *, puts: bool, **knobs: Any
) -> list[Any]:
    """(kernel, grid, numbers among its arguments, constants) of a dispatch and its combine."""
    from triton.runtime.jit import JITFunction

    from moe_comm import EPConfig
    from moe_comm.backends.slab import SlabCommunicator, region_sizes
    from moe_comm.backends.slab_modes import SlabTuning
    from moe_comm.symmetric import VirtualSymmetricMemory

    found: list[Any] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        del warmup
        numbers = [arg for arg in args if isinstance(arg, int)]
        found.append((self.__name__, grid, numbers, sorted(options.items())))

    monkeypatch.setattr(JITFunction, "run", run)
    config = EPConfig(num_experts=12, num_topk=6, hidden=128, max_tokens_per_rank=tokens)
    sizes = region_sizes(config, num_ranks, puts=puts)
    memory = VirtualSymmetricMemory.create(num_ranks, sizes, CPU, puts=puts)[0]
    group: Any = SimpleNamespace(rank=0, num_ranks=num_ranks, device=CPU)
    comm = SlabCommunicator(config, group, tuning=SlabTuning(**knobs), memory=memory)
    x, idx = (
        torch.zeros(tokens, 128, dtype=torch.bfloat16),
        torch.zeros(tokens, 6, dtype=torch.int64),
    )
    d = comm.dispatch(x, idx, torch.zeros(tokens, 6))
    comm.combine(torch.zeros(d.row_index.shape[0], 128, dtype=torch.bfloat16), d.handle)
    return found


@pytest.mark.parametrize("knob", OTHERS)
def test_a_knob_changes_what_is_launched(knob, monkeypatch) -> None:
    value, num_ranks, tokens, puts = OTHERS[knob]
    given = next((more for prefix, more in GIVEN.items() if knob.startswith(prefix)), {})
    before, after = (
        _launches(monkeypatch, num_ranks, tokens, puts=puts, **knobs)
        for knobs in (given, given | {knob: value})
    )
    assert before
    assert before != after


def test_no_knob_is_left_out() -> None:
    from moe_comm.backends.slab_modes import SlabTuning

    assert set(OTHERS) == {field.name for field in dataclasses.fields(SlabTuning)}
