"""Launching a Triton kernel again and again with arguments that are mostly the same.

Triton works out at every launch how its arguments specialize the kernel, looks the kernel up, and
calls hooks: tens of microseconds on the host where its code is not in the caches. Here that is done
once, and what remains is one call of Triton's compiled launcher, with addresses in place of
tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Where the launcher's arguments are known; elsewhere a launch takes Triton's public way.
_KNOWN = ("3.6.",)


class Launch:
    """A kernel with constants and the arguments that all calls have in common.

    Args:
        kernel: a Triton kernel whose constants come last.
        options: constants by name, and num_warps.
        args: tensors, which live as long as this, and ints, by name. The arguments left out are
            given by each call: tensors of the first call's dtypes, and ints that Triton is told
            not to specialize.
    """

    __slots__ = ("_args", "_at", "_device", "_fixed", "_options", "_run", "_start", "kernel")

    def __init__(self, kernel: Any, options: dict[str, Any], **args: Tensor | int) -> None:
        self.kernel = kernel
        constants = [name for name in kernel.arg_names if name in options]
        names = kernel.arg_names[: len(kernel.arg_names) - len(constants)]
        self._at = [i for i, name in enumerate(names) if name not in args]
        self._args = [args.get(name, 0) for name in names]
        self._options = options
        self._fixed: list[Any] = [
            value.data_ptr() if isinstance(value, Tensor) else value for value in self._args
        ]
        self._fixed += [options[name] for name in constants]
        self._device = 0
        self._run: Any = None
        self._start: tuple[Any, ...] = ()

    def __call__(self, grid: tuple[int, int], *given: Tensor | int) -> None:
        """Launch on the current stream of the current device."""
        args, touched = self._fixed.copy(), 0
        for at, value in zip(self._at, given, strict=True):
            if type(value) is int:
                args[at] = value
            else:
                args[at] = address = value.data_ptr()  # type: ignore[union-attr]
                touched |= address
        # What was compiled relies on the alignment of the first call's tensors.
        if self._run is None or touched & 15:
            self._first(grid, given, aligned=not touched & 15)
            return
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        function, cooperative, dependent, metadata = self._start
        self._run(
            grid[0], grid[1], 1, stream, function, cooperative, dependent, None, None, metadata,
            None, None, None, *args,
        )  # fmt: skip

    def _first(
        self, grid: tuple[int, int], given: tuple[Tensor | int, ...], *, aligned: bool
    ) -> None:
        """By Triton's own way."""
        args = self._args.copy()
        for at, value in zip(self._at, given, strict=True):
            args[at] = value
        compiled = self.kernel[grid](*args, **self._options)
        # None under the interpreter, and where a test keeps it from running.
        if compiled is None or not aligned or not hasattr(self.kernel, "params"):
            return
        import triton

        launcher = compiled.run
        if not triton.__version__.startswith(_KNOWN):
            return
        if launcher.global_scratch_size or launcher.profile_scratch_size:
            return
        self._device = torch.cuda.current_device()
        self._run = launcher.launch
        self._start = (
            compiled.function,
            launcher.launch_cooperative_grid,
            launcher.launch_pdl,
            compiled.packed_metadata,
        )
