"""What is known of an installed DeepEP without running it, and how it is imported.

Two generations: V1 (`deep_ep.Buffer`, modes v1-ht and v1-ll) and V2 (`deep_ep.ElasticBuffer`, mode
v2, beside a V1 Buffer). Limits were read from the sources of 1.2.1 (November 2025) and 2.1.0 (July
2026). Tests run the adapters against doubles that refuse what those sources refuse; V1's have run
against the real 1.2.1.

`deep_ep` reads and writes environment variables at import and construction, and its native part may
end the process, so it is imported for the first time in a child process (moe_comm.negotiate).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moe_comm.config import EPConfig
from moe_comm.wire import WIRES

MODULE = "deep_ep"
DISTRIBUTIONS = ("tokenspeed-deepep", "deep-ep")
# The device type that the library serves.
DEVICE_TYPE = "cuda"

# V1 high throughput inside a node (intranode.cu): ranks that kernels exist for; rows are copied in
# two halves of whole 16-byte words, each with a barrier of 8 bytes in 8192 bytes of shared memory.
HT_RANKS = (2, 4, 8)
HT_ROW_MULTIPLE = 32
HT_MAX_ROW_BYTES = 2 * (8192 - 8) // HT_ROW_MULTIPLE * HT_ROW_MULTIPLE
# V1 low latency (internode_ll.cu, launch.cuh).
LL_MAX_TOPK = 11
LL_HIDDEN = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
# NVSHMEM_QP_DEPTH, 1024 by default, must be 2 * (tokens + 1) at least; R * tokens divides by 4.
LL_MAX_TOKENS = 508
# V2 (layout.cuh, combine_utils.cuh): choices are lanes of a warp; combine reads 512 bytes a step.
V2_MAX_RANKS = 1024
V2_MAX_TOPK = 32
V2_ROW_MULTIPLE = 512
V2_MIN_NCCL = (2, 30, 4)

# Said of a mode whose sum over ranks is not the contract's: see DeepEPCommunicator.sum_tolerance.
ROUNDED = ", its sums within a tolerance of the other backends'"

# What the adapters call, by name and keyword.
_CALLS_V1 = {
    "__init__": ("group", "num_nvl_bytes", "num_rdma_bytes", "low_latency_mode",
                 "num_qps_per_rank", "explicitly_destroy"),
    "get_dispatch_config": (), "get_combine_config": (),
    "dispatch": ("x", "handle", "num_tokens_per_rank", "is_token_in_rank",
                 "num_tokens_per_expert", "config"),
    "combine": ("x", "handle", "bias", "config"),
    "get_low_latency_rdma_size_hint": (),
    "low_latency_dispatch": ("x", "topk_idx", "num_max_dispatch_tokens_per_rank", "num_experts",
                             "use_fp8"),
    "low_latency_combine": ("x", "topk_idx", "topk_weights", "handle"),
    "destroy": (),
}  # fmt: skip
_CALLS_V2 = {
    "__init__": ("group", "num_max_tokens_per_rank", "hidden", "num_topk", "allow_hybrid_mode",
                 "allow_multiple_reduction", "prefer_overlap_with_compute",
                 "num_cpu_timeout_secs", "num_gpu_timeout_secs", "explicitly_destroy"),
    "get_theoretical_num_sms": (),
    "dispatch": ("x", "topk_idx", "num_experts", "num_max_tokens_per_rank", "num_sms", "handle",
                 "do_cpu_sync"),
    "combine": ("x", "handle", "bias", "num_sms"),
    "destroy": (),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Installed:
    """An installed deep_ep: `generation` 1 or 2 and `version` ("unknown" without metadata)."""

    generation: int
    version: str

    @property
    def modes(self) -> tuple[str, ...]:
        """Modes of this generation, the preferred first."""
        return ("v2", "v1-ht", "v1-ll") if self.generation == 2 else ("v1-ht", "v1-ll")


def find() -> Installed | None:
    """The installed library, from its files and metadata; nothing of it is imported."""
    try:
        spec = importlib.util.find_spec(MODULE)
    except ValueError:
        # A module that was put into sys.modules by hand has no spec.
        spec = None
    if spec is None:
        return None
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    elastic = any((folder / "buffers" / "elastic.py").exists() for folder in folders)
    version = "unknown"
    for name in DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(name)
            break
    return Installed(generation=2 if elastic else 1, version=version)


def nccl_version() -> tuple[int, ...] | None:
    """NCCL's version: what torch was built with, else the installed package's; None: unknown."""
    if torch.version.cuda is not None:
        from torch.cuda import nccl

        return tuple(int(part) for part in nccl.version()[:3])
    for distribution in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            text = importlib.metadata.version(distribution)
            return tuple(int(part) for part in text.split(".")[:3])
    return None


def lacks(installed: Installed) -> str:
    """What the library needs and this machine lacks; "" where nothing does."""
    if installed.generation == 1:
        return ""
    found, least = nccl_version(), ".".join(map(str, V2_MIN_NCCL))
    if found is None:
        return f"DeepEP {installed.version} needs NCCL >= {least}, found none"
    if found < V2_MIN_NCCL:
        have = ".".join(map(str, found))
        return f"DeepEP {installed.version} needs NCCL >= {least}, found {have}"
    if DEVICE_TYPE == "cuda" and not _nvcc():
        return f"DeepEP {installed.version} compiles its kernels at run time and needs nvcc"
    return ""


def _nvcc() -> bool:
    homes = [os.environ.get(name, "") for name in ("CUDA_HOME", "CUDA_PATH")]
    paths = [Path(home) / "bin" / "nvcc" for home in [*homes, "/usr/local/cuda"] if home]
    named = os.environ.get("EP_JIT_NVCC_COMPILER")
    return bool(named) or shutil.which("nvcc") is not None or any(p.exists() for p in paths)


def check_calls(library: Any, installed: Installed) -> str:
    """What the adapters call and the library does not have; "" where all is there."""
    tables = [("Buffer", _CALLS_V1)]
    if installed.generation == 2:
        tables.append(("ElasticBuffer", _CALLS_V2))
    for name, calls in tables:
        kind = getattr(library, name, None)
        if kind is None:
            return f"deep_ep has no {name}"
        for call, wanted in calls.items():
            function = getattr(kind, call, None)
            if function is None:
                return f"deep_ep.{name} has no {call}"
            known = inspect.signature(function).parameters
            missing = [parameter for parameter in wanted if parameter not in known]
            if missing:
                return f"deep_ep.{name}.{call} has no parameter {', '.join(missing)}"
    return "" if hasattr(library, "topk_idx_t") else "deep_ep has no topk_idx_t"


def loaded_libraries() -> list[str]:
    """Shared libraries of the transports that this process has mapped."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return []
    names = ("libnccl", "libnvshmem", "libcudart")
    paths = (Path(line.split()[-1]) for line in maps.read_text().splitlines() if "/" in line)
    return sorted({path.name for path in paths if path.name.startswith(names)})


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    """Set variables, and undo every change of the environment at the end."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        for name, value in before.items():
            if os.environ.get(name) != value:
                os.environ[name] = value


def import_library() -> Any:
    """The module, its changes of the environment undone. Raises what its import raises."""
    with environment():
        return importlib.import_module(MODULE)


def record_bytes(config: EPConfig) -> int:
    """Bound of the bytes that travel beside a row: three numbers, ids, weights, scales, payloads,
    and what their alignment may take."""
    wire = WIRES[config.dispatch_wire]
    scale = wire.scale_dtype.itemsize if wire.scale_dtype else 0
    beside = 12 + 8 * config.num_topk + wire.num_groups(config.hidden) * scale
    payloads = config.max_payload_bytes + 16 if config.max_payload_bytes else 0
    return round_up(beside + payloads, 16)


def message_bytes(config: EPConfig) -> int:
    """Bound of a row's bytes with what travels beside it."""
    wire = WIRES[config.dispatch_wire]
    value = wire.value_dtype.itemsize if wire.value_dtype else 2
    return round_up(config.hidden * value, 16) + record_bytes(config)


def round_up(value: int, multiple: int) -> int:
    """The next multiple."""
    return -(-value // multiple) * multiple


def ht_row_bytes(config: EPConfig) -> int:
    """Bytes of a dispatched row in v1-ht."""
    return round_up(message_bytes(config), HT_ROW_MULTIPLE)


def ll_hidden(config: EPConfig) -> int | None:
    """The smallest hidden size with kernels in v1-ll whose bf16 row holds a message, and a
    combined row; None where there is none. One size serves both ways: its buffers' places depend
    on it."""
    need = max(message_bytes(config), 2 * config.hidden)
    return next((hidden for hidden in LL_HIDDEN if 2 * hidden >= need), None)


def ll_tokens(config: EPConfig) -> int:
    """Tokens of one pass in v1-ll, for every bucket: its buffers' places depend on it too."""
    return min(round_up(max(config.bucket, 1) + 1, 4), LL_MAX_TOKENS)


def ll_queues(num_ranks: int) -> int:
    """The most pseudo-experts a rank in v1-ll: 128 in all fill a chip of 132 multiprocessors."""
    return max(1, 128 // num_ranks)


def ll_experts_per_rank(config: EPConfig, num_ranks: int) -> int:
    """Pseudo-experts a rank in v1-ll, whose grid is as large as their number: a power of two, at
    most `ll_queues`, as far as its buffers stay within 1 GiB."""
    hidden = ll_hidden(config) or LL_HIDDEN[-1]
    experts = 1
    while 2 * experts <= ll_queues(num_ranks):
        buffers = 4 * 2 * experts * num_ranks * ll_tokens(config) * (2 * hidden + 16)
        if buffers > 1 << 30:
            break
        experts *= 2
    return experts


def v2_row_bytes(config: EPConfig) -> int:
    """Bytes of a dispatched row in v2."""
    return round_up(message_bytes(config), 128)


def mode_limits(config: EPConfig, num_ranks: int, num_nodes: int) -> dict[str, str]:
    """Each mode's reason to refuse this shape, "" where it serves it."""
    limits = dict.fromkeys(("v1-ht", "v1-ll", "v2"), "")
    row = ht_row_bytes(config)
    combined = 2 * round_up(config.hidden, 16)
    if num_ranks not in HT_RANKS:
        limits["v1-ht"] = f"has kernels for {HT_RANKS} ranks, not {num_ranks}"
    elif num_nodes > 1:
        limits["v1-ht"] = f"is adapted inside one node, the ranks span {num_nodes}"
    elif max(row, combined) > HT_MAX_ROW_BYTES:
        limits["v1-ht"] = f"moves rows up to {HT_MAX_ROW_BYTES} bytes, not {max(row, combined)}"
    if ll_hidden(config) is None:
        limits["v1-ll"] = f"moves rows up to {2 * LL_HIDDEN[-1]} bytes, not {message_bytes(config)}"
    elif num_ranks < 2:
        limits["v1-ll"] = "needs two ranks"
    columns = min(num_ranks, config.num_topk)
    if not 2 <= num_ranks <= V2_MAX_RANKS:
        limits["v2"] = f"needs 2 to {V2_MAX_RANKS} ranks, not {num_ranks}"
    elif columns > V2_MAX_TOPK:
        limits["v2"] = f"sends a row to at most {V2_MAX_TOPK} ranks, not {columns}"
    return limits


def costs(config: EPConfig, num_ranks: int, mode: str) -> str:
    """What the adaptation costs, in words."""
    plain = config.wire.row_bytes(config.hidden)
    if mode == "v1-ll":
        hidden = ll_hidden(config) or 0
        columns = min(num_ranks, config.num_topk)
        passes = -(-columns // LL_MAX_TOPK)
        per = ll_experts_per_rank(config, num_ranks)
        return (
            f"v1-ll: {2 * hidden} bytes a row each way for {plain} there and {2 * config.hidden} "
            f"back, {per} pseudo-experts a rank, {passes} pass{'es' if passes > 1 else ''} of at "
            f"most {ll_tokens(config)} tokens" + (ROUNDED if passes > 1 else "")
        )
    row = ht_row_bytes(config) if mode == "v1-ht" else v2_row_bytes(config)
    back = 2 * round_up(config.hidden, 16 if mode == "v1-ht" else 256)
    more = ", waits for counts on the host" if mode == "v1-ht" else ""
    if mode == "v1-ht" and min(num_ranks, config.num_topk) > 2:
        more += ROUNDED
    return f"{mode}: {row} bytes a row for {plain} there, {back} back{more}"
