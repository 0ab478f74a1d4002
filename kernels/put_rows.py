"""Rows of a dispatch, with their scales and payloads, to every rank that they reach.

Legend: T tokens here, R ranks, B the bucket, H hidden, G scale groups, K choices, C copies of an
expert. Where they go: moe_comm.kernels.dispatch. WIRE is 0 to copy elements, 1 to quantize bf16 to
fp8 on the way, 2 to mxfp8; ROWS_COPIED says that copies bring rows to other ranks, so that none are
put there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_comm.kernels.choice_route import route_tokens
from moe_comm.kernels.quantize import quantize_groups


@triton.jit
def put_row(
    token, block, num_tokens, usable, x_ptr, scales_ptr, topk_idx_ptr, payload_ptr, copy_table_ptr,
    num_copies_ptr, peers_ptr, rows_offset, scales_offset, payload_offset, rank, bucket, E,
    stride_x,
    H: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr,
    KP: tl.constexpr, C: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, WIRE: tl.constexpr,
    VALUE_BYTES: tl.constexpr, PAYLOAD: tl.constexpr, PAYLOAD_P: tl.constexpr,
    ROWS_COPIED: tl.constexpr, ROW_ALIGN: tl.constexpr,
):  # fmt: skip
    """One column block of one token to every rank it reaches; block 0 also puts given scales and
    payload."""
    real = token < num_tokens
    to_rank, _, _ = route_tokens(
        tl.zeros([1, 1], tl.int32) + token, real, topk_idx_ptr, rank, E, copy_table_ptr,
        num_copies_ptr, K, KP, C,
    )  # fmt: skip
    column = block * BLOCK + tl.arange(0, BLOCK)
    in_row = (column < H) & real
    row_ptr = x_ptr + token.to(tl.int64) * stride_x + column
    if WIRE != 0:
        x = tl.load(row_ptr, mask=in_row, other=0.0)
        values, scale = quantize_groups(x.to(tl.float32), WIRE == 2, GROUP, BLOCK)
    else:
        # What is past the row is not stored. Triton has no 0 of fp8 to put there.
        values = tl.load(row_ptr, mask=in_row)
        scale = 0
    if R <= 8:
        for step in tl.static_range(R):
            _put_row_to_peer(
                step, token, block, usable, values, scale, to_rank, in_row, column, scales_ptr,
                payload_ptr, peers_ptr, rows_offset, scales_offset, payload_offset, rank, bucket,
                H, G, GP, GROUP, R, BLOCK, WIRE, VALUE_BYTES, PAYLOAD, PAYLOAD_P, ROWS_COPIED,
                ROW_ALIGN,
            )  # fmt: skip
    else:
        for step in range(R):
            _put_row_to_peer(
                step, token, block, usable, values, scale, to_rank, in_row, column, scales_ptr,
                payload_ptr, peers_ptr, rows_offset, scales_offset, payload_offset, rank, bucket,
                H, G, GP, GROUP, R, BLOCK, WIRE, VALUE_BYTES, PAYLOAD, PAYLOAD_P, ROWS_COPIED,
                ROW_ALIGN,
            )  # fmt: skip


@triton.jit
def _put_row_to_peer(
    step, token, block, usable, values, scale, to_rank, in_row, column, scales_ptr, payload_ptr,
    peers_ptr, rows_offset, scales_offset, payload_offset, rank, bucket,
    H: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, GROUP: tl.constexpr, R: tl.constexpr,
    BLOCK: tl.constexpr, WIRE: tl.constexpr, VALUE_BYTES: tl.constexpr, PAYLOAD: tl.constexpr,
    PAYLOAD_P: tl.constexpr, ROWS_COPIED: tl.constexpr, ROW_ALIGN: tl.constexpr,
):  # fmt: skip
    """What put_row puts to the step-th peer. Stores are masked, not branched around: their
    addresses load together."""
    peer = (rank + 1 + step) % R
    base = tl.load(peers_ptr + peer)
    reached = tl.max(tl.max((to_rank == peer).to(tl.int32), 1), 0) > 0
    row = rank.to(tl.int64) * bucket + token
    send_row = reached & (usable != 0)
    if ROWS_COPIED:
        send_row = send_row & (peer == rank)
    rows_ptr = (base + rows_offset + row * (H * VALUE_BYTES)).to(tl.pointer_type(values.dtype))
    # Rows are aligned, which an address that was loaded does not show: without the hint they would
    # be stored two bytes at a time.
    rows_ptr = tl.multiple_of(rows_ptr, ROW_ALIGN)
    tl.store(rows_ptr + column, values, mask=in_row & send_row)
    if WIRE != 0:
        group = block * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
        scale_bytes: tl.constexpr = scale.dtype.primitive_bitwidth // 8
        scales_at = (base + scales_offset + row * (G * scale_bytes)).to(
            tl.pointer_type(scale.dtype)
        )
        tl.store(scales_at + group, scale, mask=(group < G) & send_row)
    if block == 0:
        if GP > 0:
            _put_bytes(
                scales_ptr + token.to(tl.int64) * G, base + scales_offset + row * G,
                reached & (usable != 0), G, GP,
            )  # fmt: skip
        if PAYLOAD > 0:
            _put_bytes(
                payload_ptr + token.to(tl.int64) * PAYLOAD, base + payload_offset + row * PAYLOAD,
                reached & (usable != 0), PAYLOAD, PAYLOAD_P,
            )  # fmt: skip


@triton.jit
def _put_bytes(source_ptr, target, writes, COUNT: tl.constexpr, COUNT_P: tl.constexpr):
    """COUNT bytes to an address, where `writes`."""
    i = tl.arange(0, COUNT_P)
    mask = (i < COUNT) & writes
    byte = tl.load(source_ptr + i, mask=mask)
    tl.store(target.to(tl.pointer_type(tl.uint8)) + i, byte, mask=mask)
