"""What the links of one host carry: copies between its GPUs, by the copy engines.

    python -m moe_comm.launch.matrix_copies OUT.json [GPUS]

One process drives all GPUs. Modes: alone (one GPU to one other, nothing else), fan-out (one GPU to
all others at once), all-at-once (every GPU to all others). Copies are captured in graphs, several
back to back, so that the host is not in the figure. What arrived is compared. Exit codes: 0 right,
1 wrong data, 2 usage, 3 fewer than two GPUs that reach each other.
"""

from __future__ import annotations

import dataclasses
import datetime
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moe_comm.config import EPConfig
from moe_comm.launch import results
from moe_comm.launch.limits import _driver_copy
from moe_comm.launch.results import Row
from moe_comm.launch.timing import percentile

SIZES = (1_000_000, 16_000_000, 256_000_000, 1_000_000_000)
SAMPLES = 7
# A replay lasts about this long, so that what starts it does not show.
_REPLAY_US = 4000.0
DEFINITIONS = {
    "copy": "time of one copy of params.bytes (fan-out: of one to every other GPU, at once; "
    "all-at-once: the slowest GPU's); median of replays of a graph of several in a row",
    "wrong": "bytes that did not arrive as they were sent",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """Who copies to whom: `name` of the mode, `pairs` (source, target)."""

    name: str
    pairs: tuple[tuple[int, int], ...]

    @property
    def ends(self) -> tuple[str, str]:
        """Names of source and target: a number, or all."""
        sources, targets = ({pair[i] for pair in self.pairs} for i in (0, 1))
        first = str(min(sources)) if len(sources) == 1 else "all"
        return first, str(min(targets)) if len(targets) == 1 else "all"


def loads_of(count: int) -> list[Load]:
    """Every load among `count` GPUs; with two a fan-out is a copy alone."""
    each = [(a, b) for a in range(count) for b in range(count) if a != b]
    loads = [Load(name="alone", pairs=(pair,)) for pair in each]
    if count > 2:
        loads += [
            Load(name="fan-out", pairs=tuple(pair for pair in each if pair[0] == source))
            for source in range(count)
        ]
    return [*loads, Load(name="all-at-once", pairs=tuple(each))]


class Copies:
    """Buffers and graphs of one size."""

    def __init__(self, size: int, count: int) -> None:
        self.size, self.copy = size, _driver_copy()
        self.sources, self.targets = {}, {}
        for source in range(count):
            device = torch.device("cuda", source)
            draw = torch.Generator(device).manual_seed(source)
            self.sources[source] = torch.empty(size, dtype=torch.uint8, device=device).random_(
                0, 256, generator=draw
            )
        for source in range(count):
            for target in range(count):
                if source != target:
                    room = torch.zeros(size, dtype=torch.uint8, device=f"cuda:{target}")
                    # Torch's own copy, once: it switches peer access on.
                    room[:1].copy_(self.sources[source][:1])
                    self.targets[source, target] = room
        self.repeats = max(2, min(200, round(_REPLAY_US * 200e3 / size)))

    def measure(self, load: Load) -> tuple[list[float], int]:
        """Microseconds of each sample (the slowest source's), and wrong bytes."""
        for pair in load.pairs:
            self.targets[pair].zero_()
        _synchronize(load)
        graphs = [
            self._capture(source, [pair for pair in load.pairs if pair[0] == source])
            for source in sorted({pair[0] for pair in load.pairs})
        ]
        samples = []
        for index in range(SAMPLES + 1):
            ends = [replay() for replay in graphs]
            _synchronize(load)
            if index:
                samples.append(max(a.elapsed_time(b) for a, b in ends) * 1e3 / self.repeats)
        wrong = sum(
            int((self.targets[s, t] != self.sources[s].to(f"cuda:{t}")).sum())
            for s, t in load.pairs
        )
        return samples, wrong

    def _capture(
        self, source: int, pairs: Sequence[tuple[int, int]]
    ) -> Callable[[], tuple[torch.cuda.Event, torch.cuda.Event]]:
        """A graph of one GPU's copies, a branch a target; what replays it gives its two ends."""
        with torch.cuda.device(source):
            main = torch.cuda.Stream()
            others = [torch.cuda.Stream() for _ in pairs]
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=main, capture_error_mode="thread_local"):
                for stream, pair in zip(others, pairs, strict=True):
                    stream.wait_stream(main)
                    with torch.cuda.stream(stream):
                        for _ in range(self.repeats):
                            self._one(pair)
                for stream in others:
                    main.wait_stream(stream)

        def replay() -> tuple[torch.cuda.Event, torch.cuda.Event]:
            with torch.cuda.device(source), torch.cuda.stream(main):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                graph.replay()
                end.record()
            return begin, end

        return replay

    def _one(self, pair: tuple[int, int]) -> None:
        target: Tensor = self.targets[pair]
        self.copy(target, self.sources[pair[0]])


def _synchronize(load: Load) -> None:
    for device in {end for pair in load.pairs for end in pair}:
        torch.cuda.synchronize(device)


def row_of(load: Load, size: int, samples: Sequence[float], wrong: int | None, count: int) -> Row:
    """The result row of one load; without samples one without figures."""
    peers = max(sum(pair[0] == source for pair in load.pairs) for source, _ in load.pairs)
    median = percentile(samples, 50) if samples else None
    source, target = load.ends
    return Row(
        backend="peer-copy", mode=load.name, phase="copy", layout=None, num_tokens=0, hidden=0,
        num_topk=0, num_experts=0, ep_size=count, wire="none", routing="none", cuda_graph=True,
        params={"from": source, "to": target, "bytes": size, "peers": peers},
        samples=len(samples), p50_us=median, p99_us=percentile(samples, 99) if samples else None,
        slowest_rank_p50_us=median, remote_bytes=size * peers, minimum_bytes=size * peers,
        remote_gbps=size * peers / median / 1e3 if median else None, wrong=wrong,
    )  # fmt: skip


def main(arguments: list[str]) -> int:
    """See the module."""
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    count = int(arguments[1]) if len(arguments) > 1 else found
    reach = all(
        torch.cuda.can_device_access_peer(a, b) for a in range(min(count, found))
        for b in range(min(count, found)) if a != b
    )  # fmt: skip
    if found < max(count, 2) or not reach:
        print(f"matrix_copies: needs {max(count, 2)} GPUs that reach each other, found {found}",
              file=sys.stderr)  # fmt: skip
        return 3
    started = datetime.datetime.now(datetime.UTC)
    rows = []
    for size in SIZES:
        copies = Copies(size, count)
        for load in loads_of(count):
            rows.append(row_of(load, size, *copies.measure(load), count))
            print(rows[-1].mode, rows[-1].params, f"{rows[-1].remote_gbps:.0f} GB/s")
        del copies
        torch.cuda.empty_cache()
    document = results.new_document(
        command="matrix_copies", argv=arguments, started=started,
        devices=[results.device_facts(i, torch.device("cuda", i)) for i in range(count)],
        topology={"num_ranks": count, "num_nodes": 1, "transport": "copy engine"},
        config=EPConfig.preset("kimi-k3"), definitions=DEFINITIONS, rows=rows,
    )  # fmt: skip
    results.write_json(arguments[0], document)
    return 1 if any(row.wrong for row in rows) else 0


if __name__ == "__main__":
    if not 2 <= len(sys.argv) <= 3:
        sys.exit("usage: python -m moe_comm.launch.matrix_copies OUT.json [GPUS]")
    sys.exit(main(sys.argv[1:]))
