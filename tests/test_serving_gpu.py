"""The same rules with pool, cache and model in GPU memory; and the rate of a full state's copy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moe_comm.model.serving.migration_header import check_header, make_header
from moe_comm.model.serving.modes import RUNNERS, Case, Rig, compare, whole
from moe_comm.model.serving.paged_cache import PagedCache
from moe_comm.model.serving.segments import export_segments, whole_part
from moe_comm.model.serving.staged_import import StagedImport
from moe_comm.model.serving.state_pool import StatePool

sys.path.append(str(Path(__file__).parent))
from serving_cases import VOCAB, SmallHybrid, small_layout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
LAYOUT = small_layout()


def filled(pool: StatePool, cache: PagedCache, position: int):
    """(handle, pages) of a random state."""
    (handle,) = pool.allocate(1)
    slot = pool.begin(handle, 0, position)
    for tensor in pool.tensors.values():
        tensor[:, slot].normal_()
    pool.commit(handle, position)
    pages = cache.allocate(pool.layout.pages_for(position))
    for page in pages:
        cache.rows[:, page].normal_()
    return handle, pages


@pytest.mark.parametrize("mode", list(RUNNERS))
def test_every_mode_is_equal_to_the_baseline_on_a_gpu(mode):
    rig = Rig(SmallHybrid(LAYOUT, device="cuda"), LAYOUT, device="cuda")
    case = Case.random(VOCAB, grid=8, num_new=3, seed=4)
    assert compare(rig, case, whole(rig, case), RUNNERS[mode](rig, case)) is None


def test_copies_of_many_layers_are_exact_on_a_gpu():
    layout = small_layout(
        kda_layer_ids=tuple(range(69)), mla_layer_ids=(69,), num_heads=3, head_dim_k=64
    )
    pool, cache = StatePool(layout, 3, device="cuda"), PagedCache(layout, 2, device="cuda")
    handle, _ = filled(pool, cache, 5)
    snapshot = pool.snapshot(handle, 5)
    restored = pool.restore(snapshot)
    for tensor in pool.tensors.values():
        rows = [tensor[:, h.slot].contiguous().view(torch.uint8) for h in (handle, restored)]
        assert torch.equal(*rows)
    assert not pool.recurrent[:, 0].any()


def test_a_state_lands_in_host_buffers_before_it_reaches_a_gpu_pool():
    source = StatePool(LAYOUT, 2, device="cuda"), PagedCache(LAYOUT, 4, device="cuda")
    target = StatePool(LAYOUT, 2, device="cuda", debug=True), PagedCache(LAYOUT, 4, device="cuda")
    handle, pages = filled(*source, 11)
    part = whole_part(LAYOUT)
    segments = export_segments(*source, handle, pages)
    tokens = list(range(11))
    header = make_header(LAYOUT, segments, request="r", tokens=tokens, pending=[1], part=part)
    staged = StagedImport.open(*target, check_header(header, LAYOUT, tokens=tokens))
    with pytest.raises(ValueError, match="host memory"):
        staged.add_part(header, direct=True)
    staged.add_part(header, direct=False)
    for name, buffer in staged.landing(part).items():
        assert buffer.device.type == "cpu"
        buffer.copy_(segments[name])
    staged.verify_part(part)
    imported = staged.publish()
    again = export_segments(*target, imported.snapshot, imported.pages)
    assert all(torch.equal(again[name], segments[name]) for name in segments)


@pytest.mark.slow
def test_a_full_state_is_copied_near_the_rate_of_a_plain_copy(tmp_path):
    out = tmp_path / "state.json"
    done = subprocess.run(
        [sys.executable, "-m", "moe_comm.launch.bench_state", str(out)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert {row["wrong"] for row in json.loads(out.read_text())["rows"]} == {0}
