"""Where prefill chunks end. A pure function of positions, so that every rank and every run of the
same prompt cuts at the same places."""

from __future__ import annotations

from collections.abc import Collection


def chunk_end(
    start: int,
    prompt_length: int,
    *,
    budget: int,
    grid: int,
    stops: Collection[int] = (),
) -> int | None:
    """End of the next prefill chunk from `start`, or None where the budget is too small for one.

    A chunk ends at the prompt's end, at an absolute multiple of `grid`, or at one of `stops`
    (positions where a snapshot is due), and has at most `budget` tokens. Multiples of `grid` are
    the places where kernels end anyway, so splitting there changes no bit of the state; a stop
    off the grid (a prompt's end) does not have that property, and is only taken when asked for.

    A budget below the distance to the next such place gives None, so a scheduler's budget must
    reach one grid step beyond its decode tokens.

    Raises ValueError for a start outside [0, prompt_length).
    """
    if not 0 <= start < prompt_length:
        raise ValueError(f"start: expected in [0, {prompt_length}), got {start}")
    if grid < 1:
        raise ValueError(f"grid: expected at least 1, got {grid}")
    limit = min(start + budget, prompt_length)
    due = min((stop for stop in stops if start < stop <= prompt_length), default=prompt_length)
    if due <= limit:
        return due
    on_grid = limit // grid * grid
    return on_grid if on_grid > start else None


def snapshot_stops(
    prompt_length: int,
    *,
    start: int = 0,
    grid: int,
    interval: int,
    branch: int | None = None,
    tail: bool = True,
) -> tuple[int, ...]:
    """Positions in (start, prompt_length] where prefill should leave a snapshot, ascending.

    Every multiple of `interval` (itself a multiple of `grid`; 0: none), the last multiple of
    `grid` before the prompt's end, so that the same prompt again finds nearly all of itself, the
    last multiple up to `branch` (how far another prompt's pages matched), and, with `tail`, the
    prompt's end itself, on the grid or not.
    """
    if interval % grid:
        raise ValueError(f"interval: expected a multiple of {grid}, got {interval}")
    stops = {(prompt_length - 1) // grid * grid}
    if tail:
        stops.add(prompt_length)
    if interval:
        stops.update(range(interval, prompt_length, interval))
    if branch is not None:
        stops.add(min(branch, prompt_length - 1) // grid * grid)
    return tuple(sorted(stop for stop in stops if start < stop <= prompt_length))
