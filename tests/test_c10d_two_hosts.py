"""Under the real torchrun: on this host, and between two network namespaces with a wire between
them, where the bytes that crossed are read from the interfaces."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rank_pool import free_port
from two_host_worker import HIDDEN, ROUNDS, TOKENS

from moe_comm import EPConfig
from moe_comm.launch.rank_data import RankData
from moe_comm.traffic import RoutingTraffic

WORKER = str(Path(__file__).parent / "two_host_worker.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
TIMEOUT_S = 150.0


def read_results(folder: Path, num_ranks: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_ranks)]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **more}


@pytest.mark.slow
def test_under_torchrun(tmp_path):
    command = [
        *TORCHRUN, "--nproc-per-node", "4", "--master-addr", "127.0.0.1",
        "--master-port", str(free_port()), WORKER, str(tmp_path),
    ]  # fmt: skip
    done = subprocess.run(
        command, env=environment(MOE_COMM_RANKS_PER_NODE="2"), capture_output=True, text=True,
        timeout=TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for result in read_results(tmp_path, 4):
        assert result["hierarchical"]["nodes"] == [0, 0, 1, 1]
        crossed = {mode: result[mode]["metrics"]["cross_node_bytes"] for mode in result}
        assert 0 < crossed["hierarchical"] < 0.7 * crossed["exact"]


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


@contextlib.contextmanager
def two_namespaces() -> Iterator[list[tuple[str, str, str]]]:
    """(namespace, interface, address) of two hosts with a veth pair between them."""
    tag = uuid.uuid4().hex[:6]
    hosts = [(f"moe{tag}{end}", f"ve{tag}{end}", f"10.77.0.{i}") for i, end in enumerate("ab", 1)]
    try:
        for name, _, _ in hosts:
            run("ip", "netns", "add", name)
        ends = [link for _, link, _ in hosts]
        run("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        names = "".join(f"{address} {name}\n" for name, _, address in hosts)
        for name, link, address in hosts:
            # `ip netns exec` shows this as /etc/hosts inside: torchrun resolves its host's name.
            folder = Path("/etc/netns") / name
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
            run("ip", "link", "set", link, "netns", name)
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", link)
            run("ip", "-n", name, "link", "set", link, "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
        yield hosts
    finally:
        for name, _, _ in hosts:
            # Its interfaces go with it; what still runs inside is ended by the caller.
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)


@pytest.mark.netns
def test_two_hosts_and_the_wire_between_them(tmp_path):
    port = str(free_port())
    with two_namespaces() as hosts:
        started = []
        for name, link, address in hosts:
            # A host name of its own each, which is how ranks tell their nodes apart.
            command = [
                "ip", "netns", "exec", name, "unshare", "--uts", "--pid", "--mount-proc",
                "--kill-child", "--fork",
                "sh", "-c", f'hostname {name} && exec "$@"', "sh", *TORCHRUN,
                "--nnodes", "2", "--nproc-per-node", "2",
                "--rdzv-backend", "c10d", "--rdzv-id", "moe", "--local-addr", address,
                "--rdzv-endpoint", f"{hosts[0][2]}:{port}", WORKER, str(tmp_path), link,
            ]  # fmt: skip
            started.append(
                subprocess.Popen(
                    command, env=environment(GLOO_SOCKET_IFNAME=link), text=True,
                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                )
            )  # fmt: skip
        try:
            said = [process.communicate(timeout=TIMEOUT_S)[0] for process in started]
        finally:
            for process in started:
                process.kill()
                process.wait()
        assert [process.returncode for process in started] == [0, 0], "\n".join(said)
    results = read_results(tmp_path, 4)
    # The rendezvous gives ranks to nodes in an order of its own.
    nodes = results[0]["exact"]["nodes"]
    assert sorted(nodes) == [0, 0, 1, 1]
    config = EPConfig.preset("kimi-k3", hidden=1, max_tokens_per_rank=TOKENS)
    data = RankData.create_all(config, num_tokens=[TOKENS] * 4)
    traffic = RoutingTraffic.of(
        [given.topk_idx for given in data], config.placement_for(4), node_of_rank=nodes
    )
    flat_rows, node_rows = traffic.rows_between_nodes
    # Every token reaches both ranks of the other node: the wire carries half as much.
    assert node_rows < 0.51 * flat_rows
    first_of_node = [nodes.index(node) for node in (0, 1)]
    for mode, rows in (("exact", flat_rows), ("hierarchical", node_rows)):
        for phase in ("dispatch", "combine"):
            # Both ranks of a node read the same interface.
            crossed = sum(results[rank][mode][phase] for rank in first_of_node) / ROUNDS
            needed = rows * HIDDEN * 2
            # Above the rows: ids and weights (1.9%), packet headers (under 5%), barriers.
            assert needed <= crossed <= 1.09 * needed, (mode, phase, crossed / needed)
