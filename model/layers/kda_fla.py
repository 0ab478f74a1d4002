"""KDA on a GPU through fla-core's Triton kernels, imported when first used.

States are [H, K, V] fp32 (fla's default order, `state_v_first=False`). Only final states are used:
the intermediate states that fla can return are bf16.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from moe_comm.errors import MoeCommError


@functools.cache
def _kernels() -> tuple[Any, Any]:
    try:
        from fla.ops.kda import chunk_kda
        from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd
    except ImportError as error:
        raise MoeCommError(
            f"KDA on a GPU needs fla-core ({error}); install it with: pip install 'moe_comm[model]'"
        ) from error
    return chunk_kda, fused_recurrent_kda_fwd


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
