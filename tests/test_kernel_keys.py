"""Keys of compiled kernels, which must not depend on what a process did before."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled under the interpreter"
)


def _forget() -> None:
    """As in a process that has launched nothing."""
    from triton.runtime.jit import JITFunction

    for name, module in sys.modules.items():
        if name.startswith("moe_comm.kernels."):
            for function in vars(module).values():
                if isinstance(function, JITFunction):
                    function.hash, function.used_global_vals = None, {}


def _keys(*begin: Callable[[], Any]) -> tuple[str, str]:
    """Of a slab's largest kernels, after others have got theirs."""
    from moe_comm.kernels.combine import _combine_kernel
    from moe_comm.kernels.dispatch import _dispatch_kernel

    _forget()
    for one in begin:
        one()
    return _dispatch_kernel.cache_key, _combine_kernel.cache_key


def test_keys_do_not_depend_on_what_was_launched_before() -> None:
    from moe_comm.backends.kernel_keys import settle_keys
    from moe_comm.kernels.slot_signals import _free_slot_kernel

    def settle() -> None:
        settle_keys.cache_clear()
        settle_keys()

    def launch_another() -> str:
        return _free_slot_kernel.cache_key

    assert _keys(settle) == _keys(settle, launch_another)
    # What this is for. Once Triton's own keys agree, there is nothing left to settle.
    assert _keys() != _keys(launch_another)
    _keys(settle)
