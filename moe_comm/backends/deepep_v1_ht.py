"""DeepEP V1, high throughput: `deep_ep.Buffer` inside a node of 2, 4 or 8 ranks.

One pseudo-expert a rank. DeepEP exchanges counts and waits for them on the host, so no CUDA graph
can hold this mode. Its combine adds terms in fp32 in order of ranks, biases first: the contract's
bits at two ranks without biases, within DeepEPCommunicator.sum_tolerance otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_comm.backends import deepep_facts as facts
from moe_comm.backends.deepep_transport import Part, Transport, Way
from moe_comm.config import EPConfig


@dataclass(kw_only=True, eq=False)
class _Route:
    """`goes` bool [T + h, R], which rank gets which message; `counts` int32 [R]; `handle`: of the
    first dispatch along it, else None."""

    goes: Tensor
    counts: Tensor
    handle: Any = None


class HighThroughput(Transport):
    """See the module."""

    mode = "v1-ht"
    own_bytes = 4
    adds_in_order = False

    def __init__(self, config: EPConfig, num_ranks: int, pg: Any, library: Any) -> None:
        self.row_bytes = facts.ht_row_bytes(config)
        self.hidden = facts.round_up(config.hidden, 16)
        self._num_ranks = num_ranks
        buffer = library.Buffer
        self._there = buffer.get_dispatch_config(num_ranks)
        self._back = buffer.get_combine_config(num_ranks)
        num_bytes = max(
            self._there.get_nvl_buffer_size_hint(self.row_bytes, num_ranks),
            self._back.get_nvl_buffer_size_hint(2 * self.hidden, num_ranks),
        )
        self._buffer = buffer(pg, num_nvl_bytes=num_bytes, explicitly_destroy=True)

    def route(self, rank: Tensor) -> _Route:
        if rank.is_cuda:
            from moe_comm.kernels.deepep_messages import destinations

            goes, counts = destinations(
                rank.contiguous(), num_ranks=self._num_ranks, num_headers=self.num_headers
            )
            return _Route(goes=goes, counts=counts)
        num_rows = rank.shape[0]
        goes = torch.zeros(
            num_rows + self.num_headers, self._num_ranks + 1, dtype=torch.bool, device=rank.device
        )
        # Masked choices go to a column of their own, which is cut off.
        column = torch.where(rank >= 0, rank, self._num_ranks).to(torch.int64)
        goes[:num_rows].scatter_(1, column, True)
        goes[num_rows:] = True
        goes = goes[:, : self._num_ranks].contiguous()
        return _Route(goes=goes, counts=goes.sum(dim=0, dtype=torch.int32))

    def dispatch(self, messages: Tensor, route: Any, bucket: int) -> Iterator[Part]:
        way: _Route = route
        rows = messages.view(torch.bfloat16)
        if way.handle is not None:
            got = self._buffer.dispatch(rows, handle=way.handle, config=self._there)
        else:
            got = self._buffer.dispatch(
                rows,
                num_tokens_per_rank=way.counts,
                is_token_in_rank=way.goes,
                num_tokens_per_expert=way.counts,
                config=self._there,
            )
            way.handle = got[4]
        yield Part(
            rows=got[0].view(torch.uint8),
            valid=None,
            tokens=slice(0, rows.shape[0]),
            state=way.handle,
        )

    def combine(self, way: Way, terms: Tensor, biases: tuple[Tensor, ...]) -> Tensor:
        bias: Any = None
        if biases:
            bias = biases[0] if len(biases) == 1 else biases
        combined: Tensor = self._buffer.combine(
            terms, handle=way.state, bias=bias, config=self._back
        )[0]
        return combined

    def close(self) -> None:
        self._buffer.destroy()
