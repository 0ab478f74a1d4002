"""Result files: the schema accepts what commands write and nothing else; the README agrees."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from moe_comm.launch import readme_tables, report
from moe_comm.launch.results import Row, read_json, validate, without_directories, write_json
from moe_comm.launch.run import summary

ROOT = Path(__file__).resolve().parent.parent
RESULTS = sorted((ROOT / "results").glob("*.json"))


def document():
    row = vars(
        Row(
            backend="c10d",
            mode="exact",
            phase="dispatch",
            layout="expert",
            num_tokens=128,
            hidden=3584,
            num_topk=16,
            num_experts=896,
            ep_size=2,
            wire="bf16",
            routing="uniform",
            samples=10,
            p50_us=50.0,
            p99_us=80.0,
            slowest_rank_p50_us=60.0,
            remote_bytes=930_000,
            minimum_bytes=917_504,
            remote_gbps=15.5,
            limit_us=30.0,
            limit_kind="all_to_all_single",
            params={"raw_all_to_all_us": 40.0},
            wrong=0,
        )
    )
    base = {**row, "backend": "per-expert", "mode": "", "remote_bytes": 7_440_000}
    base |= {"slowest_rank_p50_us": 180.0, "params": {}}
    return {
        "schema_version": 1,
        "command": "run",
        "argv": ["run"],
        "started": "2026-01-01T00:00:00+00:00",
        "git": {"commit": "0" * 40, "dirty": False},
        "versions": {"torch": "2.13.0"},
        "devices": [
            {"rank": rank, "type": "cpu", "name": "some CPU", "cores": 2} for rank in range(2)
        ],
        "topology": {"num_ranks": 2, "num_nodes": 1, "transport": "gloo"},
        "config": {
            "num_experts": 896,
            "num_topk": 16,
            "hidden": 3584,
            "dispatch_wire": "bf16",
            "combine_wire": "bf16",
            "reduction": "rank",
        },
        "seed": 0,
        "definitions": {},
        "rows": [row, base],
    }


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
    if loaded["command"] == "gpu_check":
        assert sum(loaded["counts"].values()) == len(loaded["tests"])
        return
    validate(loaded)
    assert all(not row["wrong"] for row in loaded["rows"])


def test_arguments_are_kept_without_directories():
    given = ["run", "--routing", "trace:/a/b.npz:skewed", "--json", "/x/out.json", "--csv=y/o.csv"]
    assert without_directories(given) == [
        "run", "--routing", "trace:b.npz:skewed", "--json", "out.json", "--csv=o.csv",
    ]  # fmt: skip


def test_readme_says_what_the_result_files_say():
    text = (ROOT / "README.md").read_text()
    assert readme_tables.rewrite(text, ROOT) == text, "run: python -m moe_comm.launch.readme_tables"
    assert "<!-- figures" in text


def test_readme_tables_take_the_newest_file_and_filter(tmp_path):
    (tmp_path / "results").mkdir()
    for date, tokens in (("2026-01-01", 64), ("2026-01-02", 128)):
        one = document()
        for row in one["rows"]:
            row["num_tokens"] = tokens
        write_json(str(tmp_path / f"results/{date}_cpux2_run.json"), one)
    text = "a\n<!-- figures results/*_run.json backend=c10d -->\nold\n<!-- /figures -->\nb\n"
    new = readme_tables.rewrite(text, tmp_path)
    assert "2026-01-02_cpux2_run.json" in new
    assert "2 x process on some CPU (2 cores), EP 2 over gloo" in new
    assert "| c10d:exact | dispatch | 128 | bf16 | no | 60.0 | 0.930 |" in new
    assert "per-expert" not in new
    assert "old" not in new
    assert readme_tables.rewrite(new, tmp_path) == new
    assert "No result file" in readme_tables.rewrite(text.replace("*_run", "*_none"), tmp_path)
    with pytest.raises(ValueError, match="name=value"):
        readme_tables.rewrite(text.replace("backend=c10d", "c10d"), tmp_path)


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
