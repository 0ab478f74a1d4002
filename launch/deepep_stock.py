"""DeepEP V1 by itself beside the adapted one, on two GPUs of a host, under torchrun.

    torchrun --standalone --nproc-per-node 2 -m moe_comm.launch.deepep_stock OUT.json

1. Its high throughput at 256 experts, top-8, hidden 3584, 4096 tokens a rank, bf16: dispatch (with
the layout) and combine. 2. The adapted one at 896 experts and top-16, checked against the same call
of c10d. Transport alone is what corresponds to 1: dispatch of messages that are there, with their
routing, and combine of partial sums that are there; packing, unpacking and indexing, and the sum
per rank, are timed apart, and so is the whole. 3. Its own errors at 896 experts, top-16, hidden
3584, in both modes. All by events around eager calls that ranks begin together; medians of the
slowest rank, in microseconds. The file is written after each step. Exit code 1 where results
differ.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from moe_comm import backends
from moe_comm.backends import deepep_facts, device_math
from moe_comm.config import EPConfig
from moe_comm.errors import BackendUnavailableError
from moe_comm.launch import spawn
from moe_comm.launch.experts import expert_factors, expert_step
from moe_comm.launch.rank_data import RankData
from moe_comm.launch.results import device_facts
from moe_comm.launch.timing import Statistics, time_calls
from moe_comm.launch.worker import Ranks, run_rank

TOKENS, HIDDEN = 4096, 3584
ITERS, WARMUP = 40, 5


def main(argv: Sequence[str] | None = None) -> int:
    """Run on this rank; rank 0 writes the file."""
    (path,) = sys.argv[1:] if argv is None else argv
    return run_rank(lambda ranks: _body(ranks, path), device_type="cuda", timeout_s=60.0)


def _body(ranks: Ranks, path: str) -> int:
    if ranks.num_ranks != 2:
        raise BackendUnavailableError(f"expected 2 ranks, got {ranks.num_ranks}")
    library = deepep_facts.import_library()
    installed = deepep_facts.find()
    document: dict[str, Any] = {
        "version": installed.version if installed else "",
        "device": device_facts(ranks.rank, ranks.device)["name"],
        "num_ranks": ranks.num_ranks,
        "torch": torch.__version__,
        "libraries": deepep_facts.loaded_libraries(),
        "num_tokens": TOKENS,
        "hidden": HIDDEN,
    }
    # Measured first: a refusal may leave the library in a state that it does not leave again.
    for name, step in (("stock", _stock), ("adapted", _adapted), ("refusals", _refusals)):
        document[name] = step(ranks, library)
        if name == "adapted":
            document["of_stock"] = _compared(document)
        ranks.say(f"{name}: {document[name]}")
        if ranks.is_first:
            Path(path).write_text(json.dumps(document, indent=1) + "\n")
    ranks.say(f"of stock: {document['of_stock']}")
    return 0 if document["adapted"]["wrong_elements"] == 0 else 1


def _compared(document: dict[str, Any]) -> dict[str, float]:
    """Times of the adapted one over those of the library by itself."""
    stock, adapted = document["stock"], document["adapted"]
    own = stock["dispatch_us"] + stock["combine_us"]
    back = adapted["combine_transport_us"]
    return {
        "transport": (adapted["dispatch_transport_us"] + back) / own,
        "with_packing_and_index": (adapted["dispatch_us"] + back) / own,
        "whole": adapted["round_trip_us"] / own,
    }


def _median(ranks: Ranks, call: Callable[[], Any]) -> float:
    mine = time_calls(call, ranks, iters=ITERS, warmup=WARMUP, graph=False)
    return Statistics.of(ranks.gather(mine)).slowest_rank_p50_us


def _buffer(ranks: Ranks, library: Any, row_bytes: int) -> Any:
    configs = (
        library.Buffer.get_dispatch_config(ranks.num_ranks),
        library.Buffer.get_combine_config(ranks.num_ranks),
    )
    size = max(c.get_nvl_buffer_size_hint(row_bytes, ranks.num_ranks) for c in configs)
    with deepep_facts.environment():
        return library.Buffer(ranks.group.pg, num_nvl_bytes=size, explicitly_destroy=True)


def _stock(ranks: Ranks, library: Any) -> dict[str, float]:
    config = EPConfig(num_experts=256, num_topk=8, hidden=HIDDEN, max_tokens_per_rank=TOKENS)
    data = _data(ranks, config)
    buffer = _buffer(ranks, library, 2 * HIDDEN)
    idx, weights = data.topk_idx.to(library.topk_idx_t), data.topk_weights

    def dispatch() -> Any:
        per_rank, _, per_expert, goes, _ = buffer.get_dispatch_layout(idx, config.num_experts)
        return buffer.dispatch(
            data.x, num_tokens_per_rank=per_rank, is_token_in_rank=goes,
            num_tokens_per_expert=per_expert, topk_idx=idx, topk_weights=weights,
        )  # fmt: skip

    rows, _, row_weights, _, handle, _ = dispatch()
    times = {
        "dispatch_us": _median(ranks, dispatch),
        "combine_us": _median(ranks, lambda: buffer.combine(rows, handle, row_weights)),
    }
    buffer.destroy()
    return times


def _adapted(ranks: Ranks, library: Any) -> dict[str, Any]:
    del library
    config = EPConfig(num_experts=896, num_topk=16, hidden=HIDDEN, max_tokens_per_rank=TOKENS)
    data = _data(ranks, config)
    with backends.load("c10d").build(config, ranks.group, "exact") as plain:
        arrived = plain.dispatch(data.x, data.topk_idx, data.topk_weights)
        factors = expert_factors(config.num_experts, ranks.device)
        y = expert_step(arrived, factors[plain.placement.local_expert_ids(ranks.rank)])
        want = plain.combine(y, arrived.handle)
        plain.check()
    with backends.load("deepep").build(config, ranks.group, "v1-ht") as comm:
        transport = comm.transport
        sent: list[tuple[Any, ...]] = []
        send = transport.dispatch

        def recording(*given: Any) -> Any:
            sent.append(given)
            return send(*given)

        def dispatch() -> Any:
            handle = comm.dispatch(data.x, data.topk_idx, data.topk_weights).handle
            handle.release()
            return handle

        def round_trip() -> Any:
            return comm.combine(y, comm.dispatch(data.x, data.topk_idx, data.topk_weights).handle)

        # Rows of both lie in one order, so one y serves; two ranks' terms add to the same bits.
        wrong = int((round_trip() != want).sum())
        comm.check()
        transport.dispatch = recording
        handle = dispatch()
        transport.dispatch = send
        ((messages, _, bucket),) = sent
        (way,) = handle.state.ways
        terms = torch.zeros(
            way.place.shape[0], transport.hidden, dtype=torch.bfloat16, device=ranks.device
        )
        weights, position = handle.received_weights.flatten(0, 1), handle.choice_position
        sums = torch.empty(position.shape[0], HIDDEN, dtype=torch.bfloat16, device=ranks.device)

        def travel() -> Any:
            # A route of its own each time, as the layout is the library's own.
            return list(send(messages, transport.route(handle.state.located.rank), bucket))

        times = {
            "dispatch_transport_us": _median(ranks, travel),
            "combine_transport_us": _median(ranks, lambda: transport.combine(way, terms, ())),
            "dispatch_us": _median(ranks, dispatch),
            "partial_sums_us": _median(
                ranks,
                lambda: device_math.partial_sums(
                    y, weights, position, weights_applied=False, fill_empty=False, out=sums
                ),
            ),
            "round_trip_us": _median(ranks, round_trip),
        }
    return {**times, "wrong_elements": sum(ranks.gather(wrong))}


def _refusals(ranks: Ranks, library: Any) -> dict[str, str]:
    """The library's own errors, raised on the host, at the shape that this project is for."""
    config = EPConfig(num_experts=896, num_topk=16, hidden=HIDDEN, max_tokens_per_rank=128)
    data = _data(ranks, config)
    idx = data.topk_idx.to(library.topk_idx_t)
    buffer = _buffer(ranks, library, 2 * HIDDEN)

    def high_throughput() -> None:
        per_rank, _, per_expert, goes, _ = buffer.get_dispatch_layout(idx, config.num_experts)
        buffer.dispatch(
            data.x, num_tokens_per_rank=per_rank, is_token_in_rank=goes,
            num_tokens_per_expert=per_expert, topk_idx=idx, topk_weights=data.topk_weights,
        )  # fmt: skip

    size = library.Buffer.get_low_latency_rdma_size_hint(128, 4096, ranks.num_ranks, 896)
    with deepep_facts.environment():
        low = library.Buffer(
            ranks.group.pg, num_rdma_bytes=size, low_latency_mode=True,
            num_qps_per_rank=896 // ranks.num_ranks, explicitly_destroy=True,
        )  # fmt: skip
    calls: dict[str, Callable[[], Any]] = {
        "low latency, top-16": lambda: low.low_latency_dispatch(
            torch.zeros(128, 4096, dtype=torch.bfloat16, device=ranks.device), idx, 128, 896,
            use_fp8=False,
        ),
        "low latency, hidden 3584": lambda: low.low_latency_dispatch(
            data.x, idx[:, :8].contiguous(), 128, 896, use_fp8=False
        ),
        "high throughput, 896 experts": high_throughput,
    }  # fmt: skip
    said = {}
    for name, call in calls.items():
        try:
            call()
            said[name] = "no error"
        except (RuntimeError, AssertionError) as error:
            said[name] = f"{type(error).__name__}: {error}".strip()
    return said


def _data(ranks: Ranks, config: EPConfig) -> Any:
    tokens = [config.max_tokens_per_rank] * ranks.num_ranks
    return RankData.create_all(
        config, num_tokens=tokens, routing="uniform", seed=1, device=ranks.device
    )[ranks.rank]


if __name__ == "__main__":
    spawn.leave(main())
