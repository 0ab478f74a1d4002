"""A double of DeepEP V1's deep_ep.Buffer, 1.2.1: high throughput inside a node, and low latency."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepep_double import exchange, poisoned, require
from torch import Tensor

topk_idx_t = torch.int64
_HIDDEN = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)


class EventOverlap:
    """Nothing is asynchronous here."""


@dataclass(frozen=True)
class Config:
    """The tuning knobs in order, and the sizes that follow from them."""

    num_sms: int
    num_max_nvl_chunked_send_tokens: int
    num_max_nvl_chunked_recv_tokens: int
    num_max_rdma_chunked_send_tokens: int
    num_max_rdma_chunked_recv_tokens: int

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        blocks = self.num_sms // 2 * num_ranks
        slots = blocks * self.num_max_nvl_chunked_recv_tokens
        size = blocks * 5 * 4 + slots * (hidden_bytes + 8 + 128 * 8 + 128 * 4 + 128 * 4)
        return -(-size // 128) * 128


class Buffer:
    """See the module. Fails in construction where DEEPEP_DOUBLE_FAILS names the rank."""

    num_sms: int = 20

    def __init__(
        self, group: dist.ProcessGroup | None, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0,
        low_latency_mode: bool = False, num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True, allow_mnnvl: bool = False,
        use_fabric: bool = False, explicitly_destroy: bool = False, enable_shrink: bool = False,
        comm: Any = None,
    ) -> None:  # fmt: skip
        del allow_nvlink_for_low_latency_mode, allow_mnnvl, use_fabric, enable_shrink
        require(group is not None and comm is None, "group")
        self.group, self.rank, self.group_size = group, group.rank(), group.size()
        if os.environ.get("DEEPEP_DOUBLE_FAILS") == str(self.rank):
            raise RuntimeError("Failed: CUDA error csrc/deep_ep.cpp:164 'out of memory'")
        require(num_nvl_bytes % 128 == 0 and num_rdma_bytes % 128 == 0, "alignment")
        require(num_nvl_bytes > 0 or num_rdma_bytes > 0, "num_nvl_bytes > 0 or num_rdma_bytes > 0")
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.num_qps_per_rank = low_latency_mode, num_qps_per_rank
        self.explicitly_destroy = explicitly_destroy
        # As the library does: ids of devices, and settings for NVSHMEM.
        ids: list[Any] = [None] * self.group_size
        dist.all_gather_object(ids, self.rank, group)
        require(ids == list(range(self.group_size)), "device ids")
        if low_latency_mode:
            os.environ["NVSHMEM_IBGDA_NUM_RC_PER_PE"] = str(num_qps_per_rank)
        self.nvshmem_qp_depth = int(os.environ.get("NVSHMEM_QP_DEPTH", "1024"))
        self._layout: tuple[int, int, int] | None = None
        self._results: list[Tensor] = []
        self._calls = 0
        self._alive = True

    def destroy(self) -> None:
        assert self.explicitly_destroy, "`explicitly_destroy` flag must be set"
        require(self._alive, "not destroyed")
        self._alive = False
        dist.barrier(self.group)

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        assert num_ranks in (2, 4, 8, 16, 24, 32), f"Unsupported number of EP ranks: {num_ranks}"
        return Config(Buffer.num_sms, 24 if num_ranks == 2 else 6, 256, 6, 128)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        assert num_ranks in (2, 4, 8, 16, 24, 32), f"Unsupported number of EP ranks: {num_ranks}"
        return Config(Buffer.num_sms, {2: 10, 4: 9}.get(num_ranks, 4), 256, 6, 128)

    # High throughput.

    def dispatch(
        self, x: Any, handle: tuple[Any, ...] | None = None,
        num_tokens_per_rank: Tensor | None = None, num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None, num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None, topk_weights: Tensor | None = None,
        expert_alignment: int = 1, num_worst_tokens: int = 0, config: Config | None = None,
        previous_event: Any = None, async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:  # fmt: skip
        del num_tokens_per_rdma_rank, expert_alignment, previous_event, allocate_on_comm_stream
        require(self.group_size in (2, 4, 8), "SWITCH_RANKS")
        require(isinstance(x, Tensor) and not num_worst_tokens and not async_finish, "not doubled")
        require(topk_idx is None and topk_weights is None, "not doubled")
        require(x.dim() == 2 and x.is_contiguous() and x.dtype == torch.bfloat16, "x")
        row = x.size(1) * x.element_size()
        require(row % 32 == 0 and row // 2 + 8 <= 8192, "half_hidden_bytes")
        config = config or self.get_dispatch_config(self.group_size)
        self._fits(config, row)
        if handle is None:
            goes, per_rank, per_expert = (
                is_token_in_rank,
                num_tokens_per_rank,
                num_tokens_per_expert,
            )
            assert goes is not None
            assert per_rank is not None
            assert per_expert is not None
            require(goes.dtype == torch.bool and goes.is_contiguous(), "is_token_in_rank")
            require(tuple(goes.shape) == (x.size(0), self.group_size), "is_token_in_rank")
            require(per_rank.dtype == torch.int32 and per_rank.is_contiguous(), "kInt32")
            require(per_expert.dtype == torch.int32 and per_expert.dim() == 1, "kInt32")
            require(per_expert.size(0) % self.group_size == 0, "num_experts % num_ranks")
            require(per_expert.size(0) // self.group_size <= 128, "num_experts_per_rank <= 128")
            require(bool((goes.sum(0) == per_rank).all()), "num_tokens_per_rank")
        else:
            goes = handle[4]
            require(goes.size(0) == x.size(0), "is_token_in_rank.size(0) == x.size(0)")
        lists = [goes[:, rank].nonzero().flatten() for rank in range(self.group_size)]
        rows = exchange(self.group, [x[index] for index in lists])
        received = torch.cat(rows)
        if handle is not None:
            require(received.size(0) == handle[3].size(0), "cached_num_recv_tokens")
            return received, None, None, None, None, EventOverlap()
        source = exchange(self.group, [index.to(torch.int32) for index in lists])
        prefix = torch.zeros(self.group_size, self.group_size, dtype=torch.int32)
        prefix[:, self.rank] = torch.tensor([len(part) for part in rows]).cumsum(0)
        empty = torch.empty(0, dtype=torch.int32)
        made = (prefix, empty, empty, torch.cat(source), goes.clone(), empty)
        return received, None, None, [len(received)], made, EventOverlap()

    def combine(
        self, x: Tensor, handle: tuple[Any, ...], topk_weights: Tensor | None = None,
        bias: Any = None, config: Config | None = None, previous_event: Any = None,
        async_finish: bool = False, allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:  # fmt: skip
        del previous_event, allocate_on_comm_stream
        require(topk_weights is None and not async_finish, "not doubled")
        prefix, _, _, source, goes, _ = handle
        require(x.dim() == 2 and x.is_contiguous() and x.dtype == torch.bfloat16, "x")
        require(x.size(0) == source.size(0), "src_idx.size(0) == num_tokens")
        require(x.size(1) % 8 == 0, "hidden % (sizeof(int4) / sizeof(dtype_t)) == 0")
        self._fits(config or self.get_combine_config(self.group_size), 2 * x.size(1))
        ends = [0, *prefix[:, self.rank].tolist()]
        spans = [slice(a, b) for a, b in itertools.pairwise(ends)]
        rows = exchange(self.group, [x[span] for span in spans])
        where = exchange(self.group, [source[span] for span in spans])
        values = torch.zeros(goes.size(0), x.size(1))
        for part in [] if bias is None else [bias] if isinstance(bias, Tensor) else list(bias):
            require(part.dtype == torch.bfloat16 and part.is_contiguous(), "bias")
            require(tuple(part.shape) == tuple(values.shape), "bias.size(0) == num_recv_tokens")
            values += part
        for index, part in zip(where, rows, strict=True):
            values[index.long()] += part.float()
        return values.to(torch.bfloat16), None, EventOverlap()

    def _fits(self, config: Config, row: int) -> None:
        slots = config.num_sms // 2 * self.group_size * config.num_max_nvl_chunked_recv_tokens
        require(slots * (row + 4) <= self.num_nvl_bytes, "... <= num_nvl_bytes")

    # Low latency.

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        del num_ranks
        message = 16 + 2 * hidden
        size = 4 * num_experts * num_max_dispatch_tokens_per_rank * message + 8 * num_experts
        return -(-size // 128) * 128

    def low_latency_dispatch(
        self, x: Tensor, topk_idx: Tensor, num_max_dispatch_tokens_per_rank: int,
        num_experts: int, cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None, use_fp8: bool = True,
        round_scale: bool = False, use_ue8m0: bool = False, async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Any, ...]:  # fmt: skip
        del cumulative_local_expert_recv_stats, dispatch_wait_recv_cost_stats, round_scale
        require(not (use_fp8 or use_ue8m0 or async_finish or return_recv_hook), "not doubled")
        most, ranks = num_max_dispatch_tokens_per_rank, self.group_size
        assert self.nvshmem_qp_depth >= (most + 1) * 2
        require(self.low_latency_mode, "low_latency_mode")
        require(x.dim() == 2 and x.is_contiguous() and x.dtype == torch.bfloat16, "x")
        require(topk_idx.dim() == 2 and topk_idx.is_contiguous(), "topk_idx")
        require(topk_idx.dtype == topk_idx_t, "topk_idx.scalar_type()")
        require(x.size(0) == topk_idx.size(0) <= most, "x.size(0) == topk_idx.size(0)")
        require(num_experts % ranks == 0, "num_experts % num_ranks == 0")
        require(self.num_qps_per_rank >= num_experts // ranks, "num_rc_per_pe")
        require(ranks * most % 4 == 0, "TMA requires the number of tokens to be multiple of 4")
        require(x.size(1) in _HIDDEN, 'false and "Unsupported hidden"')
        require(topk_idx.size(1) <= 11, "num_topk <= kNumMaxTopK")
        self._use(most, x.size(1), num_experts)
        local = num_experts // ranks
        token, column = (topk_idx >= 0).nonzero(as_tuple=True)
        expert = topk_idx[token, column]
        to = [(expert // local == rank).nonzero().flatten() for rank in range(ranks)]
        rows = exchange(self.group, [x[token[pick]] for pick in to])
        facts = exchange(
            self.group, [torch.stack([token[pick], expert[pick] % local], 1) for pick in to]
        )
        received = poisoned(local, ranks * most, x.size(1), dtype=torch.bfloat16)
        info = poisoned(local, ranks * most, dtype=torch.int32)
        spans = torch.zeros(local, ranks, dtype=torch.int64)
        count = torch.zeros(local, dtype=torch.int32)
        # Ranks and tokens arrive in any order.
        generator = torch.Generator().manual_seed(self._calls * 31 + self.rank)
        for source in torch.randperm(ranks, generator=generator).tolist():
            for p in range(local):
                pick = (facts[source][:, 1] == p).nonzero().flatten()
                pick = pick[torch.randperm(len(pick), generator=generator)]
                begin = int(count[p])
                spans[p, source] = begin << 32 | len(pick)
                received[p, begin : begin + len(pick)] = rows[source][pick]
                info[p, begin : begin + len(pick)] = facts[source][pick, 0].to(torch.int32)
                count[p] += len(pick)
        self._keep(received)
        return received, count, (info, spans, most, x.size(1), num_experts), EventOverlap(), None

    def low_latency_combine(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, handle: tuple[Any, ...],
        use_logfmt: bool = False, zero_copy: bool = False, async_finish: bool = False,
        return_recv_hook: bool = False, out: Tensor | None = None,
        combine_wait_recv_cost_stats: Tensor | None = None,
    ) -> tuple[Any, ...]:  # fmt: skip
        del combine_wait_recv_cost_stats
        require(not (use_logfmt or zero_copy or async_finish or return_recv_hook), "not doubled")
        info, spans, most, hidden, num_experts = handle
        ranks, local = self.group_size, num_experts // self.group_size
        require(x.is_contiguous() and x.dtype == torch.bfloat16, "x")
        require(tuple(x.shape) == (local, ranks * most, hidden), "x.size(0) == num_experts / ranks")
        require(topk_idx.dtype == topk_idx_t and topk_idx.is_contiguous(), "topk_idx")
        require(topk_weights.dtype == torch.float32 and topk_weights.is_contiguous(), "weights")
        require(topk_idx.shape == topk_weights.shape and topk_idx.size(0) <= most, "topk_weights")
        require(out is None, "not doubled")
        self._use(most, hidden, num_experts)
        rows, facts = [], []
        for source in range(ranks):
            parts, notes = [], []
            for p in range(local):
                begin, length = int(spans[p, source]) >> 32, int(spans[p, source]) & 0xFFFFFFFF
                parts.append(x[p, begin : begin + length])
                tokens = info[p, begin : begin + length].long()
                notes.append(torch.stack([tokens, torch.full_like(tokens, p)], 1))
            rows.append(torch.cat(parts))
            facts.append(torch.cat(notes))
        rows, facts = exchange(self.group, rows), exchange(self.group, facts)
        came = {}
        for rank in range(ranks):
            for row, (token, p) in zip(rows[rank], facts[rank].tolist(), strict=True):
                came[rank * local + p, token] = row
        combined = torch.zeros(topk_idx.size(0), hidden)
        for token, experts in enumerate(topk_idx.tolist()):
            for column, expert in enumerate(experts):
                if expert >= 0:
                    # The library would wait for a row that was not dispatched.
                    require((expert, token) in came, "combine waits for ever")
                    combined[token] += came[expert, token].float() * topk_weights[token, column]
        result = combined.to(torch.bfloat16)
        self._keep(result)
        return result, EventOverlap(), None

    def _use(self, most: int, hidden: int, num_experts: int) -> None:
        hint = self.get_low_latency_rdma_size_hint(most, hidden, self.group_size, num_experts)
        require(hint <= self.num_rdma_bytes, "layout.total_bytes <= num_rdma_bytes")
        # The two buffers' places follow from these: a change would mix them up.
        self._layout = self._layout or (most, hidden, num_experts)
        require(self._layout == (most, hidden, num_experts), "one layout")

    def _keep(self, result: Tensor) -> None:
        """No more than two results may be held: the third takes the first's memory."""
        self._calls += 1
        self._results.append(result)
        if len(self._results) > 2:
            self._results.pop(0).fill_(torch.nan)
