"""Stable LatentMoE: routed experts in a latent, behind one dispatch and one combine a layer.

  idx, w = router(x)                     full width, fp32
  z      = down(x)                       once a token, before it is dispatched
  y      = experts(dispatch(z))          in the latent
  latent = combine(y, w)                 fully reduced rows
  out    = up(rmsnorm(latent)) + shared(x)

The norm is not linear: it runs once, on fully combined rows. The shared experts work on the full
width; their first product overlaps the dispatch, their second one the combine
(moe_comm.model.layers.overlap). A graph capture follows the streams that takes.

The tokens of a tensor-parallel group are cut into disjoint slices before routing, one a rank, and
everything above runs on the slice: every token is dispatched once over all ranks, and nothing is
summed twice. Finished rows are gathered inside the group. Gathering the latent instead would move
half the bytes, but then every rank would do the up-projection and the shared experts of all tokens.

Shapes: N tokens of the tensor-parallel group, T of this rank's slice, D hidden, L latent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from moe_comm.communicator import Communicator
from moe_comm.handle import Dispatched
from moe_comm.model.layers.linear import Numerics, linear
from moe_comm.model.layers.multiprocessors import leave_free
from moe_comm.model.layers.norm import Mlp, rms_norm
from moe_comm.model.layers.overlap import Overlap, Work
from moe_comm.model.layers.router import Router
from moe_comm.model.parallel import Parallel

Experts = Callable[[Dispatched], torch.Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentMoe:
    """Weights, whole on every rank except the experts: down [L, D], up [D, L], norm [L].

    `experts` maps Dispatched to rows [n, L] grouped by local expert. `overlap` says how the
    communicator's calls and the shared experts are launched; their order changes no bit.
    """

    router: Router
    down: torch.Tensor
    up: torch.Tensor
    norm_weight: torch.Tensor
    shared: Mlp
    experts: Experts
    eps: float
    numerics: Numerics
    overlap: Overlap = dataclasses.field(default_factory=Overlap)

    def forward(
        self,
        x: torch.Tensor,
        comm: Communicator,
        parallel: Parallel,
        *,
        bucket: int,
        on_routing: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
    ) -> torch.Tensor:
        """x [N, D], equal on all ranks of a tensor-parallel group, to [N, D]. Collective.

        `bucket` is the token bucket of the groups, equal on all ranks and at least N on every one.
        A slice larger than the communicator's capacity goes through it in several rounds; how many
        depends on `bucket` alone. `on_routing` is given this rank's (ids, weights), a round a call.
        """
        if x.shape[0] > bucket:
            raise ValueError(f"bucket: expected at least {x.shape[0]} tokens, got {bucket}")
        first, last = parallel.token_slice(x.shape[0])
        mine = x[first:last]
        slice_bucket = parallel.slice_size(bucket)
        capacity = comm.config.bucket
        parts = []
        for start in range(0, max(slice_bucket, 1), capacity):
            room = min(capacity, slice_bucket - start)
            part = mine[start : start + capacity]
            parts.append(self._round(part, comm, bucket=room, on_routing=on_routing))
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return parallel.gather_slices(out, x.shape[0])

    def _round(
        self,
        x: torch.Tensor,
        comm: Communicator,
        *,
        bucket: int,
        on_routing: Callable[[torch.Tensor, torch.Tensor], None] | None,
    ) -> torch.Tensor:
        """One dispatch and one combine: x [T, D] to [T, D]."""
        idx, weights = self.router.forward(x)
        if on_routing is not None:
            on_routing(idx, weights)
        z = linear(x, self.down, self.numerics)
        combined, shared = self.overlap.run(self.work(x, z, idx, weights, comm, bucket=bucket))
        latent = combined.to(x.dtype)
        normed = rms_norm(latent, self.norm_weight, self.eps, self.numerics.wide)
        return linear(normed, self.up, self.numerics) + shared

    def work(
        self,
        x: torch.Tensor,
        z: torch.Tensor,
        idx: torch.Tensor,
        weights: torch.Tensor,
        comm: Communicator,
        *,
        bucket: int,
    ) -> Work:
        """What is launched between the latent down-projection z [T, L] of x [T, D] and the norm."""

        def experts(arrived: Dispatched) -> torch.Tensor:
            rows = self.experts(arrived)
            # On the wire "none" the partial sums keep this precision, so the number of ranks that
            # share a token's experts does not show in the result.
            return rows.double() if self.numerics.batch_invariant else rows

        # A row's bits must not depend on how many there are.
        free = (0, 0) if self.numerics.batch_invariant else self.overlap.free_in(bucket)

        def first() -> torch.Tensor:
            with leave_free(free[0], x.device):
                return self.shared.hidden(x)

        def rest(part: torch.Tensor) -> torch.Tensor:
            with leave_free(free[1], x.device):
                return linear(part, self.shared.down, self.numerics)

        return Work(
            comm=comm,
            z=z,
            idx=idx,
            weights=weights,
            bucket=bucket,
            experts=experts,
            first=first,
            rest=rest,
        )
