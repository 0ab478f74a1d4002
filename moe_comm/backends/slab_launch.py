"""Launching kernels of eighty arguments that hardly change from call to call.

Triton works out at every launch how the arguments specialize the kernel (their types, which
addresses are multiples of 16), which takes longer than everything else on the host. So what a
slot's calls of a bucket have in common is set up once (Places), constants likewise (Form), and
from the second launch of a kind on the compiled kernel is launched directly, with addresses in
place of tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from moe_comm.backends.direct_launch import direct


class Places:
    """A kernel's arguments that many calls have in common; the calls bring along the others.

    Args:
        kernel: a Triton kernel whose constants come last.
        num_given: arguments that are left to the calls.
        args: tensors, which live as long as this, and ints, by name.
    """

    __slots__ = ("addresses", "args", "by_value", "compiled", "given")

    def __init__(self, kernel: Any, num_given: int, **args: Tensor | int) -> None:
        names = kernel.arg_names[: len(args) + num_given]
        # Positions of what the calls bring along.
        self.given = [i for i, name in enumerate(names) if name not in args]
        assert len(self.given) == num_given, (names, list(args))
        self.args = [args.get(name, 0) for name in names]
        self.addresses = [arg if isinstance(arg, int) else arg.data_ptr() for arg in self.args]
        # Asked once: Triton hashes a kernel by its source text.
        self.by_value = specialized(kernel) if hasattr(kernel, "params") else frozenset()
        # (Form, what the given arguments specialize) -> (launch, values of constants)
        self.compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


class Form:
    """Constants of a kernel, and numbers of its launches that depend on nothing else.

    Attributes:
        options: constants by name, and num_warps.
        blocks: column blocks of a row.
        receivers: programs that wait.
        indexes: whether they also index.
    """

    __slots__ = ("blocks", "indexes", "options", "receivers")

    def __init__(
        self, options: dict[str, Any], *, blocks: int, receivers: int = 0, indexes: bool = False
    ) -> None:
        self.options, self.blocks = options, blocks
        self.receivers, self.indexes = receivers, indexes


def specialized(kernel: Any) -> frozenset[int]:
    """Positions of the ints whose value the compiled kernel depends on: whether it is 1, divisible
    by 16, and fits 32 bits."""
    return frozenset(
        i for i, p in enumerate(kernel.params) if not (p.is_constexpr or p.do_not_specialize)
    )


def launch(
    kernel: Any, programs: int, places: Places, form: Form, given: Sequence[Tensor | int]
) -> None:
    """Launch `programs` programs of a kernel on the current stream.

    Args:
        given: the arguments that places leaves out, in the kernel's order. Ints that Triton does
            not specialize fit 32 bits.
    """
    if not hasattr(kernel, "params"):
        # Interpreted: nothing is compiled.
        _first(kernel, programs, places, form, given)
        return
    by_value = places.by_value
    args = places.addresses.copy()
    traits: list[Any] = [form]
    note = traits.append
    for at, value in zip(places.given, given, strict=True):
        if isinstance(value, int):
            args[at] = value
            if at in by_value:
                note((value == 1, value % 16 == 0, -(2**31) <= value < 2**31))
        else:
            args[at] = address = value.data_ptr()
            note(value.dtype)
            note(address % 16)
    key = tuple(traits)
    found = places.compiled.get(key)
    if found is not None:
        run, constants = found
        run((programs, 1), (*args, *constants))
        return
    compiled = _first(kernel, programs, places, form, given)
    # None where a test keeps it from running.
    if compiled is not None:
        constants = tuple(form.options[name] for name in kernel.arg_names[len(args) :])
        places.compiled[key] = direct(compiled), constants


def _first(
    kernel: Any, programs: int, places: Places, form: Form, given: Sequence[Tensor | int]
) -> Any:
    """By Triton's own way, which returns the compiled kernel."""
    args = places.args.copy()
    for at, value in zip(places.given, given, strict=True):
        args[at] = value
    return kernel[(programs,)](*args, **form.options)
