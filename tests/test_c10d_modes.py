"""c10d against the reference, bit for bit: every mode with its reduction, wires and options."""

from __future__ import annotations

import pytest
from comm_cases import Case, check_case
from rank_pool import run_ranks

FLAT = ["c10d:exact", "c10d:dense"]
TOKENS = {
    2: ((7, 7), (16, 1), (0, 5), (0, 0)),
    3: ((5, 16, 0), (1, 1, 1)),
    4: ((3, 9, 0, 16), (16, 16, 16, 16)),
    8: ((1, 2, 3, 4, 5, 6, 7, 0),),
}


@pytest.mark.parametrize("backend", FLAT)
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("wire", ["bf16", "fp8", "mxfp8"])
def test_wires(backend, num_ranks, wire):
    case = Case(
        backend=backend,
        config={"dispatch_wire": wire, "combine_wire": wire},
        num_tokens=TOKENS[num_ranks],
        routing="zipf:1+masked:0.2",
        seed=num_ranks,
    )
    run_ranks(num_ranks, check_case, case)
