"""k3-tiny on two CPU ranks: many requests together, then each alone; a JSON report on stdout.

    python serving_ranks.py NUM_REQUESTS CHECKPOINT

Batch-invariant mode, teacher-forced: a request's logits must be the same bits in both runs.
"""

from __future__ import annotations

import json
import os
import random
import socket
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from moe_comm import create_communicator
from moe_comm.model.config import K3Config
from moe_comm.model.layers.linear import Numerics
from moe_comm.model.loading import load_model
from moe_comm.model.parallel import Parallel
from moe_comm.model.serving.engine import Engine
from moe_comm.model.serving.paged_cache import PagedCache
from moe_comm.model.serving.prefix_cache import PrefixCache
from moe_comm.model.serving.requests import Phase, Request
from moe_comm.model.serving.scheduler import Scheduler, SchedulerConfig
from moe_comm.model.serving.state_pool import StatePool
from moe_comm.model.transformer import ep_config

RANKS, SHARED = 2, 70


def make(num: int, vocab: int) -> list[Request]:
    draw = random.Random(5)
    shared = [draw.randrange(vocab) for _ in range(SHARED)]
    out = []
    for i in range(num):
        own = [draw.randrange(vocab) for _ in range(draw.choice((1, 2, 3, 5, 9, 17)))]
        forced = tuple(draw.randrange(vocab) for _ in range(draw.randint(1, 3)))
        # Most begin alike; some are short and share nothing.
        prompt = own if i % 7 == 3 else [*shared, *own]
        out.append(
            Request(name=f"r{i}", prompt=tuple(prompt), max_new_tokens=len(forced), forced=forced)
        )
    return out


def serve(model, requests, *, together: bool):
    """(logits by name and position, scheduler). Collective."""
    layout = model.layout()
    pool = StatePool(layout, 12, debug=True)
    cache = PagedCache(layout, 24, debug=True)
    config = SchedulerConfig(
        token_budget=80 if together else 256, max_seqs=5 if together else 1, tail_snapshots=False
    )
    prefixes = PrefixCache(pool, cache) if together else None
    scheduler = Scheduler(pool, cache, config, prefixes=prefixes)
    for request in requests:
        scheduler.submit(request)
    logits: dict = {}
    engine = Engine(
        model,
        scheduler,
        group=dist.group.WORLD,
        on_logits=lambda name, at, row: logits.setdefault(name, {}).update({at: row.clone()}),
    )
    engine.run(max_steps=20_000)
    scheduler.audit()
    if prefixes is not None:
        assert prefixes.clear()
    assert pool.audit().in_use == 0
    assert cache.audit().used == 0
    return logits, scheduler


def rank_main(rank: int, port: int, num: int, directory: str, reports) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    config, numerics = K3Config.from_checkpoint(directory), Numerics(batch_invariant=True)
    shape = ep_config(config, max_tokens_per_rank=256, numerics=numerics, timeout_s=120)
    with create_communicator(shape, backend="c10d") as comm:
        model = load_model(
            directory, config, comm=comm, parallel=Parallel.create(1), numerics=numerics
        )
        # Rank 1 has one request less: it idles at the end of both runs.
        mine = make(num, config.vocab_size)[: num - 1][rank::RANKS]
        got, scheduler = serve(model, mine, together=True)
        want, _ = serve(model, mine, together=False)
    stats = scheduler.prefixes.stats()
    reports.put(
        {
            "rank": rank,
            "requests": len(mine),
            "finished": sum(t.phase is Phase.FINISHED for t in scheduler.tracked.values()),
            "unequal": [
                name
                for name, rows in want.items()
                if got[name].keys() != rows.keys()
                or not all(torch.equal(got[name][at], row) for at, row in rows.items())
            ],
            "rows": sum(len(rows) for rows in want.values()),
            "hit_rate": stats.tokens_hit / stats.tokens_asked,
            "hits": stats.hits,
        }
    )
    dist.destroy_process_group()


def main() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("spawn")
    reports = context.SimpleQueue()
    mp.spawn(rank_main, args=(port, int(sys.argv[1]), sys.argv[2], reports), nprocs=RANKS)
    print(json.dumps(sorted((reports.get() for _ in range(RANKS)), key=lambda r: r["rank"])))


if __name__ == "__main__":
    main()
