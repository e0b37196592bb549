"""The GPU's suites, as far as a machine without one can run them: their lists, rows and poison."""

import json
import os
import random

import pytest
import torch

from tests.gpu import attention_lengths, checks, suite
from tests.gpu.attention_bits import attention_checks
from tests.gpu.checks import outcome, poisoned_workspaces, same, surrounded
from tests.gpu.engine import engine_checks
from tests.gpu.gemm import all_checks
from tests.gpu.suite import Check, run_suite, side_by_side
from tpdet.kernels.cpu.attention import attention
from tpdet.kernels.cpu.pointwise import embedding
from tpdet.kernels.inputs.paged_batch import PagedSequence, make_batch
from tpdet.verify.spec import Machine


@pytest.fixture
def no_gpu(monkeypatch):
    """What the suites ask of a GPU besides kernels."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Test")
    monkeypatch.setattr(suite, "machine", lambda device, ranks: Machine(gpu="NVIDIA Test", gpus=1))
    monkeypatch.setattr(checks, "failures", [])
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)


def test_every_suite_lists_checks_with_names_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.gpu.engine.make_model", lambda folder, **_: folder)
    for found in (all_checks(), attention_checks(), engine_checks(tmp_path)):
        names = [check.name for check in found]
        assert len(set(names)) == len(names) > 20


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


def test_a_suite_appends_its_rows_and_fails_with_a_check(no_gpu, tmp_path, monkeypatch):
    serial = lambda found, workers: [outcome(c.name, c.function, *c.arguments) for c in found]
    monkeypatch.setattr(suite, "side_by_side", serial)
    listed, timed = [Check("good", dict), Check("bad", int, ("x",))], []
    output = tmp_path / "bits.json"
    others = {"times": lambda: timed.append(1)}
    code = run_suite("gemm", lambda: listed, others, ["bits", "--output", str(output)])
    assert code == 1 and not timed
    (run,) = json.loads(output.read_text())
    assert (run["bench"], run["command"]) == ("bits", "python -m tests.gpu.gemm bits")
    assert [(row["case"], row["equal"]) for row in run["rows"]] == [
        ("gemm: good", True),
        ("gemm: bad", False),
    ]
    assert run_suite("gemm", lambda: listed, others, ["bits", "times", "--only", "good"]) == 0
    assert timed


def test_a_check_has_a_process_of_its_own_and_may_die_in_it(capfd):
    found = side_by_side([Check("dies", os._exit, (3,)), Check("lives", str, ("4 cases",))], 2)
    assert found[0] == {"case": "dies", "equal": False, "error": "the process died"}
    assert (found[1]["case"], found[1]["equal"], found[1]["note"]) == ("lives", True, "4 cases")
    assert "FAIL  dies" in capfd.readouterr().out


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
    whole = attention_lengths._run_group(data, lengths, chance, lambda left: left)
    cut = attention_lengths._run_group(data, lengths, chance, lambda _: chance.choice((7, 64)))
    assert whole == 5 and cut > 15
    data.reference[16, 1, 3] += 1e-3
    with pytest.raises(AssertionError, match="1 of"):
        attention_lengths._run_group(data, [17], chance, lambda left: left)
