"""Which way the slab takes, from values that all ranks share: config, ranks and the bucket."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moe_comm.config import EPConfig
from moe_comm.traffic import expected_distinct

MODES = ("auto", "low-latency", "high-throughput")
# Of a combine's programs, among two ranks and among more: (up to this bucket, columns, warps,
# registers of a thread). Few tokens take small programs, 4 columns a thread: more of them wait for
# memory at once. Among two ranks a middle bucket takes large ones: all run at once then.
_COMBINES_OF_TWO = ((32, 512, 4, 64), (512, 2048, 8, 64), (None, 1024, 4, 64))
_COMBINES_OF_MORE = ((256, 512, 4, 56), (None, 1024, 4, 80))
# From so many choices on a program ranks 32 of them, below 16: fewer programs read all of them.
MANY_CHOICES = 1024
# Copies bring every row to every rank, stores those that a rank is to have, at 0.95 of the rate
# (H200 at T = 4096: two ranks, and one rank of eight by slab_stand_in).
STORES_OF_COPIES = 0.95


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a call launches. `mode` of the dispatch: "low-latency" or "high-throughput";
    `*_programs`: the most programs, of a role in dispatch; of a combine: columns, warps and
    registers as in SlabTuning, and lag: tokens that it sends before it begins to add."""

    mode: str
    dispatch_programs: int
    ranked_programs: int
    counted_programs: int
    combine_programs: int
    combine_block: int
    combine_warps: int
    combine_registers: int
    combine_lag: int


@dataclass(frozen=True, kw_only=True)
class SlabTuning:
    """Knobs. Defaults are the fastest of trial runs on two H200 at 896/16/3584, T = 1 to 4096.

    Attributes:
        mode: "low-latency", "high-throughput", or "auto" by the bucket.
        copy_from_bytes: bytes to one peer from which dispatch takes copies instead of stores, where
            the wire does not quantize and tokens reach nearly every rank (896/16: up to five).
        aside_programs: the most programs of a role in a high-throughput dispatch, beside copies.
        combine_programs: the most programs of a combine; 0: as many as there is work for. Others
            must all run at once, so at most one a multiprocessor is safe.
        combine_lag: tokens that a combine sends before it begins to add what others send; 0: by the
            ranks.
        combine_block, combine_warps: 0: by the bucket and the ranks.
        combine_registers: the most registers of a thread of a combine, so that more programs run at
            once, on few multiprocessors too; 0: by the bucket and the ranks.
        direct_ranks: up to this many ranks each program of a low-latency call tells every rank
            itself; beyond, the last one does for all.
        ranked_choices: up to this many choices of a rank, at most 4096, the rank itself ranks them.
        counted_choices: up to this many the launch that receives them counts them; more are indexed
            by launches of their own.
        ranked_programs, counted_programs: the most programs that put rows where choices are ranked:
            each waits for its stores before it releases, which takes longer than a few rows; and
            where they are counted, which leaves room for the programs that count. 0: by the ranks,
            and counted_programs by the bucket too.
        ranked_registers, counted_registers: the most registers of a thread where choices are
            ranked, or counted, so that more programs run at once; 0: as many as the compiler takes.
        index_queries: choices that one program ranks; 0: by the number of choices.
        combine_unroll: loads of expert rows in flight at a time; 0: as many as a row has.
        put_programs, put_warps: programs that forward what is put, and their warps.
        *_block, *_warps: columns and warps of a program; *_programs: the most programs of a role.
    """

    mode: str = "auto"
    copy_from_bytes: int = 12 << 20
    dispatch_block: int = 4096
    dispatch_warps: int = 8
    dispatch_programs: int = 1056
    aside_programs: int = 264
    combine_block: int = 0
    combine_warps: int = 0
    combine_registers: int = 0
    combine_programs: int = 0
    combine_lag: int = 0
    combine_unroll: int = 0
    direct_ranks: int = 8
    ranked_choices: int = 4096
    counted_choices: int = 1 << 20
    ranked_programs: int = 0
    counted_programs: int = 0
    ranked_registers: int = 0
    counted_registers: int = 0
    index_queries: int = 0
    put_programs: int = 128
    put_warps: int = 8

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode: expected one of {', '.join(MODES)}, got {self.mode!r}")

    def _shape_of_combine(self, bucket: int, num_ranks: int) -> tuple[int, int, int]:
        """(columns, warps, registers) of a program, before they are fitted to a row."""
        table = _COMBINES_OF_MORE if num_ranks > 2 else _COMBINES_OF_TWO
        block, warps, registers = next(
            shape for most, *shape in table if most is None or bucket <= most
        )
        if self.combine_block:
            block, warps = self.combine_block, max(1, self.combine_block // 256)
        return block, self.combine_warps or warps, self.combine_registers or registers

    def queries_of(self, choices: int) -> int:
        """Choices that one program of an index ranks."""
        return self.index_queries or (32 if choices >= MANY_CHOICES else 16)

    def with_mode(self, mode: str) -> SlabTuning:
        """This tuning for a communicator that is asked for `mode`: "auto" leaves it as it is.

        Raises ValueError where both name a mode, and not the same.
        """
        if mode == "auto" or mode == self.mode:
            return self
        if self.mode != "auto":
            raise ValueError(f"mode: expected {self.mode!r}, the tuning's, or 'auto', got {mode!r}")
        return replace(self, mode=mode)

    def mode_of(self, config: EPConfig, bucket: int, num_ranks: int) -> str:
        """The mode of a dispatch with this bucket; the same on every rank."""
        if self.mode != "auto":
            return self.mode
        to_peer = bucket * config.wire.row_bytes(config.hidden)
        reached = expected_distinct(num_ranks, config.num_experts, config.num_topk) / num_ranks
        # What is quantized on the way is stored: nothing is left to be copied.
        copies = config.wire.scale_dtype is None and to_peer >= self.copy_from_bytes
        return "high-throughput" if copies and reached >= STORES_OF_COPIES else "low-latency"

    def plan(self, config: EPConfig, bucket: int, num_ranks: int) -> Plan:
        """The plan of a call with this bucket; the same on every rank."""
        mode = self.mode_of(config, bucket, num_ranks)
        block, warps, registers = self._shape_of_combine(bucket, num_ranks)
        # Found on pairs, for two ranks by their calls, for more by slab_stand_in. Among more, a sum
        # reads several ranks' rows at once, and each token is sent to more of them.
        many = num_ranks > 2
        return Plan(
            mode=mode,
            dispatch_programs=self.dispatch_programs
            if mode == "low-latency"
            else self.aside_programs,
            ranked_programs=self.ranked_programs or (80 if many else 40),
            # The more ranks a row goes to, the longer it keeps its program busy.
            counted_programs=self.counted_programs or (66 if bucket <= 256 * num_ranks else 132),
            combine_programs=self.combine_programs,
            combine_block=block,
            combine_warps=warps,
            combine_registers=registers,
            combine_lag=min(self.combine_lag or (32 if many else 128), bucket),
        )
