"""What the machine needs for the same bytes, measured in the same run.

Two means: a plain all_to_all_single of uint8 with the same bytes for every destination, and, on
CUDA with peer access, copies straight into the other GPUs' memory. On CUDA a phase also reads and
writes device memory, and the longer of the two is its limit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from moe_comm.launch.timing import Statistics, percentile, time_calls
from moe_comm.launch.worker import Ranks


@dataclass(kw_only=True)
class Limits:
    """Measures once per distinct load; every method is collective.

    Attributes:
        ranks: of the run.
        iters, warmup: of each measurement.
        calls: in a row, where captured.
    """

    ranks: Ranks
    iters: int
    warmup: int
    calls: int = 1
    _raw: dict[tuple[object, ...], Statistics] = field(default_factory=dict)
    _copy: dict[tuple[object, ...], float | None] = field(default_factory=dict)
    _memory_rate: float | None = None
    _product_rate: float | None = None
    _empty: dict[bool, float] = field(default_factory=dict)

    def empty_us(self, *, graph: bool) -> float:
        """What the clock says between two marks with nothing between them: part of the time of a
        call that is timed alone."""
        if graph not in self._empty:
            mine = time_calls(
                lambda: None, self.ranks, iters=self.iters, warmup=self.warmup, graph=graph
            )
            self._empty[graph] = Statistics.of(self.ranks.gather(mine)).slowest_rank_p50_us
        return self._empty[graph]

    def raw(self, matrix: Sequence[Sequence[int]], *, graph: bool) -> Statistics:
        """all_to_all_single of uint8: rank s sends matrix[s][d] bytes to rank d (nothing to
        itself)."""
        key = (tuple(map(tuple, matrix)), graph)
        if key not in self._raw:
            rank, pg = self.ranks.rank, self.ranks.group.pg
            send = [0 if d == rank else n for d, n in enumerate(matrix[rank])]
            receive = [0 if s == rank else row[rank] for s, row in enumerate(matrix)]
            source = torch.zeros(sum(send), dtype=torch.uint8, device=self.ranks.device)
            target = torch.empty(sum(receive), dtype=torch.uint8, device=self.ranks.device)

            def call() -> None:
                dist.all_to_all_single(target, source, receive, send, group=pg)

            with self.ranks.transport_errors("raw all_to_all_single"):
                mine = time_calls(
                    call, self.ranks, iters=self.iters, warmup=self.warmup, graph=graph,
                    calls=self.calls,
                )  # fmt: skip
            self._raw[key] = Statistics.of(self.ranks.gather(mine))
        return self._raw[key]

    def peer_copy_us(self, matrix: Sequence[Sequence[int]]) -> float | None:
        """The same bytes by copies into peers' memory, all ranks at once, in a graph; None where
        peers cannot be reached."""
        key = tuple(map(tuple, matrix))
        if key not in self._copy:
            pairs = self._peer_buffers(matrix[self.ranks.rank])
            if not all(self.ranks.gather(pairs is not None)):
                self._copy[key] = None
            else:
                assert pairs is not None

                copy = _driver_copy()

                def call() -> None:
                    for target, source in pairs:
                        copy(target, source)

                mine = time_calls(
                    call, self.ranks, iters=self.iters, warmup=self.warmup, graph=True,
                    calls=self.calls,
                )  # fmt: skip
                self._copy[key] = max(
                    percentile(samples, 50) for samples in self.ranks.gather(mine)
                )
        return self._copy[key]

    def _peer_buffers(self, sent: Sequence[int]) -> list[tuple[Tensor, Tensor]] | None:
        device = self.ranks.device
        if device.type != "cuda" or self.ranks.group.num_nodes > 1 or self.ranks.num_ranks == 1:
            return None
        pairs = []
        for peer, size in enumerate(sent):
            if peer == self.ranks.rank or size == 0:
                continue
            if peer >= torch.cuda.device_count() or not torch.cuda.can_device_access_peer(
                device, peer
            ):
                return None
            source = torch.zeros(size, dtype=torch.uint8, device=device)
            target = torch.empty(size, dtype=torch.uint8, device=f"cuda:{peer}")
            # Torch's own copy, once: it switches peer access on.
            target.copy_(source)
            pairs.append((target, source))
        torch.cuda.synchronize(device)
        return pairs

    def memory_us(self, num_bytes: int) -> float | None:
        """Time to move num_bytes (reads and writes together) through this device's memory at the
        rate of a large copy; None on a CPU."""
        if self.ranks.device.type != "cuda":
            return None
        if self._memory_rate is None:
            size = 1 << 29
            source = torch.zeros(size, dtype=torch.uint8, device=self.ranks.device)
            target = torch.empty_like(source)
            self._memory_rate = self._rate(2 * size, lambda: target.copy_(source))
        return num_bytes / self._memory_rate

    def products_us(self, num_operations: int) -> float | None:
        """Time of num_operations (a multiply and an add are two) at the rate of one large bf16
        product; None on a CPU."""
        if self.ranks.device.type != "cuda":
            return None
        if self._product_rate is None:
            size = 8192
            a, b, out = (
                torch.randn(size, size, device=self.ranks.device, dtype=torch.bfloat16)
                for _ in range(3)
            )
            self._product_rate = self._rate(2 * size**3, lambda: torch.mm(a, b, out=out))
        return num_operations / self._product_rate

    def _rate(self, amount: int, call: Callable[[], object]) -> float:
        """What the slowest rank does of it a microsecond."""
        mine = time_calls(call, self.ranks, iters=20, warmup=3, graph=False)
        return amount / max(percentile(samples, 50) for samples in self.ranks.gather(mine))


def _driver_copy() -> Callable[[Tensor, Tensor], None]:
    """The driver's copy on the current stream. Torch's own, across devices, records events on the
    other device's stream, which a capture does not allow."""
    driver = ctypes.CDLL("libcuda.so.1")
    function = driver.cuMemcpyAsync
    function.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]

    def copy(target: Tensor, source: Tensor) -> None:
        stream = torch.cuda.current_stream(source.device).cuda_stream
        code = function(target.data_ptr(), source.data_ptr(), source.numel(), stream)
        if code != 0:
            raise RuntimeError(f"cuMemcpyAsync: the driver answered {code}")

    return copy
