"""Result files: the schema accepts what commands write and nothing else."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from result_cases import document

from moe_comm.launch import readme_blocks, report
from moe_comm.launch.results import read_json, validate, without_directories, write_json
from moe_comm.launch.run import summary

ROOT = Path(__file__).resolve().parent.parent
RESULTS = sorted((ROOT / "results").glob("*.json"))


def test_a_document_survives_the_file(tmp_path):
    path = tmp_path / "out.json"
    write_json(str(path), document())
    assert read_json(path) == document()
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("seed"), r"missing \['seed'\]"),
        (lambda d: d.update(extra=1), r"unknown \['extra'\]"),
        (lambda d: d.update(schema_version=2), "expected 1, got 2"),
        (lambda d: d.update(seed="0"), r"result.seed: expected int"),
        (lambda d: d["git"].pop("dirty"), "'dirty'"),
        (lambda d: d["rows"][1].pop("wrong"), r"rows\[1\]"),
        (lambda d: d["rows"][0].update(cuda_graph=0), r"cuda_graph: expected bool"),
        (lambda d: d["rows"][0].update(samples=True), "samples: expected int"),
        (lambda d: d["rows"][0].update(p50_us=None), "expected p50_us where samples > 0"),
        (lambda d: d["rows"][0].update(p99_us=float("nan")), "finite number >= 0"),
        (lambda d: d["rows"][0].update(limit_us=-1.0), "finite number >= 0"),
    ],
)
def test_broken_documents_are_named(change, message):
    broken = copy.deepcopy(document())
    change(broken)
    with pytest.raises(ValueError, match=message):
        validate(broken)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_committed_results_keep_the_schema(path):
    loaded = json.loads(path.read_text())
    if path.stem.endswith("_deepep-stock"):
        check_stock(loaded)
    elif loaded["command"] == "gpu_check":
        assert sum(loaded["counts"].values()) == len(loaded["tests"])
    else:
        assert ("steps" in loaded) == (loaded["command"] == "put-check")
        assert all("error" not in step for step in loaded.get("steps", []))
        assert all(not row["wrong"] for row in readme_blocks.read(path)["rows"])


def check_stock(loaded):
    """The schema of launch/deepep_stock, its ratios computed again."""
    numbers = {
        "stock": ["dispatch_us", "combine_us"],
        "adapted": [
            "dispatch_transport_us", "combine_transport_us", "dispatch_us", "partial_sums_us",
            "round_trip_us", "wrong_elements",
        ],
        "of_stock": ["transport", "with_packing_and_index", "whole"],
    }  # fmt: skip
    texts = ["version", "device", "torch"]
    counts = ["num_ranks", "num_tokens", "hidden"]
    assert set(loaded) == {*numbers, *texts, *counts, "libraries", "refusals"}
    assert all(isinstance(loaded[name], str) for name in texts)
    assert all(isinstance(loaded[name], int) for name in counts)
    for name, fields in numbers.items():
        assert list(loaded[name]) == fields
        assert all(0 <= value < float("inf") for value in loaded[name].values())
    adapted, own = loaded["adapted"], sum(loaded["stock"].values())
    assert adapted["wrong_elements"] == 0
    back = adapted["combine_transport_us"]
    assert loaded["of_stock"] == pytest.approx(
        {
            "transport": (adapted["dispatch_transport_us"] + back) / own,
            "with_packing_and_index": (adapted["dispatch_us"] + back) / own,
            "whole": adapted["round_trip_us"] / own,
        }
    )
    assert len(loaded["refusals"]) == 3
    assert all("Error" in said for said in loaded["refusals"].values())


def test_every_result_file_has_its_topic_in_the_table():
    text = (ROOT / "results" / "README.md").read_text()
    table = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    for path in RESULTS:
        topic = path.stem.split("_", 2)[2]
        assert any(f"`{topic}`" in cell for cell in table), topic


def test_arguments_are_kept_without_directories():
    given = ["run", "--routing", "trace:/a/b.npz:skewed", "--json", "/x/out.json", "--csv=y/o.csv"]
    assert without_directories(given) == [
        "run", "--routing", "trace:b.npz:skewed", "--json", "out.json", "--csv=o.csv",
    ]  # fmt: skip


def test_tables_for_people_markdown_and_csv_hold_the_figures():
    lines = report.plain_table([report.cells(row) for row in document()["rows"]]).splitlines()
    assert lines[2].split() == [
        "c10d:exact", "dispatch", "128", "bf16", "no", "50.0", "80.0", "60.0", "0.930", "0.918",
        "1.014", "15.50", "30.0", "2.00", "0",
    ]  # fmt: skip
    assert "| c10d:exact | dispatch | 128 |" in report.markdown(document())
    csv = report.csv_text(document()).splitlines()
    assert csv[0].startswith("backend,mode,phase")
    assert csv[1].startswith("c10d,exact,dispatch,expert,128,3584,16,896,2,bf16,uniform,False")


def test_summary_compares_with_the_baseline_in_words():
    lines = summary(document()["rows"])
    assert lines[0] == (
        "# c10d:exact, dispatch, 128 tokens: 8.00x fewer remote bytes, 3.00x faster than "
        "per-expert; 1.50x the time of a raw all_to_all_single of its bytes"
    )
    assert lines[-1] == "# wrong elements: 0 in 2 checked rows"
