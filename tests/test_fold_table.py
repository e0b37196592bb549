"""The table of fold orders: of one commit's runs, the newest figure of each case, the best bold."""

import json

from tpdet.bench.fold_table import NOTHING, fold_table


def row(mode, value, tp=1, batch=1, case="decode", unit="ms", context=128):
    return {"case": case, "model": "m", "mode": mode, "tp": tp, "batch": batch,
            "context": context, "value": value, "unit": unit}  # fmt: skip


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
    assert "A GPU, torch 2, 2026-11-01, new" in found[0]
    assert found[2:] == [
        "| model | TP | mode | decode, batch 1, context 128 [ms] | "
        "prefill, batch 16, context 4096 [tokens/s] |",
        "|---|---|---|---|---|",
        "| m | 1 | pairs | **4.50** | **200.00** |",
        "| m | 1 | tree | 5.00 | 100.00 |",
        "| m | 2 | pairs | **8.00** |  |",
        "| m | 2 | gather | 9.00 |  |",
    ]


def test_only_one_commit_is_compared(tmp_path):
    """Figures of different code do not stand beside each other."""
    old, new = run("old", row("pairs", 1.0), row("tree", 2.0)), run("new", row("pairs", 0.5))
    found = "\n".join(table(tmp_path, old, new))
    assert ", old" in found and "0.50" not in found
    assert table(tmp_path, new, run("newer", row("tree", 2.0))) == [NOTHING]
    assert fold_table(tmp_path / "none.json") == [NOTHING]
