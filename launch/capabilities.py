"""The checks behind `moe-bench doctor`: each looks at a Machine and returns a Finding."""

from __future__ import annotations

from dataclasses import dataclass

from moe_comm import backends, env
from moe_comm.config import EPConfig
from moe_comm.launch.machine import Machine
from moe_comm.launch.modes import modes_of
from moe_comm.negotiate import supports
from moe_comm.topology import Topology

PASS, WARN, FAIL = "PASS", "WARN", "FAIL"
# KDA kernels reached MATE with this version.
_MATE = (0, 2, 5)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line: `capability`, `verdict` (PASS, WARN, FAIL), what was found, and the fix."""

    capability: str
    verdict: str
    detail: str
    fix: str = ""


def accelerators(machine: Machine, config: EPConfig, ep_size: int) -> Finding:
    """Devices, and whether they reach each other's memory."""
    del config
    name = "accelerators and links"
    if machine.platform == "cpu" and machine.versions.get("torch_musa"):
        return Finding(
            capability=name,
            verdict=FAIL,
            detail=f"torch_musa {machine.versions['torch_musa']} is installed and finds no device",
            fix="check the MUSA driver (mthreads-gmi) and that torch_musa matches torch",
        )
    if machine.platform == "cpu":
        return Finding(
            capability=name,
            verdict=WARN,
            detail=f"no accelerator; {machine.cores} CPU cores serve for checks, not for speed",
            fix="on a GPU machine, install torch for its accelerator: "
            "python -c 'import torch; print(torch.accelerator.is_available())' must say True",
        )
    names = ", ".join(dict.fromkeys(machine.device_names))
    have = f"{machine.num_devices} {machine.platform} devices: {names}"
    if machine.num_devices < ep_size:
        return Finding(
            capability=name,
            verdict=WARN,
            detail=f"{have}; {ep_size} ranks need more hosts",
            fix=f"start torchrun on several hosts, or use --ep {machine.num_devices}",
        )
    if machine.num_devices == 1:
        return Finding(capability=name, verdict=PASS, detail=f"{have}; one device needs no link")
    if machine.peer_access is None:
        return Finding(
            capability=name,
            verdict=WARN,
            detail=f"{have}; nothing here tells whether they reach each other's memory",
            fix="run moe-bench check: collectives work without direct access, only slower",
        )
    links = f"; links {', '.join(machine.links)}" if machine.links else ""
    if not all(all(row) for row in machine.peer_access):
        return Finding(
            capability=name,
            verdict=WARN,
            detail=f"{have}; some pairs have no peer access{links}",
            fix="enable peer access (IOMMU or ACS settings, same root complex or NVLink); without "
            "it the c10d backend over NCCL serves",
        )
    if machine.links and not any(link.startswith("NV") for link in machine.links):
        return Finding(
            capability=name,
            verdict=WARN,
            detail=f"{have}; peers reach each other over PCIe alone{links}",
            fix="expect PCIe speed, or use a machine with NVLink",
        )
    return Finding(
        capability=name, verdict=PASS, detail=f"{have}; all reach each other's memory{links}"
    )


def operators(machine: Machine, config: EPConfig, ep_size: int) -> Finding:
    """The library of operators, KDA's kernels among them."""
    del config, ep_size
    name = "operators and KDA kernels"
    versions = machine.versions
    if machine.platform == "musa":
        mate = machine.version("mate")
        missing = [
            part
            for part, ok in (
                ("MATE >= 0.2.5", mate is not None and mate >= _MATE),
                ("SGLang-MUSA (sglang with torchada)", bool(versions.get("sglang"))
                 and bool(versions.get("torchada"))),
            )
            if not ok
        ]  # fmt: skip
        if missing:
            return Finding(
                capability=name,
                verdict=FAIL if mate is None or mate < _MATE else WARN,
                detail=f"MATE {versions.get('mate') or 'missing'}, sglang "
                f"{versions.get('sglang') or 'missing'}, torchada "
                f"{versions.get('torchada') or 'missing'}",
                fix=f"install {' and '.join(missing)} from Moore Threads' package index, for the "
                "installed torch_musa",
            )
        return Finding(
            capability=name,
            verdict=PASS,
            detail=f"MATE {versions['mate']}, sglang {versions['sglang']}",
        )
    if machine.platform == "cuda":
        triton = machine.version("triton")
        if triton is None or triton < (3, 6):
            return Finding(
                capability=name,
                verdict=FAIL,
                detail=f"triton {versions.get('triton') or 'missing'}",
                fix="pip install 'triton>=3.6' (it comes with torch >= 2.11 for CUDA)",
            )
        if not versions.get("fla"):
            return Finding(
                capability=name,
                verdict=WARN,
                detail=f"triton {versions['triton']}; fla-core is missing: KDA runs in plain torch",
                fix="pip install 'moe_comm[model]'",
            )
        gemm = versions.get("humming")
        return Finding(
            capability=name,
            verdict=PASS if gemm else WARN,
            detail=f"triton {versions['triton']}, fla-core {versions['fla']}, "
            f"MXFP4 GEMM: {'humming-kernels ' + gemm if gemm else 'Triton kernel only'}",
            fix="" if gemm else "pip install 'moe_comm[gemm]' for a faster MXFP4 GEMM",
        )
    return Finding(
        capability=name,
        verdict=WARN,
        detail=f"triton {versions.get('triton') or 'missing'} (needs a GPU); operators run in "
        "plain torch",
        fix="no fix on a CPU: right, and slow",
    )


def state_pool(machine: Machine, config: EPConfig, ep_size: int) -> Finding:
    """How many sequences' recurrent state fits: K3's 69 KDA layers keep one each."""
    del config, ep_size
    # The model's configuration is read only here: most commands never need it.
    from moe_comm.model.config import K3Config
    from moe_comm.model.serving.layout import StateLayout
    from moe_comm.model.serving.state_pool import StatePool

    layout = StateLayout.from_config(K3Config.preset("kimi-k3"))
    free = min(machine.free_bytes, default=0)
    budget = free // 10
    fits = StatePool.max_concurrency(layout, budget)
    detail = (
        f"kimi-k3 keeps {layout.slot_bytes / 1e6:.0f} MB a sequence (TP 1); a tenth of the free "
        f"{free / 1e9:.0f} GB holds {fits} sequences"
    )
    if fits == 0:
        return Finding(
            capability="state pool",
            verdict=WARN,
            detail=detail,
            fix="raise tensor parallelism: a rank keeps its heads' part of the state alone",
        )
    return Finding(capability="state pool", verdict=PASS, detail=detail)


def deep_ep(machine: Machine, config: EPConfig, ep_size: int) -> Finding:
    """deep_ep's version, and what it refuses at this shape by itself."""
    name = "deep_ep"
    version = machine.versions.get("deep_ep")
    if not machine.modules.get("deep_ep"):
        on_gpu = machine.platform == "cuda"
        return Finding(
            capability=name,
            verdict=WARN,
            detail="not installed; the other backends serve"
            if on_gpu
            else f"not for {machine.platform}; the other backends serve",
            fix="pip install 'moe_comm[deepep]' to compare with it" if on_gpu else "none needed",
        )
    each = -(-config.num_experts // ep_size)
    refused = []
    if config.num_topk > 8 or config.hidden % 512 or config.hidden == 3584:
        refused.append(
            f"low latency refuses top-{config.num_topk} or hidden {config.hidden} where they are "
            "not among its compiled ones"
        )
    if each > 128:
        refused.append(f"V1 high throughput refuses {each} experts a rank (at most 128)")
    if each > 256:
        refused.append(f"V2 refuses {each} experts a rank (at most 256)")
    if not refused:
        return Finding(
            capability=name, verdict=PASS, detail=f"{version or 'version unknown'}; shape fits"
        )
    ours = (
        "use moe_comm's deepep backend: it routes by rank, so these limits do not apply"
        if "deepep" in backends.MODULES
        else "use another backend for this shape, or more ranks (--ep)"
    )
    return Finding(
        capability=name,
        verdict=WARN,
        detail=f"{version or 'version unknown'}; by itself: {'; '.join(refused)}",
        fix=ours,
    )


def transports(machine: Machine, config: EPConfig, ep_size: int) -> Finding:
    """torch.distributed's backends for this platform."""
    del config, ep_size
    name = "torch.distributed"
    known = machine.transports
    wanted = {"cuda": "nccl", "musa": "mccl"}.get(machine.platform, "gloo")
    detail = f"{', '.join(known) or 'none'}; torch {machine.versions.get('torch')}"
    if wanted in known and "gloo" in known:
        return Finding(capability=name, verdict=PASS, detail=detail)
    fixes = {
        "nccl": "install the CUDA build of torch",
        "mccl": "import torch_musa before torch.distributed starts, with MCCL in the MUSA toolkit",
        "gloo": "install a torch built with USE_GLOO",
    }
    missing = wanted if wanted not in known else "gloo"
    return Finding(
        capability=name, verdict=FAIL, detail=f"no {missing}: {detail}", fix=fixes[missing]
    )


def transfer_engine(machine: Machine, config: EPConfig, ep_size: int) -> Finding:
    """Mooncake, for state migration between hosts; torch.distributed serves without it."""
    del config, ep_size
    version = machine.versions.get("mooncake")
    if machine.modules.get("mooncake"):
        return Finding(
            capability="transfer engine",
            verdict=PASS,
            detail=f"mooncake {version or 'version unknown'}",
        )
    return Finding(
        capability="transfer engine",
        verdict=WARN,
        detail="mooncake is not installed; migration moves over torch.distributed send and recv",
        fix="pip install 'moe_comm[mooncake]'",
    )


def backend_verdicts(machine: Machine, config: EPConfig, ep_size: int) -> list[Finding]:
    """Each backend's own answer for this machine, as if ep_size ranks sat on it."""
    topology = topology_of(machine, ep_size)
    found = []
    for name in backends.AUTO_ORDER:
        verdict = supports(name, config, topology)
        names = modes_of(name, config, topology)
        modes = f"modes {', '.join(names)}" if names else ""
        found.append(
            Finding(
                capability=f"backend {name}",
                verdict=PASS if verdict.ok else WARN,
                detail="; ".join(part for part in (modes, verdict.reason) if part) or "available",
                fix="" if verdict.ok else "none needed while another backend passes",
            )
        )
    if not any(finding.verdict == PASS for finding in found):
        found.append(
            Finding(
                capability="any backend",
                verdict=FAIL,
                detail="no backend can serve this shape here",
                fix="follow the first fix above",
            )
        )
    return found


def topology_of(machine: Machine, ep_size: int) -> Topology:
    """ep_size ranks on this machine, without starting them."""
    device = machine.platform
    transport = {"cuda": "nccl", "musa": "mccl"}.get(device, "gloo")
    peers = machine.peer_access
    return Topology(
        num_ranks=ep_size,
        node_of_rank=(0,) * ep_size,
        device_type=device,
        device_names=(machine.device_names or ("cpu",))[:1] * ep_size,
        peer_access=peers is not None and all(all(row) for row in peers),
        transport=transport,
    )


def limits(machine: Machine) -> Finding:
    """Open files: every pair of ranks holds sockets."""
    files = machine.open_files
    if files is not None and files < 1024:
        return Finding(
            capability="limits",
            verdict=WARN,
            detail=f"{files} open files",
            fix="ulimit -n 4096",
        )
    return Finding(capability="limits", verdict=PASS, detail=f"open files {files}")


def variables() -> Finding:
    """The MOE_COMM_* variables in force; one that does not parse is a failure."""
    try:
        given = {v.name: v.get() for v in env.VARIABLES if v.get() != v.default}
    except ValueError as error:
        return Finding(
            capability="environment", verdict=FAIL, detail=str(error), fix="correct or unset it"
        )
    text = ", ".join(f"{name}={value}" for name, value in given.items())
    return Finding(capability="environment", verdict=PASS, detail=text or "no MOE_COMM_* set")
