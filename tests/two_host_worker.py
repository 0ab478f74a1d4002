"""One rank under torchrun: dispatch and combine, checked, and the bytes that crossed the host's own
interface while it ran. Writes {rank}.json into the folder it is given."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_comm import EPConfig, Group, create_communicator
from moe_comm.launch.experts import expert_factors, expert_step
from moe_comm.launch.oracle import expected_combine, expected_dispatch
from moe_comm.launch.rank_data import RankData

TOKENS, HIDDEN, ROUNDS = 96, 3584, 3


def interface_bytes(name: str | None) -> int:
    """Bytes that left by the interface; 0 where none is given."""
    if name is None:
        return 0
    return int(Path(f"/sys/class/net/{name}/statistics/tx_bytes").read_text())


def measure(mode: str, interface: str | None) -> dict[str, Any]:
    """A warm-up round, checked; then ROUNDS of dispatch, and as many of combine, counted apart."""
    config = EPConfig.preset(
        "kimi-k3",
        hidden=HIDDEN,
        max_tokens_per_rank=TOKENS,
        reduction="node" if mode == "hierarchical" else "rank",
    )
    group = Group()
    data = RankData.create_all(config, num_tokens=[TOKENS] * group.num_ranks)
    mine = data[group.rank]
    counted = {"nodes": list(group.node_of_rank), "dispatch": 0, "combine": 0}
    with create_communicator(config, group, f"c10d:{mode}") as comm:
        placement = comm.placement
        factors = expert_factors(config.num_experts)[placement.local_expert_ids(comm.rank)]
        for phase_round in range(ROUNDS + 1):
            dist.barrier()
            start = interface_bytes(interface)
            d = comm.dispatch(mine.x, mine.topk_idx, mine.topk_weights)
            dist.barrier()
            between = interface_bytes(interface)
            y = expert_step(d, factors)
            dist.barrier()
            later = interface_bytes(interface)
            out = comm.combine(y, d.handle)
            dist.barrier()
            end = interface_bytes(interface)
            if phase_round == 0:
                check(config, data, d, out, group)
                continue
            counted["dispatch"] += between - start
            counted["combine"] += end - later
        counted["metrics"] = comm.metrics()
    return counted


def check(config: EPConfig, data: list[RankData], d: Any, out: torch.Tensor, group: Group) -> None:
    """Bit for bit against what this rank must get."""
    placement = config.placement_for(group.num_ranks)
    want = expected_dispatch(config, data, placement, rank=group.rank, bucket=TOKENS)
    assert torch.equal(d.rows[want.reached], want.values[want.reached])
    assert torch.equal(d.topk_idx.long(), want.local_idx)
    total = int(d.expert_offsets[-1])
    assert torch.equal(d.row_index[:total].long(), want.row_index)
    expected = expected_combine(
        config, data[group.rank], placement, node_of_rank=group.node_of_rank
    )
    assert torch.equal(out, expected)


def main() -> None:
    folder, interface = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = {mode: measure(mode, interface) for mode in ("exact", "hierarchical")}
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
