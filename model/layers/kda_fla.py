"""KDA on a GPU through fla-core's Triton kernels, imported when first used.

States are [H, K, V] fp32 (fla's default order, `state_v_first=False`). Only final states are used:
the intermediate states that fla can return are bf16.

Tiles are pinned, one of fla's own candidates a kernel: in what order a kernel adds up must not hang
on a timing that each rank, and each run, takes for itself, and about a hundred candidates take a
minute to compile. Where FLA_CACHE_MODE is set, fla's choice stands.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from typing import Any

import torch

from moe_comm.errors import MoeCommError

# module, kernel -> (tile sizes, warps, stages) for 128-wide heads on sm_90: no spills, and shared
# memory for two programs a multiprocessor where the kernel walks a sequence.
_TILES: dict[tuple[str, str], tuple[dict[str, int], int, int | None]] = {
    ("fla.modules.norm.l2norm", "l2norm_fwd_kernel"): ({"BT": 32}, 8, None),
    ("fla.ops.kda.gate", "kda_gate_chunk_cumsum_vector_kernel"): ({"BS": 32}, 4, None),
    ("fla.ops.kda.chunk_intra", "chunk_kda_fwd_kernel_intra_sub_chunk"): ({}, 4, 3),
    ("fla.ops.kda.chunk_intra", "chunk_kda_fwd_kernel_inter_solve_fused"): ({"BK": 32}, 2, None),
    ("fla.ops.kda.wy_fast", "recompute_w_u_fwd_kda_kernel"): ({}, 4, 3),
    (
        "fla.ops.common.chunk_delta_h",
        "chunk_gated_delta_rule_fwd_kernel_h_blockdim64",
    ): ({"BV": 32}, 4, 2),
    ("fla.ops.gla.chunk", "chunk_gla_fwd_kernel_o"): ({"BK": 64, "BV": 64}, 4, 2),
}


@functools.cache
def _kernels() -> tuple[Any, Any]:
    try:
        from fla.ops.kda import chunk_kda
        from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd
    except ImportError as error:
        raise MoeCommError(
            f"KDA on a GPU needs fla-core ({error}); install it with: pip install 'moe_comm[model]'"
        ) from error
    if "FLA_CACHE_MODE" not in os.environ:
        pin_tiles()
    return chunk_kda, fused_recurrent_kda_fwd


def pin_tiles() -> list[str]:
    """Leave each of fla's kernels one candidate; returns the kernels where that was not found, in
    a version of fla that has others, and which tune themselves."""
    left = []
    for (module, name), (sizes, warps, stages) in _TILES.items():
        kernel: Any = None
        with contextlib.suppress(ImportError):
            kernel = getattr(importlib.import_module(module), name, None)
        while kernel is not None and not hasattr(kernel, "configs"):
            kernel = getattr(kernel, "fn", None)
        wanted = [
            config
            for config in (kernel.configs if kernel is not None else ())
            if config.kwargs == sizes
            and config.num_warps == warps
            and stages in (None, config.num_stages)
        ]
        if kernel is None or not wanted:
            left.append(name)
            continue
        kernel.configs = wanted[:1]
    return left


def chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    raw_decay: torch.Tensor,
    beta_logits: torch.Tensor,
    *,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float,
    initial_state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    cu_seqlens_cpu: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed sequences: q, k, raw_decay [N, H, K], v [N, H, V], beta_logits [N, H], initial_state
    [S, H, K, V] fp32. Normalization, gate and sigmoid happen inside. Returns (o [N, H, V] in q's
    dtype, final states [S, H, K, V] fp32)."""
    chunk_kda, _ = _kernels()
    out, final = chunk_kda(
        q.unsqueeze(0),
        k.unsqueeze(0),
        v.unsqueeze(0),
        raw_decay.unsqueeze(0),
        beta_logits.unsqueeze(0),
        A_log=a_log,
        dt_bias=dt_bias,
        initial_state=initial_state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        safe_gate=True,
        lower_bound=lower_bound,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
    )
    return out[0], final


def step_in_place(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    raw_decay: torch.Tensor,
    beta_logits: torch.Tensor,
    *,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float,
    states: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """One token of S sequences: q, k, raw_decay [S, H, K], v [S, H, V], beta_logits [S, H]; states
    [num_slots, H, K, V] fp32 is updated in place at slots [S]. Returns o [S, H, V]."""
    _, step = _kernels()
    out, _ = step(
        q.unsqueeze(1),
        k.unsqueeze(1),
        v.unsqueeze(1),
        raw_decay.unsqueeze(1),
        beta_logits.unsqueeze(1),
        A_log=a_log,
        dt_bias=dt_bias,
        initial_state=states,
        inplace_final_state=True,
        ssm_state_indices=slots,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        lower_bound=lower_bound,
    )
    mixed: torch.Tensor = out.squeeze(1)
    return mixed
