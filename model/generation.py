"""Generate tokens for a fixed set of prompts: prefill in chunks, then decode, all ranks in step.

The serving package has the scheduler; this loop admits everything at once and frees nothing until
the end. Each tensor-parallel group has its own prompts. Every step all ranks agree on the token
bucket; a group that has nothing left takes part with zero tokens.
"""

from __future__ import annotations

import dataclasses

import torch

from moe_comm.model.sampling import Sampling
from moe_comm.model.serving.batch import ForwardBatch, SequenceSlice, make_batch
from moe_comm.model.serving.chunking import chunk_end
from moe_comm.model.serving.paged_cache import PagedCache
from moe_comm.model.serving.state_pool import StatePool
from moe_comm.model.transformer import Transformer

CHUNK_GRID = 64


@dataclasses.dataclass(kw_only=True)
class _Request:
    number: int
    tokens: list[int]
    prompt_length: int
    slot: int
    pages: tuple[int, ...]
    done: int = 0  # tokens whose state is in the slot
    finished: bool = False


def generate(
    model: Transformer,
    prompts: dict[int, list[int]],
    *,
    max_new: int,
    sampling: Sampling | None = None,
    stop_ids: tuple[int, ...] = (),
    step_tokens: int = 8192,
    page_size: int = 64,
) -> dict[int, list[int]]:
    """New tokens of each prompt. Collective over all ranks.

    Args:
        model: this rank's share.
        prompts: number -> token ids, this tensor-parallel group's (equal on its ranks); may be
            empty. Numbers are unique over all groups and seed the random streams.
        max_new: tokens to generate for each prompt, at most.
        sampling: default greedy.
        stop_ids: a request ends after one of these; it is part of the result.
        step_tokens: prompt tokens of one step, at most; at least 64, where kernels may end.
        page_size: of the latent cache.

    Raises:
        ValueError: an empty prompt, or an id outside the vocabulary.
    """
    _check(model, prompts, max_new=max_new, step_tokens=step_tokens)
    sampling = Sampling() if sampling is None else sampling
    layout = model.layout(page_size=page_size)
    needed = {n: layout.pages_for(len(ids) + max_new) for n, ids in prompts.items()}
    pool = StatePool(layout, max(1, len(prompts)), device=model.device)
    cache = PagedCache(layout, max(1, sum(needed.values())), device=model.device)
    requests = []
    for number, ids in prompts.items():
        handles, pages = pool.allocate(1), cache.allocate(needed[number])
        assert handles is not None, "the pool was sized for all prompts"
        assert pages is not None, "the cache was sized for all prompts"
        requests.append(
            _Request(
                number=number,
                tokens=list(ids),
                prompt_length=len(ids),
                slot=handles[0].slot,
                pages=pages,
                finished=max_new == 0,
            )
        )
    while True:
        parts = _next_parts(requests, step_tokens)
        bucket = agreed_bucket(model, sum(end - r.done for r, end in parts))
        if bucket == 0:
            break
        logits = model.forward(_batch(parts, pool, cache, bucket))
        _advance(model, parts, logits, sampling, max_new=max_new, stop_ids=stop_ids)
    return {r.number: r.tokens[r.prompt_length :] for r in requests}


def agreed_bucket(model: Transformer, num_tokens: int) -> int:
    """The next power of two at or above the largest token count of any rank; 0 where no rank has
    work. Collective."""
    largest = model.parallel.largest(num_tokens, model.device)
    return 1 << (largest - 1).bit_length() if largest else 0


def _next_parts(requests: list[_Request], step_tokens: int) -> list[tuple[_Request, int]]:
    """(request, end) of this step: every decoding request, then prompts while tokens are left."""
    active = [r for r in requests if not r.finished]
    parts = [(r, len(r.tokens)) for r in active if r.done >= r.prompt_length]
    budget = step_tokens
    for request in active:
        if request.done < request.prompt_length and budget > 0:
            end = chunk_end(request.done, request.prompt_length, budget=budget, grid=CHUNK_GRID)
            if end is None:
                break
            parts.append((request, end))
            budget -= end - request.done
    return parts


def _batch(
    parts: list[tuple[_Request, int]], pool: StatePool, cache: PagedCache, bucket: int
) -> ForwardBatch:
    slices = [
        SequenceSlice(
            token_ids=tuple(r.tokens[r.done : end]), start=r.done, slot=r.slot, pages=r.pages
        )
        for r, end in parts
    ]
    return make_batch(slices, pool=pool, cache=cache.rows, bucket=bucket)


def _advance(
    model: Transformer,
    parts: list[tuple[_Request, int]],
    logits: torch.Tensor,
    sampling: Sampling,
    *,
    max_new: int,
    stop_ids: tuple[int, ...],
) -> None:
    rows = [i for i, (r, end) in enumerate(parts) if end == len(r.tokens)]
    for request, end in parts:
        request.done = end
    if not rows:
        return
    ready = [parts[i][0] for i in rows]
    if len(rows) < len(parts):
        logits = logits[torch.tensor(rows, device=logits.device)]
    chosen = sampling.choose(logits, [(r.number, len(r.tokens)) for r in ready])
    for request, token in zip(ready, _same_on_group(model, chosen), strict=True):
        request.tokens.append(token)
        new = len(request.tokens) - request.prompt_length
        request.finished = new >= max_new or token in stop_ids


def _same_on_group(model: Transformer, chosen: list[int]) -> list[int]:
    """The first rank's choice for the whole tensor-parallel group: a tie broken by a last bit must
    not let its ranks part."""
    if model.parallel.tp_size == 1:
        return chosen
    ids = torch.tensor(chosen, dtype=torch.int64, device=model.device)
    return [int(i) for i in model.parallel.from_first(ids).cpu()]


def _check(
    model: Transformer, prompts: dict[int, list[int]], *, max_new: int, step_tokens: int
) -> None:
    if max_new < 0:
        raise ValueError(f"max_new: expected at least 0, got {max_new}")
    if step_tokens < CHUNK_GRID:
        raise ValueError(f"step_tokens: expected at least {CHUNK_GRID}, got {step_tokens}")
    vocab, most = model.config.vocab_size, model.config.max_position_embeddings
    for number, ids in prompts.items():
        if not ids:
            raise ValueError(f"prompts[{number}]: expected at least one token, got none")
        wrong = next((i for i in ids if not 0 <= i < vocab), None)
        if wrong is not None:
            raise ValueError(f"prompts[{number}]: expected ids in [0, {vocab}), got {wrong}")
        if len(ids) + max_new > most:
            raise ValueError(
                f"prompts[{number}]: expected at most {most} tokens with the new ones, "
                f"got {len(ids) + max_new}"
            )
