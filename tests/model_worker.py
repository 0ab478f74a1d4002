"""One rank of the whole-model tests: `python model_worker.py CASE DIRECTORY RANK SIZE`.

Each case saves a file `CASE-RANK.pt` into DIRECTORY, where `checkpoint/` holds the weights. A
process of its own, so that every rank has its own default group, as in real use.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from model_cases import State, random_tokens

from moe_comm import create_communicator
from moe_comm.group import Group
from moe_comm.kernels.mxfp4_format import dequantize
from moe_comm.model.config import K3Config
from moe_comm.model.layers.linear import Numerics
from moe_comm.model.layers.norm import situ_and_mul
from moe_comm.model.loading import CheckpointSource, load_model
from moe_comm.model.parallel import Parallel
from moe_comm.model.transformer import Transformer, ep_config
from moe_comm.model.weights.checkpoint import Checkpoint
from moe_comm.model.weights.load_experts import load_experts

# (ranks, tensor-parallel size); the first is the one that others are compared with.
LAYOUTS = ((1, 1), (2, 1), (4, 1), (2, 2), (4, 2), (4, 4))
EXACT_LAYOUTS = ((1, 1), (2, 2), (4, 1), (4, 4))
INVARIANT_LAYOUTS = ((1, 1), (2, 2), (4, 2), (4, 4))
# Requests: name -> lengths of its chunks. Three of them, so that with four data-parallel groups one
# rank is idle throughout; chunks of one token, chunks shorter than the convolution, ends off the
# grid, and steps in which a request has no part.
REQUESTS = {
    "a": (64, 2, 1, 1),
    "b": (5, 0, 20, 1),
    "c": (1, 2, 0, 3),
}
CAPACITY = 48  # below the largest step: slices go through the communicator in rounds


def tiny() -> K3Config:
    """k3-tiny with fewer experts, so that six models load in seconds."""
    return dataclasses.replace(K3Config.preset("k3-tiny"), num_experts=32, num_experts_per_token=4)


def tokens_of(config: K3Config, name: str) -> list[int]:
    if name == "splits":
        return random_tokens(config, 68, seed=5)
    return random_tokens(config, sum(REQUESTS[name]), seed=ord(name))


class ExactExperts:
    """The experts in fp32 throughout: the model's own take bf16 rows, whose rounding would hide a
    small mistake elsewhere."""

    def __init__(self, config, weights):
        self.config, self.weights = config, weights

    def __call__(self, arrived):
        offsets = arrived.expert_offsets.tolist()
        rows = arrived.rows.flatten(0, 1)[arrived.row_index[: offsets[-1]].long()]
        out = torch.empty_like(rows)
        for expert, (start, end) in enumerate(itertools.pairwise(offsets)):
            gate, up, down = (dequantize(*p).float() for p in self.weights.get(expert))
            x = rows[start:end]
            hidden = situ_and_mul(x @ gate.T, x @ up.T, beta=4.0, linear_beta=25.0)
            out[start:end] = hidden @ down.T
        return out


class Run:
    """One model and its state; collects logits and routes by request, token by token."""

    def __init__(self, model, parallel):
        self.model, self.parallel = model, parallel
        self.state = State(model.layout(page_size=16))
        self.logits: dict[str, list[torch.Tensor]] = {}
        self.routes: dict[str, list[tuple[int, int, list[int]]]] = {}

    def step(self, parts, bucket):
        """parts: (name, tokens). Routes are kept of this rank's slice alone: (position, layer,
        sorted ids)."""
        owners = []
        for name, tokens in parts:
            at = self.state.tenants[name][2] if name in self.state.tenants else 0
            owners += [(name, at + i) for i in range(len(tokens))]
        first, last = self.parallel.token_slice(len(owners))
        mine, seen = owners[first:last], {}

        def observe(layer, kind, tensor):
            if kind == "topk_idx":
                start = seen.get(layer, 0)
                for (name, position), ids in zip(mine[start:], tensor.tolist(), strict=False):
                    self.routes.setdefault(name, []).append((position, layer, sorted(ids)))
                seen[layer] = start + tensor.shape[0]

        batch = self.state.batch(parts, bucket=bucket)
        logits = self.model.forward(batch, all_logits=True, observer=observe)
        assert all(count == len(mine) for count in seen.values()), "a token was routed twice"
        for (name, _), row in zip(owners, logits, strict=True):
            self.logits.setdefault(name, []).append(row.clone())

    def result(self):
        return {
            "logits": {n: torch.stack(rows) for n, rows in self.logits.items()},
            "routes": self.routes,
            "recurrent": {
                n: self.state.pool.recurrent[:, tenant[0]].clone()
                for n, tenant in self.state.tenants.items()
            },
            "tp_rank": self.parallel.tp_rank,
        }


def make(directory, config, numerics, parallel, capacity=CAPACITY):
    shape = ep_config(config, max_tokens_per_rank=capacity, numerics=numerics)
    comm = create_communicator(shape, parallel.ep_group)
    return load_model(
        directory / "checkpoint", config, comm=comm, parallel=parallel, numerics=numerics
    ), comm


def make_exact(directory, config, numerics, parallel, capacity=CAPACITY):
    """The model in fp32, experts and wires too."""
    shape = ep_config(
        config,
        max_tokens_per_rank=capacity,
        numerics=numerics,
        dispatch_wire="none",
        combine_wire="none",
    )
    comm = create_communicator(shape, parallel.ep_group)
    ids = [int(e) for e in comm.placement.slots[comm.rank]]
    with Checkpoint(directory / "checkpoint") as checkpoint:
        loaded = load_experts(checkpoint, config, ids, layout="rows")
        return Transformer.build(
            config,
            CheckpointSource(checkpoint, config),
            lambda layer: ExactExperts(config, loaded[layer]),
            comm=comm,
            parallel=parallel,
            numerics=numerics,
            dtype=torch.float32,
        ), comm


def parallel_of(rank, size, tp):
    """`Parallel.create` on the first `size` ranks; every rank makes every group."""
    everyone = dist.new_group(list(range(size)))
    groups = [dist.new_group(list(range(f, f + tp))) for f in range(0, size, tp)]
    return Parallel(
        tp_rank=rank % tp,
        tp_size=tp,
        dp_rank=rank // tp,
        dp_size=size // tp,
        tp_group=groups[rank // tp] if rank < size else None,
        ep_group=everyone,
    )


def placements(directory, rank, numerics, *, layouts=LAYOUTS, build=make):
    """Every layout in turn, on the first of the ranks; teacher-forced steps."""
    config, out = K3Config.from_checkpoint(directory / "checkpoint"), {}
    for size, tp in layouts:
        parallel = parallel_of(rank, size, tp)
        if rank >= size:
            continue
        model, comm = build(directory, config, numerics, parallel)
        run = Run(model, parallel)
        names = [n for i, n in enumerate(REQUESTS) if i % parallel.dp_size == parallel.dp_rank]
        for step in range(4):
            parts = []
            for name in names:
                begin = sum(REQUESTS[name][:step])
                length = REQUESTS[name][step]
                if length:
                    parts.append((name, tokens_of(config, name)[begin : begin + length]))
            run.step(parts, bucket=80)
        comm.check()
        out[size, tp] = run.result()
        comm.destroy()
    return out


def case_fast(directory, rank):
    return placements(directory, rank, Numerics())


def case_placements(directory, rank):
    return {
        "exact": placements(directory, rank, Numerics(), layouts=EXACT_LAYOUTS, build=make_exact),
        "invariant": case_invariant(directory, rank, layouts=INVARIANT_LAYOUTS),
    }


def case_invariant(directory, rank, layouts=LAYOUTS):
    return placements(directory, rank, Numerics(batch_invariant=True), layouts=layouts)


def case_splits(directory, rank):
    """One rank: 68 tokens at once, and prefills of 63, 64, 65 followed by decode."""
    del rank
    config, out = K3Config.from_checkpoint(directory / "checkpoint"), {}
    tokens = tokens_of(config, "splits")
    other = random_tokens(config, 30, seed=6)
    for name, numerics, build in (
        ("bf16", Numerics(), make),
        ("fp32", Numerics(), make_exact),
        ("chunked", Numerics(batch_invariant=True, kda="chunked"), make),
        ("recurrent", Numerics(batch_invariant=True, kda="recurrent"), make),
    ):
        parallel = Parallel.create(1)
        model, comm = build(directory, config, numerics, parallel, capacity=128)
        for cut in (68,) if name == "bf16" else (68, 63, 64, 65):
            run = Run(model, parallel)
            run.step([("a", tokens[:cut])], bucket=128)
            for i in range(cut, 68):
                run.step([("a", tokens[i : i + 1])], bucket=128)
            out[name, cut] = run.result()
        run = Run(model, parallel)
        run.step([("b", other[:9]), ("a", tokens[:64]), ("c", other[:1])], bucket=128)
        run.step([("c", other[1:20]), ("a", tokens[64:]), ("b", other[9:10])], bucket=128)
        out[name, "crowd"] = run.result()
        comm.destroy()
    return out


def case_gpu(directory, rank, devices=("cpu", "cuda")):
    """One rank, 70 tokens and three more, on each device: every layer's outputs, and logits."""
    del rank
    config, out = K3Config.from_checkpoint(directory / "checkpoint"), []
    tokens = random_tokens(config, 73, seed=8)
    for device in devices:
        numerics = Numerics()
        shape = ep_config(config, max_tokens_per_rank=128, numerics=numerics)
        comm = create_communicator(shape, Group(device=device))
        model = load_model(
            directory / "checkpoint", config, comm=comm, numerics=numerics, device=device
        )
        state, seen = State(model.layout(page_size=16), device=device), {}

        def observe(layer, name, tensor, kept=seen):
            kept.setdefault((layer, name), []).append(tensor.cpu())

        for begin, end in ((0, 70), (70, 71), (71, 72), (72, 73)):
            batch = state.batch([("a", tokens[begin:end])], bucket=128)
            model.forward(batch, observer=observe)
        comm.check()
        comm.destroy()
        out.append({key: torch.cat(parts) for key, parts in seen.items()})
    return out


def main() -> None:
    case, directory, rank, size = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if case == "gpu" else "gloo",
        init_method=f"file://{directory}/{case}-store",
        rank=rank,
        world_size=int(size),
        timeout=datetime.timedelta(seconds=120),
    )
    result = globals()[f"case_{case}"](directory, rank)
    torch.save(result, directory / f"{case}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
