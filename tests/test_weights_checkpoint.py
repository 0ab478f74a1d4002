"""Synthetic checkpoints, the streaming reader, and `moe-bench make-checkpoint` and `load`."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from moe_comm.launch.cli import cli
from moe_comm.model.config import K3Config
from moe_comm.model.tensor_names import dense_tensors, expert_prefix, expert_tensors
from moe_comm.model.weights.checkpoint import INDEX_NAME, Checkpoint
from moe_comm.model.weights.dense import read_dense
from moe_comm.model.weights.load_experts import expert_bytes, load_experts
from moe_comm.model.weights.manifest import MANIFEST_NAME
from moe_comm.model.weights.memory import mapped_bytes, rss_anon
from moe_comm.model.weights.safetensors_file import CheckpointError, SafetensorsFile
from moe_comm.model.weights.synthetic import write_checkpoint

CONFIG = dataclasses.replace(K3Config.preset("k3-tiny").truncate(4), num_experts=24)
EXPERT = f"{expert_prefix(2, 7)}w3.weight_packed"
SCALE = f"{expert_prefix(2, 7)}w2.weight_scale"


def run(*arguments):
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def load(directory, *more):
    return run("load", directory, "--device", "cpu", *more)


def shard_hashes(directory):
    paths = sorted(p for p in directory.iterdir() if p.name != MANIFEST_NAME)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def shard_of(directory, tensor):
    return directory / json.loads((directory / INDEX_NAME).read_text())["weight_map"][tensor]


def rewrite(path, change):
    """Rewrite one shard with safetensors' own writer after `change(tensors)`."""
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def flip(path, tensor, offset=3):
    with SafetensorsFile(path) as file:
        at = file.entries[tensor].start + offset
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoint") / "k3"
    write_checkpoint(CONFIG, directory, seed=11)
    assert load(directory, "--write-manifest").exit_code == 0
    return directory


@pytest.fixture
def directory(pristine, tmp_path):
    return shutil.copytree(pristine, tmp_path / "copy")


def test_config_round_trips_and_every_tensor_is_there(pristine):
    assert K3Config.from_checkpoint(pristine) == CONFIG
    listed = {spec.name: spec for spec in dense_tensors(CONFIG)}
    for layer in CONFIG.moe_layers:
        for expert in range(CONFIG.num_experts):
            listed |= {spec.name: spec for spec in expert_tensors(CONFIG, layer, expert)}
    with Checkpoint(pristine) as checkpoint:
        assert set(checkpoint.entries) == set(listed)
        for name, entry in checkpoint.entries.items():
            assert (entry.shape, entry.dtype) == (listed[name].shape, listed[name].dtype)
        # One layer a shard, and an expert's six tensors side by side.
        names = [e.name for e in checkpoint.files[2].entries.values()]
        first = names.index(f"{expert_prefix(2, 5)}w1.weight_packed")
        assert names[first : first + 6] == [s.name for s in expert_tensors(CONFIG, 2, 5)]


def test_seed_decides_every_byte(tmp_path):
    small = dataclasses.replace(CONFIG.truncate(2), num_experts=16)
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_checkpoint(small, tmp_path / name, seed=seed)
    a, b, c = (shard_hashes(tmp_path / name) for name in "abc")
    assert a == b
    assert all(a[name] != c[name] for name in a if name.endswith(".safetensors"))


def test_reader_agrees_with_safetensors(pristine):
    with Checkpoint(pristine) as checkpoint:
        for path in sorted(pristine.glob("*.safetensors")):
            with safe_open(path, framework="pt") as reference:
                for name in list(reference.keys())[::7]:
                    wanted = reference.get_tensor(name)
                    got = checkpoint.read(name)
                    assert got.dtype == wanted.dtype
                    assert torch.equal(
                        got.view(-1).view(torch.uint8), wanted.view(-1).view(torch.uint8)
                    ), name


@pytest.mark.parametrize("layout", ["rows", "tiles"])
def test_experts_land_in_their_slots(pristine, layout):
    ids = [20, 3, 3, 0]
    with Checkpoint(pristine) as checkpoint:
        loaded = load_experts(checkpoint, CONFIG, ids, layers=[2, 3], layout=layout)
        assert sorted(loaded) == [2, 3]
        for layer, weights in loaded.items():
            for slot, expert in enumerate(ids):
                parts = [t for pair in weights.get(slot) for t in pair]
                names = [f"w{n}.weight_{p}" for n in (1, 3, 2) for p in ("packed", "scale")]
                for name, part in zip(names, parts, strict=True):
                    raw = checkpoint.read(expert_prefix(layer, expert) + name)
                    assert torch.equal(part, raw)


def test_a_rank_without_experts_and_bad_ids(pristine):
    with Checkpoint(pristine) as checkpoint:
        assert load_experts(checkpoint, CONFIG, [], layers=[2])[2].num_experts == 0
        with pytest.raises(ValueError, match=r"expert_ids: .*24"):
            load_experts(checkpoint, CONFIG, [24])
        with pytest.raises(ValueError, match="MoE layers"):
            load_experts(checkpoint, CONFIG, [0], layers=[0])


def test_a_log_is_narrowed(pristine):
    spec = next(s for s in dense_tensors(CONFIG) if s.name.endswith(".A_log"))
    assert spec.shape[0] > CONFIG.linear_num_heads
    with Checkpoint(pristine) as checkpoint:
        got = read_dense(checkpoint, CONFIG, spec)
        raw = checkpoint.read(spec.name)
    assert got.shape == (CONFIG.linear_num_heads,)
    assert torch.equal(got, raw[: CONFIG.linear_num_heads])


def test_acceptance_of_a_good_checkpoint(directory):
    before = shard_hashes(directory)
    result = load(directory, "--json", directory.parent / "out.json")
    assert result.exit_code == 0, result.output
    assert "verified against the manifest" in result.stdout
    assert "█" in result.stdout
    document = json.loads((directory.parent / "out.json").read_text())
    (row,) = document["rows"]
    assert (document["command"], row["mode"]) == ("load", "hashing")
    report = row["params"]
    assert report["within_bound"]
    assert report["bound_bytes"] == 4 * expert_bytes(CONFIG) + (64 << 20)
    tensors = sum(p.stat().st_size for p in directory.glob("*.safetensors"))
    assert 0 < tensors - report["read_bytes"] < tensors / 2  # headers
    assert shard_hashes(directory) == before


def test_curve_as_png_and_a_share_of_the_experts(directory):
    pytest.importorskip("matplotlib")
    picture = directory.parent / "curve.png"
    more = ("--ep-size", 3, "--rank", 1, "--plot", picture, "--drop-cache", "--plain")
    result = load(directory, *more, "--json", "-")
    assert result.exit_code == 0, result.output
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    rows = json.loads(result.stdout)["rows"]
    # This load verified; the other did not hash at all.
    assert [row["mode"] for row in rows] == ["hashing", "no_hashing", "plain", "plain"]
    report, *_, plain = (row["params"] for row in rows)
    assert report["resident_bytes"] == 3 * 8 * expert_bytes(CONFIG)
    assert plain["bytes"] == sum(p.stat().st_size for p in directory.glob("*.safetensors"))
    assert report["gbps"] == pytest.approx(report["bytes"] / report["seconds"] / 1e9)
    best = max(row["params"]["gbps"] for row in rows[2:])
    for row in rows[:2]:
        assert row["params"]["of_plain"] == pytest.approx(row["params"]["gbps"] / best)
        assert row["limit_us"] / row["p50_us"] == pytest.approx(row["params"]["of_plain"])


@pytest.mark.parametrize(
    ("more", "code"),
    [
        (("--device", "nonsense"), 2),
        (("--layout", "humming"), 3),
        (("--ep-size", 2, "--rank", 2), 2),
        (("--ep-size", 2, "--write-manifest"), 2),
    ],
)
def test_usage_and_environment(directory, more, code):
    assert load(directory, *more).exit_code == code


def test_a_directory_that_is_none(tmp_path):
    assert load(tmp_path / "nothing").exit_code == 2
    (tmp_path / "config.json").write_text("{")
    result = load(tmp_path)
    assert (result.exit_code, "config.json" in result.output) == (2, True)


def test_every_flipped_tensor_exits_1(directory):
    for tensor in (EXPERT, "lm_head.weight"):
        name = tensor if tensor == EXPERT else "language_model.lm_head.weight"
        path = shard_of(directory, name)
        good = path.read_bytes()
        wanted = json.loads((directory / MANIFEST_NAME).read_text())["files"][path.name][name]
        flip(path, name)
        with Checkpoint(directory, verify=False, record=True) as checkpoint:
            checkpoint.read(name)
            got = checkpoint.hashes.seen[(path.name, name)][2]
        result = load(directory)
        assert result.exit_code == 1
        for part in (path.name, name, wanted["sha256"], got):
            assert part in result.output
        assert load(directory, "--no-verify").exit_code == 0
        path.write_bytes(good)
    assert load(directory).exit_code == 0


def test_truncated_shard_exits_2(directory):
    path = shard_of(directory, EXPERT)
    data = path.read_bytes()
    for keep, named in ((len(data) - 1, "w3.weight_scale"), (len(data) // 2, "tensor"), (5, "8")):
        path.write_bytes(data[:keep])
        result = load(directory)
        assert result.exit_code == 2
        for part in (path.name, "truncated", named):
            assert part in result.output
    path.unlink()
    result = load(directory)
    assert (result.exit_code, path.name in result.output) == (2, True)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda t: t.pop(EXPERT), "missing"),
        (lambda t: t.update({EXPERT: t[EXPERT][:-1].clone()}), "shape: expected [32, 32]"),
        (lambda t: t.update({EXPERT: t[EXPERT].view(torch.int8).clone()}), "dtype: expected U8"),
        (lambda t: t[SCALE].view(-1).__setitem__(5, 255), "NaN scale"),
    ],
)
def test_wrong_tensors_exit_2(directory, change, expected):
    path = shard_of(directory, EXPERT)
    rewrite(path, change)
    (directory / MANIFEST_NAME).unlink()
    result = load(directory)
    assert result.exit_code == 2
    assert expected in result.output
    named = SCALE if expected == "NaN scale" else EXPERT
    assert named in result.output
    assert path.name in result.output


def test_wrong_shape_is_told_from_wrong_bytes_under_a_manifest(directory):
    rewrite(shard_of(directory, EXPERT), lambda t: t.update({EXPERT: t[EXPERT][:-1].clone()}))
    assert load(directory).exit_code == 2


def test_duplicate_tensor_exits_2(directory):
    (directory / MANIFEST_NAME).unlink()
    other = directory / "model-00001-of-00005.safetensors"
    raw = load_file(shard_of(directory, EXPERT))[EXPERT]
    rewrite(other, lambda t: t.update({EXPERT: raw}))
    result = load(directory)
    assert result.exit_code == 2
    assert "duplicate" in result.output
    assert EXPERT in result.output


def test_bf16_router_is_required_although_not_ignored(directory):
    (directory / MANIFEST_NAME).unlink()
    name = "language_model.model.layers.2.block_sparse_moe.gate.weight"
    rewrite(shard_of(directory, name), lambda t: t.update({name: t[name].float()}))
    result = load(directory)
    assert result.exit_code == 2
    assert name in result.output
    assert "BF16" in result.output


def test_manifest_is_written_once_and_noticed_when_edited(directory):
    path = directory / MANIFEST_NAME
    first = path.read_bytes()
    result = load(directory, "--write-manifest")
    assert (result.exit_code, path.name in result.output) == (2, True)
    assert path.read_bytes() == first
    assert load(directory, "--write-manifest", "--force").exit_code == 0
    assert path.read_bytes() == first
    path.write_bytes(first.replace(b'"dtype": "U8"', b'"dtype": "I8"', 1))
    result = load(directory)
    assert (result.exit_code, "root differs" in result.output) == (2, True)
    data = json.loads(first)
    data["files"].popitem()
    path.write_text(json.dumps(data))
    assert load(directory).exit_code == 2


def test_make_checkpoint_refuses_what_is_not_empty(tmp_path):
    more = ("--preset", "k3-tiny", "--num-layers", 2, "--num-experts", 16)
    target = tmp_path / "d"
    assert run("make-checkpoint", target, *more).exit_code == 0
    before = shard_hashes(target)
    result = run("make-checkpoint", target, *more, "--seed", 9)
    assert result.exit_code == 2
    assert "--force" in result.output or "force" in result.output
    assert shard_hashes(target) == before
    stranger = target / "notes.txt"
    stranger.write_text("kept")
    assert run("make-checkpoint", target, *more, "--seed", 9, "--force").exit_code == 0
    assert stranger.read_text() == "kept"
    assert shard_hashes(target) != before
    assert load(target).exit_code == 0
    assert run("make-checkpoint", tmp_path / "e", "--num-experts", 8).exit_code == 2


def header_file(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "size", "message"),
    [
        ({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 2, 6)}, 6, "b: overlaps"),
        ({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 6, 10)}, 10, "b: follows a hole"),
        ({"a": entry("U8", [4], 1, 5)}, 5, "a: follows a hole"),
        ({"a": entry("BF16", [4], 0, 4)}, 4, "a: expected 8 bytes for BF16"),
        ({"a": entry("U4", [4], 0, 4)}, 4, "a: dtype: expected one of"),
        ({"a": entry("U8", [-4], 0, 4)}, 4, "a: malformed"),
        ({"a": entry("U8", [4.0], 0, 4)}, 4, "a: malformed"),
        ({"a": {"dtype": "U8"}}, 4, "a: malformed"),
        ({"a": entry("U8", [4], 0, 4)}, 3, "a: truncated"),
        ({"a": entry("U8", [4], 0, 4)}, 5, "expected .* bytes by the header"),
        (b"{not json", 0, "not JSON"),
        (b'{"a": 1, "a": 2}', 0, "a: duplicate"),
    ],
)
def test_bad_headers_are_refused(tmp_path, header, size, message):
    path = header_file(tmp_path / "x.safetensors", header, b"\0" * size)
    with pytest.raises(CheckpointError, match=message) as caught:
        SafetensorsFile(path)
    assert caught.value.file == path


def test_header_longer_than_the_file_is_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes((1 << 40).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match="truncated"):
        SafetensorsFile(path)
    path.write_bytes(b"abc")
    with pytest.raises(CheckpointError, match="truncated"):
        SafetensorsFile(path)


@pytest.mark.slow
def test_memory_stays_within_the_bound_on_full_width_experts(tmp_path):
    config = dataclasses.replace(
        K3Config.preset("kimi-k3").truncate(2, dense_layers=0), num_experts=24, vocab_size=1024
    )
    write_checkpoint(config, tmp_path / "d")
    result = load(tmp_path / "d", "--json", tmp_path / "out.json")
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "out.json").read_text())["rows"][0]["params"]
    assert report["resident_bytes"] == 2 * 24 * 17_547_264
    assert report["peak_extra_bytes"] <= report["bound_bytes"] == 4 * 17_547_264 + (64 << 20)


def test_mapped_bytes_go_back_to_the_system():
    before = rss_anon()
    for _ in range(3):
        pieces = [mapped_bytes(20 << 20) for _ in range(3)]
        for piece in pieces:
            piece.fill_(7)
        assert rss_anon() - before > 50 << 20
        assert int(pieces[2].sum()) == 7 * (20 << 20)
        del pieces, piece
        assert rss_anon() - before < 10 << 20
