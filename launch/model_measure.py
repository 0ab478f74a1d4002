"""What bench_model measures with: one rank's run, its time limits, and the rows so far."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from moe_comm.launch.results import Row
from moe_comm.launch.timing import Statistics, time_calls
from moe_comm.model.config import K3Config
from moe_comm.model.layers.latent_moe import Experts

if TYPE_CHECKING:
    from moe_comm.communicator import Communicator
    from moe_comm.launch.worker import Ranks
    from moe_comm.model.transformer import Transformer

T = TypeVar("T")
FEWEST_SAMPLES = 3
# Of Bench.timer's graphs.
CALLS_IN_A_ROW = 10
# Of a check: a prompt that ends inside a chunk, in a bucket that is timed as well, so that nothing
# is compiled for it alone.
CHECK_TOKENS, CHECK_BUCKET = 100, 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What to run; equal on all ranks. `ep_shapes`: EP sizes whose experts a rank are taken, 0 for
    the ranks' own; `section_s`, `budget_s`: seconds for a section and for all of them."""

    config: K3Config
    ep_shapes: tuple[int, ...]
    sections: tuple[str, ...]
    ports: tuple[str, ...]
    prompt_tokens: int
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    context_requests: int
    overlap_tokens: tuple[int, ...]
    timeline: bool
    backend: str
    implementation: str | None
    graph: bool
    iters: int
    seed: int
    section_s: float
    budget_s: float

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest call on a rank."""
        return max(self.prompt_tokens, *self.batches, *self.overlap_tokens, CHECK_BUCKET)

    def config_at(self, ep: int, num_ranks: int) -> K3Config:
        """The model with as many experts as give a rank what it holds at this EP size."""
        if not ep:
            return self.config
        local = self.config.num_experts // ep
        return dataclasses.replace(self.config, num_experts=local * num_ranks)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """One shape: its communicator, our model on it, the experts. `ep` as in Options."""

    comm: Communicator
    model: Transformer
    experts: Experts
    ep: int


@dataclasses.dataclass(kw_only=True)
class Bench:
    """One rank's run. Every method is collective.

    `save` is called after each section; `left_out` names what there was no time for.
    """

    ranks: Ranks
    options: Options
    save: Callable[[Bench], object]
    rows: list[Row] = dataclasses.field(default_factory=list)
    left_out: list[str] = dataclasses.field(default_factory=list)
    began: float = dataclasses.field(default_factory=time.monotonic)
    _ends: float = float("inf")

    @contextlib.contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Bound what is measured inside, then save."""
        start = time.monotonic()
        self._ends = start + self.options.section_s
        yield
        self._ends = float("inf")
        self.ranks.say(f"== {name}: {time.monotonic() - start:.1f} s")
        self.save(self)

    def left_s(self) -> float:
        """Seconds left of the section and of all; the first rank's count."""
        end = min(self._ends, self.began + self.options.budget_s)
        return float(self.ranks.gather(end - time.monotonic(), what="budget")[0])

    def in_time(self, what: str) -> bool:
        """Whether there is time for this; else it is noted as left out."""
        if self.left_s() > 0:
            return True
        self.ranks.say(f"no time left for {what}")
        self.left_out.append(what)
        return False

    def time(self, call: Callable[[], object], *, graph: bool) -> list[list[float]]:
        """Microseconds of each sample, rank by rank: as many as asked for, fewer where one takes
        so long that half of the time left would not do."""
        with torch.inference_mode():
            self._once(call)
            slowest = max(self.ranks.gather(self._once(call), what="duration"))
            fitting = int(self.left_s() / 2 / slowest)
            iters = max(min(self.options.iters, fitting), FEWEST_SAMPLES)
            mine = time_calls(call, self.ranks, iters=iters, warmup=1, graph=graph)
        return self.ranks.gather(mine, what="samples")

    def _once(self, call: Callable[[], object]) -> float:
        """Seconds of one call."""
        start = time.perf_counter()
        call()
        if self.ranks.device.type != "cpu":
            torch.accelerator.synchronize(self.ranks.device)
        return max(time.perf_counter() - start, 1e-6)

    def timer(self, call: Callable[[], object], *, graph: bool) -> Callable[[], list[float]]:
        """What times the call each time it is called, on all ranks: one sample of this rank in
        microseconds. For calls that are timed in turns.

        Captured, here and once: CALLS_IN_A_ROW of them between two events, over their number, so
        that no event stands between calls; one more goes ahead and absorbs the ranks' skew.
        """
        if not graph:
            return lambda: time_calls(call, self.ranks, iters=1, warmup=1, graph=False)
        start, end = (torch.cuda.Event(enable_timing=True, external=True) for _ in range(2))

        def marked() -> None:
            call()
            start.record()
            for _ in range(CALLS_IN_A_ROW):
                call()
            end.record()

        captured, _ = self.capture(marked, warm=call)

        def replayed() -> list[float]:
            self.replay(captured)
            return [start.elapsed_time(end) * 1e3 / CALLS_IN_A_ROW]

        return replayed

    def capture(
        self, call: Callable[[], T], *, warm: Callable[[], object] | None = None
    ) -> tuple[torch.cuda.CUDAGraph, T]:
        """A CUDA graph of one call, after two eager ones of `warm` (by default the same) on its
        stream, and what the call returned. Nothing has run in it yet."""
        device = self.ranks.device
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                (warm or call)()
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        # thread_local: NCCL's watchdog queries events from a thread of its own meanwhile.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            result = call()
        return graph, result

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        """Run a graph on all ranks, to its end."""
        torch.cuda.synchronize(self.ranks.device)
        self.ranks.gather(None, what="graph replay")
        graph.replay()
        torch.cuda.synchronize(self.ranks.device)

    def add(
        self,
        setup: Setup,
        phase: str,
        samples: list[list[float]],
        *,
        num_tokens: int,
        graph: bool,
        backend: str | None = None,
        **params: Any,
    ) -> Row:
        """Record a row; `num_tokens` a rank, `backend` where it is not the communicator's."""
        config = setup.model.config
        if setup.ep:
            params["per_rank_shape_of_ep"] = setup.ep
        row = Row(
            backend=backend or setup.comm.backend,
            mode=setup.comm.mode if backend is None else "torch",
            phase=phase,
            layout="expert",
            num_tokens=num_tokens,
            hidden=config.routed_expert_hidden_size,
            num_topk=config.num_experts_per_token,
            num_experts=config.num_experts,
            ep_size=self.ranks.num_ranks,
            wire="bf16",
            routing="model",
            cuda_graph=graph,
            params={"layers": config.num_hidden_layers, **params},
            **dataclasses.asdict(Statistics.of(samples)),
        )
        self.rows.append(row)
        self.ranks.say(
            f"{phase} T={num_tokens} {params}: {row.slowest_rank_p50_us:.1f} us"
            f"{' (graph)' if graph else ''}, {row.samples} samples"
        )
        return row
