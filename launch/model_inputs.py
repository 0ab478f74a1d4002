"""Batches that bench_model forwards: a prompt, and requests in the middle of decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moe_comm.model.layers.kda import KdaState
from moe_comm.model.serving.batch import ForwardBatch, SequenceSlice, StateTensors, make_batch
from moe_comm.model.serving.paged_cache import PagedCache
from moe_comm.model.serving.state_pool import StatePool

if TYPE_CHECKING:
    from moe_comm.launch.model_measure import Bench
    from moe_comm.model.transformer import Transformer

PAGE = 64


def prompt(
    model: Transformer, bench: Bench, num_tokens: int, *, bucket: int | None = None
) -> ForwardBatch:
    """One request of random tokens, another on each rank. The bucket is num_tokens by default."""
    pool, cache = _state(model, 1, num_tokens)
    handles, pages = pool.allocate(1), cache.allocate(model.layout().pages_for(num_tokens))
    assert handles is not None
    assert pages is not None
    generator = torch.Generator().manual_seed(bench.options.seed + bench.ranks.rank)
    tokens = torch.randint(0, model.config.vocab_size, (num_tokens,), generator=generator)
    piece = SequenceSlice(
        token_ids=tuple(tokens.tolist()), start=0, slot=handles[0].slot, pages=pages
    )
    return make_batch([piece], pool=pool, cache=cache.rows, bucket=bucket or num_tokens)


def decoding(model: Transformer, bench: Bench, requests: int, context: int) -> ForwardBatch:
    """`requests` requests with `context` tokens behind them; random state and cache rows."""
    pool, cache = _state(model, requests, context)
    generator = torch.Generator(model.device).manual_seed(bench.options.seed)
    for tensor in pool.tensors.values():
        tensor.normal_(generator=generator).mul_(0.1)
    cache.rows.normal_(generator=generator)
    handles = pool.allocate(requests)
    assert handles is not None
    slices = []
    for i, handle in enumerate(handles):
        pages = cache.allocate(model.layout().pages_for(context + 1))
        assert pages is not None
        token = (7919 * (i + 1) + 31 * bench.ranks.rank) % model.config.vocab_size
        slices.append(
            SequenceSlice(token_ids=(token,), start=context, slot=handle.slot, pages=pages)
        )
    return make_batch(slices, pool=pool, cache=cache.rows, bucket=requests)


def first_kda_state(pool: StateTensors) -> KdaState:
    """The state of the pool's first KDA layer."""
    return KdaState(
        recurrent=pool.recurrent[0],
        conv_q=pool.conv["q"][0],
        conv_k=pool.conv["k"][0],
        conv_v=pool.conv["v"][0],
    )


def _state(model: Transformer, requests: int, context: int) -> tuple[StatePool, PagedCache]:
    layout = model.layout(page_size=PAGE)
    pool = StatePool(layout, requests, device=model.device)
    cache = PagedCache(layout, requests * layout.pages_for(context + 1), device=model.device)
    return pool, cache
