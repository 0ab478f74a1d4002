"""DeepEP V2: `deep_ep.ElasticBuffer`, by destination rank, without a wait on the host.

One pseudo-expert a rank, each named at most once by a message, so its limit of experts a rank and
its trap on duplicate ids do not apply. It compiles a kernel for each number of tokens it may
receive: buckets go up to the next power of two. Inside one node it runs without its network part
and in direct mode; over nodes with both, reducing once at the source.

Its combine adds up to two biases and then terms in fp32 in order of columns: the contract's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_comm.backends import deepep_facts as facts
from moe_comm.backends.deepep_transport import Part, Transport, Way, columns_of
from moe_comm.config import EPConfig


@dataclass(kw_only=True, eq=False)
class _Route:
    """`columns` [T + h, C]; `handle`: of the first dispatch along it, else None."""

    columns: Tensor
    handle: Any = None


def construction_environment(num_nodes: int) -> dict[str, str]:
    """Variables while the buffer is built. A communicator of its own: torch's may not exist yet,
    and a null one ends the process."""
    values = {"EP_REUSE_NCCL_COMM": "0"}
    if num_nodes == 1:
        values["EP_DISABLE_GIN"] = "1"
    return values


def token_bucket(bucket: int, num_headers: int) -> int:
    """Messages that V2 is told to expect of a rank, for a bucket of ours."""
    return (1 << max(bucket - 1, 0).bit_length()) + num_headers


class Elastic(Transport):
    """See the module."""

    mode = "v2"
    capabilities = ("payloads", "capture")

    def __init__(
        self, config: EPConfig, num_ranks: int, num_nodes: int, pg: Any, library: Any
    ) -> None:
        self.row_bytes = facts.v2_row_bytes(config)
        self.hidden = facts.round_up(config.hidden, facts.V2_ROW_MULTIPLE // 2)
        self._num_ranks = num_ranks
        columns = min(num_ranks, config.num_topk)
        self.num_headers = -(-num_ranks // columns)
        self._index_dtype = library.topk_idx_t
        timeout_s = math.ceil(config.wait_s)
        self._buffer = library.ElasticBuffer(
            pg,
            num_max_tokens_per_rank=token_bucket(config.bucket, self.num_headers),
            hidden=max(self.row_bytes // 2, self.hidden),
            num_topk=columns,
            allow_hybrid_mode=num_nodes > 1,
            # In hybrid mode nodes would add their terms first.
            allow_multiple_reduction=num_nodes == 1,
            prefer_overlap_with_compute=False,
            num_cpu_timeout_secs=timeout_s,
            num_gpu_timeout_secs=timeout_s,
            explicitly_destroy=True,
        )
        self._num_sms = self._buffer.get_theoretical_num_sms(num_ranks, columns)

    def route(self, rank: Tensor) -> _Route:
        columns = columns_of(rank, self._num_ranks, num_headers=self.num_headers)
        return _Route(columns=columns.to(self._index_dtype))

    def dispatch(self, messages: Tensor, route: Any, bucket: int) -> Iterator[Part]:
        way: _Route = route
        rows = messages.view(torch.bfloat16)
        received, _, _, handle, _ = self._buffer.dispatch(
            rows,
            topk_idx=way.columns if way.handle is None else None,
            num_experts=self._num_ranks,
            num_max_tokens_per_rank=token_bucket(bucket, self.num_headers),
            num_sms=self._num_sms,
            handle=way.handle,
            do_cpu_sync=False,
        )
        way.handle = handle
        slots = torch.arange(received.shape[0], device=rows.device)
        yield Part(
            rows=received.view(torch.uint8),
            valid=slots < handle.psum_num_recv_tokens_per_scaleup_rank[-1],
            tokens=slice(0, rows.shape[0]),
            state=handle,
        )

    def combine(self, way: Way, terms: Tensor, biases: tuple[Tensor, ...]) -> Tensor:
        bias: Any = None
        if biases:
            bias = biases[0] if len(biases) == 1 else biases
        combined: Tensor = self._buffer.combine(
            terms, handle=way.state, bias=bias, num_sms=self._num_sms
        )[0]
        return combined

    def close(self) -> None:
        self._buffer.destroy()
