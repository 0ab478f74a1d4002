"""Received rows read off the wire into bfloat16, once, before products that read each many times:
as they lie, or in the order of experts for GEMMs that do not gather.

Shape legend: R source ranks, B rows of each, H hidden, G scale groups, C capacity.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _gather_rows_kernel(
    x,
    x_scale,
    row_index,
    num_rows,
    out,
    bucket,
    stride_xr,
    stride_xt,
    stride_sr,
    stride_st,
    count,
    H,
    INDEXED: tl.constexpr,
    IN_PLACE: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[n] = x[row_index[n]] in bfloat16, for n below the device scalar num_rows; IN_PLACE:
    out[row_index[n]]. Without INDEXED all `count` rows where they lie.

    Example: row_index [2, 0], num_rows 2 -> rows 2 and 0 of x, to 0 and 1, or where they lie.
    """
    live = tl.load(num_rows) if INDEXED else count
    columns = tl.cdiv(H, BLOCK)
    # Several rows at once: reads that wait for an index need company to fill the memory system.
    for tile in range(tl.program_id(0), tl.cdiv(live, ROWS) * columns, tl.num_programs(0)):
        n = (tile // columns) * ROWS + tl.arange(0, ROWS)
        if INDEXED:
            row = tl.load(row_index + n, mask=n < live, other=0).to(tl.int64)
        else:
            row = n.to(tl.int64)
        k = (tile % columns) * BLOCK + tl.arange(0, BLOCK)
        mask = (n < live)[:, None] & (k < H)[None, :]
        source, token = row // bucket, row % bucket
        x_row = x + source * stride_xr + token * stride_xt
        value = tl.load(x_row[:, None] + k[None, :], mask=mask, other=0.0)
        if KIND != 0:
            s_row = x_scale + source * stride_sr + token * stride_st
            scale = tl.load(s_row[:, None] + (k // GROUP)[None, :], mask=mask, other=0)
            if KIND == 2:
                byte = scale.to(tl.int32)
                scale = tl.maximum(byte << 23, 0x400000).to(tl.float32, bitcast=True)
                scale = tl.where(byte == 255, float("nan"), scale)
            value = (value.to(tl.float32) * scale).to(tl.bfloat16)
        target = row if IN_PLACE else n.to(tl.int64)
        tl.store(out + target[:, None] * H + k[None, :], value, mask=mask)


def gather_rows(
    rows: Tensor, scales: Tensor | None, row_index: Tensor, num_rows: Tensor, *, out: Tensor
) -> Tensor:
    """One pass over the expert rows, whose number only the device knows.

    Args:
        rows: [R, B, H] bfloat16, or float8_e4m3fn with `scales` [R, B, G] (float32 a 128 or uint8 a
            32); received row r * B + t is rows[r, t].
        row_index: [C] int32.
        num_rows: int32 [1] on the device, at most C.
        out: bfloat16 [C, H], contiguous; rows from num_rows on are not written.
    """
    return _launch(rows, scales, row_index, num_rows, row_index.shape[0], in_place=False, out=out)


def read_rows(
    rows: Tensor,
    scales: Tensor,
    row_index: Tensor,
    num_rows: Tensor,
    *,
    expected_rows: int,
    out: Tensor,
) -> Tensor:
    """Received rows where they lie: all of them, or, where fewer expert rows than received ones are
    expected, those that row_index names, each as often as it does: the same bytes.

    Args:
        rows, scales, row_index, num_rows: as for gather_rows.
        expected_rows: how many expert rows there will be, roughly.
        out: bfloat16 [R, B, H], contiguous; rows that no expert has may be left as they are.
    """
    received = rows.shape[0] * rows.shape[1]
    named = row_index if expected_rows < received else None
    count = received if named is None else row_index.shape[0]
    return _launch(rows, scales, named, num_rows, count, in_place=True, out=out)


def _launch(
    rows: Tensor,
    scales: Tensor | None,
    row_index: Tensor | None,
    num_rows: Tensor,
    count: int,
    *,
    in_place: bool,
    out: Tensor,
) -> Tensor:
    hidden = rows.shape[2]
    kind = 0 if scales is None else (1 if scales.element_size() == 4 else 2)
    block = min(1024, triton.next_power_of_2(hidden))
    # With scales, several rows a tile would pass through shared memory.
    together = 4 if kind == 0 else 1
    tiles = triton.cdiv(max(1, count), together) * triton.cdiv(hidden, block)
    factor = rows if scales is None else scales
    _gather_rows_kernel[(min(tiles, 8192),)](
        rows,
        factor,
        num_rows if row_index is None else row_index,
        num_rows,
        out,
        rows.shape[1],
        rows.stride(0),
        rows.stride(1),
        factor.stride(0),
        factor.stride(1),
        count,
        hidden,
        INDEXED=row_index is not None,
        IN_PLACE=in_place,
        KIND=kind,
        GROUP=128 if kind == 1 else 32,
        ROWS=together,
        BLOCK=block,
    )
    return out
