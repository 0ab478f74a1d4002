"""Keys by which Triton finds a compiled kernel in its cache on disk, the same in every process.

A key has in it the constants that a kernel's module names, and those of the functions that it calls
only as far as these have a key already, which they get when a kernel that calls them is launched.
So it depends on what else a process launched before, and the same kernel is compiled again in a
process that begins with another one, which takes seconds.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from types import CodeType
from typing import Any

# Of a slab's kernels where stores reach every rank.
_MODULES = ("combine", "dispatch", "slot_signals", "expert_index")


@functools.cache
def settle_keys() -> None:
    """Give every function of the slab's kernels its key, and before it those that it calls. To be
    called before any kernel is launched; nothing where kernels are interpreted."""
    seen: set[int] = set()
    for name in _MODULES:
        module = importlib.import_module(f"moe_comm.kernels.{name}")
        for function in list(vars(module).values()):
            _settle(function, seen)


def _settle(function: Any, seen: set[int]) -> None:
    if not hasattr(function, "cache_key") or not hasattr(function, "fn") or id(function) in seen:
        return
    seen.add(id(function))
    for name in _names(function.fn.__code__):
        _settle(function.fn.__globals__.get(name), seen)
    function.cache_key  # noqa: B018 - a property that is worked out when first asked for


def _names(code: CodeType) -> Iterator[str]:
    """Globals that a function's code names, in inner functions too."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
