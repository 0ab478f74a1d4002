"""Routings for benchmarks and tests: where tokens go, drawn again by any rank from a seed.

Shape legend: T tokens of a rank, K choices a token, E logical experts.

| text | meaning |
|---|---|
| auto | the shipped trace where E and K match it, else zipf:1 |
| trace[:FILE][:balanced or skewed][:LAYER] | recorded from real text; default balanced, layer 0 |
| uniform | K distinct experts, all alike |
| zipf:S | popularity 1 / position^S over a seeded shuffle of the experts, K distinct |
| hot:N | N >= K: all choices among the first N experts; N < K: those N and K - N others |
| ...+masked:P | on top of any: each choice is -1 with probability P ("masked:P" alone: auto) |
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

SHIPPED_TRACE = Path(__file__).parent / "data" / "routing_trace.npz"
KINDS = ("auto", "trace", "uniform", "zipf", "hot", "masked")
_SELECTIONS = ("balanced", "skewed")


class RoutingError(ValueError):
    """A routing that cannot be parsed, or a trace file that cannot be used."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One layer of a trace file: `topk_idx` [rows, K] int64 and `topk_weights` [rows, K] fp32."""

    topk_idx: Tensor
    topk_weights: Tensor

    @property
    def num_rows(self) -> int:
        """Tokens recorded."""
        return self.topk_idx.shape[0]


@dataclass(frozen=True, kw_only=True)
class Routing:
    """A parsed routing.

    Attributes:
        kind: "trace", "uniform", "zipf" or "hot".
        text: the canonical text, without the directory of a trace file.
        num_experts, num_topk: E and K.
        strength: S of zipf, N of hot.
        masked: P.
        trace: the rows of kind "trace", else None.
    """

    kind: str
    text: str
    num_experts: int
    num_topk: int
    strength: float = 0.0
    masked: float = 0.0
    trace: Trace | None = None

    def draw(
        self, *, rank: int, num_tokens: int, seed: int, first_token: int
    ) -> tuple[Tensor, Tensor]:
        """One rank's routing, the same wherever it is drawn.

        Args:
            rank: whose tokens.
            num_tokens: T.
            seed: of the run. A trace is read, not drawn: the seed only decides its masks.
            first_token: position of the rank's first token among all ranks' tokens. Token t of
                the rank reads trace row (first_token + t) mod rows.

        Returns:
            topk_idx [T, K] int64 and topk_weights [T, K] fp32, on the CPU.
        """
        generator = seeded(seed, rank, stream=1)
        if self.trace is not None:
            rows = (first_token + torch.arange(num_tokens)) % self.trace.num_rows
            idx, weights = self.trace.topk_idx[rows], self.trace.topk_weights[rows]
        else:
            idx = self._distinct(num_tokens, seed, generator)
            raw = torch.rand(num_tokens, self.num_topk, generator=generator) + 1e-3
            weights = raw / raw.sum(dim=1, keepdim=True)
        if self.masked > 0:
            gone = torch.rand(idx.shape, generator=generator) < self.masked
            idx = torch.where(gone, -1, idx)
        return idx, weights

    def wrap_note(self, *, num_ranks: int, num_tokens: int) -> str:
        """Says how a trace is read where it is too short for all ranks; else empty."""
        if self.trace is None or num_ranks * num_tokens <= self.trace.num_rows:
            return ""
        total, rows = num_ranks * num_tokens, self.trace.num_rows
        return (
            f"the trace has {rows} tokens and {num_ranks} ranks x {num_tokens} tokens want "
            f"{total}: token i of all reads row i mod {rows}, so rows repeat "
            f"{total / rows:.3g} times"
        )

    def _distinct(self, num_tokens: int, seed: int, generator: torch.Generator) -> Tensor:
        """[T, K] distinct experts: sampling without replacement by the Gumbel top-k trick."""
        logits = torch.zeros(self.num_experts, dtype=torch.float64)
        if self.kind == "zipf":
            # The shuffle is the run's, not the rank's: all ranks agree on who is popular.
            order = torch.randperm(self.num_experts, generator=seeded(seed, 0, stream=2))
            position = torch.arange(1, self.num_experts + 1, dtype=torch.float64)
            logits[order] = -self.strength * position.log()
        elif self.kind == "hot":
            logits[: int(self.strength)] = 1e6
        uniform = torch.rand(num_tokens, self.num_experts, generator=generator, dtype=torch.float64)
        noise = -(-uniform.clamp_min(1e-300).log()).log()
        return torch.topk(logits + noise, self.num_topk, dim=1).indices


def seeded(seed: int, rank: int, *, stream: int) -> torch.Generator:
    """A CPU generator of (seed, rank, stream): streams of one rank do not overlap by accident."""
    state = np.random.SeedSequence([seed, rank, stream]).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state) & (2**63 - 1))


def parse_routing(text: str, *, num_experts: int, num_topk: int) -> Routing:
    """Parse one routing for a shape.

    Raises RoutingError, naming what is known and the nearest, for text that cannot be parsed, and
    for a trace file that is missing, broken, or of another shape.
    """
    base, _, mask = text.strip().partition("+")
    if base.startswith("masked:") and not mask:
        base, mask = "auto", base
    masked = _masked_share(mask, text) if mask else 0.0
    kind, _, argument = base.partition(":")
    if kind not in KINDS or kind == "masked":
        near = difflib.get_close_matches(kind, KINDS, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise RoutingError(f"routing: expected one of {', '.join(KINDS)}, got {text!r}{hint}")
    if kind == "auto":
        kind, argument = ("trace", "") if _trace_fits(num_experts, num_topk) else ("zipf", "1")
    suffix = f"+masked:{masked:g}" if masked else ""
    plain = Routing(
        kind=kind,
        text=f"{kind}{suffix}",
        num_experts=num_experts,
        num_topk=num_topk,
        masked=masked,
    )
    if kind == "trace":
        trace, name = _open_trace(argument, num_experts=num_experts, num_topk=num_topk)
        return dataclasses.replace(plain, text=f"trace:{name}{suffix}", trace=trace)
    if kind == "uniform":
        if argument:
            raise RoutingError(f"routing: expected 'uniform' without an argument, got {text!r}")
        return plain
    least, most = (0.0, 16.0) if kind == "zipf" else (1.0, float(num_experts))
    strength = _number(argument, text, least=least, most=most)
    if kind == "hot" and strength != int(strength):
        raise RoutingError(f"routing: expected a whole number after 'hot:', got {text!r}")
    return dataclasses.replace(plain, text=f"{kind}:{strength:g}{suffix}", strength=strength)


def _number(argument: str, text: str, *, least: float, most: float) -> float:
    try:
        value = float(argument)
    except ValueError:
        value = float("nan")
    if not least <= value <= most:
        raise RoutingError(
            f"routing: expected a number from {least:g} to {most:g} after the colon, got {text!r}"
        )
    return value


def _masked_share(mask: str, text: str) -> float:
    kind, _, argument = mask.partition(":")
    if kind != "masked":
        raise RoutingError(f"routing: expected 'masked:P' after '+', got {text!r}")
    return _number(argument, text, least=0.0, most=1.0)


def _trace_fits(num_experts: int, num_topk: int) -> bool:
    # 896 experts and top-16 are the shipped file's (see its README); reading 1.8 MB to learn
    # that another preset does not match would cost every start.
    return (num_experts, num_topk) == (896, 16)


def _open_trace(argument: str, *, num_experts: int, num_topk: int) -> tuple[Trace, str]:
    selection, layer, parts = "balanced", 0, argument.split(":") if argument else []
    if parts and parts[-1].isdigit():
        layer = int(parts.pop())
    if parts and parts[-1] in _SELECTIONS:
        selection = parts.pop()
    path = Path(":".join(parts)) if parts else SHIPPED_TRACE
    idx, weights = _read_arrays(os.fspath(path), selection)
    want = f"[layers, tokens, {num_topk}]"
    if idx.ndim != 3 or idx.shape != weights.shape or idx.shape[2] != num_topk:
        raise RoutingError(
            f"trace {path}: expected {selection}_topk_idx and {selection}_topk_weights of shape "
            f"{want}, got {list(idx.shape)} and {list(weights.shape)}"
        )
    if not 0 <= layer < idx.shape[0] or idx.shape[1] == 0:
        raise RoutingError(
            f"trace {path}: expected a layer in 0..{idx.shape[0] - 1} with tokens in it, got "
            f"layer {layer} of {list(idx.shape)}"
        )
    if idx.dtype.kind not in "iu" or weights.dtype.kind != "f":
        raise RoutingError(
            f"trace {path}: expected integer ids and floating-point weights, got {idx.dtype} and "
            f"{weights.dtype}"
        )
    ids = torch.from_numpy(idx[layer].astype(np.int64))
    if int(ids.min()) < -1 or int(ids.max()) >= num_experts:
        raise RoutingError(
            f"trace {path}: expected ids in [-1, {num_experts}), got {int(ids.min())} to "
            f"{int(ids.max())}"
        )
    values = torch.from_numpy(weights[layer].astype(np.float32))
    return Trace(topk_idx=ids, topk_weights=values), f"{path.name}:{selection}:{layer}"


def _read_arrays(path: str, selection: str) -> tuple[np.ndarray, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise RoutingError(f"trace {path}: expected an .npz archive, got one array")
            idx, weights = (
                archive[f"{selection}_topk_idx"],
                archive[f"{selection}_topk_weights"],
            )
    except FileNotFoundError as error:
        raise RoutingError(f"trace {path}: there is no such file") from error
    except KeyError as error:
        raise RoutingError(f"trace {path}: expected an array named {error}") from error
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise RoutingError(f"trace {path}: cannot be read as .npz ({error})") from error
    return idx, weights
