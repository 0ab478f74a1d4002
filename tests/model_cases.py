"""Random weights, state and batches for tests of the model; seeded, on the CPU."""

from __future__ import annotations

import math

import torch

from moe_comm.model.config import K3Config
from moe_comm.model.serving.batch import SequenceSlice, make_batch
from moe_comm.model.serving.layout import StateLayout
from moe_comm.model.serving.paged_cache import PagedCache
from moe_comm.model.serving.state_pool import StatePool
from moe_comm.model.tensor_names import dense_tensors


class DictSource:
    """A TensorSource over a dictionary."""

    def __init__(self, tensors):
        self.tensors = tensors

    def read(self, spec):
        tensor = self.tensors[spec.name]
        assert tuple(tensor.shape) == spec.shape, spec.name
        return tensor


def random_tensors(config: K3Config, seed: int) -> dict[str, torch.Tensor]:
    """Every dense tensor, in values that bf16 holds exactly, scaled so that activations stay of
    order one; norms near one; decays spread over their range. A_log's padding is poisoned."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    out = {}
    for spec in dense_tensors(config):
        leaf = spec.name.rsplit(".", 2)[-2:] if spec.name.endswith(".weight") else [spec.name]
        if spec.name.endswith("A_log"):
            value = normal(*spec.shape) * 0.5
            value[config.linear_num_heads :] = math.nan
        elif spec.name.endswith("dt_bias"):
            value = normal(*spec.shape) - 2.0
        elif spec.name.endswith("e_score_correction_bias"):
            value = normal(*spec.shape) * 0.02
        elif "norm" in leaf[0]:
            value = 1 + 0.1 * normal(*spec.shape)
        elif "embed" in leaf[0] or "res_proj" in leaf[0]:
            value = normal(*spec.shape)
        else:
            value = normal(*spec.shape) / math.sqrt(math.prod(spec.shape[1:]))
        out[spec.name] = value.bfloat16().float()
    return out


def layout_for(config: K3Config, *, dtype=torch.float32, page_size=16, tp=(0, 1)) -> StateLayout:
    return StateLayout.from_config(
        config,
        page_size=page_size,
        conv_dtype=dtype,
        mla_dtype=dtype,
        tp_rank=tp[0],
        tp_size=tp[1],
    )


class State:
    """A pool and a cache, both poisoned where nothing was written, and one tenant a request."""

    def __init__(self, layout: StateLayout, *, num_slots=6, num_pages=48, device="cpu"):
        self.layout = layout
        self.pool = StatePool(layout, num_slots, device=device, debug=True)
        self.cache = PagedCache(layout, num_pages, device=device, debug=True)
        self.tenants: dict[str, tuple[int, list[int], int]] = {}

    def batch(self, parts: list[tuple[str, list[int]]], *, bucket=None):
        """(request name, its next tokens) in order; new names get a slot and pages."""
        slices = []
        for name, tokens in parts:
            if name not in self.tenants:
                handles = self.pool.allocate(1)
                assert handles is not None
                self.tenants[name] = (handles[0].slot, [], 0)
            slot, pages, at = self.tenants[name]
            missing = self.layout.pages_for(at + len(tokens)) - len(pages)
            if missing > 0:
                new = self.cache.allocate(missing)
                assert new is not None
                pages = [*pages, *new]
            slices.append(
                SequenceSlice(token_ids=tuple(tokens), start=at, slot=slot, pages=tuple(pages))
            )
            self.tenants[name] = (slot, pages, at + len(tokens))
        return make_batch(slices, pool=self.pool, cache=self.cache.rows, bucket=bucket)


def random_tokens(config: K3Config, num: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, config.vocab_size, (num,), generator=generator).tolist()
