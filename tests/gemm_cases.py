"""Inputs, a float64 oracle and the tolerance for the grouped expert MLP tests."""

from __future__ import annotations

import torch

from moe_comm.kernels import mxfp4_format
from moe_comm.kernels.expert_gemm_weights import ExpertWeights
from moe_comm.kernels.situ import SITU

# Half a unit in the last place of a bfloat16, relative to the value.
U = 2.0**-8


class Case:
    """Everything grouped_mlp takes, in checkpoint form and on the CPU."""

    def __init__(self, rows, scales, row_index, expert_offsets, experts, biases, hidden, inter):
        self.rows, self.scales = rows, scales
        self.row_index, self.expert_offsets = row_index, expert_offsets
        self.experts, self.biases = experts, biases
        self.hidden, self.inter = hidden, inter

    def weights(self, layout, device="cpu"):
        weights = ExpertWeights.empty(
            len(self.experts),
            self.hidden,
            self.inter,
            layout=layout,
            device=device,
            bias=self.biases is not None,
        )
        for slot, parts in enumerate(self.experts):
            gate, up, down = (tuple(t.to(device) for t in pair) for pair in parts)
            more = {}
            if self.biases is not None:
                names = ("gate_bias", "up_bias", "down_bias")
                more = dict(zip(names, (b.to(device) for b in self.biases[slot]), strict=True))
            weights.put(slot, gate=gate, up=up, down=down, **more)
        return weights

    def to(self, device):
        moved = (self.rows, self.row_index, self.expert_offsets)
        return tuple(t.to(device) for t in moved)


def make_case(
    counts,
    hidden,
    inter,
    *,
    seed=0,
    wire="bf16",
    bias=False,
    spare=3,
    exponents=(118, 124),
):
    """`counts[e]` rows for expert e, gathered from a slab with holes; capacity has `spare` rows
    past the end, whose index is -1. Undefined slab rows hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    used = sum(counts)
    slab = 2 * used + 5
    rows = torch.full((slab, hidden), torch.nan)
    # Several expert rows may come from one slab row, as tokens with many experts here do.
    index = torch.randint(0, slab, (used,), generator=generator)
    rows[index] = torch.randn(used, hidden, generator=generator)
    rows = rows.to(torch.bfloat16)
    scales = None
    if wire != "bf16":
        group = 128 if wire == "fp8" else 32
        groups = -(-hidden // group)
        if wire == "fp8":
            scales = torch.rand(slab, groups, generator=generator) * 0.02 + 0.001
        else:
            scales = torch.randint(117, 121, (slab, groups), generator=generator)
            scales = scales.to(torch.uint8)
        rows = (rows.float() * 100).to(torch.float8_e4m3fn)
    offsets = torch.zeros(len(counts) + 1, dtype=torch.int32)
    offsets[1:] = torch.tensor(counts).cumsum(0)
    row_index = torch.full((used + spare,), -1, dtype=torch.int32)
    row_index[:used] = index.to(torch.int32)

    def matrix(n, k):
        packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=generator)
        low, high = exponents
        scale = torch.randint(low, high, (n, k // 32), generator=generator).to(torch.uint8)
        return packed, scale

    experts = [
        (matrix(inter, hidden), matrix(inter, hidden), matrix(hidden, inter)) for _ in counts
    ]
    biases = None
    if bias:
        biases = [
            tuple(torch.randn(n, generator=generator).bfloat16() for n in (inter, inter, hidden))
            for _ in counts
        ]
    return Case(rows, scales, row_index, offsets, experts, biases, hidden, inter)


def oracle(case, activation=SITU):
    """y and its tolerance, float64 [used, H], one row at a time.

    Rounding model: gate and up may be rounded to bfloat16 (relative U each) before the activation,
    its result is, and y is. A row's errors are independent, so they add in the root of squares over
    the intermediate width; six of those, and two roundings of y itself. Sums in float32 are below
    that: their error is taken as 2^-18 of the sum of magnitudes.
    """
    used = int(case.expert_offsets[-1])
    y = torch.empty(used, case.hidden, dtype=torch.float64)
    tolerance = torch.empty_like(y)
    for expert, parts in enumerate(case.experts):
        start, end = int(case.expert_offsets[expert]), int(case.expert_offsets[expert + 1])
        w1, w3, w2 = (dequantize(pair) for pair in parts)
        b1 = b3 = b2 = 0.0
        if case.biases is not None:
            b1, b3, b2 = (b.double() for b in case.biases[expert])
        for n in range(start, end):
            x = read_row(case, int(case.row_index[n]))
            gate, up = w1 @ x + b1, w3 @ x + b3
            spread = (w1.abs() @ x.abs(), w3.abs() @ x.abs())
            g, u = gate.clone().requires_grad_(), up.clone().requires_grad_()
            hidden = act64(g, u, activation)
            slope_g, slope_u = torch.autograd.grad(hidden.sum(), (g, u))
            error = U * hidden.abs() + slope_g.abs() * (U * gate.abs() + 2.0**-18 * spread[0])
            error += slope_u.abs() * (U * up.abs() + 2.0**-18 * spread[1])
            y[n] = w2 @ hidden.detach() + b2
            error = error.detach()
            tolerance[n] = 6 * (w2.square() @ error.square()).sqrt() + 2 * U * y[n].abs()
            tolerance[n] += 2.0**-18 * (w2.abs() @ hidden.detach().abs()) + 1e-30
    return y, tolerance


def dequantize(pair):
    """float64, by the table and the exponent."""
    packed, scales = pair
    values = torch.tensor(mxfp4_format.E2M1_VALUES, dtype=torch.float64)
    codes = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2).long()
    factor = torch.exp2(scales.double() - 127).repeat_interleave(32, dim=-1)
    return values[codes] * factor


def read_row(case, row):
    """One slab row in float64: what a wire's row is in bfloat16."""
    x = case.rows[row].float()
    if case.scales is not None:
        if case.scales.dtype == torch.uint8:
            factor, group = torch.exp2(case.scales[row].float() - 127), 32
        else:
            factor, group = case.scales[row], 128
        x = x * factor.repeat_interleave(group)[: case.hidden]
    return x.to(torch.bfloat16).double()


def act64(g, u, activation):
    if activation.kind == "situ":
        b, lb = activation.beta, activation.linear_beta
        return b * torch.tanh(g / b) / (1 + torch.exp(-g)) * lb * torch.tanh(u / lb)
    if activation.kind == "swiglu":
        return g / (1 + torch.exp(-g)) * u
    g = torch.minimum(g, torch.tensor(activation.limit, dtype=g.dtype))
    u = u.clamp(-activation.limit, activation.limit)
    return g / (1 + torch.exp(-activation.alpha * g)) * (u + 1)


def check(case, y, *, activation=SITU, factor=1.0):
    """Every used row of y within the tolerance, none NaN; rows past the end are not looked at."""
    wanted, tolerance = oracle(case, activation)
    got = y[: wanted.shape[0]].double().cpu()
    assert torch.isfinite(got).all()
    over = (got - wanted).abs() > factor * tolerance
    if over.any():
        n, column = (int(i) for i in over.nonzero()[0])
        raise AssertionError(
            f"{int(over.sum())} of {over.numel()} elements out of tolerance; first at row {n}, "
            f"column {column}: got {got[n, column]}, expected {wanted[n, column]}, "
            f"tolerance {tolerance[n, column]}"
        )
