"""The README and the result files: tables, sentences with figures, and how tables are made."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from result_cases import document

from moe_comm.launch import readme_blocks, readme_tables
from moe_comm.launch.results import write_json
from moe_comm.model.layers.overlap import LEAVE_FREE

ROOT = Path(__file__).resolve().parent.parent


def test_readme_says_what_the_result_files_say():
    text = (ROOT / "README.md").read_text()
    assert readme_tables.rewrite(text, ROOT) == text, "run: python -m moe_comm.launch.readme_tables"
    assert "<!-- figures" in text


def test_readme_prose_says_what_the_result_files_say():
    """Figures in sentences, where no table is generated."""
    text = " ".join((ROOT / "README.md").read_text().split())
    alone = rows_of("2026-11-30g_nvidia-h200x2_slab-run")
    soak, copied, counted, last = (rows_of(f"2026-11-30{run}_nvidia-h200x2_soak") for run in "bcdg")
    memcheck = rows_of("2026-11-30_nvidia-h200x1_memcheck")[0]["params"]
    assert (memcheck["errors"], memcheck["tests"]) == (0, {"passed": 10})
    load = rows_of("2026-11-30_nvidia-h200x1_load")[0]["params"]

    times = {}
    for row in alone:
        if row["backend"] == "slab":
            case = (row["mode"], row["phase"], row["num_tokens"])
            times.setdefault(case, []).append(row["slowest_rank_p50_us"])
    worst = max(max(two) / min(two) for (_, _, tokens), two in times.items() if tokens > 1)
    assert all(len(two) == 2 for two in times.values())
    assert f"differs by at most {math.ceil(100 * (worst - 1))}%" in text
    empty = {round(row["params"]["empty_us"]) for row in alone}
    assert f"take {empty.pop()} us there" in text
    assert not empty
    assert {row["params"]["calls_in_a_row"] for row in alone} == {8}
    assert f"{sum(row['params']['pairs'] for row in soak):,} random calls" in text
    assert f"({sum(row['params']['checked'] for row in soak)} bit for bit" in text
    assert f"versions {sum(row['params']['pairs'] for row in copied):,}, half" in text
    assert f"copied, and {sum(row['params']['pairs'] for row in counted):,}, some eighth" in text
    assert f"and of today's {sum(row['params']['pairs'] for row in last):,}" in text
    delays, delays_now = (rows_of(f"2026-11-30{run}_nvidia-h200x2_delays") for run in "bg")
    before, now = (sum(row["params"]["pairs"] for row in rows) for rows in (delays, delays_now))
    assert f"With random delays it was {before:,}, and {now:,} of today's" in text
    checked = soak + copied + counted + last + delays + delays_now
    assert not any(row["params"]["hangs"] or row["wrong"] for row in checked)
    faults, faults_now = (rows_of(f"2026-11-30{run}_nvidia-h200x2_faults") for run in "bg")
    assert {row["params"]["case"] for row in faults} == {
        "stall-eager", "stall-graph", "kill-eager", "kill-graph",
    }  # fmt: skip
    assert not any(row["params"]["failures"] or row["wrong"] for row in faults + faults_now)
    assert len(faults_now) == 3
    check_matrix(text)
    check_stand_in(text)
    check_bound(text)
    check_gloo(text)
    check_overlap(text)
    check_layer(text)
    assert f"Loading {load['bytes'] / 1e9:.1f} GB" in text
    assert f"bound of {load['bound_bytes'] / 1e6:.1f} MB" in text
    assert load["within_bound"]
    assert load["of_plain"] >= 0.8


def rows_of(name):
    return readme_blocks.read(ROOT / f"results/{name}.json")["rows"]


def check_matrix(text):
    rows = rows_of("2026-11-30e_nvidia-h200x2_matrix")
    measured = [row for row in rows if "measured_at" in row["params"]]
    assert not any(row["wrong"] or row["params"].get("failures") for row in measured)
    soak = [row["params"] for row in rows if row["phase"] == "soak"]
    assert not any(one["hangs"] for one in soak)
    assert f"{len(measured):,} rows, 0 wrong, {sum(one['pairs'] for one in soak):,} more" in text
    trips = {
        (row["backend"], row["mode"]): row["slowest_rank_p50_us"]
        for row in measured
        if row["params"]["section"] == "run" and row["phase"] == "round_trip" and row["cuda_graph"]
        and (row["hidden"], row["num_tokens"], row["wire"]) == (3584, 128, "bf16")
        and row["routing"] == "uniform"
    }  # fmt: skip
    ours, nccl, theirs = (
        trips[name] for name in (("slab", "low-latency"), ("c10d", "dense"), ("deepep", "v1-ll"))
    )
    told = f"takes {ours:.1f} us in a CUDA graph, {nccl:.1f} us over NCCL and {theirs:.1f} us with"
    assert told in text
    errors = [row["params"]["relative_error"] for row in rows if "relative_error" in row["params"]]
    near = sum(error <= 0.2 for error in errors)
    notes = " ".join((ROOT / "results/README.md").read_text().split())
    assert f"{near:,} of {len(errors):,} within 20%" in notes


def check_stand_in(text):
    """One of two ranks beside a run of two, in time."""
    kind = ("phase", "num_tokens", "wire")
    ran: dict[tuple, float] = {}
    for name in ("slab-run", "slab-run-fp8"):
        for row in rows_of(f"2026-11-30g_nvidia-h200x2_{name}"):
            if row["routing"] == "uniform":
                ran[tuple(row[name] for name in kind)] = row["slowest_rank_p50_us"]
    off: dict[bool, float] = {}
    for row in rows_of("2026-11-30g_nvidia-h200x2_stand-in"):
        if row["ep_size"] == 2 and row["num_tokens"] in (1, 128, 4096):
            of_run = row["slowest_rank_p50_us"] / ran[tuple(row[name] for name in kind)]
            many = row["num_tokens"] >= 128
            off[many] = max(off.get(many, 0.0), abs(of_run - 1))
    many, few = (math.ceil(100 * off[key]) for key in (True, False))
    assert f"within {many}% of what a run of two takes from 128 tokens on, within {few}%" in text


def check_bound(text):
    """Of one of eight ranks: latency, and bytes at the rate between two sizes."""
    at = {
        (row["phase"], row["num_tokens"]): (row["slowest_rank_p50_us"], row["remote_bytes"] / 1e3)
        for row in rows_of("2026-11-30g_nvidia-h200x2_stand-in")
        if row["ep_size"] == 8 and row["params"]["wires"][0] == "bf16"
    }
    rates, link, whole, one = [], [], [], []
    for phase in ("dispatch", "combine"):
        (few, few_kb), (many, many_kb) = at[phase, 128], at[phase, 512]
        rates.append((many_kb - few_kb) / (many - few))
        link.append(few_kb / rates[-1])
        whole.append(few)
        one.append(at[phase, 1][0])
    assert "stores bring {:.0f} GB/s in dispatch and {:.0f} in combine".format(*rates) in text
    assert "their bytes take {:.1f} and {:.1f} us".format(*link) in text
    assert "the rest of {:.1f} and {:.1f} us is what a call".format(*whole) in text
    assert "one token takes anyway, {:.1f} and {:.1f} us".format(*one) in text
    assert f"in combine {whole[1] - link[1] - one[1]:.1f} more" in text
    assert min(whole) > 20


def check_gloo(text):
    (row,) = (
        row for row in rows_of("2026-11-30_cpux2_run")
        if (row["mode"], row["phase"], row["num_tokens"]) == ("exact", "dispatch", 4096)
    )  # fmt: skip
    ratio = row["slowest_rank_p50_us"] / row["params"]["raw_all_to_all_us"]
    assert f"4096 tokens takes {ratio:.1f} times one plain" in text


def check_overlap(text):
    """Of the default, by what it is called in the table."""
    rows = [row["params"] for row in rows_of("2026-11-30b_nvidia-h200x2_overlap")]
    by_name = {params["variant"]: params for params in rows}
    own = by_name[f"products-aside leave_free={LEAVE_FREE[0]}+{LEAVE_FREE[1]}"]
    assert own["hidden"] == max(params["hidden"] for params in rows)
    assert f"{100 * own['hidden']:.0f}% of dispatch and combine is hidden" in text
    in_sequence = by_name["sequence"]["both_us"] - own["shared_us"]
    exposed = own["both_us"] - own["shared_us"]
    assert in_sequence > own["comm_us"]
    assert f"In sequence they add {in_sequence:.1f} us" in text
    assert f"they add {exposed:.1f} us, {100 * (1 - exposed / in_sequence):.0f}% less" in text
    layers = [params["layer_us"] for params in rows]
    spread = math.ceil(1000 * (max(layers) / min(layers) - 1)) / 10
    assert f"all orders lie within {spread:.1f}%" in text


def check_layer(text):
    rows = {
        (row["backend"], row["mode"], row["params"]["emulated"], row["cuda_graph"]): row
        for row in rows_of("2026-11-30_nvidia-h200x2_moe-layer")
    }
    for mode, words in (("bf16", "bf16 ({:.2f}x"), ("mxfp4", "per-expert traffic ({:.2f}x)")):
        theirs = rows["per-expert", mode, None, False]["slowest_rank_p50_us"]
        captured, eager = (
            theirs / rows["slab", "low-latency", None, graph]["slowest_rank_p50_us"]
            for graph in (True, False)
        )
        assert f"{captured:.2f}x" in text
        assert words.format(eager) in text
    shares = [
        rows[case]["params"]["communication_share"]
        for case in (("slab", "low-latency", 64, True), ("per-expert", "mxfp4", 64, False))
    ]
    assert f"share {100 * shares[0]:.0f}% is communication" in text
    assert f"per-expert traffic {100 * shares[1]:.0f}%" in text


def test_readme_tables_take_the_newest_file_and_filter(tmp_path):
    (tmp_path / "results").mkdir()
    for date, tokens in (("2026-01-01", 64), ("2026-01-02", 128)):
        one = document()
        for row in one["rows"]:
            row["num_tokens"] = tokens
            row["params"]["wires"] = ["fp8", row["backend"]]
        write_json(str(tmp_path / f"results/{date}_cpux2_run.json"), one)
    text = "a\n<!-- figures results/*_run.json backend=c10d -->\nold\n<!-- /figures -->\nb\n"
    new = readme_tables.rewrite(text, tmp_path)
    assert "2026-01-02_cpux2_run.json" in new
    assert "2 x process on some CPU (2 cores), EP 2 over gloo, commit 000000000000, `moe" in new
    assert "| c10d:exact | dispatch | 128 | bf16 | no | 60.0 | 0.930 |" in new
    assert "per-expert" not in new
    assert "old" not in new
    assert readme_tables.rewrite(new, tmp_path) == new
    assert "No result file" in readme_tables.rewrite(text.replace("*_run", "*_none"), tmp_path)
    with pytest.raises(ValueError, match="name=value"):
        readme_tables.rewrite(text.replace("backend=c10d", "c10d"), tmp_path)
    of_params = "params.raw_all_to_all_us=40.0 columns=backend,x_limit,params.raw_all_to_all_us"
    new = readme_tables.rewrite(text.replace("backend=c10d", of_params), tmp_path)
    assert "| backend | x limit | raw all to all us |\n| --- | ---: | ---: |\n" in new
    assert "\n| c10d:exact | 2.00 | 40.00 |\n" in new
    assert "per-expert" not in new
    of_one = "params.wires.1=c10d params.wires.0=fp8 columns=backend"
    new = readme_tables.rewrite(text.replace("backend=c10d", of_one), tmp_path)
    assert "| c10d:exact |" in new
    assert "per-expert" not in new
    with pytest.raises(ValueError, match="expected one of"):
        readme_tables.rewrite(text.replace("backend=c10d", "columns=speed"), tmp_path)


def test_tables_of_a_tree_with_changes_and_of_other_commands_say_so(tmp_path):
    one = document() | {"command": "put-check", "argv": ["--json", "x.json", "128"]}
    one["git"]["dirty"] = True
    write_json(str(tmp_path / "1_put.json"), one | {"steps": [{"step": "parts"}]})
    text = "<!-- figures 1_put.json -->\n<!-- /figures -->"
    assert (
        "commit 000000000000 with changes, `torchrun --nproc-per-node 2 -m "
        "moe_comm.launch.put_check 128`" in readme_tables.rewrite(text, tmp_path)
    )


def test_ports_of_the_model_lie_beside_each_other(tmp_path):
    one = document() | {"command": "bench-model", "argv": ["--plot", "x.png", "--budget", "9"]}
    row = one["rows"][0] | {"phase": "decode_step"}
    ours = {"port": "ours", "tokens_per_s_per_gpu": 9.6}
    overlap = {"comm_us": 29.3, "hidden": 0.02, "hidden_in_layer": -0.59}
    one["rows"] = [
        row | {"slowest_rank_p50_us": 2000.0, "params": ours},
        row | {"slowest_rank_p50_us": 3000.0, "params": {"port": "fair"}},
        row | {"slowest_rank_p50_us": 9000.0, "params": {"port": "fair"}, "num_experts": 28},
        row | {"phase": "moe_layer", "params": overlap},
    ]
    write_json(str(tmp_path / "1_model.json"), one)
    new = readme_tables.rewrite("<!-- ports 1_model.json -->\nold\n<!-- /ports -->", tmp_path)
    assert "bench_model --budget 9`" in new
    assert "\n| decode_step | 128 | 448 (EP 2) | 2.00 | 10 | - | - | 3.00 | 1.50 |\n" in new
    assert new.count("decode_step") == 1
    assert "\n- dispatch and combine T=128: 29.3 us, hidden 2%, in the layer -59%\n" in new


def test_deepep_beside_itself_and_its_errors(tmp_path):
    one = {
        "version": "1.2", "device": "GPU", "num_ranks": 2, "num_tokens": 64, "hidden": 128,
        "stock": {"dispatch_us": 40.0, "combine_us": 60.0},
        "adapted": {
            "dispatch_transport_us": 50.0, "combine_transport_us": 60.0, "dispatch_us": 90.0,
            "partial_sums_us": 7.0, "round_trip_us": 170.0, "wrong_elements": 0,
        },
        "of_stock": {"transport": 1.1, "with_packing_and_index": 1.5, "whole": 1.7},
        "refusals": {"top-16": "RuntimeError: error /a/b/x.cu:5 'a | b'"},
    }  # fmt: skip
    (tmp_path / "1_stock.json").write_text(json.dumps(one))
    new = readme_tables.rewrite("<!-- stock 1_stock.json -->\n<!-- /stock -->", tmp_path)
    assert "2 x GPU, DeepEP 1.2, 64 tokens a rank, hidden 128" in new
    assert "top-16: transport alone | 50.0 | 60.0 | 110.0 | 1.10 |\n" in new
    assert "index with it | 90.0 | 60.0 | 150.0 | 1.50 |\n" in new
    assert "(7.0 us alone) and unpacking | - | - | 170.0 | 1.70 |\n" in new
    assert "\n| top-16 | `RuntimeError: error x.cu:5 'a \\| b'` |\n" in new
