"""The gated delta rule of KDA in plain torch: token by token, and in chunks of 64.

S <- diag(exp(g)) S;  S <- S + k u^T with u = beta (v - S^T k);  o = S^T q.
The state is [H, K, V], key axis before value axis, fp32, everywhere in this package. With float64
inputs a step or a chunk is computed in float64 and the state is rounded to fp32 after each, so that
where a sequence was cut between steps or chunks does not show.

The chunked form, with G the running sum of g inside a chunk and S0 the state before it:
  u_i = beta_i (v_i - S0^T (k_i e^{G_i})) - beta_i sum_{j<i} (k_i . k_j e^{G_i - G_j}) u_j
  o_i = S0^T (q_i e^{G_i}) + sum_{j<=i} (q_i . k_j e^{G_i - G_j}) u_j
  S   = diag(e^{G_C}) S0 + sum_j (k_j e^{G_C - G_j}) u_j^T
a unit lower triangular system for u. Decays are always of differences i >= j, so no exponent is
positive: with g down to -5 a token, e^{-G_j} alone would overflow after 18 tokens.

Shapes: T tokens of one sequence, H heads, K key width, V value width.
"""

from __future__ import annotations

import torch

from moe_comm.model.layers.sequence_plan import CHUNK


def log_decay(
    raw: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float,
    wide: torch.dtype = torch.float32,
) -> torch.Tensor:
    """lower_bound * sigmoid(exp(A_log) * (raw + dt_bias)), in `wide`, in (lower_bound, 0).

    raw [T, H, K], a_log [H], dt_bias [H * K].
    """
    heads, width = raw.shape[1:]
    shifted = raw.to(wide) + dt_bias.to(wide).view(heads, width)
    return lower_bound * torch.sigmoid(a_log.to(wide).exp().view(heads, 1) * shifted)


def recurrent_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of S sequences: q, k, g [S, H, K], v [S, H, V], beta [S, H], state [S, H, K, V],
    q already scaled; state fp32, the others fp32 or float64, which is then what is computed in.
    Returns (o [S, H, V], new state, rounded to fp32)."""
    state = state.to(q.dtype)
    state = state * g.exp().unsqueeze(-1)
    seen = (state * k.unsqueeze(-1)).sum(dim=-2)
    u = beta.unsqueeze(-1) * (v - seen)
    state = state + k.unsqueeze(-1) * u.unsqueeze(-2)
    return (state * q.unsqueeze(-1)).sum(dim=-2), state.float()


def recurrent(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence, token by token: q, k, g [T, H, K], v [T, H, V], beta [T, H], state [H, K, V].
    Returns (o [T, H, V], final state)."""
    out = torch.empty_like(v)
    current = state.unsqueeze(0)
    for t in range(q.shape[0]):
        one = slice(t, t + 1)
        out[one], current = recurrent_step(q[one], k[one], v[one], g[one], beta[one], current)
    return out, current[0]


def chunked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in chunks of 64 tokens counted from the first; arguments and results as
    `recurrent`. The last chunk is padded, so that every product has one shape."""
    out = torch.empty_like(v)
    for start in range(0, q.shape[0], CHUNK):
        part = slice(start, start + CHUNK)
        out[part], state = _one_chunk(q[part], k[part], v[part], g[part], beta[part], state)
    return out, state


def _one_chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    num = q.shape[0]
    # [H, 64, ...]; padded tokens have k = 0, beta = 0 and g = 0 and change nothing.
    q, k, v, g = (_padded(x) for x in (q, k, v, g))
    beta = _padded(beta.unsqueeze(-1))
    total = g.cumsum(dim=1)
    decay = total.exp()
    against_k, against_q = _decayed_products(q, k, total)
    state = state.to(q.dtype)
    rhs = beta * (v - (k * decay) @ state)
    u = torch.linalg.solve_triangular(
        (beta * against_k).tril(-1), rhs, upper=False, unitriangular=True
    )
    out = (q * decay) @ state + against_q.tril() @ u
    last = total[:, -1:]
    carried = (k * (last - total).exp()).transpose(1, 2) @ u
    state = decay[:, -1].unsqueeze(-1) * state + carried
    return out[:, :num].transpose(0, 1), state.float()


def _padded(x: torch.Tensor) -> torch.Tensor:
    """[T, H, D], T <= 64, to [H, 64, D] with zeros behind."""
    out = x.new_zeros(x.shape[1], CHUNK, x.shape[2])
    out[:, : x.shape[0]] = x.transpose(0, 1)
    return out


def _decayed_products(
    q: torch.Tensor, k: torch.Tensor, total: torch.Tensor, rows: int = 16
) -> tuple[torch.Tensor, torch.Tensor]:
    """For i >= j: k_i . (k_j e^{G_i - G_j}) and q_i . (k_j e^{G_i - G_j}), each [H, 64, 64];
    entries above the diagonal are finite and not used. `rows` rows at once bound the memory."""
    against_k = k.new_empty(k.shape[0], CHUNK, CHUNK)
    against_q = torch.empty_like(against_k)
    for i in range(0, CHUNK, rows):
        part = slice(i, i + rows)
        # Above the diagonal the difference is positive; clamping keeps exp finite there.
        between = (total[:, part, None] - total[:, None]).clamp_max(0.0).exp() * k[:, None]
        against_k[:, part] = (k[:, part, None] * between).sum(dim=-1)
        against_q[:, part] = (q[:, part, None] * between).sum(dim=-1)
    return against_k, against_q
