"""Kimi Delta Attention: a layer with a recurrent state of fixed size in place of a growing cache.

q, k, v = silu(short_conv(x W)) (each its own convolution); q and k are l2-normalized a head, q is
scaled by K^-0.5; log-decay = lower_bound * sigmoid(exp(A_log) * (f_b(f_a(x)) + dt_bias)) a key
channel; beta = sigmoid(x W_b) a head; the gated delta rule (kda_ops); then
out = o_proj(rmsnorm(o) * sigmoid(x W_g)), the norm a head with one weight [V] for all heads.

Heads are sharded over the tensor-parallel group: this rank holds heads [first, last) of q, k, v,
their convolution channels, decay, beta, gate and recurrent state.

Shapes: N packed tokens, D hidden, H local heads, K key width, V value width, W taps.
"""

from __future__ import annotations

import dataclasses

import torch

from moe_comm.model.layers import kda_fla, kda_ops
from moe_comm.model.layers.linear import Numerics, linear
from moe_comm.model.layers.norm import gated_rms_norm, l2_norm
from moe_comm.model.layers.sequence_plan import Piece, SequencePlan
from moe_comm.model.layers.short_conv import short_conv
from moe_comm.model.parallel import Parallel, row_parallel


@dataclasses.dataclass(frozen=True, kw_only=True)
class KdaState:
    """One layer's state tensors of the pool, updated in place: recurrent [num_slots, H, K, V] fp32,
    conv_q and conv_k [num_slots, H * K, W - 1], conv_v [num_slots, H * V, W - 1]."""

    recurrent: torch.Tensor
    conv_q: torch.Tensor
    conv_k: torch.Tensor
    conv_v: torch.Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class KdaInputs:
    """What the delta rule needs of N tokens, before any gate or norm: q, k, decay [N, H, K],
    v [N, H, V], beta [N, H] (logits)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor

    def rows(self, index: torch.Tensor | slice) -> KdaInputs:
        """The same for a subset of the tokens."""
        return KdaInputs(
            q=self.q[index],
            k=self.k[index],
            v=self.v[index],
            decay=self.decay[index],
            beta=self.beta[index],
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kda:
    """Weights, this rank's share: q, k [H K, D], v, g [H V, D], f_a [K, D] (whole), f_b [H K, K],
    b [H, D], convolutions [H K | H V, W] fp32, a_log [H] fp32, dt_bias [H K] fp32, o_norm [V],
    o [D, H V]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    f_a: torch.Tensor
    f_b: torch.Tensor
    b: torch.Tensor
    conv_q: torch.Tensor
    conv_k: torch.Tensor
    conv_v: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    o_norm: torch.Tensor
    o: torch.Tensor
    head_dim: int
    v_head_dim: int
    lower_bound: float
    eps: float
    numerics: Numerics

    def forward(
        self, x: torch.Tensor, plan: SequencePlan, state: KdaState, parallel: Parallel
    ) -> torch.Tensor:
        """x [N, D] to [N, D]; advances `state` at the batch's slots by each sequence's tokens."""
        num, heads = x.shape[0], self.a_log.shape[0]
        mix, wide = self.numerics, self.numerics.wide
        inputs = KdaInputs(
            q=short_conv(linear(x, self.q, mix), self.conv_q, state.conv_q, plan, wide).view(
                num, heads, self.head_dim
            ),
            k=short_conv(linear(x, self.k, mix), self.conv_k, state.conv_k, plan, wide).view(
                num, heads, self.head_dim
            ),
            v=short_conv(linear(x, self.v, mix), self.conv_v, state.conv_v, plan, wide).view(
                num, heads, self.v_head_dim
            ),
            decay=linear(linear(x, self.f_a, mix), self.f_b, mix).view(num, heads, self.head_dim),
            beta=linear(x, self.b, mix),
        )
        out = self._delta_rule(inputs, plan, state.recurrent)
        gate = linear(x, self.g, mix).view(num, heads, self.v_head_dim)
        normed = gated_rms_norm(out, self.o_norm, gate, self.eps, wide)
        return row_parallel(normed.view(num, -1), self.o, mix, parallel)

    def _delta_rule(
        self, inputs: KdaInputs, plan: SequencePlan, states: torch.Tensor
    ) -> torch.Tensor:
        """[N, H, V]; picks the form for each sequence and updates `states`."""
        form = self.numerics.kda
        if form in ("auto", "torch") and self.numerics.batch_invariant:
            form = "chunked"
        slots = plan.batch.slots
        on_gpu = inputs.q.is_cuda and form == "auto"
        if plan.all_single and form != "chunked":
            step = self._fla_step if on_gpu else self._torch_step
            return step(inputs, states, slots)
        out = torch.empty_like(inputs.v)
        single, passes = plan.passes(split_single=form in ("auto", "torch"))
        if single:
            rows = torch.tensor([p.start for p in single], device=slots.device)
            seqs = torch.tensor([p.seq for p in single], device=slots.device)
            step = self._fla_step if on_gpu else self._torch_step
            out[rows] = step(inputs.rows(rows), states, slots[seqs])
        for pieces in passes:
            if on_gpu:
                self._fla_chunk(inputs, pieces, states, slots, out)
            else:
                self._torch_pieces(inputs, pieces, states, slots, out, chunked=form != "recurrent")
        return out

    def _fla_step(
        self, inputs: KdaInputs, states: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        return kda_fla.step_in_place(
            inputs.q,
            inputs.k,
            inputs.v,
            inputs.decay,
            inputs.beta,
            a_log=self.a_log,
            dt_bias=self.dt_bias,
            lower_bound=self.lower_bound,
            states=states,
            slots=slots,
        )

    def _fla_chunk(
        self,
        inputs: KdaInputs,
        pieces: list[Piece],
        states: torch.Tensor,
        slots: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        lengths = torch.tensor([0, *(p.end - p.start for p in pieces)])
        cu_seqlens = lengths.cumsum(0)
        whole = int(cu_seqlens[-1]) == inputs.q.shape[0]
        rows = (
            slice(None)
            if whole
            else torch.cat([torch.arange(p.start, p.end) for p in pieces]).to(slots.device)
        )
        part = inputs if whole else inputs.rows(rows)
        where = slots[torch.tensor([p.seq for p in pieces], device=slots.device)]
        out[rows], final = kda_fla.chunk(
            part.q,
            part.k,
            part.v,
            part.decay,
            part.beta,
            a_log=self.a_log,
            dt_bias=self.dt_bias,
            lower_bound=self.lower_bound,
            initial_state=states[where],
            cu_seqlens=cu_seqlens.to(slots.device),
            cu_seqlens_cpu=cu_seqlens,
        )
        states[where] = final

    def _prepared(self, inputs: KdaInputs) -> tuple[torch.Tensor, ...]:
        """q (normalized, scaled), k (normalized), v, log-decay, beta, in Numerics.wide."""
        wide = self.numerics.wide
        return (
            l2_norm(inputs.q, wide=wide) * self.head_dim**-0.5,
            l2_norm(inputs.k, wide=wide),
            inputs.v.to(wide),
            kda_ops.log_decay(inputs.decay, self.a_log, self.dt_bias, self.lower_bound, wide),
            torch.sigmoid(inputs.beta.to(wide)),
        )

    def _torch_step(
        self, inputs: KdaInputs, states: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        q, k, v, g, beta = self._prepared(inputs)
        out, states[slots] = kda_ops.recurrent_step(q, k, v, g, beta, states[slots])
        return out.to(inputs.v.dtype)

    def _torch_pieces(
        self,
        inputs: KdaInputs,
        pieces: list[Piece],
        states: torch.Tensor,
        slots: torch.Tensor,
        out: torch.Tensor,
        *,
        chunked: bool,
    ) -> None:
        rule = kda_ops.chunked if chunked else kda_ops.recurrent
        for piece in pieces:
            rows = slice(piece.start, piece.end)
            q, k, v, g, beta = self._prepared(inputs.rows(rows))
            slot = slots[piece.seq]
            result, states[slot] = rule(q, k, v, g, beta, states[slot])
            out[rows] = result.to(out.dtype)
