"""Gated multi-head latent attention without position encoding, over a paged latent cache.

q = q_b(rms(q_a(x))), a head [nope | rope]; [c | k_pe] = kv_a(x), c normed; a cache row is
[rms(c) | k_pe], the "rope" part shared by all heads and never rotated; [k_nope | v] = kv_b(c).
out = o_proj(softmax(q k / sqrt(nope + rope)) v * sigmoid(g(x))). The two inner norms use eps 1e-6.

Prefill expands cached latents to keys and values. Decode absorbs kv_b: q_nope goes through the key
half, attention runs on the cached rows themselves, and its result goes through the value half.

Shapes: N packed tokens, D hidden, H local heads, L latent, P tokens a page, X context rows.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from moe_comm.model.layers.linear import Numerics, linear
from moe_comm.model.layers.norm import rms_norm
from moe_comm.model.layers.sequence_plan import SequencePlan
from moe_comm.model.parallel import Parallel, row_parallel

INNER_EPS = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedMla:
    """Weights, this rank's heads: q_a [Q, D] and q_a_norm [Q] (whole), q_b [H (nope + rope), Q],
    kv_a [L + rope, D] and kv_a_norm [L] (whole), kv_b [H, nope + v, L], g [H v, D], o [D, H v]."""

    q_a: torch.Tensor
    q_a_norm: torch.Tensor
    q_b: torch.Tensor
    kv_a: torch.Tensor
    kv_a_norm: torch.Tensor
    kv_b: torch.Tensor
    g: torch.Tensor
    o: torch.Tensor
    nope_dim: int
    rope_dim: int
    v_dim: int
    numerics: Numerics

    @property
    def scale(self) -> float:
        """Softmax scale: (nope + rope)^-0.5."""
        return float((self.nope_dim + self.rope_dim) ** -0.5)

    def forward(
        self, x: torch.Tensor, plan: SequencePlan, cache: torch.Tensor, parallel: Parallel
    ) -> torch.Tensor:
        """x [N, D] to [N, D]. `cache` [num_pages, P, L + rope] gets the tokens' rows, then is read
        at each sequence's block table up to its last token."""
        num, mix = x.shape[0], self.numerics
        latent = self.kv_a_norm.shape[0]
        compressed = rms_norm(linear(x, self.q_a, mix), self.q_a_norm, INNER_EPS, mix.wide)
        q = linear(compressed, self.q_b, mix)
        q = q.view(num, self.kv_b.shape[0], self.nope_dim + self.rope_dim)
        kv = linear(x, self.kv_a, mix)
        normed = rms_norm(kv[:, :latent].contiguous(), self.kv_a_norm, INNER_EPS, mix.wide)
        row = torch.cat([normed, kv[:, latent:]], dim=-1)
        cache.view(-1, cache.shape[-1])[plan.cache_rows] = row.to(cache.dtype)
        if mix.batch_invariant:
            mixed = self._one_by_one(q, plan, cache)
        else:
            mixed = self._attend(q, plan, cache)
        gate = torch.sigmoid(linear(x, self.g, mix).to(mix.wide))
        gated = (mixed.reshape(num, -1).to(mix.wide) * gate).to(x.dtype)
        return row_parallel(gated, self.o, mix, parallel)

    def absorb(self, q: torch.Tensor) -> torch.Tensor:
        """Queries [T, H, nope + rope] to queries of cache rows, [T, H, L + rope]."""
        key_half = self.kv_b[:, : self.nope_dim].to(q.dtype)
        absorbed = torch.einsum("thn,hnl->thl", q[..., : self.nope_dim], key_half)
        return torch.cat([absorbed, q[..., self.nope_dim :]], dim=-1)

    def unabsorb(self, mixed: torch.Tensor) -> torch.Tensor:
        """Mixed latents [T, H, L] to head outputs [T, H, v]."""
        value_half = self.kv_b[:, self.nope_dim :].to(mixed.dtype)
        return torch.einsum("thl,hvl->thv", mixed, value_half)

    def _context(self, plan: SequencePlan, cache: torch.Tensor, seq: int) -> torch.Tensor:
        """A sequence's cache rows, up to and with its newest token: [X, L + rope]."""
        length = plan.batch.starts[seq] + plan.batch.lengths[seq]
        pages = -(-length // cache.shape[1])
        table = plan.batch.block_tables[seq, :pages].long()
        return cache[table].reshape(-1, cache.shape[-1])[:length]

    def _one_by_one(self, q: torch.Tensor, plan: SequencePlan, cache: torch.Tensor) -> torch.Tensor:
        """Absorbed attention of one token at a time over exactly its own context, in float64: its
        shapes, so its bits, depend on its position alone."""
        latent = self.kv_a_norm.shape[0]
        out = q.new_empty(q.shape[0], self.kv_b.shape[0], self.v_dim)
        for seq, (begin, start) in enumerate(
            zip(plan.offsets[:-1], plan.batch.starts, strict=True)
        ):
            context = self._context(plan, cache, seq).double()
            for i in range(plan.batch.lengths[seq]):
                rows = context[: start + i + 1]
                one = self.absorb(q[begin + i : begin + i + 1].double())[0]
                p = torch.softmax(one @ rows.t() * self.scale, dim=-1)
                mixed = (p @ rows[:, :latent]).unsqueeze(0)
                out[begin + i] = self.unabsorb(mixed)[0].to(q.dtype)
        return out

    def _attend(self, q: torch.Tensor, plan: SequencePlan, cache: torch.Tensor) -> torch.Tensor:
        """Sequences of one token together and absorbed, the others one by one and expanded."""
        tables, starts = plan.batch.block_tables, plan.batch.start_positions
        if plan.all_single:
            return self._decode(q, tables, starts + 1, cache)
        out = q.new_empty(q.shape[0], q.shape[1], self.v_dim)
        singles = [s for s, length in enumerate(plan.batch.lengths) if length == 1]
        if singles:
            seqs = torch.tensor(singles, device=q.device)
            rows = plan.last_tokens[seqs]
            out[rows] = self._decode(q[rows], tables[seqs], starts[seqs] + 1, cache)
        for seq, begin in enumerate(plan.offsets[:-1]):
            length = plan.batch.lengths[seq]
            if length > 1:
                context = self._context(plan, cache, seq).to(q.dtype)
                part = slice(begin, begin + length)
                out[part] = self._expanded(q[part], context)
        return out

    def _expanded(self, q: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """q [T, H, nope + rope], the last T of the context's X tokens; causal. [T, H, v]."""
        num, heads = q.shape[:2]
        latent, width = self.kv_a_norm.shape[0], context.shape[0]
        kv = F.linear(context[:, :latent], self.kv_b.flatten(0, 1).to(q.dtype))
        kv = kv.view(width, heads, self.nope_dim + self.v_dim)
        shared = context[:, None, latent:].expand(width, heads, self.rope_dim)
        key = torch.cat([kv[..., : self.nope_dim], shared], dim=-1)
        value = kv[..., self.nope_dim :]
        if q.is_cuda:
            # Flash kernels take one width for keys and values: padding is cheaper than the others.
            value = F.pad(value, (0, max(0, q.shape[-1] - self.v_dim)))
        q4, k4, v4 = (x.transpose(0, 1).unsqueeze(0) for x in (q, key, value))
        if num == width:
            mixed = F.scaled_dot_product_attention(q4, k4, v4, is_causal=True, scale=self.scale)
        else:
            mask = causal_lower_right(num, width)
            mixed = F.scaled_dot_product_attention(q4, k4, v4, attn_mask=mask, scale=self.scale)
        return mixed[0, :, :, : self.v_dim].transpose(0, 1)

    def _decode(
        self, q: torch.Tensor, tables: torch.Tensor, lengths: torch.Tensor, cache: torch.Tensor
    ) -> torch.Tensor:
        """One token a sequence, absorbed: q [S, H, nope + rope], block tables [S, pages], context
        lengths [S] with the new token. [S, H, v]."""
        latent = self.kv_a_norm.shape[0]
        absorbed = self.absorb(q)
        decode = paged_decode_torch
        if q.is_cuda:
            from moe_comm.kernels.mla_decode import mla_decode as decode
        mixed = decode(absorbed, cache, tables, lengths, latent=latent, scale=self.scale)
        return self.unabsorb(mixed)


def paged_decode_torch(
    q: torch.Tensor,
    cache: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    *,
    latent: int,
    scale: float,
) -> torch.Tensor:
    """`kernels.mla_decode` in torch, over padded contexts, fp32 throughout. Rows past a sequence's
    end are zeroed as well as masked: stale bytes may be NaN, and NaN times zero is NaN."""
    rows = cache[tables.long()].flatten(1, 2).float()
    there = torch.arange(rows.shape[1], device=q.device) < lengths[:, None]
    rows = rows.masked_fill(~there.unsqueeze(-1), 0)
    scores = torch.einsum("shl,sxl->shx", q.float(), rows) * scale
    p = torch.softmax(scores.masked_fill(~there.unsqueeze(1), float("-inf")), dim=-1)
    return torch.einsum("shx,sxl->shl", p, rows[..., :latent]).to(q.dtype)
