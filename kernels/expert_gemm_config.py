"""Tile sizes of the Triton expert GEMM, and their choice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ProductTiles:
    """One product's tiles. block_n: columns of the output (gate and up have that many each)."""

    block_n: int
    num_warps: int = 4
    num_stages: int = 4
    programs_per_sm: int = 2


@dataclass(frozen=True, kw_only=True)
class TileConfig:
    """block_m: expert rows of a tile; swap: weights are the left operand; gated, down: the two
    products' tiles; tail: for an expert's rows beyond whole tiles, where they fit one of its tiles
    (tail.block_m below block_m, without a tail of its own)."""

    block_m: int
    gated: ProductTiles
    down: ProductTiles
    swap: bool = True
    tail: TileConfig | None = None

    def __post_init__(self) -> None:
        if self.tail is not None and (self.tail.tail or self.tail.block_m >= self.block_m):
            raise ValueError(
                f"tail: expected tiles of fewer than {self.block_m} rows without a tail, "
                f"got {self.tail}"
            )


# Reading weights is the bound for few rows, so what counts is how many weights an instruction gets
# through: wide columns, enough programs to wait for memory, and 8 rows, where Triton takes
# mma.sync, which needs no waiting between dequantization and product as wgmma does.
# programs_per_sm are those that registers and shared memory of sm_90 hold at once;
# tests/test_gemm_ptx.py counts them.
FEWEST = TileConfig(
    block_m=8,
    gated=ProductTiles(block_n=128, programs_per_sm=3),
    down=ProductTiles(block_n=256, programs_per_sm=3),
)
FEW = TileConfig(
    block_m=16,
    gated=ProductTiles(block_n=128, programs_per_sm=3),
    down=ProductTiles(block_n=128, programs_per_sm=3),
)
SOME = TileConfig(
    block_m=32,
    gated=ProductTiles(block_n=64, num_stages=3, programs_per_sm=4),
    down=ProductTiles(block_n=128, num_stages=3, programs_per_sm=3),
)
# Dequantization of a weight is shared by a block's rows, tensor cores idle meanwhile unless another
# warp group multiplies: 8 warps a multiprocessor, in one program or two.
MANY = TileConfig(
    block_m=64,
    gated=ProductTiles(block_n=128, num_warps=8, num_stages=3, programs_per_sm=1),
    down=ProductTiles(block_n=128, num_stages=3, programs_per_sm=2),
)
# A tile of 128 rows takes far less than twice the time of 64, and one of 32 that of 64 almost: what
# is left of an expert's rows is small or goes into a large tile.
MOST = TileConfig(
    block_m=128,
    tail=SOME,
    gated=ProductTiles(block_n=128, num_warps=8, num_stages=3, programs_per_sm=1),
    down=ProductTiles(block_n=256, num_warps=8, num_stages=3, programs_per_sm=1),
)


def choose_tiles(rows_per_expert: float) -> TileConfig:
    """By the mean number of rows an expert: few rows are bound by reading weights, many by the
    tensor cores. launch/bench_gemm.py --tune searches tiles for a shape."""
    if rows_per_expert <= 6:
        # Even routing then gives 1 expert in 7 more than 8 rows.
        return FEWEST
    if rows_per_expert <= 16:
        return FEW
    if rows_per_expert <= 48:
        return SOME
    return MANY if rows_per_expert <= 64 else MOST
