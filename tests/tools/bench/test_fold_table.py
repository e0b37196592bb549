"""The table of fold orders: a size of one commit, the newest figure of each case, the best bold."""

import json

from scripts.tables.fold_table import NOTHING, fold_table


def row(mode, value, tp=1, batch=1, case="decode", unit="ms", context=128, model="m"):
    return {
        "case": case,
        "model": model,
        "mode": mode,
        "tp": tp,
        "batch": batch,
        "context": context,
        "value": value,
        "unit": unit,
    }


def run(commit, *rows):
    return {"commit": commit, "gpu": "A GPU", "torch": "2", "date": "2026-11-01", "rows": rows}


def table(tmp_path, *runs):
    path = tmp_path / "latency.json"
    path.write_text(json.dumps(runs))
    return fold_table(path)


def test_modes_are_compared_by_size_and_case(tmp_path):
    prefill = {"case": "prefill", "unit": "tokens/s", "batch": 16, "context": 4096}
    found = table(
        tmp_path,
        run("new", row("tree", 5.0), row("gather", 9.0, tp=2), row("tree", 100.0, **prefill)),
        run("new", row("pairs", 6.0), row("pairs", 8.0, tp=2), row("pairs", 200.0, **prefill)),
        run("new", row("pairs", 4.5), row("pairs, gather", 1.0), row("gather", 4.0, case="other")),
    )
    assert found == [
        "Bold: the best of a size.",
        "",
        "| model | TP | mode | decode, batch 1, context 128 [ms] | "
        "prefill, batch 16, context 4096 [tokens/s] | commit |",
        "|---|---|---|---|---|---|",
        "| m | 1 | pairs | **4.50** | **200.00** | new |",
        "| m | 1 | tree | 5.00 | 100.00 | new |",
        "| m | 2 | pairs | **8.00** |  | new |",
        "| m | 2 | gather | 9.00 |  | new |",
        "",
        "- TP 1, 2: `tpdet bench` on A GPU, torch 2, 2026-11-01, new.",
        "",
        "Not measured in the default order, `tree`: TP 2, 1 of 1 cases in `pairs` "
        "(a rank sends up to 2 partials there, 1 in the default).",
    ]


def test_only_one_commit_of_a_size_is_compared(tmp_path):
    """Figures of different code do not stand beside each other."""
    old, new = run("old", row("pairs", 1.0), row("tree", 2.0)), run("new", row("pairs", 0.5))
    found = "\n".join(table(tmp_path, old, new))
    assert ", old" in found and "0.50" not in found
    assert table(tmp_path, new, run("newer", row("tree", 2.0))) == [NOTHING]
    assert fold_table(tmp_path / "none.json") == [NOTHING]


def test_a_size_that_a_newer_commit_left_out_keeps_its_own_and_the_page_says_so(tmp_path):
    old = run(
        "old",
        row("pairs", 1.0),
        row("tree", 2.0),
        row("pairs", 3.0, tp=4),
        row("gather", 4.0, tp=4),
    )
    found = table(tmp_path, old, run("new", row("pairs", 7.0), row("tree", 6.0)))
    rows = [line for line in found if line.startswith("| m | ")]
    assert rows == [
        "| m | 1 | pairs | 7.00 | new |",
        "| m | 1 | tree | **6.00** | new |",
        "| m | 4 | pairs | **3.00** | old |",
        "| m | 4 | gather | 4.00 | old |",
    ]
    assert found[-7:-2] == [
        "",
        "- TP 1: `tpdet bench` on A GPU, torch 2, 2026-11-01, new.",
        "- TP 4: `tpdet bench` on A GPU, torch 2, 2026-11-01, old.",
        "",
        found[-3],
    ]
    assert "compare the rows of one size" in found[-3]
    assert "TP 4, 1 of 1 cases in `pairs` (a rank sends 1 partial and adds as much" in found[-1]
