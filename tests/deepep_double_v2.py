"""A double of DeepEP V2's deep_ep.ElasticBuffer, 2.1.0, as on a box without RDMA."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepep_double import exchange, poisoned, require
from deepep_double_v1 import EventOverlap, topk_idx_t
from torch import Tensor


@dataclass
class EPHandle:
    """What the adapters may know of a handle, and the order that this double received in."""

    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    topk_idx: Tensor
    psum_num_recv_tokens_per_scaleup_rank: Tensor
    recv_src_metadata: Tensor
    order: Tensor
    num_recv_rows: int


class ElasticBuffer:
    """See the module."""

    def __init__(
        self, group: dist.ProcessGroup, num_bytes: int | None = None, num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0, hidden: int = 0, num_topk: int = 0,
        use_fp8_dispatch: bool = False, deterministic: bool = False,
        allow_hybrid_mode: bool = True, allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True, sl_idx: int = 3, num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300, num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:  # fmt: skip
        del deterministic, prefer_overlap_with_compute, sl_idx, num_allocated_qps
        require(num_bytes is None and num_cpu_bytes == 0 and not use_fp8_dispatch, "not doubled")
        # Torch's communicator may be null; without RDMA the network part must be off.
        require(os.environ.get("EP_REUSE_NCCL_COMM") == "0", "segmentation fault: _comm_ptr() is 0")
        require(os.environ.get("EP_DISABLE_GIN") == "1", "NCCL GIN is unavailable")
        require(not allow_hybrid_mode and allow_multiple_reduction, "not doubled")
        require(num_max_tokens_per_rank > 0 and hidden > 0, "num_max_tokens_per_rank > 0")
        require(isinstance(num_cpu_timeout_secs, int) and num_cpu_timeout_secs > 0, "timeout")
        require(isinstance(num_gpu_timeout_secs, int) and num_gpu_timeout_secs > 0, "timeout")
        self.group, self.rank_idx, self.num_ranks = group, group.rank(), group.size()
        self.num_max_tokens_per_rank, self.explicitly_destroy = (
            num_max_tokens_per_rank,
            explicitly_destroy,
        )
        topk = min(self.num_ranks, num_topk or 32)
        self._num_bytes = num_max_tokens_per_rank * 2 * hidden * max(self.num_ranks, topk)
        self.shapes: set[tuple[int, ...]] = set()
        dist.barrier(group)

    def destroy(self) -> None:
        assert self.explicitly_destroy
        dist.barrier(self.group)

    def get_theoretical_num_sms(
        self, num_experts: int, num_topk: int, num_scaleout_topk: int = 0, rdma_gbs: float = 0,
        nvlink_gbs: float = 0, sm_read_gbs: float = 200, sm_write_gbs: float = 50,
    ) -> int:  # fmt: skip
        del num_scaleout_topk, rdma_gbs, nvlink_gbs, sm_read_gbs, sm_write_gbs
        assert num_experts % self.num_ranks == 0
        assert num_topk <= num_experts
        return 64

    def dispatch(
        self, x: Any, topk_idx: Tensor | None = None, topk_weights: Tensor | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None, num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None, expert_alignment: int | None = None,
        num_sms: int = 0, num_qps: int = 0, previous_event: Any = None,
        previous_event_before_epilogue: Any = None, async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False, handle: EPHandle | None = None,
        do_handle_copy: bool = True, do_cpu_sync: bool | None = None, do_expand: bool = False,
        do_zero_padding: bool = False, use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Any, ...]:  # fmt: skip
        del num_qps, previous_event, previous_event_before_epilogue, allocate_on_comm_stream
        del cumulative_local_expert_recv_stats, do_handle_copy, do_zero_padding
        require(isinstance(x, Tensor) and topk_weights is None and not do_expand, "not doubled")
        require(not async_with_compute_stream and not use_tma_aligned_col_major_sf, "not doubled")
        require(do_cpu_sync is False, "not doubled")
        require(x.dim() == 2 and x.is_contiguous(), "x")
        require(x.size(1) * x.element_size() % 16 == 0, "x.size(1) % sizeof(int4) == 0")
        require(num_sms > 0, "num_sms > 0")
        most = num_max_tokens_per_rank or self.num_max_tokens_per_rank
        if handle is not None:
            assert topk_idx is None
            alignment = expert_alignment or handle.expert_alignment
            assert (num_experts or handle.num_experts, alignment, most) == (
                handle.num_experts, handle.expert_alignment, handle.num_max_tokens_per_rank
            )  # fmt: skip
            chosen = handle.topk_idx
        else:
            assert topk_idx is not None
            assert num_experts is not None
            require(num_experts % self.num_ranks == 0, "num_experts % num_ranks == 0")
            require(num_experts // self.num_ranks <= 256, "kNumMaxExpertsPerRank")
            require(topk_idx.dtype == topk_idx_t and topk_idx.is_contiguous(), "topk_idx")
            require(topk_idx.size(1) <= 32, "Too many top-k selections")
            chosen = topk_idx.clone()
            named = chosen.sort(1).values
            twice = (named[:, 1:] == named[:, :-1]) & (named[:, 1:] >= 0)
            require(not bool(twice.any()), "device trap: ptx::deduplicate(dst_expert_idx)")
        require(x.size(0) == chosen.size(0) <= most, "num_tokens <= num_max_tokens_per_rank")
        need = most * x.size(1) * x.element_size() * self.num_ranks
        require(need <= self._num_bytes, "get_dispatch_buffer_size(...) <= num_buffer_bytes")
        self.shapes.add((most, x.size(1)))
        local = (num_experts or handle.num_experts) // self.num_ranks
        goes = [((chosen // local == r) & (chosen >= 0)).any(1).nonzero().flatten()
                for r in range(self.num_ranks)]  # fmt: skip
        rows = exchange(self.group, [x[index] for index in goes])
        tokens = exchange(self.group, [index.to(torch.int32) for index in goes])
        total = sum(len(part) for part in rows)
        received = poisoned(most * self.num_ranks, x.size(1), dtype=x.dtype)
        if handle is None:
            generator = torch.Generator().manual_seed(len(self.shapes) * 7 + self.rank_idx)
            order = torch.randperm(total, generator=generator)
            meta = poisoned(most * self.num_ranks, chosen.size(1) + 2, dtype=torch.int32)
            source = torch.cat([part + r * most for r, part in enumerate(tokens)])
            meta[:total, 0] = source.to(torch.int32)[order]
            counts = torch.tensor([len(part) for part in rows]).cumsum(0).to(torch.int32)
            handle = EPHandle(local * self.num_ranks, expert_alignment or 1, most, num_sms, chosen,
                              counts, meta, order, received.size(0))  # fmt: skip
        received[:total] = torch.cat(rows)[handle.order]
        return received, None, None, handle, EventOverlap()

    def combine(
        self, x: Tensor, handle: EPHandle, topk_weights: Tensor | None = None, bias: Any = None,
        num_sms: int = 0, num_qps: int = 0, previous_event: Any = None,
        previous_event_before_epilogue: Any = None, async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:  # fmt: skip
        del num_sms, num_qps, previous_event, previous_event_before_epilogue
        del allocate_on_comm_stream
        require(topk_weights is None and not async_with_compute_stream, "not doubled")
        require(x.dim() == 2 and x.is_contiguous() and x.dtype == torch.bfloat16, "x")
        require(x.size(0) == handle.num_recv_rows, "num_reduced_tokens == num_tokens")
        require(x.size(1) % 256 == 0, "Invalid length, cannot find unrolling factor")
        most, ranks = handle.num_max_tokens_per_rank, self.num_ranks
        columns = handle.topk_idx
        need = most * x.size(1) * 2 * min(ranks, columns.size(1))
        require(need <= self._num_bytes, "get_combine_buffer_size(...) <= num_buffer_bytes")
        biases = [] if bias is None else [bias] if isinstance(bias, Tensor) else list(bias)
        for part in biases:
            require(part.is_contiguous() and part.dtype == torch.bfloat16, "bias.scalar_type()")
            require(tuple(part.shape) == (columns.size(0), x.size(1)), "bias.size(0)")
        source = handle.recv_src_metadata[: len(handle.order), 0].long()
        picks = [(source // most == rank).nonzero().flatten() for rank in range(ranks)]
        rows = exchange(self.group, [x[pick] for pick in picks])
        tokens = exchange(self.group, [source[pick] % most for pick in picks])
        held = torch.zeros(ranks, columns.size(0), x.size(1), dtype=torch.bfloat16)
        for rank in range(ranks):
            held[rank, tokens[rank]] = rows[rank]
        local = handle.num_experts // ranks
        out = torch.empty(columns.size(0), x.size(1), dtype=torch.bfloat16)
        for token, chosen in enumerate(columns.tolist()):
            order = list(dict.fromkeys(expert // local for expert in chosen if expert >= 0))
            if not biases and len(order) <= 2:
                # Two bf16 are added as they are: -0 and -0 give -0.
                zero = torch.zeros(x.size(1), dtype=torch.bfloat16)
                first, second, *_ = *(held[rank, token] for rank in order), zero, zero
                out[token] = first + second
                continue
            total = torch.zeros(x.size(1))
            for part in biases:
                total += part[token]
            for rank in order:
                total += held[rank, token]
            out[token] = total.to(torch.bfloat16)
        return out, None, EventOverlap()
