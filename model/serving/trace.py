"""Request traces: who arrives when, with how many tokens; drawn, or read from a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moe_comm.model.serving.requests import Request


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """One request of a trace. `group`: requests of one group begin with the same `shared_tokens`
    tokens. Raises ValueError for lengths that make no request."""

    arrival_s: float
    prompt_tokens: int
    new_tokens: int
    group: int = 0
    shared_tokens: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.arrival_s < float("inf"):
            raise ValueError(f"arrival_s: expected a finite number >= 0, got {self.arrival_s}")
        for name in ("prompt_tokens", "new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if not 0 <= self.shared_tokens <= self.prompt_tokens:
            raise ValueError(
                f"shared_tokens: expected 0 to {self.prompt_tokens}, got {self.shared_tokens}"
            )


def poisson_trace(
    num: int,
    *,
    rate: float,
    prompt_tokens: tuple[int, int],
    new_tokens: tuple[int, int],
    shared_tokens: int,
    groups: int,
    seed: int,
) -> list[Arrival]:
    """`num` arrivals at `rate` a second (0: all at once). Lengths are uniform between the two ends
    of their range; `shared_tokens` come before the drawn prompt."""
    draw = torch.Generator().manual_seed(seed)
    now, out = 0.0, []
    for _ in range(num):
        if rate > 0:
            gap = torch.rand(1, generator=draw, dtype=torch.float64)
            now += float(-torch.log1p(-gap)) / rate
        own = _between(prompt_tokens, draw)
        out.append(
            Arrival(
                arrival_s=now,
                prompt_tokens=shared_tokens + own,
                new_tokens=_between(new_tokens, draw),
                group=_between((0, groups - 1), draw),
                shared_tokens=shared_tokens,
            )
        )
    return out


def read_trace(path: str | Path) -> list[Arrival]:
    """One JSON object a line with the fields of Arrival, ascending `arrival_s`. ValueError names
    the line."""
    known = set(Arrival.__dataclass_fields__)
    trace: list[Arrival] = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            fields: Any = json.loads(line)
            if not isinstance(fields, dict) or set(fields) - known:
                raise ValueError(f"expected an object with fields of {sorted(known)}")  # noqa: TRY301 - a line of a file
            arrival = Arrival(**fields)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{where}: {error}") from error
        if trace and arrival.arrival_s < trace[-1].arrival_s:
            raise ValueError(f"{where}: arrival_s: expected ascending, got {arrival.arrival_s}")
        trace.append(arrival)
    if not trace:
        raise ValueError(f"{path}: expected at least one request")
    return trace


def make_requests(trace: Sequence[Arrival], *, vocab: int, seed: int) -> list[Request]:
    """Requests "r0", "r1", ... with random tokens; equal for equal arguments on every rank."""
    out = []
    for number, arrival in enumerate(trace):
        shared = _tokens(arrival.shared_tokens, vocab, seed=hash_seed(seed, 1, arrival.group))
        own = arrival.prompt_tokens - arrival.shared_tokens
        out.append(
            Request(
                name=f"r{number}",
                prompt=(*shared, *_tokens(own, vocab, seed=hash_seed(seed, 2, number))),
                max_new_tokens=arrival.new_tokens,
                arrival_s=arrival.arrival_s,
            )
        )
    return out


def hash_seed(seed: int, kind: int, number: int) -> int:
    """A seed of its own for each (kind, number)."""
    return (seed * 1_000_003 + kind) * 1_000_003 + number


def _tokens(num: int, vocab: int, *, seed: int) -> tuple[int, ...]:
    draw = torch.Generator().manual_seed(seed % 2**63)
    return tuple(torch.randint(0, vocab, (num,), generator=draw).tolist())


def _between(ends: tuple[int, int], draw: torch.Generator) -> int:
    return int(torch.randint(ends[0], ends[1] + 1, (1,), generator=draw))
