"""The search for the Triton kernel's tiles: likeliest first, within a number of seconds.

Candidates come from what a compiler says of them for sm_90 without a GPU (tests/test_gemm_ptx.py,
`-m slow`, checks it): none spills, and programs_per_sm are those that fit a multiprocessor. Among
those, the order is by weights a loop instruction gets through, then by warps that fit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import click
import torch

from moe_comm.kernels.expert_gemm_config import MANY, SOME, ProductTiles, TileConfig
from moe_comm.kernels.expert_gemm_weights import ExpertWeights
from moe_comm.launch import results
from moe_comm.launch.bench_gemm_case import Case
from moe_comm.launch.bench_gemm_measure import Limits, row, time_graph, triton_part, triton_row
from moe_comm.launch.timing import percentile


@dataclass(frozen=True, kw_only=True)
class Group:
    """Tiles that share a row block, so that one plan serves both products, and a tail."""

    block_m: int
    swap: bool
    gated: tuple[ProductTiles, ...]
    down: tuple[ProductTiles, ...]
    tail: TileConfig | None = None


def _tiles(*given: tuple[int, int, int, int]) -> tuple[ProductTiles, ...]:
    """(block_n, warps, stages, programs a multiprocessor), likeliest first."""
    return tuple(
        ProductTiles(block_n=n, num_warps=warps, num_stages=stages, programs_per_sm=programs)
        for n, warps, stages, programs in given
    )


_EIGHT = Group(
    block_m=8,
    swap=True,
    gated=_tiles(
        (128, 4, 4, 3), (128, 4, 3, 3), (64, 4, 3, 5), (128, 4, 2, 4), (64, 2, 4, 6), (64, 4, 4, 5)
    ),
    down=_tiles(
        (256, 4, 4, 3),
        (256, 4, 3, 3),
        (128, 4, 4, 4),
        (128, 2, 4, 6),
        (128, 4, 3, 4),
        (64, 4, 4, 8),
    ),
)
_SIXTEEN = Group(
    block_m=16,
    swap=True,
    gated=_tiles((128, 4, 4, 3), (64, 2, 3, 6), (64, 4, 4, 4), (128, 4, 3, 3), (64, 4, 3, 5)),
    down=_tiles((128, 4, 4, 3), (128, 2, 3, 5), (256, 4, 3, 2), (64, 4, 4, 6), (128, 4, 3, 3)),
)
_THIRTY_TWO = Group(
    block_m=32,
    swap=True,
    gated=_tiles((64, 4, 3, 4), (128, 4, 3, 2), (64, 4, 4, 3), (128, 4, 4, 2)),
    down=_tiles((128, 4, 3, 3), (256, 4, 3, 2), (128, 4, 4, 3), (256, 4, 4, 2)),
)
_SIXTY_FOUR = Group(
    block_m=64,
    swap=True,
    gated=_tiles((128, 8, 3, 1), (64, 4, 3, 2), (128, 8, 4, 1), (64, 4, 4, 2)),
    down=_tiles((128, 4, 3, 2), (256, 8, 3, 1), (128, 8, 3, 2), (256, 8, 4, 1)),
)
_LARGE = Group(
    block_m=128,
    swap=True,
    gated=_tiles((128, 8, 3, 1), (128, 8, 4, 1), (64, 8, 3, 1)),
    down=_tiles((256, 8, 3, 1), (128, 8, 3, 1), (128, 4, 3, 1)),
    tail=SOME,
)
_LARGE_MIDDLING = Group(
    block_m=128, swap=True, gated=_LARGE.gated[:1], down=_LARGE.down[:1], tail=MANY
)
# Rows on the left, dequantized weights through shared memory.
_LARGE_LEFT = Group(
    block_m=128,
    swap=False,
    gated=_tiles((128, 8, 3, 1), (64, 8, 3, 1)),
    down=_tiles((256, 8, 3, 1), (128, 8, 3, 1)),
)


def candidates(rows_per_expert: float) -> tuple[Group, ...]:
    """Groups to try, in order."""
    if rows_per_expert <= 16:
        return (_EIGHT, _SIXTEEN) if rows_per_expert <= 6 else (_SIXTEEN, _EIGHT, _THIRTY_TWO)
    if rows_per_expert <= 48:
        return (_THIRTY_TWO, _SIXTEEN, _SIXTY_FOUR)
    if rows_per_expert <= 64:
        return (_SIXTY_FOUR, _LARGE, _THIRTY_TWO)
    return (_LARGE, _LARGE_MIDDLING, _SIXTY_FOUR, _LARGE_LEFT)


def tune(
    case: Case,
    weights: ExpertWeights,
    limits: Limits,
    *,
    iters: int,
    seconds: float,
) -> Iterator[results.Row]:
    """Time candidates until `seconds` have passed; a group's best pair is then timed as a whole,
    and checked. What was left out is said on stderr."""
    end = time.monotonic() + seconds
    for group in candidates(case.count / case.experts):
        best: dict[bool, tuple[float, ProductTiles]] = {}
        # Turn about, so that a pair is there early.
        for gated, tiles in _turn_about(group):
            if time.monotonic() > end:
                click.echo(f"out of time: {group.block_m} rows, from {tiles} on", err=True)
                break
            config = TileConfig(
                block_m=group.block_m,
                gated=tiles,
                down=tiles,
                swap=group.swap,
                tail=group.tail,
            )
            try:
                call = triton_part(case, weights, config, gated=gated)
                samples = time_graph(call, iters=iters)
            except Exception as error:  # noqa: BLE001 - another GPU's limits: several types
                click.echo(f"skip {config}: {type(error).__name__}: {error}", err=True)
                continue
            part = "w13" if gated else "w2"
            yield row(
                case, limits, samples, backend="triton", part=part, wrong=None, tiles=asdict(config)
            )
            seen = (percentile(samples, 50), tiles)
            best[gated] = min(best.get(gated, seen), seen, key=lambda pair: pair[0])
        if len(best) == 2:
            config = TileConfig(
                block_m=group.block_m,
                swap=group.swap,
                gated=best[True][1],
                down=best[False][1],
                tail=group.tail,
            )
            yield triton_row(case, weights, limits, config, iters=iters)
        if time.monotonic() > end:
            return
    torch.cuda.synchronize()


def _turn_about(group: Group) -> Iterator[tuple[bool, ProductTiles]]:
    for index in range(max(len(group.gated), len(group.down))):
        for gated, tiles in ((True, group.gated), (False, group.down)):
            if index < len(tiles):
                yield gated, tiles[index]
