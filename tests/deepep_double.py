"""What both doubles of DeepEP share, and packages that stand in for `deep_ep`.

The doubles have the documented signatures of the two generations, check what their sources check
(shapes, dtypes, limits), and move the data between ranks over gloo. They run on CPU ranks.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

V1 = "from deepep_double_v1 import Buffer, Config, EventOverlap, topk_idx_t\n"
V2 = V1 + "from deepep_double_v2 import ElasticBuffer, EPHandle\n__version__ = '2.1.0'\n"


def require(condition: bool, text: str) -> None:
    """As the native part reports a failed assertion."""
    if not condition:
        raise RuntimeError(f"Failed: Assertion error deep_ep.cpp '{text}'")


def exchange(group: dist.ProcessGroup, outgoing: list[Tensor]) -> list[Tensor]:
    """outgoing[r] goes to rank r; what came, by source."""
    mine = dist.get_rank(group)
    everything: list[list[Tensor]] = [[] for _ in outgoing]
    # Clones: a view would be pickled with everything that it is a view of.
    dist.all_gather_object(everything, [part.clone() for part in outgoing], group=group)
    return [sent[mine].clone() for sent in everything]


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    """Memory that nobody wrote: NaNs, or -99."""
    if dtype == torch.bfloat16:
        return torch.full(shape, torch.nan, dtype=dtype)
    return torch.full(shape, -99).to(dtype)


def write_package(folder: Path, source: str, *, version: str = "1.2.1", elastic: bool = False,
                  nccl: str | None = None) -> Path:  # fmt: skip
    """A `deep_ep` whose __init__ is `source`, with its metadata, below `folder`."""
    package = folder / "deep_ep"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(source)
    if elastic:
        (package / "buffers").mkdir()
        (package / "buffers" / "elastic.py").write_text("")
    described = [("tokenspeed_deepep", "tokenspeed-deepep", version)]
    if nccl is not None:
        described.append(("nvidia_nccl_cu13", "nvidia-nccl-cu13", nccl))
    for file, name, number in described:
        info = folder / f"{file}-{number}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
    return folder


@contextlib.contextmanager
def installed(folder: str | None, **variables: str) -> Iterator[None]:
    """`folder` in front of the module path, the backend made to serve CPU ranks, and variables."""
    from moe_comm.backends import deepep_facts

    kept = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    deepep_facts.DEVICE_TYPE = "cpu"
    if folder is not None:
        sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        deepep_facts.DEVICE_TYPE = "cuda"
        if folder is not None:
            sys.path.remove(folder)
        for name in [name for name in sys.modules if name.split(".")[0] == "deep_ep"]:
            del sys.modules[name]
        importlib.invalidate_caches()
        for name, value in kept.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
