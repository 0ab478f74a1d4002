"""The MXFP4 format as checkpoints hold it. The functions live with the kernels that read it."""

from __future__ import annotations

from moe_comm.kernels.mxfp4_format import (
    E2M1_VALUES,
    GROUP,
    NAN_SCALE,
    decode_scales,
    dequantize,
    has_nan_scale,
    join_blocks,
    pack_codes,
    quantize,
    split_gpt_oss,
    unpack_codes,
)

__all__ = [
    "E2M1_VALUES",
    "GROUP",
    "NAN_SCALE",
    "decode_scales",
    "dequantize",
    "has_nan_scale",
    "join_blocks",
    "pack_codes",
    "quantize",
    "split_gpt_oss",
    "unpack_codes",
]
