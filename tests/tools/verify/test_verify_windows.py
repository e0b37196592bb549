"""Verification of models with windows has a probe whose window begins pages behind the others."""

import msgspec
import pytest

from tests.tools.verify.test_verify_drafts import SPEC, verified
from tpdet.tools.verify.run import make_family, with_far_probe


@pytest.fixture
def lengths(tmp_path):
    """A function of a family: the lengths of its probes."""

    def of(family):
        model = make_family(family, tmp_path, seed=0)
        return with_far_probe(msgspec.structs.replace(SPEC, model=str(model))).prompt_lengths

    return of


def test_models_with_windows_alone_have_a_far_probe(lengths):
    assert lengths("qwen3") == SPEC.prompt_lengths == (5, 252, 9)
    assert lengths("gpt_oss") == (5, 252, 9, 572)


def test_a_far_probe_is_equal_in_a_batch(tiny_model, tmp_path):
    far = {"like": "gemma3_text", "prompt_lengths": (5, 572)}
    alone, batch = verified(tiny_model, tmp_path, relations=("alone", "batch"), **far)
    assert alone.equal and batch.equal and batch.circumstance == "batch 6"
    assert batch.positions > 572
