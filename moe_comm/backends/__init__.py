"""Backends, by name. Each module offers `supports(config, topology) -> Support` and
`build(config, group, mode) -> Communicator`, and may offer `probe(topology) -> Support` for
libraries that can abort the process; that one runs in a child process, once for all configs."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import NamedTuple

# In order of preference. "reference" serves tests: it is asked for by name alone.
AUTO_ORDER: tuple[str, ...] = ("slab", "deepep", "c10d")
MODULES: dict[str, str] = {
    "slab": "moe_comm.backends.slab",
    "deepep": "moe_comm.backends.deepep",
    "c10d": "moe_comm.backends.c10d",
    "reference": "moe_comm.backends.reference",
}
# All modes there are; which of them serve a config here, each module's supports() says.
MODES: dict[str, tuple[str, ...]] = {
    "slab": ("auto", "low-latency", "high-throughput"),
    "deepep": ("v1-ht", "v1-ll", "v2"),
    "c10d": ("exact", "dense", "hierarchical"),
    "reference": ("loop",),
}


class Support(NamedTuple):
    """A backend's answer. `ok`: it can serve this config here. `reason`: why not, or a remark.
    `modes`: its modes, the default first. `capabilities`: of "capture", "overlap", "masking",
    "payloads", "autograd", "put" (rows travel by NVSHMEM's puts instead of stores)."""

    ok: bool
    reason: str = ""
    modes: tuple[str, ...] = ()
    capabilities: tuple[str, ...] = ()


def load(name: str) -> ModuleType:
    """Import a backend's module. Raises whatever its import raises."""
    return importlib.import_module(MODULES[name])
