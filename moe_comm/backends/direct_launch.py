"""Launching a Triton kernel again and again with arguments that are mostly the same.

Triton works out at every launch how its arguments specialize the kernel, looks the kernel up, and
calls hooks: tens of microseconds on the host where its code is not in the caches. Here that is done
once, and what remains is one call of Triton's compiled launcher, with addresses in place of
tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# Where the launcher's arguments are known; elsewhere a launch takes Triton's public way.
_KNOWN = ("3.6.",)


def direct(compiled: Any) -> Callable[[tuple[int, int], Sequence[Any]], None]:
    """What launches a compiled kernel on a grid with addresses, ints and constants, on the current
    stream of the current device: Triton's own launcher, called without what Triton does around it
    where its arguments are known."""
    import triton

    launcher: Any = getattr(compiled, "run", None)
    if not (
        triton.__version__.startswith(_KNOWN)
        and hasattr(launcher, "launch_cooperative_grid")
        and not (launcher.global_scratch_size or launcher.profile_scratch_size)
    ):
        return lambda grid, args: compiled[(*grid, 1)](*args)
    launch, function, metadata = launcher.launch, compiled.function, compiled.packed_metadata
    cooperative, dependent = launcher.launch_cooperative_grid, launcher.launch_pdl
    device, stream_of = torch.cuda.current_device(), torch._C._cuda_getCurrentRawStream

    def run(grid: tuple[int, int], args: Sequence[Any]) -> None:
        launch(
            grid[0], grid[1], 1, stream_of(device), function, cooperative, dependent, None, None,
            metadata, None, None, None, *args,
        )  # fmt: skip

    return run


class Launch:
    """A kernel with constants and the arguments that all calls have in common.

    Args:
        kernel: a Triton kernel whose constants come last.
        options: constants by name, and num_warps.
        args: tensors, which live as long as this, and ints, by name. The arguments left out are
            given by each call: tensors of the first call's dtypes, and ints that Triton is told
            not to specialize.
    """

    __slots__ = ("_args", "_at", "_fixed", "_options", "_run", "kernel")

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
        self._run: Callable[[tuple[int, int], Sequence[Any]], None] | None = None

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
        self._run(grid, args)

    def _first(
        self, grid: tuple[int, int], given: tuple[Tensor | int, ...], *, aligned: bool
    ) -> None:
        """By Triton's own way."""
        args = self._args.copy()
        for at, value in zip(self._at, given, strict=True):
            args[at] = value
        compiled = self.kernel[grid](*args, **self._options)
        # None under the interpreter, and where a test keeps it from running.
        if compiled is not None and aligned and hasattr(self.kernel, "params"):
            self._run = direct(compiled)
