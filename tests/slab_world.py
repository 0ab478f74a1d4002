"""Virtual ranks: the slab's engines of R ranks over one allocation, put phases first, then waits;
on a GPU also whole calls at once, each rank on a stream of its own.

Every comparison is with moe_comm.backends.reference. On the CPU (Triton's interpreter) bf16
rounding truncates, so there arithmetic is only compared within a tolerance; indices, masks and
copied rows are compared exactly everywhere.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_comm import EPConfig
from moe_comm.backends.reference import RankInput, ReferenceWorld
from moe_comm.backends.slab_engine import SlabEngine, region_sizes
from moe_comm.backends.slab_modes import SlabTuning
from moe_comm.calls import check_combine, check_dispatch
from moe_comm.handle import Dispatched
from moe_comm.symmetric import VirtualSymmetricMemory


class VirtualWorld:
    """R engines and the reference beside them."""

    def __init__(
        self,
        config: EPConfig,
        num_ranks: int,
        device: torch.device,
        tuning: SlabTuning | None = None,
        seed_count: int = 2**31 - 2,
        *,
        puts: bool = False,
    ) -> None:
        self.config, self.num_ranks, self.device = config, num_ranks, device
        self.memories = VirtualSymmetricMemory.create(
            num_ranks, region_sizes(config, num_ranks, puts=puts), device, puts=puts
        )
        placement = config.placement_for(num_ranks)
        self.engines = [
            SlabEngine(
                config,
                rank=rank,
                num_ranks=num_ranks,
                num_local_experts=placement.num_local_experts(rank),
                memory=self.memories[rank],
                copy_table=placement.copy_table.to(device),
                num_copies=placement.num_copies.to(device),
                tuning=tuning,
            )
            for rank in range(num_ranks)
        ]
        for engine in self.engines:
            engine.seed_counters(seed_count)
        self.reference = ReferenceWorld(config, num_ranks)
        self.exact = device.type == "cuda"
        # Set: whole calls, begun in any order and at odd times.
        self.at_once: random.Random | None = None
        self._streams = [torch.cuda.Stream(device) for _ in self.engines] if self.exact else []

    def inputs(
        self,
        tokens: Sequence[int],
        generator: torch.Generator,
        *,
        masked: float = 0.1,
        dtype: torch.dtype = torch.bfloat16,
    ) -> list[RankInput]:
        """Random rows; ids with duplicates, and -1 at the given share."""
        made = []
        for num_tokens in tokens:
            shape = (num_tokens, self.config.num_topk)
            ids = torch.randint(self.config.num_experts, shape, generator=generator)
            drop = torch.rand(shape, generator=generator) < masked
            made.append(
                RankInput(
                    x=torch.randn(num_tokens, self.config.hidden, generator=generator)
                    .to(dtype)
                    .to(self.device),
                    topk_idx=torch.where(drop, -1, ids).to(self.device),
                    topk_weights=torch.rand(shape, generator=generator).to(self.device),
                )
            )
        return made

    def mask_rank(self, rank: int, inputs: Sequence[RankInput]) -> list[RankInput]:
        """The others go on without a rank; their inputs with choices of its experts masked, and
        nothing of its own: what counts of these from now on."""
        dead = torch.tensor(self.config.placement_for(self.num_ranks).local_expert_ids(rank))
        alive = []
        for other, given in enumerate(inputs):
            lost = torch.isin(given.topk_idx, dead.to(self.device)) | (other == rank)
            if other != rank:
                self.engines[other].mask_rank(rank)
            alive.append(replace(given, topk_idx=torch.where(lost, -1, given.topk_idx)))
        return alive

    def poison(self) -> None:
        """Rows nobody has written must be seen: NaN in every value region of every rank."""
        for memory in self.memories:
            for name in (
                "dispatch_rows", "dispatch_scales", "topk_weights", "staging"
            ):  # fmt: skip
                size = memory.regions.sizes.get(name, 0)
                if not size:
                    continue
                memory.view(name, (size,), torch.uint8).fill_(0xFF)

    def dispatch(
        self, inputs: Sequence[RankInput], *, bucket: int | None = None, slot: int = 0,
        payloads: Sequence[dict[str, Tensor]] | None = None,
    ) -> list[Dispatched]:  # fmt: skip
        """All ranks put, then all wait."""
        calls = []
        for rank, given in enumerate(inputs):
            call = check_dispatch(
                self.config,
                self.device,
                given.x,
                given.topk_idx,
                given.topk_weights,
                num_tokens=given.num_tokens,
                bucket=bucket,
                payloads=payloads[rank] if payloads else None,
                handle=None,
            )
            call.slot, call.call = slot, 0
            calls.append(call)
        return self._call("dispatch", calls)

    def _call(self, name: str, calls: Sequence[Any]) -> list[Any]:
        """The ranks' calls: all put, then all wait; or whole ones at once."""
        launches = [getattr(engine, name) for engine in self.engines]
        if self.at_once is None:
            for launch, call in zip(launches, calls, strict=True):
                launch(call, send=True, receive=False)
            return [
                launch(call, send=False, receive=True)
                for launch, call in zip(launches, calls, strict=True)
            ]
        results: list[Any] = [None] * self.num_ranks
        torch.cuda.synchronize(self.device)
        for rank in self.at_once.sample(range(self.num_ranks), self.num_ranks):
            with torch.cuda.stream(self._streams[rank]):
                torch.cuda._sleep(self.at_once.choice((0, 1_000, 20_000, 200_000)))
                results[rank] = launches[rank](calls[rank], send=True, receive=True)
        torch.cuda.synchronize(self.device)
        return results

    def combine(
        self, rows: Sequence[Tensor], dispatched: Sequence[Dispatched], **options: Any
    ) -> list[Tensor]:
        """All ranks put, then all wait; outputs poisoned first."""
        calls = []
        biases = options.pop("biases", None)
        for rank, (y, d) in enumerate(zip(rows, dispatched, strict=True)):
            out = torch.full((d.handle.num_rows, self.config.hidden), torch.nan, dtype=y.dtype)
            calls.append(
                check_combine(
                    self.config,
                    self.device,
                    self.num_ranks,
                    y,
                    d.handle,
                    layout=options.get("layout", "expert"),
                    weights_applied=options.get("weights_applied", False),
                    bias=biases[rank] if biases else None,
                    out=out.to(self.device),
                    num_expert_rows=d.row_index.shape[0],
                )
            )
        return self._call("combine", calls)

    def check_dispatched(self, got: Sequence[Dispatched], want: Sequence[Dispatched]) -> None:
        """Everything a rank receives, bit for bit."""
        for rank, (a, b) in enumerate(zip(got, want, strict=True)):
            where = f"rank {rank}"
            assert torch.equal(a.num_tokens_per_rank, b.num_tokens_per_rank), where
            bucket = b.handle.bucket
            position = torch.arange(bucket, device=self.device)
            valid = position[None, :] < b.num_tokens_per_rank[:, None]
            assert torch.equal(torch.where(valid[..., None], a.topk_idx, -1), b.topk_idx), where
            assert torch.equal(a.expert_offsets, b.expert_offsets), where
            assert torch.equal(a.row_index, b.row_index), where
            assert torch.equal(a.handle.choice_position, b.handle.choice_position), where
            assert torch.equal(a.handle.choice_rank, b.handle.choice_rank), where
            here = b.topk_idx >= 0
            assert torch.equal(a.topk_weights[here], b.topk_weights[here]), where
            rows = here.any(-1)
            if a.scales is not None and b.scales is not None:
                same = a.scales[rows].view(torch.uint8) == b.scales[rows].view(torch.uint8)
                assert bool(same.all()), where
            if self.exact or a.scales is None:
                same = a.rows[rows].view(torch.uint8) == b.rows[rows].view(torch.uint8)
                assert bool(same.all()), where
            for name, tensor in b.payloads.items():
                assert torch.equal(a.payloads[name][rows], tensor[rows]), (where, name)

    def check_combined(self, got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
        """Bit for bit on a GPU. Under the interpreter each rounding to bf16 may lose one unit."""
        quantized = self.config.combine_wire in ("fp8", "mxfp8")
        for rank, (a, b) in enumerate(zip(got, want, strict=True)):
            if self.exact:
                assert torch.equal(a, b), f"rank {rank}"
            else:
                scale = float(b.float().abs().max()) if b.numel() else 0.0
                allowed = scale * (2**-2 if quantized else 2**-6)
                error = float((a.float() - b.float()).abs().max()) if b.numel() else 0.0
                assert error <= allowed, f"rank {rank}: {error} > {allowed}"

    def round_trip(
        self, tokens: Sequence[int], generator: torch.Generator, *, bucket: int | None = None,
        slot: int = 0, masked: float = 0.1, dtype: torch.dtype = torch.bfloat16, **options: Any,
    ) -> None:  # fmt: skip
        """One dispatch and one combine of every rank against the reference."""
        inputs = self.inputs(tokens, generator, masked=masked, dtype=dtype)
        self.poison()
        want = self.reference.dispatch(inputs, bucket=bucket)
        got = self.dispatch(inputs, bucket=bucket, slot=slot)
        self.check_dispatched(got, want)
        rows_layout = options.get("layout") == "rows"
        rows = [
            torch.randn(
                (self.num_ranks, d.handle.bucket, self.config.hidden)
                if rows_layout
                else (d.row_index.shape[0], self.config.hidden),
                generator=generator,
            )
            .to(dtype)
            .to(self.device)
            for d in want
        ]
        if options.pop("with_bias", False):
            options["biases"] = [
                tuple(torch.randn_like(given.x) for _ in range(2)) for given in inputs
            ]
        reference = {k: v for k, v in options.items() if k in ("layout", "weights_applied")}
        combined = self.reference.combine(
            rows, [d.handle for d in want], biases=options.get("biases"), **reference
        )
        self.check_combined(self.combine(rows, got, **options), combined)
        self.check_returned_rows_are_empty()
        assert [engine.status.tolist() for engine in self.engines] == [[0] * 8] * self.num_ranks

    def check_returned_rows_are_empty(self) -> None:
        """Between combines, memory of partial sums is empty (moe_comm.kernels.returned_rows)."""
        for memory in self.memories:
            for name in ("combine_rows", "combine_scales"):
                size = memory.regions.sizes[name]
                assert bool((memory.view(name, (size,), torch.uint8) == 0xFF).all()), name
