"""One rank of many on two GPUs: rank 0 has a GPU to itself, the other R - 1 stand in on the second.

Rank 0 makes the calls it would make among R GPUs, on the memory and with the links that it would
have: everything for other ranks goes over the link, everything here is its own. The others send
before it begins and receive once it is done, so that only one thing is missing, waiting for ranks
that begin at the same time. Two such worlds, one the other way round, run at once: then each link
carries in both directions what it would. See slab_stand_in for what is made of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_comm.backends.slab_engine import SlabEngine
from moe_comm.backends.slab_modes import SlabTuning
from moe_comm.chunks import Pending
from moe_comm.config import EPConfig
from moe_comm.handle import Dispatched
from moe_comm.launch.experts import apply_expert, expert_factors
from moe_comm.launch.oracle import ExpectedDispatch, expected_combine, expected_dispatch
from moe_comm.launch.rank_data import RankData
from moe_comm.launch.slab_sweep_ports import Port
from moe_comm.launch.verify import Findings, check_combined, check_dispatched
from moe_comm.launch.virtual_ranks import apart, on
from moe_comm.wire import dequantize


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What all ranks have to do: `config` with as many slots as calls in a row, and their data
    [R], on any device."""

    config: EPConfig
    data: Sequence[RankData]

    def on(self, device: torch.device) -> list[RankData]:
        """The data on a device."""
        return [
            RankData(
                rank=one.rank, x=one.x.to(device), topk_idx=one.topk_idx.to(device),
                topk_weights=one.topk_weights.to(device),
            )
            for one in self.data
        ]  # fmt: skip


class StandInWorld:
    """Rank 0 of a problem on `home`, the others on `away`.

    Attributes:
        ports: a rank each.
        home, away: the devices.
    """

    def __init__(
        self, problem: Problem, home: torch.device, away: torch.device, tuning: SlabTuning
    ) -> None:
        config, count = problem.config, len(problem.data)
        self.home, self.away, self._config = home, away, config
        self._placement = config.placement_for(count)
        self._data = {device: problem.on(device) for device in {home, away}}
        on_cuda = home.type == "cuda"
        self.streams = {d: torch.cuda.Stream(d) if on_cuda else None for d in {home, away}}
        devices = [home] + [away] * (count - 1)
        self.ports = []
        for rank, comm in enumerate(apart(config, devices, tuning)):
            mine = self._data[devices[rank]][rank]
            y, out = self._expert_rows(rank, devices[rank]), torch.empty_like(mine.x)
            self.ports.append(Port(comm=comm, mine=mine, y=y, out=out, calls=config.num_slots))
        self._sent: list[list[Pending[Dispatched]]] = []
        self._got: list[list[Dispatched]] = []
        self._back: list[list[Pending[Tensor]]] = []
        # What rank 0 has received, in the order of its slots.
        self.arrived: list[Dispatched] = []
        if on_cuda:
            for device in {home, away}:
                torch.cuda.synchronize(device)

    def dispatch(self) -> None:
        """Rank 0's calls, each into a slot of its own, on the current stream."""
        self.arrived = [self.ports[0].dispatch() for _ in range(self._config.num_slots)]

    def combine(self) -> None:
        """Rank 0's combines of what it has received."""
        for each in self.arrived:
            self.ports[0].combine(each)

    def others_send(self) -> None:
        """Ahead of dispatch."""
        with self._there():
            slots = range(self._config.num_slots)
            self._sent = [[port.start_dispatch() for port in self.ports[1:]] for _ in slots]

    def others_receive_and_return(self) -> None:
        """After dispatch, ahead of combine."""
        with self._there():
            self._got = [[pending.wait() for pending in slot] for slot in self._sent]
            for port, last in zip(self.ports[1:], self._got[-1], strict=True):
                port.last = last
            self._back = [
                [p.start_combine(got) for p, got in zip(self.ports[1:], slot, strict=True)]
                for slot in self._got
            ]

    def others_end(self) -> None:
        """After combine."""
        with self._there():
            for slot in self._back:
                for pending in slot:
                    pending.wait()

    def poison(self) -> None:
        """Rows of rank 0's last call and its result must come again."""
        with on(self.home):
            self.ports[0].poison()

    def check(self, ranks: Sequence[int]) -> list[Findings]:
        """What the last calls of these ranks brought, against the reference."""
        found = []
        for rank in ranks:
            port, device = self.ports[rank], self.home if rank == 0 else self.away
            assert port.last is not None
            with on(device):
                port.comm.check()
                found.append(check_dispatched(port.last, self._expected(rank, device), rank=rank))
                want = expected_combine(
                    self._config, port.mine, self._placement, node_of_rank=[0] * len(self.ports)
                )
                found.append(check_combined(port.out, want, rank=rank))
        return found

    def _expected(self, rank: int, device: torch.device) -> ExpectedDispatch:
        data = self._data[device]
        return expected_dispatch(
            self._config, data, self._placement, rank=rank, bucket=data[0].num_tokens
        )

    def _expert_rows(self, rank: int, device: torch.device) -> Tensor:
        """[N, H] of the expert step of launch/experts.py."""
        arrived = self._expected(rank, device)
        rows = dequantize(arrived.values, arrived.scales, self._config.wire).flatten(0, 1)
        factors = expert_factors(self._config.num_experts, device)
        local = factors[self._placement.local_expert_ids(rank)]
        return apply_expert(
            rows[arrived.row_index], local.repeat_interleave(arrived.expert_offsets.diff())
        )

    def _there(self) -> Any:
        return on(self.away, self.streams[self.away])


class Meeting:
    """Lets the current streams of two devices go on at about the same time: each waits for the
    other's word, at most `timeout_s`."""

    def __init__(self, devices: Sequence[torch.device], timeout_s: float) -> None:
        config = EPConfig(
            num_experts=len(devices), num_topk=1, hidden=64, max_tokens_per_rank=1,
            timeout_s=timeout_s,
        )  # fmt: skip
        self._comms = apart(config, devices, SlabTuning())
        # Compiled before anything is captured.
        for index, device in enumerate(devices):
            with on(device):
                self.join(index)
        for device in devices:
            torch.cuda.synchronize(device)

    def join(self, index: int) -> None:
        """On device `index`, which is the current one."""
        engine: SlabEngine = self._comms[index].engine
        engine.signal_release(0)
