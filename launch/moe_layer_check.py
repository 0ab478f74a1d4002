"""A layer against its oracle: the router's choice, and the rows that come back."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_comm.launch.expert_source import ExpertSource
from moe_comm.launch.moe_layer_case import LayerCase
from moe_comm.launch.moe_layer_oracle import expected_layer, expected_routing, wire_rows
from moe_comm.launch.moe_layer_subjects import Layer
from moe_comm.launch.options import BadInput
from moe_comm.launch.verify import Findings, flip_bit


def check_layer(
    layer: Layer,
    case: LayerCase,
    source: ExpertSource,
    expected: dict[str, tuple[Tensor, Tensor]],
    *,
    rank: int,
    flip: bool,
) -> Findings:
    """One layer, untimed, with everything that comes back compared. Collective.

    Args:
        expected: kept between layers of one case: what rows must come back, by dispatch wire.
        flip: damage one received row before the experts read it, for tests of this check.

    BadInput where the case's routing is none that a router can choose.
    """
    found = Findings(rank=rank, phase="moe_layer")
    ids, weights = expected_routing(case)
    if not torch.equal(ids, case.wanted_idx.sort(dim=1).values):
        raise BadInput(
            f"routing {case.routing}: a router cannot choose it; a token names an expert twice"
        )
    routed = layer.route()
    order = routed[0].argsort(dim=1)
    place = ("token", "place")
    found.compare("router ids", routed[0].gather(1, order), ids, axes=place)
    near = weights.abs().double() * 1e-3
    found.compare_close("router weights", routed[1].gather(1, order), weights, near, axes=place)
    wire = layer.wires[0]
    if wire not in expected:
        rows = wire_rows(case.z, case.config.replace(dispatch_wire=wire))
        choices = (ids, weights) if case.prepared is None else case.prepared
        expected[wire] = expected_layer(rows, *choices, source)
    arrived = layer.dispatch(routed)
    if flip:
        flip_bit(arrived)
    out = layer.combine(layer.experts(arrived), arrived, routed)
    want, allowed = expected[wire]
    found.compare_close("out", out, want, allowed.double(), axes=("token", "column"))
    return found
