"""gpt-oss's layout of experts, read into the same runtime form as K3's."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_comm.kernels.expert_gemm import grouped_mlp
from moe_comm.kernels.situ import Activation
from moe_comm.model.weights.checkpoint import Checkpoint
from moe_comm.model.weights.gpt_oss import load_gpt_oss_experts
from moe_comm.model.weights.load_all import stream_tensors
from moe_comm.model.weights.manifest import HashMismatchError, Manifest
from moe_comm.model.weights.safetensors_file import CheckpointError

cases = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("gemm_cases.py"))))
CLAMPED = Activation(kind="swiglu_clamped")
BASE = "model.layers.1.mlp.experts."


@pytest.fixture
def case():
    return cases.make_case([2, 0, 3], 96, 64, seed=31, bias=True)


@pytest.fixture
def directory(case, tmp_path):
    """The case's experts as gpt-oss files them: rows of gate and up by turns."""

    def turns(gate, up):
        return torch.stack((gate, up), dim=1).flatten(0, 1)

    blocks, scales, bias, down, down_scales, down_bias = [], [], [], [], [], []
    for (gate, up, last), (gate_bias, up_bias, last_bias) in zip(
        case.experts, case.biases, strict=True
    ):
        blocks.append(turns(gate[0], up[0]).unflatten(-1, (-1, 16)))
        scales.append(turns(gate[1], up[1]))
        bias.append(turns(gate_bias, up_bias))
        down.append(last[0].unflatten(-1, (-1, 16)))
        down_scales.append(last[1])
        down_bias.append(last_bias)
    named = {
        "gate_up_proj_blocks": blocks,
        "gate_up_proj_scales": scales,
        "gate_up_proj_bias": bias,
        "down_proj_blocks": down,
        "down_proj_scales": down_scales,
        "down_proj_bias": down_bias,
    }
    tensors = {BASE + name: torch.stack(parts).contiguous() for name, parts in named.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize("layout", ["rows", "tiles"])
def test_products_are_the_experts_own(case, directory, layout):
    with Checkpoint(directory) as checkpoint:
        weights = load_gpt_oss_experts(checkpoint, 1, [0, 1, 2], layout=layout)
    y = grouped_mlp(
        case.rows,
        case.row_index,
        case.expert_offsets,
        weights,
        activation=CLAMPED,
        implementation="torch",
    )
    cases.check(case, y, activation=CLAMPED)


def test_a_share_in_another_order(case, directory):
    with Checkpoint(directory) as checkpoint:
        weights = load_gpt_oss_experts(checkpoint, 1, [2, 0])
        with pytest.raises(ValueError, match="expert_ids: expected ids in"):
            load_gpt_oss_experts(checkpoint, 1, [3])
    for slot, expert in enumerate((2, 0)):
        for have, want in zip(weights.get(slot), case.experts[expert], strict=True):
            assert torch.equal(have[0], want[0])
            assert torch.equal(have[1], want[1])


def test_faults_are_named(directory):
    path = directory / "model.safetensors"
    good = load_file(path)
    for name, change, message in (
        ("down_proj_scales", lambda t: t.view(-1).__setitem__(3, 255), "NaN scale in expert 0"),
        ("gate_up_proj_bias", lambda t: t.resize_(3, 126), "shape: expected"),
    ):
        tensors = {key: value.clone() for key, value in good.items()}
        change(tensors[BASE + name])
        save_file(tensors, path)
        with (
            Checkpoint(directory) as checkpoint,
            pytest.raises(CheckpointError, match=message) as caught,
        ):
            load_gpt_oss_experts(checkpoint, 1, [0])
        assert caught.value.tensor == BASE + name
    tensors = dict(good)
    tensors.pop(BASE + "down_proj_bias")
    save_file(tensors, path)
    with (
        Checkpoint(directory) as checkpoint,
        pytest.raises(CheckpointError, match="missing"),
    ):
        load_gpt_oss_experts(checkpoint, 1, [0])


def test_hashes_cover_slices_too(directory):
    with Checkpoint(directory, record=True) as checkpoint:
        stream_tensors(checkpoint, list(checkpoint.entries.values()))
        Manifest(tensors=checkpoint.hashes.seen).save(directory)
    with Checkpoint(directory) as checkpoint:
        load_gpt_oss_experts(checkpoint, 1, [0])
        at = checkpoint.entries[BASE + "down_proj_blocks"].start + 1
    path = directory / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    with Checkpoint(directory) as checkpoint, pytest.raises(HashMismatchError):
        load_gpt_oss_experts(checkpoint, 1, [2])
