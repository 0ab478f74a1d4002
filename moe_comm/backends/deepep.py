"""The deepep backend: DeepEP moves rows between ranks, with any number of experts and choices.

No released DeepEP serves 896 experts and top-16 on two ranks by itself. Adapted, its kernels see
ranks as destinations, and expert ids, weights and scales travel as opaque bytes. Modes: v1-ht and
v1-ll (moe_comm.backends.deepep_v1_ht, deepep_v1_ll) with a V1 or V2 library, v2 (deepep_v2) with a
V2. What each costs is part of supports()'s remark; slab does the same with fewer bytes and
launches, so `auto` prefers it.

V1 has run under it as DeepEP 1.2.1, on two GPUs. V2 has not: like V1, it is tested against a double
of its documented calls, on CPU ranks.

A wait for a lost rank is DeepEP's own in V1: about 100 s, after which it raises on the host or ends
the CUDA context. timeout_s bounds V2's waits.
"""

from __future__ import annotations

from moe_comm.backends import Support
from moe_comm.backends import deepep_facts as facts
from moe_comm.backends.deepep_base import DeepEPCommunicator
from moe_comm.backends.deepep_transport import Transport
from moe_comm.config import EPConfig
from moe_comm.group import Group, drop_group
from moe_comm.topology import Topology


def supports(config: EPConfig, topology: Topology) -> Support:
    """Whether a DeepEP is installed that can serve this; nothing of it is imported."""
    installed = facts.find()
    if installed is None:
        return Support(False, "deep_ep is not installed; pip install 'moe_comm[deepep]'")
    if topology.device_type != facts.DEVICE_TYPE:
        return Support(
            False, f"needs {facts.DEVICE_TYPE} devices, the ranks have {topology.device_type}"
        )
    if config.reduction != "rank":
        return Support(False, f"adds rank by rank, the config asks for {config.reduction!r}")
    if config.combine_wire != "bf16":
        return Support(False, f"combines in bf16 alone, the config asks for {config.combine_wire}")
    if config.dispatch_wire == "none":
        return Support(False, "rows travel as bf16, fp8 or mxfp8, the config asks for none")
    if topology.device_type == "cuda" and not topology.peer_access:
        return Support(False, "needs direct access between all GPUs of a node")
    lack = facts.lacks(installed)
    if lack:
        return Support(False, lack)
    limits = facts.mode_limits(config, topology.num_ranks, topology.num_nodes)
    modes = tuple(mode for mode in installed.modes if not limits[mode])
    if not modes:
        reasons = "; ".join(f"{mode} {limits[mode]}" for mode in installed.modes)
        return Support(False, f"DeepEP {installed.version}: {reasons}")
    remarks = [facts.costs(config, topology.num_ranks, mode) for mode in modes]
    return Support(
        True,
        f"DeepEP {installed.version}; " + "; ".join(remarks),
        modes,
        # What every mode can: v1-ht waits on the host, so it is not captured.
        ("payloads", "capture") if modes == ("v2",) else ("payloads",),
    )


def probe(topology: Topology) -> Support:
    """Import the library and look for what is called of it. For a child process."""
    del topology
    installed = facts.find()
    if installed is None:
        return Support(False, "deep_ep is not installed")
    lack = facts.check_calls(facts.import_library(), installed)
    if lack:
        return Support(False, f"DeepEP {installed.version}: {lack}")
    loaded = facts.loaded_libraries()
    return Support(True, f"loads {', '.join(loaded)}" if loaded else "")


def build(config: EPConfig, group: Group, mode: str | None) -> DeepEPCommunicator:
    """A communicator over buffers of its own. Collective.

    Construction exchanges objects on a process group made for it: a rank whose constructor fails
    must not leave others in an exchange that its next one, on the caller's group, would meet.
    """
    installed = facts.find()
    assert installed is not None, "supports() asks first"
    if mode is None:
        limits = facts.mode_limits(config, group.num_ranks, group.num_nodes)
        mode = next(name for name in installed.modes if not limits[name])
    pg = group.subgroup(
        f"deepep {mode}",
        # V2 asks the group for its CUDA backend; objects go over gloo in both.
        backend="cpu:gloo,cuda:nccl" if mode == "v2" and group.device.type == "cuda" else "gloo",
        timeout_s=max(60.0, 4 * config.wait_s),
    )
    try:
        transport = _transport(mode, config, group, pg, facts.import_library())
        return DeepEPCommunicator(config, group, transport, pg)
    except BaseException:
        drop_group(pg)
        raise


def _transport(mode: str, config: EPConfig, group: Group, pg: object, library: object) -> Transport:
    # Each module is imported where it is used: a mode costs nothing until it is chosen.
    ranks = group.num_ranks
    if mode == "v2":
        from moe_comm.backends.deepep_v2 import Elastic, construction_environment

        with facts.environment(**construction_environment(group.num_nodes)):
            return Elastic(config, ranks, group.num_nodes, pg, library)
    if mode == "v1-ll":
        from moe_comm.backends.deepep_v1_ll import LowLatency

        with facts.environment():
            return LowLatency(config, ranks, pg, library)
    from moe_comm.backends.deepep_v1_ht import HighThroughput

    with facts.environment():
        return HighThroughput(config, ranks, pg, library)
