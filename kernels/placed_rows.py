"""What an index inside a dispatch's launch writes of received rows, once their places are known.

Legend: R ranks, B the bucket, K choices, padded to a power of two KP. A program has ROWS whole rows
of the R * B received ones, whose ROWS * KP cells are its tensors.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def write_placed(
    first_row, row, i, inside, slot, place, weight, total, lost, capacity, num_rows, ids_ptr,
    weights_ptr, row_index_ptr, position_ptr, order_ptr, order_weights_ptr, count_ptr,
    K: tl.constexpr, KP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """row_index, position and Order of expert_index, and the received ids [R, B, K] (-1 where not
    here) and weights. Where `lost`, nothing counts as here.

    Args:
        first_row: of this program.
        row, i, inside: of each cell: its row, its choice (row * K + column), whether there is one.
        slot, place, weight: its local expert (-1 where not here), expert row, and weight.
        total: expert rows in all, a scalar; what follows in row_index is -1.
    """
    total = tl.where(lost == 0, total, 0)
    slot = tl.where(lost == 0, slot, -1)
    here = slot >= 0
    kept = here & (place < capacity)
    position = tl.where(kept, place, -1)
    tl.store(row_index_ptr + place, row, mask=kept)
    tl.store(row_index_ptr + i, -1, mask=inside & (i >= total) & (i < capacity))
    tl.store(position_ptr + i, position, mask=inside)
    tl.store(ids_ptr + i, slot, mask=inside)
    tl.store(weights_ptr + i, weight, mask=here)
    # The order in which combine adds.
    present = tl.reshape(here.to(tl.int32), (ROWS, KP))
    before_it = tl.reshape(tl.cumsum(present, 1), (ROWS * KP,)) - 1
    tl.store(order_ptr + row * K + before_it, position, mask=here)
    tl.store(order_weights_ptr + row * K + before_it, weight, mask=here)
    rows_here = first_row + tl.arange(0, ROWS)
    tl.store(count_ptr + rows_here, tl.sum(present, 1), mask=rows_here < num_rows)
