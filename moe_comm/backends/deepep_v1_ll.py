"""DeepEP V1, low latency: `deep_ep.Buffer` in its bf16 mode, whose rows are opaque bytes.

Its grid has one program for each pseudo-expert, so a rank has several, and token t takes the one of
number t mod P. Supported row sizes are few: the smallest that holds a message serves both ways,
since the places of its buffers depend on it. A call takes ceil(min(R, K) / 11) passes over the
columns and as many over the tokens as its queues ask for; how many depends on the bucket alone.

Its combine adds terms in fp32 in order of columns, which is the contract's in a single pass;
further passes are added in fp32 after a rounding to bf16, as are biases.

Shape legend: P pseudo-experts a rank, and as in deepep_base.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_comm.backends import deepep_facts as facts
from moe_comm.backends.deepep_transport import Part, Transport, Way, columns_of
from moe_comm.config import EPConfig


@dataclass(frozen=True, kw_only=True, eq=False)
class _Pass:
    """For the way back: `experts` [n, columns] of the messages sent, and DeepEP's handle."""

    experts: Tensor
    handle: Any


class LowLatency(Transport):
    """See the module."""

    mode = "v1-ll"
    own_bytes = 16
    adds_biases = False
    capabilities = ("payloads", "capture")

    def __init__(self, config: EPConfig, num_ranks: int, pg: Any, library: Any) -> None:
        hidden = facts.ll_hidden(config)
        assert hidden is not None, "supports() refuses what fits no row"
        self.hidden, self.row_bytes = hidden, 2 * hidden
        self._num_ranks = num_ranks
        self._most = facts.ll_tokens(config)
        self._per_rank = facts.ll_experts_per_rank(config, num_ranks)
        columns = min(num_ranks, config.num_topk)
        self.num_headers = -(-num_ranks // columns)
        self.num_passes = -(-columns // facts.LL_MAX_TOPK)
        # Passes of even width: none is left with a column or two.
        self._width = -(-columns // self.num_passes)
        self._index_dtype = library.topk_idx_t
        buffer = library.Buffer
        num_bytes = buffer.get_low_latency_rdma_size_hint(
            self._most, hidden, num_ranks, self._num_experts
        )
        self._buffer = buffer(
            pg,
            num_rdma_bytes=num_bytes,
            low_latency_mode=True,
            # At least one a pseudo-expert; NVSHMEM keeps the number that a process first asks for,
            # so every communicator asks for the most that any can need.
            num_qps_per_rank=facts.ll_queues(num_ranks),
            explicitly_destroy=True,
        )

    @property
    def _num_experts(self) -> int:
        return self._num_ranks * self._per_rank

    def route(self, rank: Tensor) -> Tensor:
        columns = columns_of(rank, self._num_ranks, num_headers=self.num_headers)
        turn = torch.arange(columns.shape[0], device=rank.device) % self._per_rank
        experts = torch.where(columns >= 0, columns * self._per_rank + turn[:, None], -1)
        return experts.to(self._index_dtype)

    def dispatch(self, messages: Tensor, route: Any, bucket: int) -> Iterator[Part]:
        experts: Tensor = route
        rows = messages.view(torch.bfloat16)
        room = torch.arange(self._num_ranks * self._most, device=rows.device)
        for start in range(0, bucket + self.num_headers, self._most):
            here = slice(min(start, rows.shape[0]), min(start + self._most, rows.shape[0]))
            for column in range(0, experts.shape[1], self._width):
                sent = rows[here]
                to = experts[here, column : column + self._width].contiguous()
                if not sent.shape[0]:
                    # Another rank has more tokens: take part with a message to nobody.
                    sent, to = rows[:1], torch.full_like(experts[:1, : to.shape[1]], -1)
                received, count, handle, _, _ = self._buffer.low_latency_dispatch(
                    sent, to, self._most, self._num_experts, use_fp8=False
                )
                yield Part(
                    rows=received.view(-1, self.hidden).view(torch.uint8),
                    valid=(room < count[:, None]).view(-1),
                    tokens=here,
                    state=_Pass(experts=to, handle=handle),
                )

    def combine(self, way: Way, terms: Tensor, biases: tuple[Tensor, ...]) -> Tensor:
        state: _Pass = way.state
        weights = torch.ones(state.experts.shape, dtype=torch.float32, device=terms.device)
        combined: Tensor = self._buffer.low_latency_combine(
            terms.view(self._per_rank, -1, self.hidden), state.experts, weights, state.handle
        )[0]
        return combined

    def close(self) -> None:
        self._buffer.destroy()
