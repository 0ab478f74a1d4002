"""A request's whole state and logits at one position, and where two of them first differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from moe_comm.model.serving.layout import CONV_GROUPS, StateLayout
from moe_comm.model.serving.paged_cache import PagedCache
from moe_comm.model.serving.requests import StepPlan
from moe_comm.model.serving.scheduler import Scheduler
from moe_comm.model.serving.segments import Segments, slot_views, whole_part
from moe_comm.model.serving.slots import Handle
from moe_comm.model.serving.state_pool import StatePool


@dataclass(frozen=True, kw_only=True)
class Capture:
    """Copies, on the host. `segments` as in `segments.py`; `logits` [vocab] of the last token, or
    None where the state was only taken over, not computed."""

    position: int
    segments: Segments
    logits: torch.Tensor | None


# One request under one mode: captures by position, ascending.
Run = dict[int, Capture]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first place where a capture is not the baseline's. `layer` counts from 0 (None: the
    logits); `position` is the token: of the state, or of the MLA row."""

    layer: int | None
    tensor: str
    position: int
    index: tuple[int, ...]
    expected: float
    got: float
    num_wrong: int
    num_total: int
    max_abs: float

    def __str__(self) -> str:
        where = "logits" if self.layer is None else f"layer {self.layer}, {self.tensor}"
        return (
            f"{where}, position {self.position}, element {list(self.index)}: expected "
            f"{self.expected:.9g}, got {self.got:.9g}; {self.num_wrong} of {self.num_total} "
            f"elements differ, by at most {self.max_abs:.3g}"
        )


class Recorder:
    """Keeps what a scheduler's requests come by, by name and position.

    `runs`: state and logits wherever a token is chosen (an `on_logits` hook). `taken_over`: the
    state that a request begins to compute from when it did not start at zero: restored from the
    prefix cache, brought back from host memory, or imported (call `watch` before each forward).
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.runs: dict[str, Run] = {}
        self.taken_over: dict[str, Run] = {}
        self._seen: set[Handle] = set()

    def __call__(self, name: str, position: int, row: torch.Tensor) -> None:
        self.runs.setdefault(name, {})[position] = self._take(name, position, row)

    def watch(self, plan: StepPlan) -> None:
        """Look at the states that a step is about to advance."""
        for item in plan.work:
            handle = item.tracked.state
            if handle is None or handle in self._seen:
                continue
            self._seen.add(handle)
            if item.start > 0:
                name = item.tracked.name
                capture = self._take(name, item.start, None)
                self.taken_over.setdefault(name, {})[item.start] = capture

    def _take(self, name: str, position: int, row: torch.Tensor | None) -> Capture:
        tracked = self.scheduler.tracked[name]
        assert tracked.state is not None
        pool, cache = self.scheduler.pool, self.scheduler.cache
        return take(pool, cache, tracked.state.slot, tracked.pages, position, row)


def take(
    pool: StatePool,
    cache: PagedCache,
    slot: int,
    pages: Sequence[int],
    position: int,
    logits: torch.Tensor | None,
) -> Capture:
    """Copy a slot and its rows; the caller says how many tokens they hold."""
    part = whole_part(pool.layout)
    segments = {n: v.to("cpu", copy=True) for n, v in slot_views(pool, slot, part).items()}
    segments["mla"] = cache.gather(pages, position).cpu()
    kept = None if logits is None else logits.detach().cpu().clone()
    return Capture(position=position, segments=segments, logits=kept)


def layers_of(
    layout: StateLayout, capture: Capture
) -> Iterator[tuple[int | None, str, torch.Tensor]]:
    """(layer, tensor name, tensor) from the bottom of the network up, the logits last."""
    kda = {layer: i for i, layer in enumerate(layout.kda_layer_ids)}
    mla = {layer: i for i, layer in enumerate(layout.mla_layer_ids)}
    for layer in sorted((*kda, *mla)):
        if layer in kda:
            for name in (*(f"conv.{g}" for g in CONV_GROUPS), "recurrent"):
                yield layer, name, capture.segments[name][kda[layer]]
        else:
            yield layer, "mla", capture.segments["mla"][mla[layer]]
    if capture.logits is not None:
        yield None, "logits", capture.logits


def first_difference(layout: StateLayout, want: Capture, got: Capture) -> Difference | None:
    """The lowest layer's first tensor that is not equal bit for bit; None where all are. NaN equals
    nothing, itself included."""
    # Where one of the two has no logits, the states are compared alone.
    pairs = zip(layers_of(layout, want), layers_of(layout, got), strict=False)
    for (layer, name, expected), (_, _, actual) in pairs:
        if expected.shape == actual.shape and torch.equal(expected, actual):
            continue
        if expected.shape != actual.shape:
            raise ValueError(
                f"{name}: expected shape {tuple(expected.shape)}, got {tuple(actual.shape)}"
            )
        wrong = expected != actual
        index = tuple(int(i) for i in wrong.nonzero()[0])
        position = index[0] if name == "mla" else want.position
        return Difference(
            layer=layer,
            tensor=name,
            position=position,
            index=index,
            expected=float(expected[index]),
            got=float(actual[index]),
            num_wrong=int(wrong.sum()),
            num_total=wrong.numel(),
            max_abs=float((expected.double() - actual.double()).abs().max()),
        )
    return None


def relative_error(layout: StateLayout, want: Capture, got: Capture) -> float:
    """The largest over all layers and tensors of |got - want| / |want|, in the 2-norm."""
    worst = 0.0
    pairs = zip(layers_of(layout, want), layers_of(layout, got), strict=False)
    for (_, _, expected), (_, _, actual) in pairs:
        size = max(float(expected.double().norm()), 1e-30)
        error = float((expected.double() - actual.double()).norm()) / size
        worst = max(worst, error if error == error else float("inf"))
    return worst
