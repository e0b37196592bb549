"""Scripts in the style of vLLM's offline examples run with `vllm` replaced by `tpdet`."""

import gc
import re
import runpy
import sys

import pytest

from tests.lib.tree import ROOT

FOLDER = ROOT / "tests" / "vllm_names" / "scripts"
QUICK = ("chat.py", "engine_loop.py", "save_outputs.py", "streaming.py")
"""Those that run at every change: between them they use most of the names."""
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.py"))


def test_there_are_fourteen_and_they_are_written_for_vllm():
    assert len(SCRIPTS) >= 14 and {*QUICK} <= {*SCRIPTS}
    for name in SCRIPTS:
        text = (FOLDER / name).read_text()
        assert re.search("^from vllm import", text, re.MULTILINE) or "from vllm." in text
        assert "tpdet" not in text


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SCRIPTS],
)
def test_it_runs_unchanged(name, tiny_model, tmp_path, monkeypatch, capsys):
    text = (FOLDER / name).read_text()
    script = tmp_path / name
    script.write_text(re.sub(r"^from vllm\b", "from tpdet", text, flags=re.MULTILINE))
    monkeypatch.setattr(sys, "argv", [str(script), str(tiny_model("qwen3", kv_heads=2))])
    runpy.run_path(str(script), run_name="__main__")
    gc.collect()  # the model that it left open ends here
    shown = capsys.readouterr()
    assert shown.out.strip() and "Traceback" not in shown.err
