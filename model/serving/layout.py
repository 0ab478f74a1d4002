"""The byte layout of one request's state: what a slot and a page hold, and a name for it.

Shapes (one tensor-parallel rank): L KDA layers, M MLA layers, H local heads, Dk and Dv head
widths, W the convolution width, P tokens a page.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, replace
from typing import Any

import torch

LAYOUT_VERSION = 1
RECURRENT_DTYPE = torch.float32
CONV_GROUPS = ("q", "k", "v")


@dataclass(frozen=True, kw_only=True)
class StateLayout:
    """Frozen description of recurrent, convolution and MLA state on one tensor-parallel rank.

    Axis order is part of the layout: recurrent state is [head, key, value] ("HKV"), a convolution
    window is [channel, tap] with the oldest token first, channels grouped by head.

    Fields: `kda_layer_ids`, `mla_layer_ids` (0-based positions in the network, ascending),
    `num_heads` (all ranks together), `head_dim_k`, `head_dim_v`, `conv_width` (W; a window holds
    W - 1 tokens), `conv_dtype`, `mla_width` (values a token and MLA layer), `mla_dtype`,
    `page_size` (tokens a page), `chunk_size` (the absolute grid on which kernels end),
    `tp_rank`, `tp_size`, `model_id` (which weights made the state; free text).

    Raises ValueError for a shape that cannot exist, naming the field.
    """

    kda_layer_ids: tuple[int, ...]
    mla_layer_ids: tuple[int, ...]
    num_heads: int
    head_dim_k: int
    head_dim_v: int
    conv_width: int = 4
    conv_dtype: torch.dtype = torch.bfloat16
    mla_width: int = 576
    mla_dtype: torch.dtype = torch.bfloat16
    page_size: int = 64
    chunk_size: int = 64
    tp_rank: int = 0
    tp_size: int = 1
    model_id: str = ""

    def __post_init__(self) -> None:
        for name in ("num_heads", "head_dim_k", "head_dim_v", "mla_width", "page_size"):
            _expect(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        _expect(self.chunk_size >= 1, "chunk_size", "at least 1", self.chunk_size)
        _expect(self.conv_width >= 2, "conv_width", "at least 2", self.conv_width)
        _expect(self.tp_size >= 1, "tp_size", "at least 1", self.tp_size)
        _expect(
            0 <= self.tp_rank < self.tp_size, "tp_rank", f"in [0, {self.tp_size})", self.tp_rank
        )
        _expect(
            self.num_heads % self.tp_size == 0,
            "num_heads",
            f"a multiple of tp_size {self.tp_size}",
            self.num_heads,
        )
        for name in ("kda_layer_ids", "mla_layer_ids"):
            ids = getattr(self, name)
            _expect(tuple(sorted(set(ids))) == tuple(ids), name, "ascending and distinct", ids)
        both = set(self.kda_layer_ids) & set(self.mla_layer_ids)
        _expect(not both, "mla_layer_ids", "disjoint from kda_layer_ids", sorted(both))

    @classmethod
    def from_config(
        cls,
        config: Any,
        *,
        page_size: int = 64,
        chunk_size: int = 64,
        tp_rank: int = 0,
        tp_size: int = 1,
        conv_dtype: torch.dtype = torch.bfloat16,
        mla_dtype: torch.dtype = torch.bfloat16,
        model_id: str = "",
    ) -> StateLayout:
        """The layout of a model, from a configuration object's attributes.

        Read: `kda_layers`, `mla_layers` (0-based), `linear_num_heads`, `linear_head_dim`,
        `linear_v_head_dim`, `linear_conv_size` and `mla_cache_dim`.
        """
        return cls(
            kda_layer_ids=tuple(config.kda_layers),
            mla_layer_ids=tuple(config.mla_layers),
            num_heads=config.linear_num_heads,
            head_dim_k=config.linear_head_dim,
            head_dim_v=config.linear_v_head_dim,
            conv_width=config.linear_conv_size,
            conv_dtype=conv_dtype,
            mla_width=config.mla_cache_dim,
            mla_dtype=mla_dtype,
            page_size=page_size,
            chunk_size=chunk_size,
            tp_rank=tp_rank,
            tp_size=tp_size,
            model_id=model_id,
        )

    @property
    def num_kda_layers(self) -> int:
        return len(self.kda_layer_ids)

    @property
    def num_mla_layers(self) -> int:
        return len(self.mla_layer_ids)

    @property
    def local_heads(self) -> int:
        """Heads of this rank: [tp_rank * local_heads, (tp_rank + 1) * local_heads)."""
        return self.num_heads // self.tp_size

    @property
    def head_range(self) -> tuple[int, int]:
        """First head of this rank and one past its last, counted over all ranks."""
        return self.tp_rank * self.local_heads, (self.tp_rank + 1) * self.local_heads

    @property
    def recurrent_shape(self) -> tuple[int, int, int]:
        """One KDA layer's recurrent state, fp32: (H, Dk, Dv)."""
        return self.local_heads, self.head_dim_k, self.head_dim_v

    def channels(self, group: str) -> int:
        """Channels of one head in convolution group "q", "k" or "v"."""
        _expect(group in CONV_GROUPS, "group", f"one of {CONV_GROUPS}", group)
        return self.head_dim_v if group == "v" else self.head_dim_k

    def conv_shape(self, group: str) -> tuple[int, int]:
        """One KDA layer's window of a group, `conv_dtype`: (H * channels, W - 1)."""
        return self.local_heads * self.channels(group), self.conv_width - 1

    @property
    def snapshot_grid(self) -> int:
        """Positions, in tokens, where a snapshot meets both the chunk grid and the page grid."""
        return math.lcm(self.chunk_size, self.page_size)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot: recurrent and convolution state of every KDA layer."""
        recurrent = math.prod(self.recurrent_shape) * RECURRENT_DTYPE.itemsize
        windows = sum(math.prod(self.conv_shape(g)) for g in CONV_GROUPS)
        return self.num_kda_layers * (recurrent + windows * self.conv_dtype.itemsize)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: `page_size` rows of every MLA layer."""
        return self.num_mla_layers * self.page_size * self.mla_width * self.mla_dtype.itemsize

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` rows."""
        return -(-num_tokens // self.page_size)

    def describe(self) -> dict[str, Any]:
        """Every field as plain JSON values, axis orders included."""
        return {
            "version": LAYOUT_VERSION,
            "model_id": self.model_id,
            "kda_layer_ids": list(self.kda_layer_ids),
            "mla_layer_ids": list(self.mla_layer_ids),
            "num_heads": self.num_heads,
            "head_dim_k": self.head_dim_k,
            "head_dim_v": self.head_dim_v,
            "recurrent_axes": "HKV",
            "recurrent_dtype": _dtype_name(RECURRENT_DTYPE),
            "conv_width": self.conv_width,
            "conv_axes": "channel,tap(oldest first)",
            "conv_dtype": _dtype_name(self.conv_dtype),
            "mla_width": self.mla_width,
            "mla_dtype": _dtype_name(self.mla_dtype),
            "chunk_size": self.chunk_size,
            "page_size": self.page_size,
            "tp_rank": self.tp_rank,
            "tp_size": self.tp_size,
        }

    def fingerprint(self) -> str:
        """sha256 over every field. Equal fingerprints mean that bytes can be copied as they are."""
        return _digest(self.describe())

    def model_fingerprint(self) -> str:
        """sha256 over what tensor parallelism and paging do not change.

        Equal model fingerprints mean that state can move after reslicing heads and repaging.
        """
        local = ("page_size", "tp_rank", "tp_size")
        return _digest({k: v for k, v in self.describe().items() if k not in local})

    def with_tp(self, tp_rank: int, tp_size: int) -> StateLayout:
        """The same model's layout on another tensor-parallel rank."""
        return replace(self, tp_rank=tp_rank, tp_size=tp_size)


def _digest(fields: dict[str, Any]) -> str:
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _expect(ok: bool, name: str, expected: str, got: object) -> None:
    if not ok:
        raise ValueError(f"{name}: expected {expected}, got {got!r}")
