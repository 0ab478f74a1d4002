"""Settings of a slab sweep: which knobs, at which size, in the order in which they are worth a
GPU's time. Pure; see slab_sweep for what is done with them."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import moe_comm
from moe_comm.backends.slab_modes import SlabTuning

LOW, HIGH = "low-latency", "high-throughput"
BF16, FP8 = ("bf16", "bf16"), ("fp8", "fp8")
# What is timed: whole calls; their send and receive halves apart; beside a GEMM.
CALLS, HALVES, OVERLAP = "calls", "halves", "overlap"
# As many programs as a quarter of an H200's multiprocessors, and so on by twos.
PROGRAMS = (33, 66, 132, 264, 528, 1056)
# Of those, so many surely run at once on an H200: one a multiprocessor.
MOST_AT_ONCE = 132
# Files in kernels/ that a slab's calls run.
_KERNELS = (
    "choice_route.py", "chunked_index.py", "combine.py", "dispatch.py", "expert_index.py",
    "placed_rows.py", "put_rows.py", "quantize.py", "ranked_index.py", "returned_rows.py",
    "signal.py", "slot_signals.py",
)  # fmt: skip
# Which of them bounds the programs that put a dispatch's rows depends on its size and mode.
PROGRAM_KNOBS = (
    "ranked_programs", "counted_programs", "aside_programs", "dispatch_programs",
    "combine_programs",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One thing to time.

    Attributes:
        section: which it was asked for by.
        num_tokens: T, of every rank, and the bucket.
        tuning: the knobs; names its mode.
        wires: of dispatch and combine.
        kind: CALLS, HALVES or OVERLAP.
        side_priority: of the slab's stream for copies; None: the slab's own.
    """

    section: str
    num_tokens: int
    tuning: SlabTuning
    wires: tuple[str, str] = BF16
    kind: str = CALLS
    side_priority: int | None = None

    @property
    def knobs(self) -> dict[str, Any]:
        """Every knob."""
        return dataclasses.asdict(self.tuning)

    @property
    def changed(self) -> dict[str, Any]:
        """What is not the default, the mode aside."""
        plain = dataclasses.asdict(SlabTuning(mode=self.tuning.mode))
        found = {name: value for name, value in self.knobs.items() if value != plain[name]}
        if self.side_priority is not None:
            found["side_priority"] = self.side_priority
        return found

    @property
    def identity(self) -> str:
        """The same for settings that time the same, whatever section asks for them."""
        what = [self.num_tokens, self.wires, self.kind, self.side_priority, self.knobs]
        return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:12]

    def __str__(self) -> str:
        words = [self.section, f"T={self.num_tokens}", self.tuning.mode, "/".join(self.wires)]
        if self.kind != CALLS:
            words.append(self.kind)
        return " ".join(words + [f"{name}={value}" for name, value in self.changed.items()])


def settings_of(sections: Sequence[str]) -> list[Setting]:
    """The sections' settings one section after the other, each once: where it is asked for first.

    Raises ValueError for an unknown section.
    """
    found: dict[str, Setting] = {}
    for name in sections:
        if name not in SECTIONS:
            raise ValueError(f"sections: expected some of {', '.join(SECTIONS)}, got {name!r}")
        for setting in SECTIONS[name]():
            found.setdefault(setting.identity, setting)
    return list(found.values())


def source_digest() -> str:
    """Of the slab's code and kernels: times of other code do not belong into one file."""
    root = Path(moe_comm.__file__).resolve().parent
    files = [*(root / "backends").glob("slab*.py"), *(root / "kernels" / name for name in _KERNELS)]
    digest = hashlib.sha256()
    for file in sorted(files, key=lambda path: path.name):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def _variants() -> Iterator[Setting]:
    """The stream of copies, and halves of a call apart."""

    def of(*, num_tokens: int = 4096, mode: str = HIGH, **rest: Any) -> Setting:
        tuning = SlabTuning(mode=mode)
        return Setting(section="variants", num_tokens=num_tokens, tuning=tuning, **rest)

    yield of()
    yield of(side_priority=0)
    yield of(kind=HALVES)
    yield of(mode=LOW)
    yield of(mode=LOW, kind=HALVES)
    yield of(num_tokens=128, mode=LOW)
    yield of(num_tokens=128, mode=LOW, kind=HALVES)


def _crossover() -> Iterator[Setting]:
    """Both modes at every size, near the expected crossover and at the quoted sizes first."""
    first = (128, 4096, 2048, 1024, 512)
    rest = (256, 32, 8, 1)
    for sizes, mode in ((first, None), (rest, LOW), (rest, HIGH)):
        for wires, num_tokens in itertools.product((BF16, FP8), sizes):
            for one in (LOW, HIGH) if mode is None else (mode,):
                yield Setting(
                    section="crossover", num_tokens=num_tokens, tuning=SlabTuning(mode=one),
                    wires=wires,
                )  # fmt: skip


def _programs() -> Iterator[Setting]:
    """Programs of each role. A dispatch does not hang on combine's, so both are changed at once,
    where so many of combine's run at once for sure."""
    cases = (
        (128, LOW, BF16, "ranked_programs"), (4096, HIGH, BF16, "aside_programs"),
        (4096, LOW, BF16, "counted_programs"), (4096, LOW, FP8, "counted_programs"),
    )  # fmt: skip
    for (num_tokens, mode, wires, rows), programs in itertools.product(cases, reversed(PROGRAMS)):
        roles = (rows, "combine_programs") if programs <= MOST_AT_ONCE else (rows,)
        tuning = SlabTuning(mode=mode, **dict.fromkeys(roles, programs))
        yield Setting(section="programs", num_tokens=num_tokens, tuning=tuning, wires=wires)


def _blocks() -> Iterator[Setting]:
    """Blocks, unrolling and lag of a large combine: one of them changed, then all."""
    shapes = ((0, 0), (2048, 8), (4096, 8), (512, 2))
    unrolls, lags = (0, 16, 4), (0, 512, 2048)
    # Positions in the three lists; what is the default lies at 0.
    grid = sorted(
        itertools.product(range(len(shapes)), range(len(unrolls)), range(len(lags))),
        key=lambda at: (sum(i > 0 for i in at), sum(at)),
    )
    for shape, unroll, lag in grid:
        block, warps = shapes[shape]
        yield Setting(
            section="blocks", num_tokens=4096,
            tuning=SlabTuning(
                mode=HIGH, combine_block=block, combine_warps=warps,
                combine_unroll=unrolls[unroll], combine_lag=lags[lag],
            ),
        )  # fmt: skip


def _small() -> Iterator[Setting]:
    """Index, signals and blocks of few tokens."""
    knobs: list[dict[str, int]] = [
        {}, {"direct_ranks": 0}, {"combine_block": 4096}, {"combine_block": 1024},
        {"index_queries": 8}, {"index_queries": 16}, {"index_queries": 32},
    ]  # fmt: skip
    for given, num_tokens in itertools.product(knobs, (128, 1, 32)):
        tuning = SlabTuning(mode=LOW, **given)
        yield Setting(section="small", num_tokens=num_tokens, tuning=tuning)


def _overlap() -> Iterator[Setting]:
    """Beside a GEMM."""
    cases = ((128, LOW, BF16), (4096, HIGH, BF16), (4096, LOW, BF16), (128, LOW, ("fp8", "bf16")),
             (4096, HIGH, ("fp8", "bf16")))  # fmt: skip
    for num_tokens, mode, wires in cases:
        tuning = SlabTuning(mode=mode)
        yield Setting(
            section="overlap", num_tokens=num_tokens, tuning=tuning, wires=wires, kind=OVERLAP
        )


# In the order of a sweep that is asked for none in particular.
SECTIONS: dict[str, Callable[[], Iterator[Setting]]] = {
    "variants": _variants,
    "crossover": _crossover,
    "overlap": _overlap,
    "small": _small,
    "programs": _programs,
    "blocks": _blocks,
}
