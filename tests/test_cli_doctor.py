"""doctor on machines that are not at hand, and list and doctor on this one."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from moe_comm import EPConfig, backends
from moe_comm.launch.cli import cli
from moe_comm.launch.doctor import examine
from moe_comm.launch.machine import Machine, detect, version_numbers

K3 = EPConfig.preset("kimi-k3")
CAPABILITIES = [
    "accelerators and links",
    "operators and KDA kernels",
    "state pool",
    "deep_ep",
    "torch.distributed",
    "transfer engine",
]
ALL = ((True, True), (True, True))


def machine(platform, **changes):
    plain = {
        "platform": platform,
        "device_names": ("a", "a"),
        "free_bytes": (140 * 10**9,) * 2,
        "versions": {"torch": "2.11.0", "triton": "3.6.0"},
        "transports": ("gloo", "nccl"),
        "open_files": 65536,
    }
    return Machine(**{**plain, **changes})


def verdict(found, capability):
    return next(f for f in found if f.capability == capability)


def test_the_six_capabilities_come_first_each_with_a_fix_where_it_is_not_right():
    for platform in ("cpu", "cuda", "musa"):
        found = examine(machine(platform), K3, 2)
        assert [f.capability for f in found[:6]] == CAPABILITIES
        assert all(f.fix for f in found if f.verdict != "PASS")


def test_a_good_cuda_machine_passes():
    versions = {"torch": "2.11.0", "triton": "3.6.0", "fla": "0.6.0", "humming": "0.1.20"}
    versions |= {"deep_ep": "1.2.1", "mooncake": "0.3.13"}
    good = machine(
        "cuda",
        peer_access=ALL,
        links=("NV18",),
        versions=versions,
        modules={"deep_ep": True, "mooncake": True},
    )
    found = examine(good, EPConfig.preset("deepseek-v3"), 2)
    assert {f.capability: f.verdict for f in found[:6]} == dict.fromkeys(CAPABILITIES, "PASS")
    assert "NV18" in found[0].detail


@pytest.mark.parametrize(
    ("changes", "capability", "want", "says"),
    [
        ({"peer_access": ((True, False), (False, True))}, 0, "WARN", "no peer access"),
        ({"peer_access": ALL, "links": ("SYS",)}, 0, "WARN", "PCIe"),
        ({"device_names": ("a",)}, 0, "WARN", "2 ranks need more hosts"),
        ({"versions": {"triton": "3.4.0"}}, 1, "FAIL", "triton 3.4.0"),
        ({"versions": {"triton": "3.6.0"}}, 1, "WARN", "fla-core is missing"),
        ({"free_bytes": (10**9,)}, 2, "WARN", "holds 0 sequences"),
        ({"modules": {"deep_ep": True}, "versions": {"deep_ep": "1.2.1"}}, 3, "WARN",
         "448 experts a rank (at most 128)"),
        ({"transports": ("gloo",)}, 4, "FAIL", "no nccl"),
        ({"modules": {}}, 5, "WARN", "mooncake is not installed"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_cuda_machine_is_said(changes, capability, want, says):
    found = verdict(examine(machine("cuda", **changes), K3, 2), CAPABILITIES[capability])
    assert found.verdict == want
    assert says in found.detail


@pytest.mark.parametrize(
    ("mate", "sglang", "want"),
    [
        (None, "0.5", "FAIL"),
        ("0.2.4+musa43", "0.5", "FAIL"),
        ("0.2.5", None, "WARN"),
        ("0.2.5+musa43", "0.5", "PASS"),
        ("0.10", "0.5", "PASS"),
    ],
)
def test_musa_wants_mate_of_a_version_and_sglang(mate, sglang, want):
    here = machine("musa", versions={"mate": mate, "sglang": sglang, "torchada": "0.1.90"})
    found = verdict(examine(here, K3, 2), "operators and KDA kernels")
    assert found.verdict == want
    if want != "PASS":
        assert "Moore Threads" in found.fix


def test_musa_wants_mccl_and_a_device():
    assert verdict(examine(machine("musa"), K3, 2), "torch.distributed").verdict == "FAIL"
    ready = machine("musa", transports=("gloo", "mccl"))
    assert verdict(examine(ready, K3, 2), "torch.distributed").verdict == "PASS"
    lost = machine("cpu", device_names=(), versions={"torch_musa": "2.7"})
    assert verdict(examine(lost, K3, 2), "accelerators and links").verdict == "FAIL"


def test_unparsable_variable_is_a_failure(monkeypatch):
    monkeypatch.setenv("MOE_COMM_TIMEOUT_S", "soon")
    found = verdict(examine(machine("cpu"), K3, 2), "environment")
    assert found.verdict == "FAIL"
    assert "MOE_COMM_TIMEOUT_S" in found.detail


@pytest.mark.parametrize(
    ("text", "want"), [("0.2.5+musa", (0, 2, 5)), ("2.13.0+cpu", (2, 13, 0)), ("dev", ())]
)
def test_version_numbers(text, want):
    assert version_numbers(text) == want


def test_doctor_and_list_speak_json_about_this_machine():
    done = CliRunner().invoke(cli, ["doctor", "--json"])
    document = json.loads(done.output)
    assert [f["capability"] for f in document["findings"][:6]] == CAPABILITIES
    failed = any(f["verdict"] == "FAIL" for f in document["findings"])
    here = detect()
    assert document["machine"]["platform"] == here.platform
    assert "gloo" in document["machine"]["transports"]
    # In-process click ignores what a command returns; the code is tested by the function itself.
    assert failed == any(f.verdict == "FAIL" for f in examine(here, K3, max(here.num_devices, 1)))

    listed = json.loads(CliRunner().invoke(cli, ["list", "--json"]).output)
    assert set(listed["backends"]) == set(backends.MODULES)
    assert listed["backends"]["c10d"]["modes"] == ["exact", "dense", "hierarchical"]
    assert listed["presets"]["kimi-k3"] == {"num_experts": 896, "num_topk": 16, "hidden": 3584}
    plain = CliRunner().invoke(cli, ["list"]).output
    assert "c10d:hierarchical" in plain
    assert "zipf:S" in plain
