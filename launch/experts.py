"""The expert step of benchmarks and checks: cheap, exact on every device, different per expert.

y = bf16(row * factor(e)), one fp32 multiplication, with e the logical expert: a row that reaches a
wrong expert, or the right one under a wrong id, comes back different. Shape legend: N expert rows,
H hidden, E logical experts, L local experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_comm.handle import Dispatched


def expert_factors(num_experts: int, device: torch.device | str = "cpu") -> Tensor:
    """[E] fp32: +-2^(e // 128 mod 8 - 4) * (1 + (79 e mod 128) / 128), negative for odd e.

    Up to 1024 experts have factors that differ by a unit of bf16 or more; 79 is odd, so it visits
    all 128 fractions, and near ids have far factors.
    """
    e = torch.arange(num_experts, dtype=torch.int64)
    size = torch.exp2((e // 128 % 8 - 4).double()) * (1 + (79 * e % 128) / 128)
    return torch.where(e % 2 == 1, -size, size).to(torch.float32).to(device)


def apply_expert(rows: Tensor, factors: Tensor) -> Tensor:
    """rows [N, H] and factors [N], the experts' -> [N, H] bf16 (rows' own dtype for float64)."""
    if rows.dtype == torch.float64:
        return rows * factors.double().unsqueeze(-1)
    return (rows.float() * factors.unsqueeze(-1)).to(torch.bfloat16)


def expert_step(arrived: Dispatched, local_factors: Tensor) -> Tensor:
    """The experts of one rank: y [N, H], grouped by local expert.

    Args:
        arrived: what dispatch returned.
        local_factors: [L], `expert_factors` of the rank's experts, by local id.

    Synchronizes to learn N.
    """
    total = int(arrived.expert_offsets[-1])
    rows = arrived.dequantized_rows().flatten(0, 1)[arrived.row_index[:total].long()]
    counts = arrived.num_tokens_per_expert.long()
    factors = local_factors.repeat_interleave(counts, output_size=total)
    return apply_expert(rows, factors)
