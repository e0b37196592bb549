"""Pictures of results: what they show, that the committed results can be drawn, refusals."""

import json
from pathlib import Path

import pytest

from tpdet.bench import plot
from tpdet.bench.plot_data import by_context, curves, points
from tpdet.cli import main
from tpdet.errors import NotFoundError, UsageError

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"


def decode(batch, ms, tp=1, mode="pairs", context=128, model="qwen3-8b"):
    return {"case": "decode", "model": model, "tp": tp, "mode": mode, "batch": batch,
            "context": context, "value": ms, "unit": "ms"}  # fmt: skip


def test_curves_are_by_size_and_mode_at_the_shortest_context():
    rows = [decode(16, 5.0), decode(1, 4.0), decode(1, 3.0, mode="approximate"),
            decode(1, 9.0, context=2048), decode(1, 2.0, tp=2)]  # fmt: skip
    found = curves([({}, rows)])
    assert [(curve.tp, curve.mode, curve.steps) for curve in found] == [
        (1, "approximate", ((1, 3.0),)),
        (1, "pairs", ((1, 4.0), (16, 5.0))),
        (2, "pairs", ((1, 2.0),)),
    ]


def test_growth_is_drawn_where_there_are_several_contexts(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [decode(1, 4.0), decode(1, 5.0, context=2048), decode(16, 5.0),
            decode(1, 9.0, context=4096, mode="tree")]  # fmt: skip
    (growth,) = by_context([({}, rows)])["qwen3-8b"]
    assert (growth.batch, growth.steps) == (1, ((128, 4.0), (2048, 5.0)))
    results = tmp_path / "results"
    results.mkdir()
    run = [{"gpu": "NVIDIA H200", "rows": rows}]
    (results / "latency.h200.json").write_text(json.dumps(run))
    assert main(["bench", "plot", "--results", str(results), "--output", str(tmp_path)]) == 0
    assert (tmp_path / "context-qwen3-8b.h200.svg").exists()


def test_points_stand_under_the_roof():
    gemm = {"case": "gemm o", "unit": "us", "value": 10.0, "flops": 1e9, "bytes": 1e7}
    own = decode(1, 4.0, model="somebodys")
    found = points([({}, [gemm, own, decode(1, 4.0, tp=2)])])
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
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    assert main(["bench", "plot"]) == 2
    assert "pip install 'tpdet[plot]'" in capsys.readouterr().err


def test_folders_and_files_that_hold_no_results(tmp_path):
    with pytest.raises(NotFoundError, match="not a directory"):
        plot.results_of(tmp_path / "none", None)
    assert plot.results_of(tmp_path, None) == []
    cpu = [{"gpu": "cpu", "rows": [decode(1, 4.0)]}]
    (tmp_path / "latency.cpu.json").write_text(json.dumps(cpu))
    assert plot.results_of(tmp_path, None) == []
    (tmp_path / "x.json").write_text("[{}]")
    with pytest.raises(UsageError, match=r"x\.json is no results file"):
        plot.results_of(tmp_path, None)
