"""Predictions of N ranks of one host from the pair's data and the link figures, before a run.

Times are of the slowest rank. R ranks, T tokens of a rank, K choices of E experts, H hidden.

    t(R, T) = tau(T') + max(0, V(R, T) - V(2, T')) / (r * F) + e(R, T)

tau       the pair's own time, piecewise linear in tokens (matrix_pair), of the same backend, phase,
          shape and routing; of the slab's dispatch in the mode that it takes among R. For a shape
          that the pair did not measure: tau of another shape, its part above the smallest T scaled
          by the bytes of a row (dispatch: wire included) or of a token's expert rows (combine and
          the per-expert baseline: K * H); latency stays.
T'        T; dispatch of others than the slab and per-expert: R * T / 2, since R * T received rows
          and R * T * K choices to index are then the pair's. The slab indexes while rows travel.
V         remote bytes of the busiest rank: rows that moe_comm.traffic says (uniform routing:
          expected_distinct(R) * (R - 1) / R a token), ids and weights with them in dispatch; whole
          blocks, (R - 1) * T rows, for c10d:dense and where the slab takes copies; T * K * (R-1)/R
          for per-expert.
e         of the slab: what slab_stand_in measured of one of R ranks less what it measured of one
          of two and less the link's time for the bytes beyond: below 0 where these travel while
          something else takes its time. At the same phase, mode and R, of the nearest shape, by the
          bytes of a row; linear in T, from 0 at T = 0. Where either was measured at fewer than two
          sizes, and of other backends, 0.
r         bytes a microsecond of the pair's peer copy at its largest size.
F         copies to all peers at once over copies to one, by rate, where section copies has measured
          them on this host; else 1: a GPU has the same links to a switch, whoever is behind it.

Releases and polls are one instruction for all peers, so no term counts ranks. round_trip is
dispatch + combine. copies: a + peers * bytes / r, through the pair's points. moe_layer: the pair's
layer less its round trip is the experts' part G; while an active expert has fewer than 64 rows the
product is bound by its weights: G(R) = G(2) * ((1 - s) * A(R) / A(2) + s) with A the experts a rank
has with rows, E / R * (1 - (1 - K / E)^(R T)), and s = min(1, T * K / A(2) / 64); the predicted
round trip is added.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from moe_comm.backends.slab_modes import SlabTuning
from moe_comm.config import EPConfig
from moe_comm.launch.matrix_pair import PairData, Shape, line_through, rate_of
from moe_comm.launch.routing import SHIPPED_TRACE, Routing, parse_routing
from moe_comm.traffic import RoutingTraffic, expected_distinct

_ROWS_FOR_COMPUTE = 64


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Microseconds, and remote bytes where rows travel; or `reason` why there is none. `note`: what
    to think of it."""

    us: float | None = None
    remote_bytes: int | None = None
    reason: str = ""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Predictor:
    """Predicts cells of a host with `num_ranks` ranks.

    Attributes:
        pair: the pair's data.
        num_ranks: R.
        fan_out: F.
        seed: of the routing.
    """

    pair: PairData
    num_ranks: int
    fan_out: float = 1.0
    seed: int = 0

    def cell(
        self, name: str, phase: str, config: EPConfig, tokens: int, routing: str
    ) -> Prediction:
        """One row of `moe-bench run` for backend `name`; `config` has shape and wires, `routing` is
        its text."""
        if phase == "round_trip":
            return self._sum([self.cell(name, p, config, tokens, routing)
                              for p in ("dispatch", "combine")])  # fmt: skip
        if phase == "moe_layer":
            return self._layer(name, config, tokens, routing)
        rate = rate_of(self.pair.copy_points())
        mode = self._mode(name, config, tokens) if name.startswith("slab") else ""
        if mode and phase == "dispatch" and mode != self._mode(name, config, tokens, 2):
            # The pair takes copies where this many ranks take stores.
            name = f"slab:{mode}"
        wanted = Shape(
            hidden=config.hidden, num_topk=config.num_topk, num_experts=config.num_experts,
            wire=config.dispatch_wire if phase == "dispatch" else config.combine_wire,
        )  # fmt: skip
        known = self.pair.shapes(name, phase)
        if not known or rate is None:
            what = "peer copies" if known else f"{name} {phase}"
            return Prediction(reason=f"no data of the pair for {what}")
        by_received = phase == "dispatch" and not name.startswith(("slab", "per-expert"))
        equal = tokens * self.num_ranks / 2 if by_received else float(tokens)
        here = self._bytes(self.num_ranks, name, phase, config, tokens, routing)
        there = self._bytes(2, name, phase, config, equal, "uniform")
        near = self._nearest(name, phase, wanted)
        points = self.pair.points(name, phase, near, routing)
        if len(points) < 2:
            return Prediction(reason=f"the pair measured {name} {phase} at one size alone")
        time = self._tau(name, phase, wanted, near, points, equal)
        beyond = max(0.0, here - there) if self.num_ranks > 2 else 0.0
        notes = [] if near == wanted else [f"from {near}"]
        if equal > points[-1][0]:
            notes.append(f"beyond the pair's {points[-1][0]} tokens")
        excess, told = 0.0, ""
        if name.startswith("slab") and beyond:
            excess, told = self._excess(phase, mode, wanted, tokens)
        notes += [told] if told else []
        return Prediction(
            us=max(0.0, time + beyond / (rate * self.fan_out) + excess),
            remote_bytes=round(here),
            note="; ".join(notes),
        )

    def _mode(self, name: str, config: EPConfig, tokens: int, ranks: int = 0) -> str:
        """The mode of a slab of this name, with or without its mode, among `ranks`; 0: R."""
        tuning = SlabTuning(mode=name.partition(":")[2] or "auto")
        return tuning.mode_of(config, tokens, ranks or self.num_ranks)

    def _excess(self, phase: str, mode: str, wanted: Shape, tokens: int) -> tuple[float, str]:
        """e, and where it is from."""
        ranks, rate = self.num_ranks, rate_of(self.pair.copy_points())
        found = self.pair.stand_ins.get((phase, mode if phase == "dispatch" else ""), {})
        shapes = [s for s in found if all(len(found[s].get(r, ())) > 1 for r in (2, ranks))]
        if not shapes or rate is None:
            return 0.0, ""
        shape = min(shapes, key=lambda s: _unlike(s, wanted))
        two = sorted(found[shape][2].items())
        points = [(0.0, 0.0)]
        for size, time in sorted(found[shape][ranks].items()):
            here, there = (
                self._bytes(r, f"slab:{mode}", phase, shape.config, size, "uniform")
                for r in (ranks, 2)
            )
            over = time - line_through(two, size) - max(0.0, here - there) / rate
            points.append((size, over))
        scale = wanted.row_bytes / shape.row_bytes
        excess = line_through(points, tokens, least=-math.inf)
        return scale * excess, f"stand-ins of {ranks} ranks at {shape}"

    def copy(self, size: int, peers: int) -> Prediction:
        """`size` bytes to each of `peers` at once."""
        points = self.pair.copy_points()
        rate = rate_of(points)
        if rate is None:
            return Prediction(reason="no data of the pair for peer copies")
        alone = line_through(points, size)
        return Prediction(us=alone + (peers - 1) * size / rate, remote_bytes=size * peers)

    def _nearest(self, name: str, phase: str, wanted: Shape) -> Shape:
        """The shape that the pair measured, or the one most like it."""
        return min(
            self.pair.shapes(name, phase),
            key=lambda shape: _unlike(shape, wanted),
        )

    @staticmethod
    def _tau(
        name: str, phase: str, wanted: Shape, near: Shape, points: Sequence[tuple[int, float]],
        tokens: float,
    ) -> float:  # fmt: skip
        least, first = points[0]
        if near == wanted or tokens <= least:
            return line_through(points, tokens)
        if phase == "dispatch" and name != "per-expert":
            scale = wanted.row_bytes / near.row_bytes
        else:
            scale = wanted.hidden * wanted.num_topk / (near.hidden * near.num_topk)
        return first + (line_through(points, tokens) - first) * scale

    def _bytes(
        self, ranks: int, name: str, phase: str, config: EPConfig, tokens: float, routing: str
    ) -> float:
        """Remote bytes of the busiest rank."""
        back = phase == "combine"
        row = (config.return_wire if back else config.wire).row_bytes(config.hidden)
        if name == "per-expert":
            return tokens * config.num_topk * (ranks - 1) / ranks * 2 * config.hidden
        if not back:
            row += 8 * config.num_topk
        whole = name == "c10d:dense"
        if name.startswith("slab") and not back:
            # Of the slab, only a dispatch by copies sends rows that nobody asked for; what is
            # quantized on the way is not copied.
            mode = self._mode(name, config, max(1, round(tokens)), ranks)
            whole = mode == "high-throughput" and config.wire.scale_dtype is None
        if whole:
            return (ranks - 1) * tokens * row
        if routing == "uniform":
            distinct = expected_distinct(ranks, config.num_experts, config.num_topk)
            return distinct * (ranks - 1) / ranks * tokens * row
        traffic = traffic_of(config, ranks, int(tokens), routing, self.seed)
        rows = traffic.returned_rows if back else traffic.remote_rows
        return float(rows.max()) * row

    def _layer(self, name: str, config: EPConfig, tokens: int, routing: str) -> Prediction:
        pair = Predictor(pair=self.pair, num_ranks=2, seed=self.seed)
        ways = [p.cell(name, "round_trip", config, tokens, routing) for p in (self, pair)]
        shapes = self.pair.shapes(name, "moe_layer")
        known = [s for s in shapes if (s.hidden, s.wire) == (config.hidden, config.dispatch_wire)]
        if not known or ways[0].us is None or ways[1].us is None:
            return Prediction(reason=f"no data of the pair for {name} moe_layer at this wire")
        whole = line_through(self.pair.points(name, "moe_layer", known[0], routing), tokens)
        few, many = (self._active(r, config, tokens) for r in (self.num_ranks, 2))
        share = min(1.0, tokens * config.num_topk / many / _ROWS_FOR_COMPUTE)
        experts = max(0.0, whole - ways[1].us) * ((1 - share) * few / many + share)
        return Prediction(
            us=experts + ways[0].us, remote_bytes=ways[0].remote_bytes, note=ways[0].note
        )

    @staticmethod
    def _active(ranks: int, config: EPConfig, tokens: int) -> float:
        """Experts of one rank that have rows."""
        chosen = 1 - (1 - config.num_topk / config.num_experts) ** (ranks * tokens)
        return config.num_experts / ranks * chosen

    @staticmethod
    def _sum(parts: Sequence[Prediction]) -> Prediction:
        reason = "; ".join(dict.fromkeys(part.reason for part in parts if part.reason))
        if reason:
            return Prediction(reason=reason)
        return Prediction(
            us=sum(part.us or 0.0 for part in parts),
            remote_bytes=sum(part.remote_bytes or 0 for part in parts),
            note="; ".join(dict.fromkeys(part.note for part in parts if part.note)),
        )


def _unlike(shape: Shape, wanted: Shape) -> tuple[object, ...]:
    """How far a shape is from the one wanted, in order of what matters."""
    return (
        shape != wanted,
        shape.wire != wanted.wire,
        shape.num_topk != wanted.num_topk,
        abs(shape.hidden - wanted.hidden),
    )


@functools.lru_cache(maxsize=64)
def _parsed(routing: str, num_experts: int, num_topk: int) -> Routing:
    # Rows name the shipped trace by its file, which is not where a reader is.
    routing = routing.replace(f"trace:{SHIPPED_TRACE.name}:", "trace:")
    return parse_routing(routing, num_experts=num_experts, num_topk=num_topk)


@functools.lru_cache(maxsize=256)
def _traffic(
    num_experts: int, num_topk: int, ranks: int, tokens: int, routing: str, seed: int
) -> RoutingTraffic:
    parsed = _parsed(routing, num_experts, num_topk)
    ids = [
        parsed.draw(rank=rank, num_tokens=tokens, seed=seed, first_token=rank * tokens)[0]
        for rank in range(ranks)
    ]
    shape = EPConfig(num_experts=num_experts, num_topk=num_topk, hidden=1)
    return RoutingTraffic.of(ids, shape.placement_for(ranks))


def traffic_of(
    config: EPConfig, ranks: int, tokens: int, routing: str, seed: int
) -> RoutingTraffic:
    """Rows that the run will move: its routing, drawn beforehand."""
    return _traffic(config.num_experts, config.num_topk, ranks, tokens, routing, seed)
