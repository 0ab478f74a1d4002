"""Validated arguments of one dispatch or combine: what the backends get to see.

Every message names the argument, what was expected and what came. Nothing here moves a byte.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_comm import env
from moe_comm.config import EPConfig
from moe_comm.handle import DispatchHandle

if TYPE_CHECKING:
    from collections.abc import Mapping

Rows = Tensor | tuple[Tensor, Tensor]
_ID_DTYPES = (torch.int16, torch.int32, torch.int64)


@dataclass(kw_only=True, eq=False)
class DispatchCall:
    """One dispatch. `x` [T, H] and `scales` [T, G] are as given: quantized already where
    `is_quantized`; `reuse` is the handle whose routing is repeated, or None; `prepared` is what
    the backend keeps from one half for the other."""

    x: Tensor
    scales: Tensor | None
    is_quantized: bool
    topk_idx: Tensor
    topk_weights: Tensor
    num_tokens: int | Tensor
    bucket: int
    payloads: dict[str, Tensor] = field(default_factory=dict)
    reuse: DispatchHandle | None = None
    slot: int = -1
    call: int = -1
    prepared: Any = None

    @property
    def num_rows(self) -> int:
        """T of x, padding included."""
        return self.x.shape[0]


@dataclass(kw_only=True, eq=False)
class CombineCall:
    """One combine. `y` is [N, H] (layout "expert") or [R, B, D] (layout "rows"); `prepared` as in
    DispatchCall."""

    y: Tensor
    handle: DispatchHandle
    layout: str
    weights_applied: bool
    bias: tuple[Tensor, ...]
    out: Tensor | None
    prepared: Any = None


def check_dispatch(
    config: EPConfig,
    device: torch.device,
    x: Rows,
    topk_idx: Tensor | None,
    topk_weights: Tensor | None,
    *,
    num_tokens: int | Tensor | None,
    bucket: int | None,
    payloads: Mapping[str, Tensor] | None,
    handle: DispatchHandle | None,
) -> DispatchCall:
    """Raise ValueError or TypeError for anything that cannot be dispatched; else the call."""
    values, scales = _check_rows(config, device, x)
    num_rows = values.shape[0]
    if handle is not None:
        if topk_idx is not None or topk_weights is not None:
            raise ValueError(
                "handle: expected topk_idx and topk_weights to be None where a handle is "
                "reused, since the handle owns the routing"
            )
        if num_rows != handle.num_rows:
            raise ValueError(
                f"x: expected {handle.num_rows} rows, those of the reused handle, got {num_rows}"
            )
        topk_idx, topk_weights = handle.topk_idx, handle.topk_weights
        num_tokens, bucket = handle.num_tokens, handle.bucket
    if topk_idx is None or topk_weights is None:
        raise ValueError("topk_idx, topk_weights: expected tensors (or a handle), got None")
    capacity = config.bucket
    bucket = capacity if bucket is None else bucket
    if not 0 <= bucket <= capacity:
        raise ValueError(f"bucket: expected 0 to {capacity} tokens (the capacity), got {bucket}")
    if num_rows > bucket:
        what = "max_tokens_per_rank" if bucket == config.max_tokens_per_rank else "the bucket"
        raise ValueError(f"x: expected at most {bucket} tokens ({what}), got {num_rows}")
    _check_routing(config, device, topk_idx, topk_weights, num_rows)
    if num_tokens is None:
        num_tokens = num_rows
    elif isinstance(num_tokens, Tensor):
        scalar = num_tokens.numel() == 1 and num_tokens.dtype in _ID_DTYPES
        if not scalar or num_tokens.device != device:
            raise ValueError(
                f"num_tokens: expected an int or a scalar integer tensor on {device}, got "
                f"{tuple(num_tokens.shape)} {num_tokens.dtype} on {num_tokens.device}"
            )
    elif not 0 <= num_tokens <= num_rows:
        raise ValueError(f"num_tokens: expected 0 to {num_rows} (x.shape[0]), got {num_tokens}")
    extra = dict(payloads or {})
    for name, tensor in extra.items():
        if tensor.shape[:1] != (num_rows,) or tensor.device != device:
            raise ValueError(
                f"payloads[{name!r}]: expected [{num_rows}, ...] on {device}, got "
                f"{tuple(tensor.shape)} on {tensor.device}"
            )
    return DispatchCall(
        x=values,
        scales=scales,
        is_quantized=isinstance(x, tuple),
        topk_idx=topk_idx,
        topk_weights=topk_weights,
        num_tokens=num_tokens,
        bucket=bucket,
        payloads=extra,
        reuse=handle,
    )


def _check_rows(config: EPConfig, device: torch.device, x: Rows) -> tuple[Tensor, Tensor | None]:
    wire = config.wire
    values, scales = x if isinstance(x, tuple) else (x, None)
    if not isinstance(values, Tensor):
        raise TypeError(f"x: expected a tensor or (values, scales), got {type(values).__name__}")
    if values.dim() != 2 or values.shape[1] != config.hidden:
        raise ValueError(
            f"x: expected shape [T, {config.hidden}] (hidden), got {tuple(values.shape)}"
        )
    if values.device != device:
        raise ValueError(f"x: expected a tensor on {device}, got {values.device}")
    if isinstance(x, tuple):
        if wire.scale_dtype is None:
            raise ValueError(
                f"x: expected one tensor, since wire {wire.name!r} has no scales, got a tuple"
            )
        want = (values.shape[0], wire.num_groups(config.hidden))
        if not isinstance(scales, Tensor) or tuple(scales.shape) != want:
            got = tuple(scales.shape) if isinstance(scales, Tensor) else type(scales).__name__
            raise ValueError(f"x[1]: expected scales of shape {list(want)}, got {got}")
        if scales.dtype != wire.scale_dtype or scales.device != device:
            raise ValueError(
                f"x[1]: expected {wire.scale_dtype} on {device}, got {scales.dtype} on "
                f"{scales.device}"
            )
        expected = wire.value_dtype
    else:
        expected = None if wire.name == "none" else torch.bfloat16
    if expected is not None and values.dtype != expected:
        raise ValueError(f"x: expected {expected} for wire {wire.name!r}, got {values.dtype}")
    return values, scales


def _check_routing(
    config: EPConfig,
    device: torch.device,
    topk_idx: Tensor,
    topk_weights: Tensor,
    num_rows: int,
) -> None:
    want = (num_rows, config.num_topk)
    # Without wires everything may be float64, so that gradients can be checked numerically.
    bare = config.dispatch_wire == config.combine_wire == "none"
    weight_dtypes = (torch.float32, torch.float64) if bare else (torch.float32,)
    for name, tensor, dtypes in (
        ("topk_idx", topk_idx, _ID_DTYPES),
        ("topk_weights", topk_weights, weight_dtypes),
    ):
        if tuple(tensor.shape) != want:
            raise ValueError(
                f"{name}: expected shape {list(want)} ([T, num_topk]), got {tuple(tensor.shape)}"
            )
        if tensor.dtype not in dtypes:
            names = ", ".join(str(dtype) for dtype in dtypes)
            raise ValueError(f"{name}: expected {names}, got {tensor.dtype}")
        if tensor.device != device:
            raise ValueError(f"{name}: expected a tensor on {device}, got {tensor.device}")
    if env.DEBUG.get() and topk_idx.numel():
        low, high = int(topk_idx.min()), int(topk_idx.max())
        if low < -1 or high >= config.num_experts:
            bad = low if low < -1 else high
            raise ValueError(f"topk_idx: expected ids in [-1, {config.num_experts}), got {bad}")


def check_combine(
    config: EPConfig,
    device: torch.device,
    num_ranks: int,
    y: Tensor,
    handle: DispatchHandle,
    *,
    layout: str,
    weights_applied: bool,
    bias: Tensor | tuple[Tensor, ...] | None,
    out: Tensor | None,
    num_expert_rows: int,
) -> CombineCall:
    """Raise ValueError for anything that cannot be combined; else the call."""
    if layout not in ("expert", "rows"):
        raise ValueError(f"layout: expected 'expert' or 'rows', got {layout!r}")
    hidden = config.hidden
    if layout == "expert":
        fits = y.dim() == 2 and y.shape[1] == hidden and y.shape[0] <= num_expert_rows
        want = f"[N <= {num_expert_rows}, {hidden}]"
    else:
        fits = tuple(y.shape) == (num_ranks, handle.bucket, hidden)
        want = f"[{num_ranks}, {handle.bucket}, {hidden}] (R, bucket, hidden)"
    if not fits:
        raise ValueError(f"y: expected shape {want} for layout {layout!r}, got {tuple(y.shape)}")
    if config.combine_wire != "none" and y.dtype != torch.bfloat16:
        raise ValueError(
            f"y: expected torch.bfloat16 for combine wire {config.combine_wire!r}, got {y.dtype}"
        )
    if y.device != device:
        raise ValueError(f"y: expected a tensor on {device}, got {y.device}")
    biases = () if bias is None else (bias,) if isinstance(bias, Tensor) else tuple(bias)
    for name, tensor in [*((f"bias[{i}]", b) for i, b in enumerate(biases)), ("out", out)]:
        if tensor is None:
            continue
        if (
            tuple(tensor.shape) != (handle.num_rows, hidden)
            or tensor.device != device
            or tensor.dtype != y.dtype
        ):
            raise ValueError(
                f"{name}: expected [{handle.num_rows}, {hidden}] {y.dtype} on {device}, got "
                f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
            )
    return CombineCall(
        y=y,
        handle=handle,
        layout=layout,
        weights_applied=weights_applied or layout == "rows",
        bias=biases,
        out=out,
    )
