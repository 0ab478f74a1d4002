"""Which way the slab takes, from values that all ranks share: config, ranks and the bucket."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moe_comm.config import EPConfig

MODES = ("auto", "low-latency", "high-throughput")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a call launches. `mode` of the dispatch: "low-latency" or "high-throughput";
    `*_programs`: the most programs, of a role in dispatch; dispatch_chunks: pieces whose transfer
    overlaps; combine_lag: tokens that a combine sends before it begins to add."""

    mode: str
    dispatch_programs: int
    dispatch_chunks: int
    combine_programs: int
    combine_lag: int


@dataclass(frozen=True, kw_only=True)
class SlabTuning:
    """Knobs. Defaults come from trial runs on two H200 at 896/16/3584: dispatch by stores and by
    copies took alike at about 12 MB to a peer. There is no table of them in results/ yet.

    Attributes:
        mode: "low-latency", "high-throughput", or "auto" by the bucket.
        copy_from_bytes: bytes to one peer from which dispatch takes copies instead of stores.
        combine_programs: the most programs of a combine; 0: as many as there is work for. Others
            must all run at once, so at most one a multiprocessor is safe.
        combine_lag: tokens that a combine sends before it begins to add what others send.
        combine_few: programs up to which a combine takes smaller blocks to have more of them.
        direct_ranks: up to this many ranks each program of a low-latency call tells every rank
            itself; beyond, the last one does for all.
        index_queries: choices that one program ranks.
        combine_unroll: loads of expert rows in flight at a time; 0: as many as a row has.
        put_programs, put_warps: programs that forward what is put, and their warps.
        *_block, *_warps: columns and warps of a program; *_programs: the most programs of a role.
    """

    mode: str = "auto"
    copy_from_bytes: int = 12 << 20
    dispatch_block: int = 4096
    dispatch_warps: int = 8
    dispatch_programs: int = 1056
    dispatch_chunks: int = 2
    combine_block: int = 4096
    combine_warps: int = 8
    combine_programs: int = 0
    combine_lag: int = 512
    combine_few: int = 256
    combine_unroll: int = 0
    direct_ranks: int = 8
    index_queries: int = 16
    put_programs: int = 128
    put_warps: int = 8

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode: expected one of {', '.join(MODES)}, got {self.mode!r}")

    def with_mode(self, mode: str) -> SlabTuning:
        """This tuning for a communicator that is asked for `mode`: "auto" leaves it as it is.

        Raises ValueError where both name a mode, and not the same.
        """
        if mode == "auto" or mode == self.mode:
            return self
        if self.mode != "auto":
            raise ValueError(f"mode: expected {self.mode!r}, the tuning's, or 'auto', got {mode!r}")
        return replace(self, mode=mode)

    def plan(self, config: EPConfig, bucket: int) -> Plan:
        """The plan of a call with this bucket; the same on every rank."""
        mode = self.mode
        if mode == "auto":
            to_peer = bucket * config.wire.row_bytes(config.hidden)
            mode = "high-throughput" if to_peer >= self.copy_from_bytes else "low-latency"
        return Plan(
            mode=mode,
            dispatch_programs=self.dispatch_programs,
            dispatch_chunks=self.dispatch_chunks,
            combine_programs=self.combine_programs,
            combine_lag=min(self.combine_lag, bucket),
        )
