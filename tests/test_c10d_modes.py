"""c10d against the reference, bit for bit: every mode with its reduction, wires and options."""

from __future__ import annotations

import pytest
from comm_cases import Case, check_case
from rank_pool import run_ranks

TOKENS = {
    2: ((7, 7), (16, 1), (0, 5), (0, 0)),
    3: ((5, 16, 0), (1, 1, 1)),
    4: ((3, 9, 0, 16), (16, 16, 16, 16)),
    8: ((1, 2, 3, 4, 5, 6, 7, 0),),
}
WIRES = ["bf16", "fp8", "mxfp8", "none"]
MODES = ["exact", "dense", "hierarchical"]


def case_of(mode: str, num_ranks: int, ranks_per_node: int | None = None, **fields) -> Case:
    """A case of a mode, which settles the reduction; two ranks a node where nothing is said."""
    config = dict(fields.pop("config", {}))
    if mode == "hierarchical":
        config["reduction"] = "node"
        ranks_per_node = ranks_per_node or 2
    fields.setdefault("num_tokens", TOKENS[num_ranks])
    fields.setdefault("seed", num_ranks)
    return Case(backend=f"c10d:{mode}", config=config, ranks_per_node=ranks_per_node, **fields)


@pytest.mark.parametrize("mode", ["exact", "dense"])
@pytest.mark.parametrize(
    ("num_ranks", "wire"),
    [(2, wire) for wire in WIRES]
    + [(4, wire) for wire in WIRES]
    + [(3, "mxfp8"), pytest.param(8, "bf16", marks=pytest.mark.slow)],
)
def test_wires(mode, num_ranks, wire):
    config = {"dispatch_wire": wire, "combine_wire": wire}
    case = case_of(mode, num_ranks, config=config, routing="zipf:1+masked:0.2")
    run_ranks(num_ranks, check_case, case)


@pytest.mark.parametrize(
    ("num_ranks", "ranks_per_node", "wire"),
    [(4, 2, wire) for wire in WIRES]
    + [pytest.param(8, 4, "bf16", marks=pytest.mark.slow)]
    + [(3, 2, "fp8"), (2, 1, "mxfp8"), (3, 3, "bf16")],
)
def test_hierarchical(num_ranks, ranks_per_node, wire):
    config = {"dispatch_wire": wire, "combine_wire": wire}
    case = case_of(
        "hierarchical", num_ranks, ranks_per_node, config=config, routing="uniform+masked:0.2"
    )
    run_ranks(num_ranks, check_case, case)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_any_registered_backend(mode, num_ranks):
    """Collectives alone, as with a vendor's plug-in, instead of one message a peer."""
    case = case_of(
        mode, num_ranks, config={"dispatch_wire": "fp8", "combine_wire": "bf16"}, payloads=True
    )
    run_ranks(num_ranks, check_case, case, "vendor")


OPTIONS = {
    "layout-rows": {"layout": "rows"},
    "weights-applied": {"weights_applied": True},
    "one-bias": {"num_biases": 1},
    "three-biases-and-out": {"num_biases": 3, "out": True},
    "quantized-input": {
        "quantized": True, "config": {"dispatch_wire": "fp8", "combine_wire": "bf16"}
    },
    "quantized-input-mx": {
        "quantized": True, "config": {"dispatch_wire": "mxfp8", "combine_wire": "none"}
    },
    "payloads": {"payloads": True, "config": {"dispatch_wire": "mxfp8"}},
    "smaller-bucket": {"bucket": 16, "config": {"max_tokens_per_rank": 24}},
    "padding": {"padding": 4, "config": {"max_tokens_per_rank": 24}},
    "padding-device-count": {
        "padding": 4, "num_tokens_as": "tensor", "config": {"max_tokens_per_rank": 24}
    },
    "async": {"split": True, "payloads": True},
    "handle-again": {"repeat": True, "payloads": True, "config": {"dispatch_wire": "fp8"}},
    "handle-again-bare": {"repeat": True, "padding": 1, "config": {"max_tokens_per_rank": 17}},
    "redundant-experts": {"load": 9},
    "rank-without-experts": {"counts": (0, 17, 23, 0)},
    "one-rank-has-all": {"counts": (0, 40, 0, 0)},
    "all-on-one-rank": {"routing": "hot:6"},
    "duplicates": {
        "edit": tuple((r, t, k, 7) for r in range(4) for t in (0, 2) for k in range(6))
    },
    "all-masked": {"routing": "uniform+masked:1"},
    "float32": {
        "dtype": "float32", "config": {"dispatch_wire": "none", "combine_wire": "none"}
    },
    "float64": {
        "dtype": "float64", "config": {"dispatch_wire": "none", "combine_wire": "none"}
    },
    "float16": {
        "dtype": "float16", "config": {"dispatch_wire": "none", "combine_wire": "none"}
    },
    "hidden-1": {"config": {"hidden": 1}},
    "hidden-odd": {"config": {"hidden": 33, "dispatch_wire": "fp8", "combine_wire": "mxfp8"}},
    "one-token-far": {
        "num_tokens": ((1, 4096, 1, 0),), "routing": "uniform",
        "config": {"max_tokens_per_rank": 4096, "hidden": 8, "num_topk": 2},
    },
    "few-rows-kept": {"config": {"max_expert_rows": 11}, "overflow": True},
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("option", OPTIONS)
def test_options(mode, option):
    run_ranks(4, check_case, case_of(mode, 4, **OPTIONS[option]))
