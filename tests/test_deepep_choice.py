"""A deep_ep that is missing, broken or too old: auto lands on the next backend, on all ranks, with
the reason, and the run is right. And what the facts say of shapes that no mode serves."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time

import deepep_double as double
import pytest
import torch
from comm_cases import SHAPE, Case, check_case
from rank_pool import RankContext, run_ranks

from moe_comm import BackendUnavailableError, EPConfig, Topology, backends, negotiate
from moe_comm.backends import deepep
from moe_comm.backends import deepep_facts as facts

LANDS = Case(backend="auto", num_tokens=((16, 5),), config={"timeout_s": 20.0})


def lands(
    context: RankContext, folder: str | None, variables: dict[str, str], timeout_s: float
) -> tuple[str, list[str], float]:
    """What auto chose, the lines that were logged, and how long it took; the run is checked."""
    lines: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, handler = logging.getLogger("moe_comm"), Handler(level=logging.INFO)
    level, before = logger.level, dict(os.environ)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    order = backends.AUTO_ORDER
    # slab, before deepep, has no CPU ranks; its reason must be told as well.
    assert order == ("slab", "deepep", "c10d")
    case = LANDS.replace(config={"timeout_s": timeout_s})
    start = time.monotonic()
    try:
        with double.installed(folder, **variables):
            with context.communicator(case.ep_config(), "auto") as comm:
                took, chosen = time.monotonic() - start, f"{comm.backend}:{comm.mode}"
                assert comm.metrics()["fallbacks"] == (2 if comm.backend == "c10d" else 1)
            if comm.backend == "c10d" and "DEEPEP_DOUBLE_FAILS" not in variables:
                with pytest.raises(BackendUnavailableError, match="backend 'deepep': none can"):
                    context.communicator(case.ep_config(), "deepep")
            check_case(context, case)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert dict(os.environ) == before
    return chosen, lines[:1], took


def falls_back(folder, reason: str, timeout_s: float = 20.0, **variables: str) -> None:
    """All ranks of two land on c10d, and rank 0 alone says why."""
    first, second = run_ranks(2, lands, folder, variables, timeout_s)
    assert first[0] == second[0] == "c10d:exact"
    (line,) = first[1]
    assert line.startswith("backend c10d, mode exact (slab: needs CUDA devices")
    assert reason in line, line
    # No rank has waited for one that failed until its time was over.
    assert max(first[2], second[2]) < 2 * timeout_s
    assert second[1] == []


def test_a_sound_one_is_taken(tmp_path):
    folder = str(double.write_package(tmp_path, double.V1))
    first, second = run_ranks(2, lands, folder, {}, 20.0)
    assert first[0] == second[0] == "deepep:v1-ht"
    assert first[1][0].startswith("backend deepep, mode v1-ht (slab: needs CUDA devices")


def test_without_deep_ep():
    falls_back(None, "deepep: deep_ep is not installed; pip install 'moe_comm[deepep]'")


def test_one_that_raises_on_import(tmp_path):
    text = "raise ImportError('libnvshmem_host.so.3: cannot open shared object file')"
    folder = str(double.write_package(tmp_path, text))
    falls_back(folder, "deepep: ImportError: libnvshmem_host.so.3: cannot open shared object file")


def test_one_that_ends_the_process(tmp_path):
    text = "import os, sys\nprint('GDRCopy is missing', file=sys.stderr, flush=True)\nos.abort()"
    folder = str(double.write_package(tmp_path, text))
    falls_back(folder, "its probe ended the process (exit code -6): GDRCopy is missing (rank 0)")


def test_one_whose_constructor_fails_on_one_rank(tmp_path):
    """The other rank's constructor is then in an exchange that nobody joins: it hears of that, and
    both reasons are told."""
    folder = str(double.write_package(tmp_path, double.V1))
    falls_back(folder, "csrc/deep_ep.cpp:164 'out of memory' (rank 1)", DEEPEP_DOUBLE_FAILS="1")


def test_one_without_what_is_called(tmp_path):
    text = double.V1 + "del Buffer.low_latency_combine\n"
    folder = str(double.write_package(tmp_path, text))
    falls_back(folder, "deepep: DeepEP 1.2.1: deep_ep.Buffer has no low_latency_combine")


def test_v2_with_an_nccl_that_is_too_old(tmp_path):
    double.write_package(tmp_path, double.V2, version="2.1.0", elastic=True, nccl="2.28.9")
    falls_back(str(tmp_path), "deepep: DeepEP 2.1.0 needs NCCL >= 2.30.4, found 2.28.9")


def test_v2_that_finds_another_nccl_loaded(tmp_path):
    text = "assert False, 'Invalid NCCL versions: a (loaded) v.s. b (expected)'"
    double.write_package(tmp_path, text, version="2.1.0", elastic=True, nccl="2.30.7")
    falls_back(str(tmp_path), "deepep: AssertionError: Invalid NCCL versions: a (loaded) v.s. b")


# What the facts say, without ranks.


def topology_of(ranks: int = 2, nodes: int = 1, device: str = "cpu") -> Topology:
    return Topology(
        num_ranks=ranks, node_of_rank=tuple(r * nodes // ranks for r in range(ranks)),
        device_type=device, device_names=("a",) * ranks, peer_access=True, transport="gloo",
    )  # fmt: skip


@pytest.fixture
def sound(tmp_path):
    """A sound V1 on this process's path."""
    with double.installed(str(double.write_package(tmp_path, double.V1))):
        yield


@pytest.mark.usefixtures("sound")
def test_verdicts():
    config = EPConfig.preset("kimi-k3", max_tokens_per_rank=128)
    assert facts.find() == facts.Installed(generation=1, version="1.2.1")
    good = deepep.supports(config, topology_of())
    assert good.ok
    assert good.modes == ("v1-ht", "v1-ll")
    assert "v1-ht: 7328 bytes a row for 7168 there, 7168 back" in good.reason
    assert "v1-ll: 8192 bytes a row each way for 7168 there and 7168 back" in good.reason
    assert "1 pass of at most 132 tokens" in good.reason
    for changes, shape, reason in (
        ({"reduction": "node"}, {}, "adds rank by rank"),
        ({"combine_wire": "fp8"}, {}, "combines in bf16 alone"),
        ({"dispatch_wire": "none"}, {}, "rows travel as bf16, fp8 or mxfp8"),
        ({}, {"device": "cuda"}, "needs cpu devices, the ranks have cuda"),
        ({"hidden": 16384}, {}, "v1-ht moves rows up to 16352 bytes"),
        ({}, {"ranks": 1}, "v1-ht has kernels for (2, 4, 8) ranks, not 1; v1-ll needs two ranks"),
    ):
        verdict = deepep.supports(config.replace(**changes), topology_of(**shape))
        assert not verdict.ok
        assert reason in verdict.reason
    wide = deepep.supports(config, topology_of(ranks=32, nodes=4))
    assert wide.modes == ("v1-ll",)
    assert "2 passes" in wide.reason
    assert wide.reason.endswith(facts.ROUNDED)
    assert facts.ROUNDED not in good.reason
    assert facts.ROUNDED in deepep.supports(config, topology_of(ranks=4)).reason
    assert deepep.supports(config.replace(hidden=7168), topology_of(8)).modes == ("v1-ht", "v1-ll")


def test_verdict_of_negotiation_has_the_probes(tmp_path):
    """What list and doctor print is what auto goes by."""
    config = EPConfig(**SHAPE)
    folder = double.write_package(tmp_path, "raise OSError('no device')")
    with double.installed(str(folder)):
        start = time.monotonic()
        verdict = negotiate.supports("deepep", config, topology_of())
        assert (verdict.ok, verdict.reason) == (False, "OSError: no device")
        first = time.monotonic() - start
        # One answer serves every config of this process.
        again = negotiate.supports("deepep", config.replace(num_slots=3), topology_of())
        assert again == verdict
        assert time.monotonic() - start - first < first
    assert "deep_ep" not in sys.modules


@pytest.mark.parametrize("ranks", [2, 4, 8, 64])
def test_low_latency_sizes(ranks):
    for tokens in (1, 128, 4096):
        config = EPConfig.preset("kimi-k3", max_tokens_per_rank=tokens)
        hidden, most = facts.ll_hidden(config), facts.ll_tokens(config)
        per = facts.ll_experts_per_rank(config, ranks)
        assert hidden == 4096
        assert most <= 508
        assert ranks * most % 4 == 0
        assert per == 1 or 8 * per * ranks // 2 * most * (2 * hidden + 16) <= 1 << 30
        assert per * ranks <= max(128, ranks)
        if tokens == 1 and ranks <= 64:
            assert per * ranks == 128
    wide = EPConfig.preset("kimi-k3-wide", dispatch_wire="fp8")
    assert facts.ll_hidden(wide) == 7168
    assert facts.ll_hidden(wide.replace(dispatch_wire="bf16")) == 8192


def test_environment_is_given_back(monkeypatch):
    monkeypatch.setenv("KEPT", "1")
    before = dict(os.environ)

    def fails() -> None:
        with facts.environment(EP_DISABLE_GIN="1", KEPT="2"):
            assert os.environ["EP_DISABLE_GIN"] == "1"
            os.environ["NVSHMEM_DISABLE_P2P"] = "0"
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    assert dict(os.environ) == before


def test_nothing_is_imported_to_find_it(tmp_path):
    double.write_package(tmp_path, "raise SystemExit('imported')")
    text = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from moe_comm.backends import deepep_facts as facts\n"
        "assert facts.find().version == '1.2.1'\n"
        "assert 'deep_ep' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", text, str(tmp_path)], capture_output=True)
    assert done.returncode == 0, done.stderr
    assert torch.cuda.is_initialized() is False
