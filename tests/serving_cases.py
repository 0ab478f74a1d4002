"""A small hybrid sequence model and helpers for tests of the state pool and what is built on it.

The model is a test model, not the transformer: the same kinds of state (convolution windows, a
gated delta-rule state with Dk != Dv, paged MLA rows), written as plain loops over tokens in
float64. Its results therefore do not depend on the batch or on how a prompt is cut, and every byte
of state reaches the logits: comparisons can be exact.
"""

from __future__ import annotations

import torch

from moe_comm.model.serving.engine import Engine
from moe_comm.model.serving.layout import StateLayout
from moe_comm.model.serving.paged_cache import PagedCache
from moe_comm.model.serving.prefix_cache import PrefixCache
from moe_comm.model.serving.scheduler import Scheduler, SchedulerConfig
from moe_comm.model.serving.state_pool import StatePool

VOCAB, HIDDEN = 61, 12


def small_layout(**changes) -> StateLayout:
    """KDA, MLA, KDA; 4 heads, Dk 5, Dv 3, windows of 3; pages of 8 tokens on a grid of 8."""
    fields = {
        "kda_layer_ids": (0, 2),
        "mla_layer_ids": (1,),
        "num_heads": 4,
        "head_dim_k": 5,
        "head_dim_v": 3,
        "conv_width": 4,
        "conv_dtype": torch.bfloat16,
        "mla_width": 6,
        "mla_dtype": torch.bfloat16,
        "page_size": 8,
        "chunk_size": 8,
        "model_id": "test",
    }
    return StateLayout(**{**fields, **changes})


class SmallHybrid:
    """`forward(batch)` as the transformer's: advances state in place, returns last-token logits."""

    def __init__(self, layout: StateLayout, *, seed: int = 0, device="cpu") -> None:
        assert layout.tp_size == 1
        self.layout, self.device = layout, torch.device(device)
        draw = torch.Generator().manual_seed(seed)

        def weight(*shape):
            drawn = torch.randn(*shape, generator=draw, dtype=torch.float64) / shape[0] ** 0.5
            return drawn.to(device)

        self.embed, self.head = weight(VOCAB, HIDDEN) * VOCAB**0.5, weight(HIDDEN, VOCAB)
        self.kda, self.mla = [], []
        heads = layout.num_heads
        widths = {g: heads * layout.channels(g) for g in "qkv"}
        for _ in layout.kda_layer_ids:
            self.kda.append(
                {
                    "proj": {g: weight(HIDDEN, widths[g]) for g in "qkv"},
                    "taps": {g: weight(layout.conv_width, widths[g]) for g in "qkv"},
                    "decay": weight(HIDDEN, heads * layout.head_dim_k),
                    "beta": weight(HIDDEN, heads),
                    "out": weight(widths["v"], HIDDEN),
                }
            )
        for _ in layout.mla_layer_ids:
            width = layout.mla_width
            self.mla.append(
                {
                    "row": weight(HIDDEN, width),
                    "q": weight(HIDDEN, width),
                    "o": weight(width, HIDDEN),
                }
            )

    def forward(self, batch) -> torch.Tensor:
        logits = torch.empty(batch.num_seqs, VOCAB, device=self.device)
        begin = 0
        for i, (length, start) in enumerate(zip(batch.lengths, batch.starts, strict=True)):
            slot, pages = int(batch.slots[i]), batch.block_tables[i].tolist()
            for t in range(length):
                x = self.embed[batch.token_ids[begin + t]]
                kda, mla = 0, 0
                for layer in range(len(self.kda) + len(self.mla)):
                    if layer in self.layout.mla_layer_ids:
                        x = x + self._mla(mla, x, batch.cache[mla], pages, start + t)
                        mla += 1
                    else:
                        x = x + self._kda(kda, x, batch.pool, slot)
                        kda += 1
                    x = x / (1 + x.abs().mean())
            logits[i] = (x @ self.head).float()
            begin += length
        return logits

    def _kda(self, at, x, pool, slot):
        weights, layout = self.kda[at], self.layout
        mixed = {}
        for group in "qkv":
            window = pool.conv[group][at, slot]
            new = (x @ weights["proj"][group]).to(window.dtype)
            rows = torch.cat([window, new[:, None]], dim=1)
            mixed[group] = torch.tanh((rows.double() * weights["taps"][group].T).sum(1))
            window.copy_(rows[:, 1:])
        q, k = (mixed[g].view(layout.num_heads, layout.head_dim_k) for g in "qk")
        v = mixed["v"].view(layout.num_heads, layout.head_dim_v)
        k = k / (k.norm(dim=1, keepdim=True) + 1e-6)
        decay = torch.exp(-torch.sigmoid((x @ weights["decay"]).view_as(k)))
        beta = torch.sigmoid(x @ weights["beta"])
        state = pool.recurrent[at, slot]
        s = state.double() * decay[:, :, None]
        error = v - torch.einsum("hk,hkv->hv", k, s)
        s = s + beta[:, None, None] * k[:, :, None] * error[:, None, :]
        state.copy_(s)
        return torch.einsum("hk,hkv->hv", q, s).reshape(-1) @ weights["out"]

    def _mla(self, at, x, rows, pages, position):
        weights, size = self.mla[at], self.layout.page_size
        rows[pages[position // size], position % size] = (x @ weights["row"]).to(rows.dtype)
        table = torch.tensor(pages[: position // size + 1], device=self.device)
        seen = rows[table].reshape(-1, rows.shape[-1])[: position + 1].double()
        share = torch.softmax(seen @ (x @ weights["q"]), dim=0)
        return (share @ seen) @ weights["o"]


def prompt(length: int, seed: int = 1) -> tuple[int, ...]:
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, VOCAB, (length,), generator=draw).tolist())


class Server:
    """Pool, cache, prefix cache, scheduler and engine around the small model, in debug mode."""

    def __init__(
        self,
        layout: StateLayout | None = None,
        *,
        num_slots: int = 8,
        num_pages: int = 64,
        token_budget: int = 24,
        max_seqs: int = 4,
        prefix: bool = True,
        clock=None,
        model=None,
        group=None,
        **config,
    ) -> None:
        self.layout = layout or small_layout()
        self.pool = StatePool(self.layout, num_slots, debug=True)
        self.cache = PagedCache(self.layout, num_pages, debug=True)
        self.prefixes = PrefixCache(self.pool, self.cache) if prefix else None
        self.scheduler = Scheduler(
            self.pool,
            self.cache,
            SchedulerConfig(token_budget=token_budget, max_seqs=max_seqs, **config),
            prefixes=self.prefixes,
        )
        self.logits: dict[str, dict[int, torch.Tensor]] = {}
        self.model = model or SmallHybrid(self.layout)
        self.engine = Engine(
            self.model,
            self.scheduler,
            group=group,
            on_logits=lambda name, at, row: self.logits.setdefault(name, {}).update({at: row}),
            clock=clock or (lambda: 1e9),
        )

    def run(self, *requests, max_steps: int = 2000) -> None:
        for request in requests:
            self.scheduler.submit(request)
        self.engine.run(max_steps=max_steps)

    def tokens(self, name: str) -> list[int]:
        return self.scheduler.tracked[name].generated

    def expect_empty(self) -> None:
        """Nothing is in use but what the prefix cache holds; and that can be dropped."""
        self.scheduler.audit()
        if self.prefixes is not None:
            assert self.prefixes.clear()
        assert self.pool.audit().in_use == 0
        assert self.cache.audit().used == 0


_ALONE: dict[tuple, dict[int, torch.Tensor]] = {}


def alone(request) -> dict[int, torch.Tensor]:
    """Logits by position of a request that runs by itself, without a prefix cache."""
    key = (request.prompt, request.max_new_tokens, request.forced)
    if key not in _ALONE:
        server = Server(prefix=False, token_budget=4096, max_seqs=1)
        server.run(request)
        _ALONE[key] = server.logits[request.name]
    return _ALONE[key]


def assert_same_logits(got: dict, want: dict, name: str = "") -> None:
    assert got.keys() == want.keys(), name
    for position, row in want.items():
        assert torch.equal(got[position], row), f"{name}: position {position}"
