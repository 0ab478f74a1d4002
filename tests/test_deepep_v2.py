"""The V2 adapter on CPU ranks over a double of deep_ep.ElasticBuffer, against the reference.

No real DeepEP runs here: the double checks what its source checks and moves the rows over gloo.
"""

from __future__ import annotations

from typing import Any

import deepep_double as double
import pytest
import torch
from comm_cases import SHAPE, Case, check_case
from rank_pool import RankContext, run_ranks

from moe_comm import EPConfig
from moe_comm.backends.deepep_v2 import construction_environment, token_bucket


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """A module path with a V2 double on it, and an NCCL that is new enough."""
    path = tmp_path_factory.mktemp("v2")
    double.write_package(path, double.V2, version="2.1.0.post1", elastic=True, nccl="2.30.7")
    return str(path)


def checks(context: RankContext, folder: str, cases: list[Case]) -> None:
    with double.installed(folder):
        for case in cases:
            check_case(context, case)


@pytest.mark.parametrize("ranks", [2, 3])
def test_v2_adds_in_the_contracts_order(folder, ranks):
    tokens = {2: (16, 5), 3: (7, 0, 16)}[ranks]
    base = Case(backend="deepep:v2", num_tokens=(tokens, tuple(reversed(tokens))), num_biases=2)
    cases = [
        base,
        base.replace(config={"dispatch_wire": "fp8", "max_payload_bytes": 64}, payloads=True),
        base.replace(routing="uniform+masked:0.3", num_tokens_as="tensor", num_biases=1, out=True),
        base.replace(layout="rows", num_biases=0, seed=4),
        base.replace(repeat=True, load=3, seed=5, num_biases=0),
        base.replace(config={"max_expert_rows": 30}, overflow=True, seed=6),
    ]
    run_ranks(ranks, checks, folder, cases)


def k3(context: RankContext, folder: str) -> tuple[Any, ...]:
    case = Case(
        config={"num_experts": 896, "num_topk": 16, "hidden": 3584, "max_tokens_per_rank": 4},
        num_tokens=((4, 3),),
    )
    with double.installed(folder):
        # The preferred mode of a V2; 448 experts a rank, far beyond its own 256.
        with context.communicator(case.ep_config(), "deepep") as comm:
            found = (comm.mode, comm.transport.row_bytes, comm.transport.hidden)
        check_case(context, case.replace(backend="deepep:v2"))
    return found


def test_896_experts_and_top_16_on_two_ranks(folder):
    assert run_ranks(2, k3, folder) == [("v2", 7424, 3584)] * 2


def modes(context: RankContext, folder: str) -> None:
    """A V2 package has V1's Buffer too; and few kernels are compiled for many buckets."""
    config = EPConfig(**{**SHAPE, "max_tokens_per_rank": 32})
    with double.installed(folder):
        for mode in ("v1-ht", "v1-ll"):
            check_case(context, Case(backend=f"deepep:{mode}", num_tokens=((3, 0),)))
        with context.communicator(config, "deepep:v2") as comm:
            x = torch.zeros(1, config.hidden, dtype=torch.bfloat16)
            idx, weights = torch.zeros(1, 6, dtype=torch.int64), torch.ones(1, 6)
            for bucket in range(1, 33):
                comm.dispatch(x, idx, weights, bucket=bucket).handle.release()
            assert len(comm.transport._buffer.shapes) == 6


def test_other_modes_of_the_package_and_its_buckets(folder):
    run_ranks(2, modes, folder)
    assert [token_bucket(b, 1) for b in (1, 2, 3, 128, 129)] == [2, 3, 5, 129, 257]


def test_the_network_part_follows_from_the_nodes():
    assert construction_environment(1) == {"EP_REUSE_NCCL_COMM": "0", "EP_DISABLE_GIN": "1"}
    assert construction_environment(2) == {"EP_REUSE_NCCL_COMM": "0"}
