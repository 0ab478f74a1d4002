"""EPConfig: the shape of one MoE layer's communication, its wires and its capacities."""

from __future__ import annotations

import dataclasses
import difflib
import math
from dataclasses import dataclass
from typing import Any, Literal

from moe_comm import env
from moe_comm.placement import ExpertPlacement
from moe_comm.wire import WIRES, Wire

Reduction = Literal["rank", "node"]

# (experts, top-k, hidden): published model configurations. kimi-k3's hidden is the latent its
# experts run at; kimi-k3-wide is its model dimension, a stress shape; k3-tiny is for tests.
PRESETS: dict[str, tuple[int, int, int]] = {
    "kimi-k3": (896, 16, 3584),
    "kimi-k3-wide": (896, 16, 7168),
    "deepseek-v3": (256, 8, 7168),
    "qwen3-235b": (128, 8, 4096),
    "gpt-oss-120b": (128, 4, 2880),
    "k3-tiny": (896, 16, 64),
}


@dataclass(frozen=True, kw_only=True)
class EPConfig:
    """What all ranks of a communicator agree on. Frozen; validates itself.

    Attributes:
        num_experts: E, logical experts (redundant physical copies are the placement's business).
        num_topk: K, choices a token.
        hidden: H, elements of a dispatched row.
        max_tokens_per_rank: the largest T of one dispatch on one rank; sizes the buffers.
        dispatch_wire, combine_wire: "bf16", "fp8", "mxfp8" or "none" (see moe_comm.wire).
            A low-precision combine quantizes every rank's partial sum, its own included.
        reduction: "rank": a token's partial sums are added rank by rank; "node": first inside
            each node (the hierarchical mode's order). See moe_comm.backends.reference.
        num_slots: receive slots, the number of dispatches that may be outstanding.
        chunk_tokens: tokens of one chunk of `Communicator.forward`; None: no chunks.
        max_expert_rows: bound on the expert rows of one rank and call; None: the worst case,
            R * bucket * K (a token may name one expert K times). Rows beyond it are dropped,
            the last in order, with an error bit.
        max_payload_bytes: bytes a token for the `payloads` of dispatch, on backends that
            reserve memory for them; 0: none.
        timeout_s: seconds after which a wait for a peer raises PeerTimeoutError.
        placement: which rank holds which expert; None: contiguous, uneven where E % R != 0.
    """

    num_experts: int
    num_topk: int
    hidden: int
    max_tokens_per_rank: int = 128
    dispatch_wire: str = "bf16"
    combine_wire: str = "bf16"
    reduction: Reduction = "rank"
    num_slots: int = 2
    chunk_tokens: int | None = None
    max_expert_rows: int | None = None
    max_payload_bytes: int = 0
    timeout_s: float = 30.0
    placement: ExpertPlacement | None = None

    def __post_init__(self) -> None:
        at_least = {
            "num_experts": 1,
            "num_topk": 1,
            "hidden": 1,
            "max_tokens_per_rank": 0,
            "num_slots": 1,
            "max_payload_bytes": 0,
        }
        for name, least in at_least.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}: expected a whole number >= {least}, got {value!r}")
        for name in ("chunk_tokens", "max_expert_rows"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name}: expected a whole number >= 1 or None, got {value!r}")
        if self.num_topk > self.num_experts:
            raise ValueError(
                f"num_topk: expected at most num_experts = {self.num_experts}, got {self.num_topk}"
            )
        for name in ("dispatch_wire", "combine_wire"):
            if getattr(self, name) not in WIRES:
                raise ValueError(
                    f"{name}: expected one of {', '.join(WIRES)}, got {getattr(self, name)!r}"
                )
        if self.reduction not in ("rank", "node"):
            raise ValueError(f"reduction: expected 'rank' or 'node', got {self.reduction!r}")
        if not 0 < self.timeout_s < math.inf:
            raise ValueError(
                f"timeout_s: expected seconds above 0 and finite, got {self.timeout_s!r}"
            )
        if self.placement is not None and self.placement.num_experts != self.num_experts:
            raise ValueError(
                f"placement: expected a table of num_experts = {self.num_experts} experts, "
                f"got {self.placement.num_experts}"
            )

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> EPConfig:
        """A published model's shape by name, with any field replaced.

        Raises ValueError for an unknown name, listing the known ones and the nearest.
        """
        if name not in PRESETS:
            near = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"preset: expected one of {', '.join(PRESETS)}, got {name!r}{hint}")
        num_experts, num_topk, hidden = PRESETS[name]
        shape = {"num_experts": num_experts, "num_topk": num_topk, "hidden": hidden}
        return cls(**{**shape, **overrides})

    @property
    def wire(self) -> Wire:
        """The dispatch wire's format."""
        return WIRES[self.dispatch_wire]

    @property
    def return_wire(self) -> Wire:
        """The combine wire's format."""
        return WIRES[self.combine_wire]

    @property
    def bucket(self) -> int:
        """The default token bucket: the capacity of one dispatch."""
        return min(self.max_tokens_per_rank, self.chunk_tokens or self.max_tokens_per_rank)

    @property
    def wait_s(self) -> float:
        """The bound of a wait: MOE_COMM_TIMEOUT_S where set, else timeout_s."""
        return env.TIMEOUT_S.get() or self.timeout_s

    def placement_for(self, num_ranks: int) -> ExpertPlacement:
        """The placement, or the contiguous one; ValueError where it is for other ranks."""
        if self.placement is None:
            return ExpertPlacement.contiguous(self.num_experts, num_ranks)
        if self.placement.num_ranks != num_ranks:
            raise ValueError(
                f"placement: expected a table for {num_ranks} ranks, got {self.placement.num_ranks}"
            )
        return self.placement

    def expert_row_capacity(self, num_ranks: int, num_local_experts: int, bucket: int) -> int:
        """Length of row_index: max_expert_rows, or the worst case of this bucket.

        A token may name one expert several times, so the worst case a token is K wherever the
        rank has an expert at all.
        """
        worst = num_ranks * bucket * (self.num_topk if num_local_experts else 0)
        return worst if self.max_expert_rows is None else min(worst, self.max_expert_rows)

    def buffer_bytes(self, num_ranks: int) -> dict[str, int]:
        """Bytes of receive memory one rank needs, by region, all slots together. Pure.

        Keys: dispatch_rows, dispatch_scales, topk_idx, topk_weights, payloads, combine_rows,
        combine_scales and total. The memory follows the chunk where chunk_tokens is set.
        """
        rows = self.num_slots * num_ranks * self.bucket
        scale = self.wire.scale_dtype.itemsize if self.wire.scale_dtype else 0
        back = self.return_wire.scale_dtype.itemsize if self.return_wire.scale_dtype else 0
        value = self.wire.value_dtype.itemsize if self.wire.value_dtype else 8
        returned = self.return_wire.value_dtype.itemsize if self.return_wire.value_dtype else 8
        regions = {
            "dispatch_rows": rows * self.hidden * value,
            "dispatch_scales": rows * self.wire.num_groups(self.hidden) * scale,
            "topk_idx": rows * self.num_topk * 4,
            "topk_weights": rows * self.num_topk * 4,
            "payloads": rows * self.max_payload_bytes,
            "combine_rows": rows * self.hidden * returned,
            "combine_scales": rows * self.return_wire.num_groups(self.hidden) * back,
        }
        regions["total"] = sum(regions.values())
        return regions

    def replace(self, **changes: Any) -> EPConfig:
        """A copy with fields replaced, validated again."""
        return dataclasses.replace(self, **changes)

    def describe(self) -> dict[str, Any]:
        """Plain values of every field, for result files and for comparing ranks."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        placement = self.placement
        values["placement"] = (
            None if placement is None else [list(slots) for slots in placement.slots]
        )
        return values
