"""Every MOE_COMM_* variable, typed, in one table. Read when asked for, never at import.

An unparsable value raises: a misspelt setting must not pass for the default.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Variable(Generic[T]):
    """One environment variable: `name`, `kind` (as documentation), `default` and `effect`."""

    name: str
    kind: str
    default: T
    effect: str
    parse: Callable[[str], T]

    def get(self) -> T:
        """Return the parsed value, or the default where the variable is unset or empty."""
        text = os.environ.get(self.name, "")
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:
            raise ValueError(f"{self.name}: expected {self.kind}, got {text!r}") from error


def _bool(text: str) -> bool:
    values = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}
    if text.lower() not in values:
        raise ValueError(text)
    return values[text.lower()]


def _positive_float(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise ValueError(text)
    return value


BACKEND = Variable[str | None](
    name="MOE_COMM_BACKEND",
    kind="a backend's name, or 'auto'",
    default=None,
    effect="backend of create_communicator(backend='auto'); fails where it cannot run",
    parse=str,
)
DEBUG = Variable[bool](
    name="MOE_COMM_DEBUG",
    kind="0 or 1",
    default=False,
    effect="check expert ids and phases synchronously on every call",
    parse=_bool,
)
TIMEOUT_S = Variable[float | None](
    name="MOE_COMM_TIMEOUT_S",
    kind="seconds above 0",
    default=None,
    effect="overrides EPConfig.timeout_s, the bound of every wait for a peer",
    parse=_positive_float,
)
COMMIT = Variable[str | None](
    name="MOE_COMM_COMMIT",
    kind="a commit id",
    default=None,
    effect="commit named in result files, of a copied tree",
    parse=str,
)
NODE_RANKS = Variable[int | None](
    name="MOE_COMM_RANKS_PER_NODE",
    kind="a whole number above 0",
    default=None,
    effect="ranks of one node, where the host name does not tell (rank // N is the node)",
    parse=lambda text: int(_positive_float(text)),
)
SLAB_FORCE_PUT = Variable[bool](
    name="MOE_COMM_SLAB_FORCE_PUT",
    kind="0 or 1",
    default=False,
    effect="the slab backend forwards rows by NVSHMEM's puts even where stores reach every rank",
    parse=_bool,
)

VARIABLES: tuple[Variable[object], ...] = (
    BACKEND,  # type: ignore[assignment]
    DEBUG,
    TIMEOUT_S,
    COMMIT,
    NODE_RANKS,
    SLAB_FORCE_PUT,
)
