"""Figures of the default fold order, and which others stand in for it where it was not measured."""

import json

from scripts.tables.other_orders import other_orders
from scripts.tables.size_table import NOTHING, size_table
from tests.tools.bench.test_fold_table import row
from tpdet.tools.measurement.results_file import in_default_order, newest_rows


def written(path, *runs):
    made = [{"commit": f"c{number}", "rows": rows} for number, rows in enumerate(runs)]
    path.write_text(json.dumps(made))
    return path


def test_the_default_counts_and_else_the_newest_of_another_order(tmp_path):
    path = written(
        tmp_path / "latency.json",
        [row("tree", 1.0), row("pairs", 2.0, tp=4), row("sequential", 3.0, tp=2)],
        [row("pairs", 4.0), row("sequential", 5.0, tp=4), row("pairs", 6.0, tp=2)],
        [row("approximate", 7.0, tp=2), row("gather", 8.0, tp=4), row("tree, gather", 9.0, tp=4)],
        [row("pairs", 10.0, batch=16), row("approximate", 11.0, tp=8)],
        [row("tree", 12.0, batch=16)],
    )
    found = {
        (line["tp"], line["batch"]): (line["mode"], line["value"], run["commit"])
        for run, line in in_default_order(newest_rows(path))
    }
    assert found == {
        (1, 1): ("tree", 1.0, "c0"),
        (1, 16): ("tree", 12.0, "c4"),
        (2, 1): ("pairs", 6.0, "c1"),
        (4, 1): ("sequential", 5.0, "c1"),
    }


def test_what_stands_in_is_named_with_what_it_sends():
    assert other_orders([(1, "tree"), (8, "tree")]) == ""
    cases = [(1, "tree"), (1, "pairs"), (2, "pairs"), (4, "pairs"), (4, "pairs"), (4, "sequential")]
    assert other_orders(cases) == (
        "Not measured in the default order, `tree`: "
        "TP 1, 1 of 2 cases in `pairs` (nothing is sent and as much added in either); "
        "TP 2, 1 of 1 cases in `pairs` (a rank sends up to 2 partials there, 1 in the default); "
        "TP 4, 2 of 3 cases in `pairs` (a rank sends 1 partial and adds as much in either); "
        "TP 4, 1 of 3 cases in `sequential` "
        "(a rank sends up to 2 partials there, 1 in the default)."
    )


def test_a_size_is_a_line_of_cases_that_every_size_has(tmp_path):
    rate = {"case": "prefill", "unit": "tokens/s", "batch": 2, "context": 4096}
    latency = written(
        tmp_path / "latency.json",
        [row("pairs", 2.0, tp=4), row("pairs", 5000.4, tp=4, **rate)],
        [row("tree", 4.0), row("tree", 1000.0, **rate), row("tree", 9.0, batch=16)],
        [row("pairs", 3.0), row("approximate", 1.0), row("tree", 1.0, model="other")],
    )
    mixed = {"case": "mixed", "unit": "s", "batch": 256, "context": 1024}
    throughput = written(
        tmp_path / "throughput.json",
        [],
        [],
        [],
        [
            row("pairs", 5.0, **mixed),
            row("pairs", 2.5, tp=4, **mixed),
            row("pairs", 7.0, **mixed | {"case": "mixed output"}),
        ],
    )
    found = size_table([latency, throughput], "m")
    assert found[:4] == [
        "| TP | decode, batch 1 [ms] | prefill, 2 of 4,096 [tokens/s] | mixed, 256 of 1,024 [s] | "
        "commits |",
        "|---|---|---|---|---|",
        "| 1 | 4.00 `tree` | 1,000 `tree` | 5.00 `pairs` | c1, c3 |",
        "| 4 | 2.00 `pairs` | 5,000 `pairs` | 2.50 `pairs` | c0, c3 |",
    ]
    assert "TP 1, 1 of 3 cases in `pairs`" in found[-1] and "TP 4, 3 of 3" in found[-1]
    assert size_table([], "m") == [NOTHING] == size_table([latency], "nobody")
