"""High throughput's dispatch: what runs on the stream of the copies, and in which order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from interpreter import inside, outside
from test_slab_interpreted import CPU, _world


@outside
def test_order_under_the_interpreter(interpreted) -> None:
    interpreted()


def steps_of(engine: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a dispatch does from here on, in order: launches, copies, and forks of the stream."""
    steps: list[str] = []

    def noted(name: str) -> None:
        real = getattr(engine, name)

        def step(*args: Any, **options: Any) -> Any:
            steps.append(name)
            return real(*args, **options)

        monkeypatch.setattr(engine, name, step)

    for name in ("_dispatch_kernel", "_copy_rows", "_fork", "_copy_word"):
        noted(name)
    return steps


@inside
def test_what_the_kernel_puts_is_told_of_after_it(monkeypatch) -> None:
    """Payloads and given scales are put by the kernel, on the calls' stream: the release of the
    rows, on the other one, has to come after it."""
    world = _world(2, "high-throughput", max_payload_bytes=16)
    steps = steps_of(world.engines[0], monkeypatch)
    payloads = [{"a": torch.arange(9)}, {"a": torch.arange(3)}]
    inputs = world.inputs((9, 3), torch.Generator().manual_seed(21))
    given = [replace(one, payloads=more) for one, more in zip(inputs, payloads, strict=True)]
    want = world.reference.dispatch(given)
    world.check_dispatched(world.dispatch(inputs, payloads=payloads), want)
    assert steps[:5] == ["_fork", "_copy_rows", "_dispatch_kernel", "_fork", "_copy_word"]


@inside
def test_what_is_quantized_on_the_way_is_not_copied(monkeypatch) -> None:
    world = _world(2, "high-throughput", hidden=256, dispatch_wire="fp8", max_tokens_per_rank=24)
    steps = steps_of(world.engines[0], monkeypatch)
    inputs = world.inputs((24, 3), torch.Generator().manual_seed(22))
    want = world.reference.dispatch(inputs)
    world.check_dispatched(world.dispatch(inputs), want)
    assert steps == ["_dispatch_kernel", "_dispatch_kernel"]
    assert world.engines[0].device == CPU
