"""A slow float64 model of K3, written from the formulas alone: one sequence, no cache, no pages, no
chunks, no ranks, a loop over tokens wherever the formula has one. It shares no code with model/.

`tensors` maps checkpoint names to tensors; `experts(layer, expert)` gives (w1, w3, w2) in float64.
"""

from __future__ import annotations

import math

import torch

F64 = torch.float64


def rms(x, weight, eps):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def situ(gate, up, beta, linear_beta):
    bounded = beta * torch.tanh(gate / beta) / (1 + torch.exp(-gate))
    return bounded * linear_beta * torch.tanh(up / linear_beta)


def conv_silu(x, weight):
    """x [T, C], weight [C, 1, W]: y_t = silu(sum_j w_j x_{t - W + 1 + j}), zeros before."""
    taps = weight.shape[-1]
    out = torch.zeros_like(x)
    for t in range(x.shape[0]):
        for j in range(taps):
            if t - taps + 1 + j >= 0:
                out[t] += weight[:, 0, j] * x[t - taps + 1 + j]
    return out / (1 + torch.exp(-out))


def delta_rule(q, k, v, g, beta, state):
    """q, k, g [T, H, K], v [T, H, V], beta [T, H], state [H, K, V]; one token, one head at once."""
    state = state.clone()
    out = torch.empty_like(v)
    for t in range(q.shape[0]):
        for h in range(q.shape[1]):
            s = torch.diag(torch.exp(g[t, h])) @ state[h]
            s = s + beta[t, h] * torch.outer(k[t, h], v[t, h] - s.T @ k[t, h])
            state[h] = s
            out[t, h] = s.T @ q[t, h]
    return out, state


def l2(x):
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def kda(x, w, *, heads, dim, v_dim, lower_bound, eps):
    """x [T, D]; w: names below self_attn. Returns (out [T, D], final state [heads, dim, v_dim])."""
    num = x.shape[0]
    q = conv_silu(x @ w["q_proj.weight"].T, w["q_conv1d.weight"]).view(num, heads, dim)
    k = conv_silu(x @ w["k_proj.weight"].T, w["k_conv1d.weight"]).view(num, heads, dim)
    v = conv_silu(x @ w["v_proj.weight"].T, w["v_conv1d.weight"]).view(num, heads, v_dim)
    raw = (x @ w["f_a_proj.weight"].T @ w["f_b_proj.weight"].T).view(num, heads, dim)
    rate = torch.exp(w["A_log"][:heads]).view(heads, 1)
    g = lower_bound * torch.sigmoid(rate * (raw + w["dt_bias"].view(heads, dim)))
    beta = torch.sigmoid(x @ w["b_proj.weight"].T)
    zero = torch.zeros(heads, dim, v_dim, dtype=F64)
    out, state = delta_rule(l2(q) / math.sqrt(dim), l2(k), v, g, beta, zero)
    gate = torch.sigmoid(x @ w["g_proj.weight"].T).view(num, heads, v_dim)
    out = rms(out, w["o_norm.weight"], eps) * gate
    return out.reshape(num, -1) @ w["o_proj.weight"].T, state


def mla(x, w, *, heads, nope, rope, v_dim):
    """x [T, D]; causal, expanded keys and values, no rotation."""
    num = x.shape[0]
    latent = w["kv_a_layernorm.weight"].shape[0]
    q = rms(x @ w["q_a_proj.weight"].T, w["q_a_layernorm.weight"], 1e-6) @ w["q_b_proj.weight"].T
    q = q.view(num, heads, nope + rope)
    both = x @ w["kv_a_proj_with_mqa.weight"].T
    compressed = rms(both[:, :latent], w["kv_a_layernorm.weight"], 1e-6)
    kv = (compressed @ w["kv_b_proj.weight"].T).view(num, heads, nope + v_dim)
    out = torch.zeros(num, heads, v_dim, dtype=F64)
    for t in range(num):
        for h in range(heads):
            scores = torch.stack(
                [
                    (q[t, h, :nope] @ kv[s, h, :nope] + q[t, h, nope:] @ both[s, latent:])
                    / math.sqrt(nope + rope)
                    for s in range(t + 1)
                ]
            )
            p = torch.softmax(scores, dim=0)
            out[t, h] = (p[:, None] * kv[: t + 1, h, nope:]).sum(0)
    gate = torch.sigmoid(x @ w["g_proj.weight"].T)
    return (out.reshape(num, -1) * gate) @ w["o_proj.weight"].T


def mlp(x, w, beta, linear_beta):
    hidden = situ(x @ w["gate_proj.weight"].T, x @ w["up_proj.weight"].T, beta, linear_beta)
    return hidden @ w["down_proj.weight"].T


def choose(logits, bias, k):
    """One token's experts and weights: a full sort by (choice descending, id ascending)."""
    scores = 1 / (1 + torch.exp(-logits))
    order = sorted(range(len(scores)), key=lambda e: (-float(scores[e] + bias[e]), e))[:k]
    weights = scores[order] / (scores[order].sum() + 1e-20)
    return order, weights


def moe(x, w, experts, config, *, given=None):
    """x [T, D]. `given` [T, K]: take these experts in place of the router's own choice (their
    weights still come from the scores). Returns (out, chosen ids as a list of sorted lists)."""
    beta, linear_beta = config.activation_situ_beta, config.activation_situ_linear_beta
    logits = x @ w["gate.weight"].T
    z = x @ w["routed_expert_down_proj.weight"].T
    latent = torch.zeros_like(z)
    chosen = []
    for t in range(x.shape[0]):
        order, weights = choose(
            logits[t], w["gate.e_score_correction_bias"], config.num_experts_per_token
        )
        chosen.append(sorted(order))
        if given is not None:
            order = [int(e) for e in given[t]]
            scores = torch.sigmoid(logits[t, order])
            weights = scores / (scores.sum() + 1e-20)
        for weight, expert in zip(weights, order, strict=True):
            w1, w3, w2 = experts(expert)
            latent[t] += weight * (w2 @ situ(w1 @ z[t], w3 @ z[t], beta, linear_beta))
    normed = rms(latent, w["routed_expert_norm.weight"], config.rms_norm_eps)
    shared = mlp(x, below(w, "shared_experts."), beta, linear_beta)
    return normed @ w["routed_expert_up_proj.weight"].T + shared, chosen


def aggregate(rows, norm, proj, eps):
    """AttnRes: softmax over rows of (rmsnorm(row) * norm) . proj, then the mean of raw rows."""
    out = torch.zeros_like(rows[0])
    for t in range(rows[0].shape[0]):
        scores = torch.stack([rms(row[t], norm, eps) @ proj[0] for row in rows])
        p = torch.softmax(scores, dim=0)
        for r, row in enumerate(rows):
            out[t] += p[r] * row[t]
    return out


def below(tensors, prefix):
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def model(config, tensors, experts, tokens, *, given=None):
    """Logits [T, vocab] of one sequence. `experts(layer, expert)`; `given`: layer -> [T, K].
    Returns (logits, {layer: chosen}, {kda layer: final state})."""
    w = {n: t.to(F64) for n, t in below(tensors, "language_model.").items()}
    eps, block = config.rms_norm_eps, config.attn_res_block_size
    embedded = w["model.embed_tokens.weight"][torch.tensor(tokens)]
    bank, running, routes, states = [], embedded, {}, {}
    for layer in range(config.num_hidden_layers):
        lw = below(w, f"model.layers.{layer}.")
        hidden = running
        if bank:
            hidden = aggregate(
                [*bank, running],
                lw["self_attention_res_norm.weight"],
                lw["self_attention_res_proj.weight"],
                eps,
            )
        if layer % block == 0:
            bank.append(running)
            running = None
        normed = rms(hidden, lw["input_layernorm.weight"], eps)
        attn = below(lw, "self_attn.")
        if layer + 1 in config.full_attn_layers:
            out = mla(
                normed,
                attn,
                heads=config.num_attention_heads,
                nope=config.qk_nope_head_dim,
                rope=config.qk_rope_head_dim,
                v_dim=config.v_head_dim,
            )
        else:
            out, states[layer] = kda(
                normed,
                attn,
                heads=config.linear_num_heads,
                dim=config.linear_head_dim,
                v_dim=config.linear_v_head_dim,
                lower_bound=config.linear_gate_lower_bound,
                eps=eps,
            )
        running = out if running is None else running + out
        hidden = aggregate(
            [*bank, running], lw["mlp_res_norm.weight"], lw["mlp_res_proj.weight"], eps
        )
        normed = rms(hidden, lw["post_attention_layernorm.weight"], eps)
        if layer < config.first_k_dense_replace:
            out = mlp(
                normed,
                below(lw, "mlp."),
                config.activation_situ_beta,
                config.activation_situ_linear_beta,
            )
        else:
            out, routes[layer] = moe(
                normed,
                below(lw, "block_sparse_moe."),
                lambda e, at=layer: experts(at, e),
                config,
                given=None if given is None else given[layer],
            )
        running = running + out
    hidden = aggregate(
        [*bank, running],
        w["model.output_attn_res_norm.weight"],
        w["model.output_attn_res_proj.weight"],
        eps,
    )
    logits = rms(hidden, w["model.norm.weight"], eps) @ w["lm_head.weight"].T
    return logits, routes, states
