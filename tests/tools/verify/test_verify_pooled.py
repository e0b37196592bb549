"""`tpdet verify` of models that pool: equal in every circumstance, and planted faults are found."""

import msgspec
import pytest

from tests.lib.models.pooled_models import classifier, sentence_folder
from tests.tools.verify.test_verify_drafts import SPEC
from tpdet.cli import main
from tpdet.kernels.exact import pooling as exact
from tpdet.tools.verify import rank
from tpdet.tools.verify.compare import compare
from tpdet.tools.verify.spec import WorldReport

SMALL = {"kv_heads": 2, "hidden": 64, "intermediate": 128, "layers": 1}
RELATIONS = "alone", "batch", "chunks", "preempted", "prefixes"
LENGTHS = 5, 300, 37


def verified(model, folder, **changes):
    """The relations of a world of one rank in this process."""
    named = {"relations": RELATIONS, "prompt_lengths": LENGTHS} | changes
    spec = msgspec.structs.replace(SPEC, model=str(model), **named)
    where = folder / "world"
    where.mkdir()
    (where / "spec.json").write_bytes(msgspec.json.encode(spec))
    assert rank.main([str(where)]) == 0
    report = msgspec.json.decode((where / "report.json").read_bytes(), type=WorldReport)
    return compare([report], folder), report


@pytest.mark.parametrize("kind", ["last", "labels", "tokens"])
def test_pooled_prompts_are_equal_in_every_circumstance(tiny_model, tmp_path, kind):
    plain = tiny_model("qwen3", **SMALL)
    model, task = {
        "last": (lambda: sentence_folder(plain, tmp_path / "model"), "auto"),
        "labels": (lambda: classifier(plain, tmp_path / "model"), "auto"),
        "tokens": (lambda: plain, "score"),
    }[kind]
    relations, report = verified(model(), tmp_path, task=task)
    assert [each.difference for each in relations] == [None] * len(relations)
    assert len(relations) >= len(RELATIONS) and relations[0].positions == len(LENGTHS)
    width = {"last": 64, "labels": 3, "tokens": 1}[kind]
    assert {len(bits) for bits in report.traces[0].logprob_bits.values()} == {width}
    assert not report.left_out, "a prompt has a page of the cache"


def test_a_mean_that_depends_on_chunks_is_found(tiny_model, tmp_path, monkeypatch):
    def rounded(rows):
        return (rows.sum(0).double() * 2.0**exact.MEAN_BITS).long(), rows.abs().amax()

    monkeypatch.setattr(exact, "mean_terms", rounded)
    model = sentence_folder(tiny_model("qwen3", **SMALL), tmp_path / "model", "mean_tokens")
    relations, _ = verified(model, tmp_path, relations=("alone", "chunks"))
    assert relations[0].equal and not all(each.equal for each in relations)
    wrong = [each.difference for each in relations if not each.equal]
    assert "another vector" in wrong[0]


@pytest.mark.slow
@pytest.mark.parametrize("control", [False, True])
def test_the_command_verifies_a_model_that_pools_and_its_control_differs(
    tiny_model, tmp_path, control, capsys
):
    model = sentence_folder(tiny_model("qwen3", **SMALL), tmp_path / "model")
    sizes = "1,2" if control else "1,2,4,8"
    flags = ["--device", "cpu", "--tp", sizes, "--batch", "1,4", "--relations", "steps"]
    flags += ["--dtype", "float32"]  # three rows of bf16 may be equal by stock arithmetic too
    found = main(["verify", str(model), *flags, *(["--control"] if control else [])])
    assert found == int(control)
    assert "prefix hits" in capsys.readouterr().out
