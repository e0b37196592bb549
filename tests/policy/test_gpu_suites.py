"""The GPU's suites, as far as a machine without one can run them: their lists, rows and poison."""

import importlib
import json
import os
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from scripts import gpu_times, load_times
from scripts.gpu_times.parts import run_parts
from tests.gpu import conftest
from tests.gpu.attention import lengths as attention_lengths
from tests.gpu.engine.bits import SIZES
from tests.gpu.lib import checks
from tests.gpu.lib.checks import outcome, poisoned_workspaces, same, surrounded
from tests.gpu.lib.suite import Check, side_by_side
from tests.gpu.test_bits import SUITES, names, prepare
from tests.lib.forked import run_forked
from tests.lib.tree import ROOT
from tpdet.checkpoint.model_config import load_model_config
from tpdet.checkpoint.model_config.fit import check_ranks
from tpdet.kernels.cpu.attention import attention
from tpdet.kernels.cpu.pointwise import embedding
from tpdet.kernels.inputs.paged_batch import PagedSequence, make_batch
from tpdet.llm import LLM
from tpdet.requests.request import SamplingParams
from tpdet.tools.synthetic.make_model import make_model
from tpdet.tools.worlds.machine import Machine

IMPORTS = """
import torch

def refuse(*_):
    raise AssertionError("an import asks for a GPU")

for name in ("_lazy_init", "is_available", "device_count", "get_device_properties"):
    setattr(torch.cuda, name, refuse)
import tests.gpu.lib.imported_checks
from triton.runtime import driver
assert driver._active is driver._default is None, "an import asks for Triton's driver"
"""


@pytest.fixture
def no_gpu(monkeypatch):
    """What the suites ask of a GPU besides kernels."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Test")
    monkeypatch.setattr(conftest, "machine", lambda *_: Machine(gpu="NVIDIA Test", gpus=1))
    monkeypatch.setattr(checks, "failures", [])
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)


def test_every_suite_lists_checks_with_names_of_their_own(tmp_path):
    for suite in SUITES.values():
        found = [check.name for check in suite(tmp_path)]
        assert found and len(set(found)) == len(found)
    assert len(names()) > 150
    assert not any(tmp_path.iterdir()), "a list makes models"


def test_the_engine_suite_finds_the_models_that_are_made_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.gpu.engine.bits.make_model", lambda folder, **_: folder.mkdir())
    prepare(tmp_path, ["gemm: shards"])
    assert not any(tmp_path.iterdir())
    prepare(tmp_path, ["engine: sampler"])
    used = {check.arguments[0] for check in SUITES["engine"](tmp_path) if check.arguments}
    assert used == {tmp_path, *tmp_path.iterdir()}


def test_the_models_of_the_engine_suite_fit_eight_ranks(tmp_path, monkeypatch):
    monkeypatch.setitem(SIZES, "layers", 1)  # they take as long to make as they have layers
    prepare(tmp_path, ["engine: sampler"])
    for model in tmp_path.iterdir():
        check_ranks(load_model_config(str(model)), 8, leaves=None)


@pytest.mark.parametrize("like", ["qwen3_moe", "gpt_oss"])
def test_a_checkpoint_that_is_written_to_time_its_load_is_one_of_its_family(like, tmp_path):
    model = make_model(tmp_path / "model", like=like, layers=2, dtype="bfloat16")
    (model / "model.safetensors").unlink()
    load_times.write_checkpoint(model, shards=3, block=1 << 12)
    with LLM(str(model), skip_tokenizer_init=True, device="cpu", kv_pages=4) as llm:
        assert len(llm.generate([[1, 2]], SamplingParams(max_tokens=2), use_tqdm=False)) == 1


def test_pytest_collects_every_check_and_none_passes_without_a_gpu():
    """Nor does one run that nobody asked for: `make test` and a bare pytest leave them out."""
    command = ["pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "tests/gpu"]
    command += ["--tb=line"]  # a traceback each takes as long as all the rest
    done = run_forked(*command, environment={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 1 and "no GPU here" in done.stdout and "passed" not in done.stdout
    assert f"{len(names())} errors" in done.stdout
    assert all(f"::test_a_check_of_bits[{name}]" in done.stdout for name in names())
    for file in ("pyproject.toml", "Makefile"):
        assert "not gpu" in (ROOT / file).read_text()


def test_a_check_becomes_a_row_whether_it_fails_or_not(no_gpu):
    assert outcome("values", lambda: {"value": 2e-7, "unit": "relative error"}) == {
        "case": "values",
        "equal": True,
        "value": 2e-7,
        "unit": "relative error",
        "seconds": 0.0,
    }
    assert outcome("words", lambda: "12 cases")["note"] == "12 cases"
    left, right = torch.zeros(3), torch.tensor([0.0, -0.0, 0.0])
    row = outcome("bits", same, left, right, "zeros")
    assert not row["equal"] and "zeros: 1 of 3 differ, first at (1,)" in row["error"]


def test_each_suite_appends_a_run_of_its_rows(no_gpu, tmp_path):
    rows = {
        "gemm: good": outcome("good", dict),
        "gemm: bad": outcome("bad", int, "x"),
        "engine: sampler": outcome("sampler", dict),
    }
    conftest.record(tmp_path / "bits.json", rows)
    gemm, engine = json.loads((tmp_path / "bits.json").read_text())
    assert (gemm["bench"], gemm["command"]) == ("bits", "pytest -m gpu tests/gpu -k gemm")
    assert [(row["case"], row["equal"]) for row in gemm["rows"]] == [
        ("gemm: good", True),
        ("gemm: bad", False),
    ]
    assert [row["case"] for row in engine["rows"]] == ["engine: sampler"]


def test_a_timing_program_runs_the_parts_that_are_named(no_gpu, monkeypatch):
    timed = []
    parts = {"times": lambda: timed.append("times"), "sweep": lambda: timed.append("sweep")}
    assert run_parts("kernels.gemm", parts, ["sweep"]) == 0 and timed == ["sweep"]
    assert run_parts("kernels.gemm", parts, []) == 0 and timed == ["sweep", "times", "sweep"]
    monkeypatch.setattr(checks, "failures", ["times"])
    assert run_parts("kernels.gemm", parts, ["times"]) == 1
    with pytest.raises(SystemExit):
        run_parts("kernels.gemm", parts, ["bits"])


def test_every_timing_program_starts_without_a_gpu_and_is_listed(capsys):
    """Its modules' names are there, its arguments are read, and the room's text names it."""
    folder, listed = ROOT / "scripts" / "gpu_times", gpu_times.__doc__
    programs = [path for path in folder.rglob("*.py") if "__main__" in path.read_text()]
    assert len(programs) > 20
    for path in programs:
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        with pytest.raises(SystemExit) as ended:
            importlib.import_module(name).main(["--help"])
        assert ended.value.code == 0 and f"usage: python -m {name}" in capsys.readouterr().out
        assert re.search(rf"\b{path.stem}\b", listed), f"{name} is not in the text of its room"


def test_no_check_imports_a_timing_program():
    """Programs time what checks make: an import the other way would close a circle."""
    files = [*(ROOT / "tests" / "gpu").rglob("*.py"), *(ROOT / "tests" / "lib").rglob("*.py")]
    assert not [str(path) for path in files if "scripts.gpu_times" in path.read_text()]


def test_a_check_has_a_process_of_its_own_and_may_die_in_it():
    with ThreadPoolExecutor(3) as threads:
        listed = [
            Check("dies", os._exit, (3,)),
            Check("lives", str, ("4 cases",)),
            Check("hangs", time.sleep, (600,), 1.0),
        ]
        died, lived, hung = (row.result() for row in side_by_side(listed, threads))
    assert died == {"case": "dies", "equal": False, "error": "the process died"}
    assert (lived["case"], lived["equal"], lived["note"]) == ("lives", True, "4 cases")
    assert hung == {"case": "hangs", "equal": False, "error": "no answer in 1 s"}


def test_what_checks_import_asks_for_no_gpu(tmp_path):
    """Forks of a process that has used a GPU cannot."""
    program = tmp_path / "imports.py"
    program.write_text(IMPORTS)
    done = run_forked(str(program))
    assert done.returncode == 0, done.stderr


def test_poison_fills_outputs_and_finds_what_is_written_beside_them():
    x = torch.randn(5, 7)
    around = surrounded(x)
    assert torch.equal(around, x) and around._base.isnan().sum() == around._base.numel() - 35
    with poisoned_workspaces("cpu"):
        y, ids = torch.empty(3, 4), torch.empty(3, dtype=torch.int64)
        z = torch.empty_like(x, dtype=torch.float16)
        assert y.isnan().all() and y.is_contiguous() and y.shape == (3, 4)
        assert z.isnan().all() and z.dtype == torch.float16 and ids.dtype == torch.int64
        y.fill_(1.0)
    with pytest.raises(AssertionError, match="outside"), poisoned_workspaces("cpu"):
        wrong = torch.empty((3, 4))
        wrong._base[checks._GUARD + 12] = 0.0
    assert not torch.full((1,), 2.0).isnan().any() and torch.empty(4)._base is None


class HostCase:
    """Stands in for a case on a GPU: the CPU's attention, which keeps the same rules."""

    def __init__(self, length):
        draw = lambda heads, seed: torch.randn(
            length, heads, 16, generator=torch.Generator().manual_seed(seed)
        )
        self.q, self.k, self.v = draw(2, 0), draw(1, 1), draw(1, 2)
        pages = self.pool(-(-length // 256))
        batch = make_batch((PagedSequence(0, length, 0, tuple(range(len(pages[0])))),))
        self.store_rows(self.k, self.v, pages, batch)
        self.reference = self.attend(self.q, pages, batch)

    def pool(self, pages):
        return [torch.full((pages, 1, 256, 16), torch.nan) for _ in "kv"]

    def store_rows(self, keys, values, pages, batch):
        embedding.store_kv(keys, values, *pages, batch)

    def attend(self, q, pages, batch, *ways):
        return attention.paged_attention(q, *pages, batch, None)


def test_every_length_is_computed_whole_and_in_chunks(no_gpu, monkeypatch):
    on_host = lambda sequences, device, short: make_batch(sequences, "cpu", short)
    monkeypatch.setattr(attention_lengths, "make_batch", on_host)
    data, chance = HostCase(300), random.Random(0)
    lengths = [1, 300, 17, 256, 257]
    whole = attention_lengths.run_group(data, lengths, chance, lambda left: left)
    cut = attention_lengths.run_group(data, lengths, chance, lambda _: chance.choice((7, 64)))
    assert whole == 5 and cut > 15
    data.reference[16, 1, 3] += 1e-3
    with pytest.raises(AssertionError, match="1 of"):
        attention_lengths.run_group(data, [17], chance, lambda left: left)
