"""The adapters on a real DeepEP, on two GPUs, against the reference. Not run yet: the doubles of
test_deepep_v1 and test_deepep_v2 stand in on CPU ranks."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from comm_cases import Case, check_case
from rank_pool import RankContext, RankPool

from moe_comm.backends import deepep_facts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multi_gpu(2),
    pytest.mark.skipif(importlib.util.find_spec("deep_ep") is None, reason="needs deep_ep"),
]
K3 = {"num_experts": 896, "num_topk": 16, "hidden": 3584, "max_tokens_per_rank": 128}
CASES = [
    Case(config=K3, num_tokens=((1, 0), (128, 128), (5, 127))),
    Case(config={**K3, "dispatch_wire": "fp8"}, num_tokens=((128, 64),), routing="hot:20"),
    Case(config={**K3, "dispatch_wire": "mxfp8"}, num_tokens=((3, 128),), quantized=True),
    Case(config=K3, num_tokens=((128, 9),), routing="uniform+masked:0.3", num_tokens_as="tensor"),
    Case(config=K3, num_tokens=((60, 128),), layout="rows", out=True),
    Case(config=K3, num_tokens=((17, 128),), repeat=True),
    Case(config={**K3, "max_tokens_per_rank": 1200}, num_tokens=((1200, 700),)),
]


def checks(context: RankContext, mode: str, case: Case) -> None:
    check_case(context, case.replace(backend=f"deepep:{mode}"))


@pytest.fixture(scope="module", params=["v1-ht", "v1-ll", "v2"])
def mode_pool(request: Any) -> Any:
    """A mode, and ranks of its own: a device assertion of the library ends their context."""
    installed = deepep_facts.find()
    if installed is None or request.param not in installed.modes:
        pytest.skip(f"the installed deep_ep has no {request.param}")
    lack = deepep_facts.lacks(installed)
    if lack:
        pytest.skip(lack)
    with RankPool(2, "cuda") as ranks:
        yield request.param, ranks


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_real_deepep(mode_pool, case) -> None:
    mode, ranks = mode_pool
    if not ranks.is_alive:
        pytest.fail("the ranks ended in an earlier case")
    ranks.run(checks, mode, case, timeout_s=120.0)
