"""Pictures of results: what they show, that the committed results can be drawn, refusals."""

import importlib.util
import json

import pytest

from tests.lib.tree import ROOT
from tpdet.cli import main
from tpdet.errors import NotFoundError, UsageError
from tpdet.tools.bench import plot
from tpdet.tools.bench.plot_data import by_context, costs, curves, points

RESULTS = ROOT / "docs" / "results"


def decode(batch, ms, tp=1, mode="pairs", context=128, model="qwen3-8b"):
    return {
        "case": "decode",
        "model": model,
        "tp": tp,
        "mode": mode,
        "batch": batch,
        "context": context,
        "value": ms,
        "unit": "ms",
    }


def test_curves_are_by_size_and_mode_at_the_shortest_context():
    rows = [decode(16, 5.0), decode(1, 4.0), decode(1, 3.0, mode="approximate"),
            decode(1, 9.0, context=2048), decode(1, 2.0, tp=2), decode(1, 2.5, tp=2, mode="gather"),
            decode(1, 1.0, tp=4), decode(1, 1.5, tp=4, mode="tree")]  # fmt: skip
    found = curves([({}, rows)])
    assert [(curve.tp, curve.mode, curve.steps) for curve in found] == [
        (1, "approximate", ((1, 3.0),)),
        (1, "pairs", ((1, 4.0), (16, 5.0))),
        (2, "pairs", ((1, 2.0),)),
        (4, "tree", ((1, 1.5),)),
    ]


def test_growth_is_drawn_where_there_are_several_contexts(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [decode(1, 4.0), decode(1, 5.0, context=2048), decode(16, 5.0),
            decode(1, 9.0, context=4096, mode="tree")]  # fmt: skip
    (growth,) = by_context([({}, rows)])["qwen3-8b"]
    assert (growth.batch, growth.steps) == (1, ((128, 4.0), (2048, 5.0)))
    assert growth.mode == "pairs", "the default was timed at one context only"
    results = tmp_path / "results"
    results.mkdir()
    run = [{"gpu": "NVIDIA H200", "rows": rows}]
    (results / "latency.h200.json").write_text(json.dumps(run))
    assert main(["bench", "plot", "--results", str(results), "--output", str(tmp_path)]) == 0
    assert (tmp_path / "context-qwen3-8b.h200.svg").exists()


def test_the_cost_of_determinism_is_of_cases_measured_both_ways(tmp_path):
    pytest.importorskip("matplotlib")
    fast = {"mode": "approximate"}
    prefill = {"case": "prefill", "model": "qwen3-8b", "tp": 2, "batch": 2, "context": 64,
               "unit": "tokens/s", "mode": "pairs", "value": 50.0}  # fmt: skip
    rows = [
        decode(1, 4.4, mode="tree"), decode(1, 4.0, **fast), decode(1, 9.0), decode(16, 5.0),
        decode(64, 3.0, mode="approximate, gather"), decode(64, 6.0),
        prefill, prefill | fast | {"value": 40.0}, decode(2, 1.0, model="other"),
    ]  # fmt: skip
    found = costs([({}, rows[:3]), ({}, rows[3:])])
    assert list(found) == ["qwen3-8b"]
    one, two = found["qwen3-8b"]
    assert (one.tp, one.mode) == (1, "tree") and (two.tp, two.mode) == (2, "pairs")
    assert (one.tp, one.cases) == (1, (("decode, batch 1, context 128", pytest.approx(1.1)),))
    assert (two.tp, two.cases) == (2, (("prefill, 2 prompts of 64", pytest.approx(0.8)),))
    results = tmp_path / "results"
    results.mkdir()
    (results / "latency.h200.json").write_text(json.dumps([{"gpu": "NVIDIA H200", "rows": rows}]))
    assert main(["bench", "plot", "--results", str(results), "--output", str(tmp_path)]) == 0
    assert (tmp_path / "cost-qwen3-8b.h200.svg").exists()
    assert not (tmp_path / "cost-other.h200.svg").exists()


def test_the_cost_is_of_one_commit_not_of_two_machines():
    """The newest commit that timed both; a newer strict figure alone replaces nothing."""
    both = [decode(1, 5.0), decode(1, 4.0, mode="approximate")]
    found = [
        ({"commit": "a"}, [decode(1, 9.0), *both[1:]]), ({"commit": "b"}, both[:1]),
        ({"commit": "b"}, both[1:]), ({"commit": "c"}, [decode(1, 1.0, mode="tree")]),
    ]  # fmt: skip
    ((cost,),) = costs(found).values()
    assert (cost.mode, cost.cases) == ("pairs", (("decode, batch 1, context 128", 1.25),))
    assert costs(found[2:]) == {}


def test_approximate_rows_are_in_neither_growth_nor_roofline():
    rows = [decode(1, 4.0, mode="approximate"), decode(1, 5.0, mode="approximate", context=256)]
    assert by_context([({}, rows)]) == {} and points([({}, rows)]) == []


def test_points_stand_under_the_roof():
    gemm = {"case": "gemm o", "unit": "us", "value": 10.0, "flops": 1e9, "bytes": 1e7}
    own = decode(1, 4.0, model="somebodys")
    others = [decode(1, 4.0, tp=2, mode=mode) for mode in ("pairs", "gather", "approximate")]
    found = points([({}, [gemm, own, *others])])
    assert [point.group for point in found] == ["gemm", "decode of the model, TP 2"]
    assert (found[0].intensity, found[0].speed) == (100.0, pytest.approx(1e14))
    assert found[1].intensity == pytest.approx(1.0, rel=0.02)


def test_the_committed_results_are_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert main(["bench", "plot", "--results", str(RESULTS), "--output", str(tmp_path)]) == 0
    names = ["latency-qwen3-8b.h200.png", "latency-qwen3-8b.h200.svg", "roofline.h200.png",
             "roofline.h200.svg"]  # fmt: skip
    assert set(names) <= {path.name for path in tmp_path.iterdir()}
    assert str(tmp_path / names[0]) in capsys.readouterr().out
    for name in names:
        data = (tmp_path / name).read_bytes()
        assert data.startswith(b"\x89PNG" if name.endswith("png") else b"<?xml"), name


def test_matplotlib_is_an_extra(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["bench", "plot"]) == 2
    assert "pip install 'tpdet[plot]'" in capsys.readouterr().err


def test_folders_and_files_that_hold_no_results(tmp_path):
    with pytest.raises(NotFoundError, match="is no directory: name one"):
        plot.results_of(tmp_path / "none", None)
    assert plot.results_of(tmp_path, None) == []
    cpu = [{"gpu": "cpu", "rows": [decode(1, 4.0)]}]
    (tmp_path / "latency.cpu.json").write_text(json.dumps(cpu))
    assert plot.results_of(tmp_path, None) == []
    (tmp_path / "x.json").write_text("[{}]")
    with pytest.raises(UsageError, match=r"x\.json is no results file"):
        plot.results_of(tmp_path, None)
